"""Loading the compiled kernel libraries, and saying why one is not loaded.

A library that cannot load leaves the package importable: its ops run on the reference backend.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parent

#: torch's name for what the CPU can do -> the library built for it, best first.
CPU_LEVELS = {"AVX512": "avx512", "AVX2": "avx2", "DEFAULT": "baseline"}

#: Backend -> path of the loaded library, and backend -> why none is loaded.
loaded: dict[str, Path] = {}
_failures: dict[str, str] = {}


def failure(backend: str) -> str | None:
    """Why the library of "cpu" or "cuda" is not loaded; None when it is."""
    return None if backend in loaded else _failures.get(backend, "it was never loaded")


def build_info() -> dict[str, Any]:
    """What setup.py wrote when the libraries were built; empty where nothing was built."""
    path = library_folder() / "_build_info.json"
    return json.loads(path.read_text()) if path.exists() else {}


def library_folder() -> Path:
    """The folder the libraries are loaded from.

    `MEMOPT_LIBRARY_DIR` if set, else this package. A source checkout that shadows the installed
    package (``python -m memopt`` in its root) takes the installed package's libraries, provided
    that they were built from the sources it holds.
    """
    if override := os.environ.get("MEMOPT_LIBRARY_DIR"):
        return Path(override)
    if any(PACKAGE.glob("_cpu_*.so")) or not (PACKAGE.parent / "csrc").is_dir():
        return PACKAGE
    for installed in importlib.metadata.distributions(name="memopt"):
        folder = Path(str(installed.locate_file("memopt")))
        if any(folder.glob("_cpu_*.so")):
            return folder
    return PACKAGE


def source_digest(root: Path) -> str:
    """A digest of all of `root`/csrc, by which a build names the sources it was made of."""
    digest = hashlib.sha256()
    for path in sorted((root / "csrc").rglob("*.*")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def load_all() -> None:
    """Load what this machine can run; called once, when memopt is imported."""
    folder = library_folder()
    if folder != PACKAGE and (PACKAGE.parent / "csrc").is_dir():
        info = folder / "_build_info.json"
        built_from = json.loads(info.read_text()).get("sources") if info.exists() else None
        if built_from != source_digest(PACKAGE.parent):
            stale = (
                f"the libraries in {folder} were built from other sources than "
                f"{PACKAGE.parent}/csrc; run `pip install .` again"
            )
            _failures["cpu"] = _failures["cuda"] = stale
            return
    _load_cpu(folder)
    if torch.version.cuda is None:
        _failures["cuda"] = f"torch {torch.__version__} is built without CUDA"
    else:
        _load("cuda", folder / "_cuda.abi3.so")


def _load_cpu(folder: Path) -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    levels = list(CPU_LEVELS)
    # A library made for more than the CPU can do would crash; one made for less merely runs slower.
    start = levels.index(capability) if capability in CPU_LEVELS else levels.index("DEFAULT")
    candidates = [folder / f"_cpu_{CPU_LEVELS[level]}.abi3.so" for level in levels[start:]]
    _load("cpu", next((path for path in candidates if path.exists()), candidates[-1]))


def _load(backend: str, path: Path) -> None:
    if not path.exists():
        reason = build_info().get(backend, "the package was not built, or the file was deleted")
        _failures[backend] = f"{path} does not exist ({reason}); run `pip install .` again"
        return
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        _failures[backend] = f"{path} does not load: {error}"
    else:
        loaded[backend] = path
