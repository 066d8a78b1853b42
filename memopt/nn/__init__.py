"""Drop-in layers: the constructors, parameters and state_dicts of `torch.nn`, less memory saved."""

from typing import Any

from memopt import _collect
from memopt.nn import functional

_modules = _collect.public_names("memopt.nn")
globals().update(_modules)

__all__ = ["functional", *_modules]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module 'memopt.nn' has no attribute {name!r}")
