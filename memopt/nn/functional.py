"""The functions behind the layers, one from each file of `memopt.ops`."""

from typing import Any

from memopt import _collect

_functions = _collect.public_names("memopt.ops")
globals().update(_functions)

__all__ = list(_functions)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module 'memopt.nn.functional' has no attribute {name!r}")
