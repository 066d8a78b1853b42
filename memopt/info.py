"""`memopt info`: what is installed, what loaded or why not, and where each op runs."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from typing import Any

import torch

import memopt
from memopt import _backends, _libraries
from memopt._registry import OPS, Op

SUMMARY = "versions, the kernel libraries that loaded or why not, and where each op runs"
DESCRIPTION = """\
Shows the versions of memopt and of what it stands on, which compiled kernel libraries
loaded or why one did not, what the CPU can do, and for each op the backend that runs it
on each device. `reference` is plain PyTorch: right everywhere, but slower.

Works when nothing could be loaded; that is when it is needed."""

DEVICES = ("cpu", "cuda")
REFUSED = "error"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(arguments: argparse.Namespace) -> int:
    facts = collect()
    print(json.dumps(facts, indent=2) if arguments.json else render(facts))
    return 0


# -- Finding out -----------------------------------------------------------------------------------


def collect() -> dict[str, Any]:
    """Everything `memopt info` shows, ready for JSON."""
    ops: dict[str, dict[str, str]] = {}
    refusals: dict[str, list[str]] = {device: [] for device in DEVICES}
    for name, op in OPS.items():
        ops[name] = {}
        for device in DEVICES:
            ops[name][device], refusal = _backend(op, device)
            if refusal and refusal not in refusals[device]:
                refusals[device].append(refusal)
    return {
        "versions": {
            "memopt": memopt.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "numpy": _version("numpy"),
            "triton": _version("triton"),
        },
        "platform": platform.platform(),
        "build": _libraries.build_info(),
        "libraries": {
            name: {
                "path": str(_libraries.loaded[name]) if name in _libraries.loaded else None,
                "failure": _libraries.failure(name),
            }
            for name in _backends.DEVICE_OF_BACKEND
        },
        "cpu": {
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "library": _library_level(),
        },
        "cuda": {
            "torch_built_for": torch.version.cuda,
            # Counts devices, and creates no CUDA context.
            "devices": torch.cuda.device_count(),
        },
        "backend": {"chosen": _backends.selected(), "refusals": refusals},
        "ops": ops,
    }


def _version(package: str) -> str | None:
    """The version of an installed package, which is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _library_level() -> str | None:
    """What the loaded CPU library was compiled for, e.g. "AVX2", in torch's names."""
    path = _libraries.loaded.get("cpu")
    if path is None:
        return None
    built_for = path.name.removeprefix("_cpu_").partition(".")[0]
    return next(level for level, name in _libraries.CPU_LEVELS.items() if name == built_for)


def _backend(op: Op, device: str) -> tuple[str, str | None]:
    """The backend that runs `op` on `device`, or "error" and why an explicit choice is refused."""
    try:
        return op.backend_on(device), None
    except (ValueError, RuntimeError) as error:
        return REFUSED, str(error).removeprefix(f"{op.name}: ")


# -- Showing it ------------------------------------------------------------------------------------


def render(facts: dict[str, Any]) -> str:
    """The facts as text for people."""
    sections = [
        _pairs("Versions", {k: v or "not installed" for k, v in facts["versions"].items()}),
        _pairs("Build", _build(facts)),
        _pairs("Kernel libraries", _loaded(facts)),
        _pairs("Machine", _machine(facts)),
        _table(facts),
    ]
    return "\n\n".join(sections)


def _pairs(title: str, pairs: dict[str, str]) -> str:
    width = max(map(len, pairs), default=0)
    return "\n".join([title, *(f"  {key:<{width}}  {value}" for key, value in pairs.items())])


def _build(facts: dict[str, Any]) -> dict[str, str]:
    if not facts["build"]:
        return {"none": "no record of a build; run `pip install .`"}
    return {
        "torch": f"built beside {facts['build'].get('torch', 'an unknown version')}",
        **{k: str(v) for k, v in facts["build"].items() if k in DEVICES},
    }


def _loaded(facts: dict[str, Any]) -> dict[str, str]:
    return {
        name: library["path"] or f"not loaded: {library['failure']}"
        for name, library in facts["libraries"].items()
    }


def _machine(facts: dict[str, Any]) -> dict[str, str]:
    cpu, cuda = facts["cpu"], facts["cuda"]
    level = f"{cpu['capability']}, threads: {cpu['threads']}"
    if cpu["library"] not in (None, cpu["capability"]):
        level += f"; the library loaded is for {cpu['library']}"
    count = cuda["devices"]
    devices = f"{count} device{'s' if count != 1 else ''}"
    return {
        "system": facts["platform"],
        "CPU": level,
        "CUDA": f"{devices}; torch is built "
        + (f"for CUDA {cuda['torch_built_for']}" if cuda["torch_built_for"] else "without CUDA"),
    }


def _table(facts: dict[str, Any]) -> str:
    """Which backend each op takes per device, and below it why some take the reference."""
    ops, chosen = facts["ops"], facts["backend"]["chosen"]
    width = max(map(len, ops), default=0)
    cells = {device: max(len("reference"), len(device)) for device in DEVICES}

    def line(name: str, row: dict[str, str]) -> str:
        columns = (f"{row[device]:<{cells[device]}}" for device in DEVICES)
        return f"  {name:<{width}}  {'  '.join(columns)}".rstrip()

    title = "Backend of each op, by the device of its input"
    if chosen:
        title += f" (asked for: {chosen!r})"
    lines = [title, line("", {device: device for device in DEVICES})]
    lines += [line(name, row) for name, row in ops.items()]
    return "\n".join([*lines, *_reasons(facts)])


def _reasons(facts: dict[str, Any]) -> list[str]:
    lines = []
    refusals: dict[str, list[str]] = facts["backend"]["refusals"]
    for reason in dict.fromkeys(reason for device in DEVICES for reason in refusals[device]):
        lines.append(f"  error: {reason}")
    if facts["backend"]["chosen"] is None:
        for device in DEVICES:
            without = [name for name, row in facts["ops"].items() if row[device] == "reference"]
            if not without:
                continue
            failure = facts["libraries"][device]["failure"]
            why = failure or f"the library has no kernel for {', '.join(without)}"
            lines.append(f"  reference on {device}: {why}")
    return ["", *lines] if lines else []
