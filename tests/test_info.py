"""The command line, and `memopt info`: also where nothing loads and nothing is as it should be."""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path

import pytest

import memopt
from memopt import _libraries, info
from memopt.__main__ import main
from memopt._registry import OPS, Op
from support import run_python

PACKAGE = Path(memopt.__file__).parent


@pytest.fixture(scope="module")
def without_libraries(tmp_path_factory) -> Path:
    """A folder that holds the package less its compiled libraries."""
    folder = tmp_path_factory.mktemp("bare")
    shutil.copytree(PACKAGE, folder / "memopt", ignore=shutil.ignore_patterns("*.so", "_build*"))
    return folder


# -- The command line ------------------------------------------------------------------------------


def test_no_arguments_print_the_help(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "info" in shown and "demo" in shown and "--version" in shown


@pytest.mark.parametrize("arguments", [["--help"], ["info", "--help"], ["demo", "--help"]])
def test_help_exits_with_0(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"memopt {memopt.__version__}\n"


@pytest.mark.parametrize("arguments", [["unheard-of"], ["info", "extra"], ["--unheard-of"]])
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_an_interrupt_ends_without_a_traceback(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "run", interrupted)
    assert main(["info"]) == 130
    assert "interrupted" in capsys.readouterr().err


# -- memopt info -----------------------------------------------------------------------------------


def rows(text: str) -> dict[str, list[str]]:
    """What is shown, by the first word of a line: op -> backend on the CPU and on CUDA."""
    found: dict[str, list[str]] = {}
    for line in filter(str.strip, text.splitlines()):
        first, *others = line.split()
        found.setdefault(first, others)
    return found


def test_text_and_json_show_the_same(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts["ops"]) == set(OPS)
    for op, backends in facts["ops"].items():
        assert rows(text)[op] == [backends["cpu"], backends["cuda"]]
    for package, version in facts["versions"].items():
        assert rows(text)[package] == (version or "not installed").split()
    assert facts["versions"]["memopt"] == memopt.__version__
    for library in facts["libraries"].values():
        assert (library["path"] is None) == (library["failure"] is not None)
        assert (library["path"] or library["failure"]) in text


def test_every_op_runs_where_it_says():
    facts = info.collect()
    for name, op in OPS.items():
        assert facts["ops"][name]["cpu"] == ("cpu" if op.has_kernel("CPU") else "reference")


def test_an_op_without_a_kernel_is_named_below_the_table(monkeypatch):
    has_kernel = Op.has_kernel
    monkeypatch.setattr(Op, "has_kernel", lambda op, key: op.name != "relu" and has_kernel(op, key))
    text = info.render(info.collect())
    assert rows(text)["relu"][0] == "reference"
    assert "reference on cpu: the library has no kernel for relu\n" in text + "\n"


def test_a_library_for_less_than_the_cpu_can_do_is_pointed_out(monkeypatch):
    monkeypatch.setitem(_libraries.loaded, "cpu", Path("/somewhere/_cpu_baseline.abi3.so"))
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    facts = info.collect()
    assert facts["cpu"]["capability"] == "AVX2" and facts["cpu"]["library"] == "DEFAULT"
    assert "the library loaded is for DEFAULT" in info.render(facts)


def test_an_explicit_backend_is_shown():
    with memopt.backend("reference"):
        text = info.render(info.collect())
    assert "asked for: 'reference'" in text
    assert rows(text)["relu"] == ["reference", "reference"]


def test_an_explicit_backend_that_cannot_run_somewhere_says_so():
    with memopt.backend("cpu"):
        facts = info.collect()
    assert facts["ops"]["relu"] == {"cpu": "cpu", "cuda": "error"}
    [refusal] = facts["backend"]["refusals"]["cuda"]
    assert refusal.startswith("backend 'cpu' was asked for")
    assert refusal in info.render(facts)


@pytest.mark.parametrize("chosen", ["", "nonsense", "cpu", "cuda"])
def test_works_when_no_library_could_load(without_libraries, chosen):
    env = {"MEMOPT_BACKEND": chosen, "MEMOPT_LIBRARY_DIR": ""}
    text = run_python("-m", "memopt", "info", cwd=without_libraries, env=env).stdout
    assert "cpu   not loaded: " in text and "does not exist" in text
    assert "no record of a build" in text
    if chosen:
        assert rows(text)["relu"] == ["error", "error"]
        assert f"error: backend: got {chosen!r}" in text or f"error: backend {chosen!r}" in text
    else:
        assert rows(text)["relu"] == ["reference", "reference"]
        assert "reference on cpu: " in text


def test_starts_no_cuda_and_imports_no_triton(without_libraries):
    code = """
        import sys, torch
        before = set(sys.modules)
        from memopt.__main__ import main
        assert main(["info"]) == 0
        assert not torch.cuda.is_initialized()
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        assert not new & {"triton", "sklearn", "matplotlib", "tqdm"}, new
    """
    run_python("-c", textwrap.dedent(code), cwd=without_libraries)
