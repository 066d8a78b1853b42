"""Ops and modules are found, not listed: adding one adds a file and edits none."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any


def public_names(package: str) -> dict[str, Any]:
    """Import every module of `package` and return what their ``__all__`` name."""
    found: dict[str, Any] = {}
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if info.name.startswith("_") or info.name == "functional":
            continue
        module = importlib.import_module(f"{package}.{info.name}")
        found |= {name: getattr(module, name) for name in module.__all__}
    return found
