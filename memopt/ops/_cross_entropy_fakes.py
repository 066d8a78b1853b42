"""What the ops of linear_cross_entropy return, without its data, and what they check."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt.ops import _cross_entropy, _linear
from memopt.ops._cross_entropy import Rows


def fake(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    of_rows, reduction, settings = rest[:3], rest[3], rest[4:8]
    with_entropy, with_argmax, *wanted, _, _, chunk_rows = rest[8:]
    op = "linear_cross_entropy"
    rows = Rows(target, *of_rows, *settings)
    _linear.check_linear(op, input, linear_weight, linear_bias, chunk_rows)
    check_rows(op, rows, input, linear_weight)
    if reduction not in _cross_entropy.REDUCTIONS:
        raise RuntimeError(
            f"{op}: reduction is {reduction!r}, needs one of {_cross_entropy.REDUCTIONS}"
        )
    if any(wanted) and reduction == "none":
        raise RuntimeError(
            f"{op}: gradients are formed in the forward pass of a sum or a mean, and with "
            "reduction 'none' they cannot be"
        )
    check_scale(op, rows, wanted[3])
    sums = _linear.accumulator(input.dtype)
    count = input.shape[0]

    def by_row(wanted: bool, dtype: torch.dtype = sums) -> Tensor:
        return input.new_empty((count if wanted else 0,), dtype=dtype)

    loss = input.new_empty((count,) if reduction == "none" else (), dtype=sums)
    dtype = sums if input.dtype == torch.float16 else input.dtype
    return (
        loss,
        by_row(True),
        by_row(with_entropy),
        by_row(with_argmax, torch.int64),
        input.new_empty((), dtype=sums),
        input.new_empty((count, _cross_entropy.STATISTICS), dtype=sums),
        *_linear.fake_gradients(input, linear_weight, wanted[:3], dtype),
        by_row(wanted[3]),
    )


def backward_fake(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    op = "linear_cross_entropy_backward"
    *of_rows, statistics, grad_loss, grad_lse, grad_entropy = rest[:7]
    rows = Rows(target, *of_rows, *rest[7:11])
    *wanted, _, chunk_rows = rest[11:]
    _linear.check_linear(op, input, linear_weight, linear_bias, chunk_rows)
    check_rows(op, rows, input, linear_weight)
    check_scale(op, rows, wanted[3])
    sums, count = (_linear.accumulator(input.dtype),), input.shape[0]
    shape = (count, _cross_entropy.STATISTICS)
    _linear.check_tensor(op, "statistics", statistics, shape, sums, input.device)
    for name, grad in (
        ("grad_loss", grad_loss),
        ("grad_lse", grad_lse),
        ("grad_entropy", grad_entropy),
    ):
        _linear.check_tensor(op, name, grad, (count,), sums, input.device)
    grad_scale = input.new_empty((count if wanted[3] else 0,), dtype=sums[0])
    return *_linear.fake_gradients(input, linear_weight, wanted[:3], input.dtype), grad_scale


def check_rows(op: str, rows: Rows, input: Tensor, linear_weight: Tensor) -> None:
    """What the ops check of the rows of a loss."""
    count, classes = input.shape[0], linear_weight.shape[0]
    wide = _linear.accumulator(input.dtype)
    if classes == 0:
        raise RuntimeError(f"{op}: the linear weight has no rows, needs one for each class")
    narrow = (input.dtype, wide)
    needed = {
        "target": ((count, classes), narrow) if rows.soft else ((count,), (torch.int64,)),
        "weight": ((classes,), (torch.float32, torch.float64, torch.bfloat16, torch.float16)),
        "token_weight": ((count,), (wide,)),
        "logit_scale": ((count,), (wide,)),
    }
    for name, (shape, dtypes) in needed.items():
        _linear.check_tensor(op, name, getattr(rows, name), shape, dtypes, input.device)
    if not 0 <= rows.label_smoothing <= 1:
        raise RuntimeError(
            f"{op}: label_smoothing is {rows.label_smoothing}, needs to be between 0 and 1"
        )
    if rows.softcap < 0:
        raise RuntimeError(f"{op}: softcap is {rows.softcap}, needs to be positive, or 0")


def check_scale(op: str, rows: Rows, want_scale: bool) -> None:
    if want_scale and rows.logit_scale is None:
        raise RuntimeError(f"{op}: there is no logit_scale to want a gradient of")
