"""Which implementation of an op runs: `memopt.backend` and `MEMOPT_BACKEND`.

Every op is registered once in each namespace below. `memopt` is the automatic choice: PyTorch's
dispatcher takes the compiled kernel of the tensor's device, else the reference. A namespace
`memopt_<backend>` holds one implementation only, so a backward pass always runs where its forward
pass ran, also after the context that chose it has been left.
"""

from __future__ import annotations

import os
from types import TracebackType

BACKENDS = ("reference", "cpu", "cuda")

#: The device type a compiled backend runs on; `reference` runs on any.
DEVICE_OF_BACKEND = {"cpu": "cpu", "cuda": "cuda"}

# Process-wide, like torch.backends: torch.compile guards on it, which it cannot do for ContextVar.
_selected: str | None = os.environ.get("MEMOPT_BACKEND") or None


def selected() -> str | None:
    """The backend asked for by `memopt.backend` or `MEMOPT_BACKEND`; None means automatic."""
    return _selected


def require(name: str) -> None:
    """Raise unless backend `name` exists and its compiled library is loaded."""
    from memopt import _libraries

    if name not in BACKENDS:
        raise ValueError(
            f"backend: got {name!r}, needs one of {', '.join(map(repr, BACKENDS))} "
            "(from memopt.backend() or the environment variable MEMOPT_BACKEND)"
        )
    if name != "reference" and (why := _libraries.failure(name)):
        raise RuntimeError(f"backend {name!r} is not available: {why}")


class backend:  # noqa: N801 - a context manager, named like torch.no_grad
    """Choose the implementation that memopt ops use, for the whole process.

    Args:
        name: "reference" (plain PyTorch, any device), "cpu" (C++) or "cuda" (C++/CUDA).

    Raises:
        ValueError: `name` is not a backend.
        RuntimeError: its compiled library is not loaded; the message says why.

    Example:
        >>> import torch, memopt
        >>> with memopt.backend("reference"):
        ...     memopt.nn.functional.relu(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """

    def __init__(self, name: str) -> None:
        require(name)
        self.name = name
        self._previous: list[str | None] = []

    def __enter__(self) -> backend:
        global _selected
        self._previous.append(_selected)
        _selected = self.name
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        global _selected
        _selected = self._previous.pop()
