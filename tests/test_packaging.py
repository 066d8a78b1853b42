"""sdist to wheel to import away from the tree; the stable ABI; setup.py's choices."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

import memopt
from support import run_python

ROOT = Path(__file__).resolve().parent.parent
QUICK = {"MEMOPT_NO_CUDA": "1", "MEMOPT_CPU_LEVELS": "baseline"}
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_{0}(sys.argv[1]))"


# -- sdist and wheel -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The sdist of this tree, built from a copy so that nothing here is written to."""
    folder = tmp_path_factory.mktemp("sdist")
    skipped = shutil.ignore_patterns(
        ".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "_build_info.json"
    )
    tree = shutil.copytree(ROOT, folder / "tree", ignore=skipped)
    built = run_python("-c", BUILD.format("sdist"), str(folder), cwd=tree, env=QUICK)
    return folder / built.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def unpacked_sdist(sdist) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent, filter="data")
    return sdist.parent / sdist.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(unpacked_sdist) -> Path:
    """The wheel built from nothing but the sdist."""
    folder = unpacked_sdist.parent
    built = run_python("-c", BUILD.format("wheel"), str(folder), cwd=unpacked_sdist, env=QUICK)
    assert "memopt: CUDA library not built: MEMOPT_NO_CUDA=1 was set" in built.stdout
    return folder / built.stdout.splitlines()[-1]


def test_sdist_holds_the_sources_and_the_tests(unpacked_sdist):
    for folder, pattern in (
        ("csrc", "*.*"),
        ("memopt", "*.py"),
        ("triton_kernels", "*.py"),
        ("tests", "*.py"),
        ("benches", "*.py"),
    ):
        for path in (ROOT / folder).rglob(pattern):
            name = path.relative_to(ROOT)
            assert (unpacked_sdist / name).exists(), f"the sdist lacks {name}"
    for name in ("memopt/py.typed", "LICENSE", "README.md", "setup.py"):
        assert (unpacked_sdist / name).exists(), f"the sdist lacks {name}"


def test_wheel_serves_every_python_and_holds_the_package(wheel):
    assert re.fullmatch(r"memopt-[\d.]+-cp310-abi3-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = json.loads(archive.read("memopt/_build_info.json"))
    for path in (ROOT / "memopt").rglob("*.py"):
        assert path.relative_to(ROOT).as_posix() in names
    for path in (ROOT / "triton_kernels").rglob("*.py"):
        assert f"memopt/{path.relative_to(ROOT).as_posix()}" in names
    assert {"memopt/py.typed", "memopt/_cpu_baseline.abi3.so"} <= names
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith((".dist-info", ".data"))} == {"memopt"}
    assert info["cuda"] == "not built: MEMOPT_NO_CUDA=1 was set"
    assert info["cpu"] == "built for baseline"


def test_wheel_works_away_from_the_tree(wheel, tmp_path):
    target = tmp_path / "site"
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target))
    run_python(*pip, str(wheel), cwd=tmp_path)
    code = """
        import sys, torch, memopt
        from pathlib import Path
        from memopt import _libraries
        assert Path(memopt.__file__).is_relative_to(sys.argv[1]), memopt.__file__
        assert _libraries.loaded["cpu"].is_relative_to(sys.argv[1])
        with memopt.backend("cpu"):
            x = torch.tensor([-1.0, 2.0], requires_grad=True)
            memopt.nn.functional.relu(x).sum().backward()
        assert x.grad.tolist() == [0.0, 1.0]
        print(memopt.__version__)
    """
    result = run_python(
        "-c", textwrap.dedent(code), str(target), cwd=tmp_path, env={"PYTHONPATH": str(target)}
    )
    assert result.stdout.strip() == wheel.name.split("-")[1]


# -- The stable ABI --------------------------------------------------------------------------------

# What a library may take from outside: the C and C++ runtimes and torch's C shims. (torch's own
# libraries carry some of libstdc++ without a version, and the linker then asks for none.)
_RUNTIME = re.compile(r"@+(GLIBC|GLIBCXX|CXXABI|GCC|G?OMP|OACC)_?[\w.]*$")
_STD = re.compile(r"^_Z(N[KRO]*)?S[tabsiod](?!.*(3c10|2at|5torch))")
_SHIM = re.compile(r"^(aoti_torch_|torch_)\w+$")
_OPTIONAL = re.compile(r"^(_ITM_(de)?registerTMCloneTable|__gmon_start__)$")


