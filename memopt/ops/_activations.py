"""The activations of conv_relu_pool: csrc/common/activation.h in Python.

A code of a pooled element is ``branch * positions + position``, branch 1 being leaky_relu's
negative side, or the dead code where the activation's derivative at the winner is 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("relu", "leaky_relu", "relu6", "hardtanh", "identity")


def parameters(
    op: str,
    activation: str,
    negative_slope: float | None,
    min_val: float | None,
    max_val: float | None,
) -> tuple[str, float, float]:
    """The raw op's (activation, alpha, beta) from the public arguments, None where not given.

    Raises:
        ValueError: an unknown activation, an argument of another one, or min_val > max_val.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation is {activation!r}, needs one of {ACTIVATIONS}")
    given = {"negative_slope": negative_slope, "min_val": min_val, "max_val": max_val}
    owners = {"negative_slope": "leaky_relu", "min_val": "hardtanh", "max_val": "hardtanh"}
    for name, value in given.items():
        if value is not None and activation != owners[name]:
            raise ValueError(
                f"{op}: {name} is {value}, but it belongs to {owners[name]!r} and activation is "
                f"{activation!r}"
            )
    if activation == "leaky_relu":
        return activation, 0.01 if negative_slope is None else float(negative_slope), 0.0
    if activation == "hardtanh":
        low = -1.0 if min_val is None else float(min_val)
        high = 1.0 if max_val is None else float(max_val)
        if low > high:
            raise ValueError(f"{op}: min_val is {low}, needs at most max_val, which is {high}")
        return activation, low, high
    return activation, 0.0, 0.0


def apply(x: Tensor, activation: str, alpha: float, beta: float) -> Tensor:
    if activation == "relu":
        return F.relu(x)
    if activation == "leaky_relu":
        return F.leaky_relu(x, alpha)
    if activation == "relu6":
        return F.relu6(x)
    if activation == "hardtanh":
        return F.hardtanh(x, alpha, beta)
    return x


def branches(activation: str) -> int:
    return 2 if activation == "leaky_relu" else 1


def codes_at(
    x: Tensor, position: Tensor, positions: int, activation: str, alpha: float, beta: float
) -> Tensor:
    """Codes from the winners' positions and their values `x` before the activation; -1 is dead.

    As in eager's backward formulas, NaN is not dead.
    """
    if activation == "relu":
        return torch.where(x <= 0, -1, position)
    if activation == "leaky_relu":
        return torch.where(x > 0, position, position + positions)
    if activation in ("relu6", "hardtanh"):
        low, high = (0.0, 6.0) if activation == "relu6" else (alpha, beta)
        return torch.where((x <= low) | (x >= high), -1, position)
    return position


def mask(x: Tensor, activation: str, alpha: float, beta: float) -> Tensor:
    """Where the derivative at `x` is 1: not 0, and not leaky_relu's slope."""
    if activation == "relu":
        return ~(x <= 0)
    if activation == "leaky_relu":
        return x > 0
    low, high = (0.0, 6.0) if activation == "relu6" else (alpha, beta)
    return ~((x <= low) | (x >= high))
