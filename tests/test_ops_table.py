"""No op lacks a part: every registered op is held against one table."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from pathlib import Path

import pytest
from torch import _C

import memopt
from memopt._registry import NAMESPACES
from support import OPS, checked_ops, run_python

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(p.stem for p in (ROOT / "memopt/ops").glob("*.py") if not p.stem.startswith("_"))


def file_of(op_name: str) -> str:
    """The file of `memopt.ops` that declares an op."""
    package, _, file = OPS[op_name].reference.__module__.rpartition(".")
    assert package == "memopt.ops", f"{op_name} is declared in {package}.{file}"
    return file


def has(namespace: str, op_name: str, dispatch_key: str) -> bool:
    return _C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{op_name}", dispatch_key)


def test_there_are_ops():
    assert OPS
    assert {file_of(name) for name in OPS} <= set(FILES)


@pytest.mark.parametrize("name", OPS)
def test_op_is_complete(name):
    op = OPS[name]
    assert file_of(name) in FILES
    assert op.has_kernel("CPU"), "no C++ kernel is loaded"
    for namespace in NAMESPACES:
        assert has(namespace, name, "CompositeExplicitAutograd"), "no reference"
        assert has(namespace, name, "Meta"), "no fake"
        assert has(namespace, name, "Autograd"), "no autograd"
        assert has(namespace, name, "AutocastCPU"), "no autocast"
        assert has(namespace, name, "AutocastCUDA"), "no autocast"
    assert op.backward is not None or op.not_differentiable is not None


def test_every_op_passes_opcheck(tmp_path):
    """By `support.check_op` in the op's test file: in this run, else in one of its own."""
    missing = set(OPS) - checked_ops
    if missing:
        files = sorted({str(ROOT / f"tests/test_{file_of(name)}.py") for name in missing})
        code = (
            "import json, sys, pytest\n"
            "status = pytest.main(sys.argv[1:])\n"
            "import support\n"
            "print(json.dumps([int(status), sorted(support.checked_ops)]))"
        )
        arguments = ("-q", "-c", str(ROOT / "pyproject.toml"), "-k", "opcheck", *files)
        source = str(Path(memopt.__file__).parent.parent)
        result = run_python("-c", code, *arguments, cwd=tmp_path, env={"PYTHONPATH": source})
        status, checked = json.loads(result.stdout.splitlines()[-1])
        assert status == 0, result.stdout
        missing -= set(checked)
    assert not missing, "no test named *opcheck* passes these to support.check_op"


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("part", ["tests/test_{}.py", "benches/bench_{}.py", "csrc/cpu/{}.cpp"])
def test_op_file_has_its_counterparts(file, part):
    # A file that declares no op of its own composes its function of another file's: no kernel.
    if part.startswith("csrc") and file not in {file_of(name) for name in OPS}:
        return
    path = ROOT / part.format(file)
    assert path.exists(), f"memopt/ops/{file}.py has no {part.format(file)}"


@pytest.mark.parametrize("file", FILES)
def test_public_functions_are_in_nn_functional(file):
    module = importlib.import_module(f"memopt.ops.{file}")
    for name in module.__all__:
        assert getattr(memopt.nn.functional, name) is getattr(module, name)


# -- An op is added by adding files ----------------------------------------------------------------


def documented_files() -> dict[str, str]:
    """The files of the worked example in docs/architecture.md, by path."""
    text = (ROOT / "docs/architecture.md").read_text()
    found = re.findall(r"^\*\*\d\. `([^`]+)`\*\*.*?^```\w+\n(.*?)^```$", text, re.M | re.S)
    assert len(found) == 5, [path for path, _ in found]
    return dict(found)


def test_an_op_is_added_by_files_alone(tmp_path):
    for folder in ("memopt", "csrc", "triton_kernels"):
        ignored = shutil.ignore_patterns("*.so", "*.cpp", "__pycache__")  # compile the toy only
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path)
    for folder in ("tests", "benches"):
        (tmp_path / folder).mkdir()
    for file in ("tests/conftest.py", "tests/support.py", "benches/harness.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    for file, text in documented_files().items():
        (tmp_path / file).write_text(text)
    levels = {"MEMOPT_NO_CUDA": "1", "MEMOPT_CPU_LEVELS": "baseline"}
    run_python("setup.py", "build_ext", "--inplace", cwd=tmp_path, env=levels)

    here = {"PYTHONPATH": str(tmp_path), "ATEN_CPU_CAPABILITY": "default"}
    run_python("-m", "pytest", "-q", "tests/test_triple.py", cwd=tmp_path, env=here)
    run_python("benches/bench_triple.py", "--quick", cwd=tmp_path, env=here)
    code = (
        "import torch, memopt\n"
        "with memopt.backend('cpu'):\n"
        "    print(memopt.nn.Triple()(torch.ones(4)).tolist())"
    )
    assert run_python("-c", code, cwd=tmp_path, env=here).stdout.strip() == str([3.0] * 4)