def undefined_symbols(library: Path) -> list[str]:
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    )
    return [line.split()[-1] for line in listed.stdout.splitlines()]


def assert_stable(library: Path) -> None:
    symbols = undefined_symbols(library)
    assert any(_SHIM.match(symbol) for symbol in symbols), "not a library that uses torch"
    allowed = (_RUNTIME, _STD, _SHIM, _OPTIONAL)
    foreign = [s for s in symbols if not any(pattern.search(s) for pattern in allowed)]
    assert not foreign, f"{library.name} needs more than torch's stable ABI: {foreign}"


def test_libraries_need_only_the_stable_abi(wheel, tmp_path):
    libraries = list(Path(memopt.__file__).parent.glob("*.so"))
    assert libraries
    with zipfile.ZipFile(wheel) as archive:
        libraries.append(Path(archive.extract("memopt/_cpu_baseline.abi3.so", tmp_path)))
    for library in libraries:
        assert_stable(library)


def test_the_audit_sees_a_symbol_of_torch_or_python(tmp_path):
    source = tmp_path / "foreign.cpp"
    source.write_text(
        "#include <vector>\n"
        "namespace at { void add(); struct Tensor {}; }\n"
        "extern template class std::vector<at::Tensor>;\n"
        'extern "C" { int aoti_torch_x(); void* PyList_New(long); }\n'
        "void* f(std::vector<at::Tensor>& v) {\n"
        "  at::add(); aoti_torch_x(); v.reserve(9); return PyList_New(0);\n"
        "}\n"
    )
    library = tmp_path / "foreign.so"
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    with pytest.raises(AssertionError) as error:
        assert_stable(library)
    for symbol in ("_ZN2at3addEv", "PyList_New", "_ZNSt6vectorIN2at6Tensor"):
        assert symbol in str(error.value)
    assert "'aoti_torch_x'" not in str(error.value)


# -- setup.py finds the CUDA toolkit, or says why not ----------------------------------------------


@pytest.fixture
def cuda_home(monkeypatch):
    """setup.py's function, on an environment without a toolkit."""
    with monkeypatch.context() as patch:
        patch.setattr("setuptools.setup", lambda **_: None)
        patch.setenv("MEMOPT_NO_CUDA", "1")
        function = runpy.run_path(str(ROOT / "setup.py"))["cuda_home"]
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    return function


def toolkit(folder: Path) -> Path:
    for name in ("bin/nvcc", "include/cuda_runtime.h"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


def nvcc_on_path(folder: Path, script: str, monkeypatch) -> None:
    nvcc = folder / "nvcc"
    folder.mkdir()
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_cuda_home_sees_through_a_wrapper_script(cuda_home, tmp_path, monkeypatch):
    home = toolkit(tmp_path / "toolkit")
    nvcc_on_path(tmp_path / "bin", f"echo '#$ TOP={home}/bin/..' >&2", monkeypatch)
    assert cuda_home() == str(home)


def test_cuda_home_follows_a_link(cuda_home, tmp_path, monkeypatch):
    home = toolkit(tmp_path / "toolkit")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").symlink_to(home / "bin/nvcc")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert cuda_home() == str(home)


def test_cuda_home_is_taken_from_the_environment(cuda_home, tmp_path, monkeypatch):
    home = toolkit(tmp_path / "toolkit")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert cuda_home() == str(home)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert cuda_home() is None  # what was asked for, or nothing


def test_forced_cuda_without_a_toolkit_is_an_error_that_says_why(tmp_path):
    env = {
        **{k: v for k, v in os.environ.items() if k not in ("CUDA_PATH", "MEMOPT_NO_CUDA")},
        "CUDA_HOME": str(tmp_path / "nowhere"),
        "MEMOPT_FORCE_CUDA": "1",
    }
    result = subprocess.run(
        [sys.executable, str(ROOT / "setup.py"), "--name"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "MEMOPT_FORCE_CUDA=1, but no CUDA toolkit was found in CUDA_HOME=" in result.stderr


def test_unknown_cpu_level_is_an_error(tmp_path):
    result = run_python(
        str(ROOT / "setup.py"),
        "--name",
        cwd=tmp_path,
        env={**QUICK, "MEMOPT_CPU_LEVELS": "baseline,sse9"},
        check=False,
    )
    assert result.returncode != 0
    assert "MEMOPT_CPU_LEVELS: unknown ['sse9']" in result.stderr
