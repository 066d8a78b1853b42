"""What importing memopt does and leaves undone, also without its libraries or with broken ones."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import shutil
import textwrap
from pathlib import Path

import pytest

import memopt
from support import run_python

PACKAGE = Path(memopt.__file__).parent


def run(code: str, cwd: Path, **env: str) -> str:
    """What `code` prints, to either stream."""
    result = run_python("-c", textwrap.dedent(code), cwd=cwd, env=env)
    return result.stdout + result.stderr


@pytest.fixture
def without_libraries(tmp_path) -> Path:
    """A folder that holds the package less its compiled libraries."""
    shutil.copytree(PACKAGE, tmp_path / "memopt", ignore=shutil.ignore_patterns("*.so"))
    return tmp_path


@pytest.fixture
def with_broken_libraries(without_libraries) -> Path:
    for library in PACKAGE.glob("_cpu_*.so"):
        (without_libraries / "memopt" / library.name).write_bytes(b"not a library")
    return without_libraries


# -- Import hygiene --------------------------------------------------------------------------------


def test_import_prints_nothing_and_starts_nothing():
    code = """
        import sys
        import torch
        before = set(sys.modules)
        done = []
        def audit(event, args):
            writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
            if writes or event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
                done.append((event, args[0]))
        sys.addaudithook(audit)
        import memopt
        assert not done, done
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        assert not new & {"triton", "sklearn", "matplotlib", "tqdm"}, new
        for module in ("torch._dynamo", "torch._inductor", "torch.utils.cpp_extension"):
            assert module in before or module not in sys.modules, module
        assert not torch.cuda.is_initialized()
    """
    assert run(code, PACKAGE.parent, PYTHONDONTWRITEBYTECODE="1") == ""


def test_the_public_names_are_there():
    for module in (memopt, memopt.nn, memopt.nn.functional):
        assert len(set(module.__all__)) == len(module.__all__) > 0
        for name in module.__all__:
            assert getattr(module, name) is not None, f"{module.__name__}.{name}"
        with pytest.raises(AttributeError, match="nonsense"):
            _ = module.nonsense


# -- Without the libraries -------------------------------------------------------------------------

USE_RELU = """
    import logging
    logging.basicConfig(format="%(name)s: %(message)s")
    import torch, memopt
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    for _ in range(3):
        memopt.nn.functional.relu(x).sum().backward()
    assert x.grad.tolist() == [0.0, 3.0]
    layer = torch.compile(memopt.nn.ReLU(), backend="aot_eager", fullgraph=True)
    assert layer(x).tolist() == [0.0, 2.0]
"""

REASONS = {"without_libraries": "does not exist", "with_broken_libraries": "does not load"}


@pytest.mark.parametrize("folder", REASONS)
def test_ops_run_on_the_reference_and_say_so_once(folder, request):
    lines = run(USE_RELU, request.getfixturevalue(folder)).splitlines()
    for op in ("relu", "relu_backward"):
        assert (
            sum(line.startswith(f"memopt: {op} has no compiled kernel for cpu") for line in lines)
            == 1
        )
    assert len(lines) == 2, lines


@pytest.mark.parametrize("folder", REASONS)
def test_an_explicit_backend_raises_with_the_cause(folder, request):
    code = """
        import memopt
        try:
            memopt.backend("cpu")
        except RuntimeError as error:
            print(error)
    """
    message = run(code, request.getfixturevalue(folder))
    assert "backend 'cpu' is not available" in message
    assert REASONS[folder] in message
    assert "_cpu_" in message


@pytest.mark.parametrize("folder", REASONS)
def test_info_says_why(folder, request):
    result = run_python("-m", "memopt", "info", cwd=request.getfixturevalue(folder))
    assert REASONS[folder] in result.stdout
    assert "reference" in result.stdout


def test_environment_names_the_missing_library_at_first_use(without_libraries):
    code = USE_RELU.replace("for _ in range(3):", "if True:")
    result = run_python(
        "-c",
        textwrap.dedent(code),
        cwd=without_libraries,
        env={"MEMOPT_BACKEND": "cpu"},
        check=False,
    )
    assert result.returncode == 1
    assert "RuntimeError: backend 'cpu' is not available" in result.stderr


# -- MEMOPT_BACKEND --------------------------------------------------------------------------------


def test_environment_chooses_the_backend():
    code = """
        import torch, memopt
        from memopt._registry import OPS
        assert OPS["relu"].backend_on("cpu") == "reference"
        output = memopt.nn.functional.relu(torch.ones(2, requires_grad=True))
        assert output.grad_fn.namespace == "memopt_reference"
    """
    assert run(code, PACKAGE.parent, MEMOPT_BACKEND="reference") == ""


def test_a_wrong_backend_in_the_environment_is_reported_at_first_use():
    code = """
        import torch, memopt
        print("imported")
        try:
            memopt.nn.functional.relu(torch.ones(2, requires_grad=True))
        except ValueError as error:
            print(error)
    """
    printed = run(code, PACKAGE.parent, MEMOPT_BACKEND="nonsense").splitlines()
    assert printed[0] == "imported"
    assert "'nonsense'" in printed[1]
    assert "MEMOPT_BACKEND" in printed[1]
    for name in ("reference", "cpu", "cuda"):
        assert repr(name) in printed[1]


def test_backend_contexts_nest_and_are_left_on_errors():
    from memopt._backends import selected

    before = selected()
    with memopt.backend("reference"):
        with pytest.raises(KeyError), memopt.backend("cpu"):
            assert selected() == "cpu"
            raise KeyError
        assert selected() == "reference"
    assert selected() == before
    with pytest.raises(ValueError, match="'triton'"):
        memopt.backend("triton")


# -- Examples in docstrings ------------------------------------------------------------------------


def examples() -> list[doctest.DocTest]:
    modules = [memopt] + [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(memopt.__path__, "memopt.")
        if not info.name.endswith("__main__")
        and not info.name.startswith(("memopt._cpu_", "memopt._cuda", "memopt.triton_kernels"))
    ]
    finder = doctest.DocTestFinder()
    return [test for module in modules for test in finder.find(module) if test.examples]


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_docstring_example(example):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_every_public_name_has_an_example():
    documented = {example.name for example in examples()}
    for module in (memopt, memopt.nn, memopt.nn.functional):
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                full_name = f"{value.__module__}.{value.__qualname__}"
                assert full_name in documented, f"{full_name} has no example in its docstring"
