"""Log-probabilities of chosen classes of a linear layer's softmax, without the logits.

    z = x Wᵀ + b    y[k] = z[t[k]] - log Σ exp(z)    dz = Σ dy[k] onehot(t[k]) - softmax(z) Σ dy

z (N, V) exists a block at a time, in the forward pass and again in backward, which saves x, W, t
and two numbers for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt._registry import Op, cast_floating, under_transform
from memopt.ops import _linear

__all__ = ["linear_log_probs"]

_OP = "linear_log_probs"


def _gathered(log_probs: Tensor, index: Tensor, ignore_index: int) -> Tensor:
    counts = index != ignore_index
    return torch.where(counts, log_probs.gather(-1, torch.where(counts, index, 0)), 0)


def _stock(
    input: Tensor, weight: Tensor, index: Tensor, bias: Tensor | None, ignore_index: int
) -> Tensor:
    """By stock functions on all of the logits; differentiable."""
    logits = F.linear(input, weight, bias)
    wide = logits.to(_linear.accumulator(logits.dtype))
    return _gathered(F.log_softmax(wide, -1), index, ignore_index)


def _reference(
    input: Tensor,
    weight: Tensor,
    index: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    log_probs, statistics = _fake(input, weight, index, bias, ignore_index, chunk_rows)
    for rows in _linear.chunks(len(input), chunk_rows):
        z = F.linear(input[rows], weight, bias).to(log_probs.dtype)
        log_probs[rows] = _gathered(F.log_softmax(z, -1), index[rows], ignore_index)
        largest = z.amax(-1, keepdim=True)
        statistics[rows] = torch.cat([largest, (z - largest).exp().sum(-1, keepdim=True)], -1)
    return log_probs, statistics


def _fake(
    input: Tensor,
    weight: Tensor,
    index: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    _check(_OP, input, weight, index, bias, chunk_rows)
    wide = _linear.accumulator(input.dtype)
    return input.new_empty(index.shape, dtype=wide), input.new_empty(
        (input.shape[0], 2), dtype=wide
    )


def _check(
    op: str, input: Tensor, weight: Tensor, index: Tensor, bias: Tensor | None, chunk_rows: int
) -> None:
    _linear.check_linear(op, input, weight, bias, chunk_rows)
    fits = index.dim() == 2 and index.shape[0] == input.shape[0]
    if not fits or index.dtype != torch.int64 or index.device != input.device:
        raise RuntimeError(
            f"{op}: index is {index.dtype} of shape {tuple(index.shape)} on {index.device}, needs "
            f"torch.int64 of shape ({input.shape[0]}, K) on {input.device}"
        )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.ignore_index, ctx.chunk_rows = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: None = None) -> tuple[Tensor | None, ...]:
    *tensors, statistics = ctx.saved_tensors
    needs = ctx.needs_input_grad
    wanted = (needs[1], needs[2], needs[4])
    if torch.is_grad_enabled():

        def log_probs(x: Tensor, w: Tensor, index: Tensor, b: Tensor | None) -> Sequence[Tensor]:
            return [_stock(x, w, index, b, ctx.ignore_index)]

        found: Sequence[Tensor | None] = _linear.differentiable_gradients(
            log_probs, tensors, (0, 1, 3), wanted, [grad]
        )
    else:
        gradients = _linear_log_probs_backward.on(ctx.namespace)(
            grad, *tensors, statistics, ctx.ignore_index, *wanted, ctx.chunk_rows
        )
        found = _linear.only_wanted(gradients, wanted)
    grad_input, grad_weight, grad_bias = found
    return grad_input, grad_weight, None, grad_bias


def _backward_reference(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    index: Tensor,
    bias: Tensor | None,
    statistics: Tensor,
    ignore_index: int,
    want_input: bool,
    want_weight: bool,
    want_bias: bool,
    chunk_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_backward(grad, input, weight, index, bias, statistics, chunk_rows)
    gradients = _linear.Gradients(input, weight, (want_input, want_weight, want_bias))
    for rows in _linear.chunks(len(input), chunk_rows):
        z = F.linear(input[rows], weight, bias).to(grad.dtype)
        counts = index[rows] != ignore_index
        dy = torch.where(counts, grad[rows], 0)
        dz = -F.softmax(z, -1) * dy.sum(-1, keepdim=True)
        dz = dz.scatter_add(-1, torch.where(counts, index[rows], 0), dy)
        gradients.add(rows, torch.where(counts.any(-1, keepdim=True), dz, 0).to(input.dtype))
    return gradients.finish()


def _backward_fake(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    index: Tensor,
    bias: Tensor | None,
    statistics: Tensor,
    ignore_index: int,
    want_input: bool,
    want_weight: bool,
    want_bias: bool,
    chunk_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_backward(grad, input, weight, index, bias, statistics, chunk_rows)
    wanted = (want_input, want_weight, want_bias)
    return _linear.fake_gradients(input, weight, wanted, input.dtype)


def _check_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    index: Tensor,
    bias: Tensor | None,
    statistics: Tensor,
    chunk_rows: int,
) -> None:
    op = "linear_log_probs_backward"
    _check(op, input, weight, index, bias, chunk_rows)
    wide = _linear.accumulator(input.dtype)
    for name, tensor, shape in (
        ("grad", grad, tuple(index.shape)),
        ("statistics", statistics, (input.shape[0], 2)),
    ):
        _linear.check_tensor(op, name, tensor, shape, (wide,), input.device)


def _autocast(args: Sequence[Any], dtype: torch.dtype) -> Sequence[Any]:
    input, weight, index, bias, *rest = args
    input, weight, bias = cast_floating((input, weight, bias), dtype)
    return input, weight, index, bias, *rest


_linear_log_probs = Op(
    "linear_log_probs",
    "(Tensor input, Tensor weight, Tensor index, Tensor? bias, int ignore_index, "
    "SymInt chunk_rows) -> (Tensor log_probs, Tensor statistics)",
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast=_autocast,
)

_linear_log_probs_backward = Op(
    "linear_log_probs_backward",
    "(Tensor grad, Tensor input, Tensor weight, Tensor index, Tensor? bias, Tensor statistics, "
    "int ignore_index, bool want_input, bool want_weight, bool want_bias, SymInt chunk_rows) -> "
    "(Tensor, Tensor, Tensor)",
    reference=_backward_reference,
    fake=_backward_fake,
    not_differentiable="differentiate linear_log_probs itself, with create_graph=True",
)


def linear_log_probs(
    input: Tensor,
    weight: Tensor,
    index: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    max_chunk_bytes: int | None = None,
) -> Tensor:
    """``log_softmax(linear(input, weight, bias), -1).gather(-1, index)`` without the (N, V) matrix.

    Neither pass holds the logits. The result is float32 for inputs in float16 and bfloat16 too
    (float64 for float64).

    Args:
        input: (..., H), floating point.
        weight: (V, H).
        index: (..., K), int64: the classes whose log-probabilities are wanted.
        bias: (V,).
        ignore_index: an entry of `index` that stands for no class: its result is 0. Rows of such
            entries only cost nothing.
        max_chunk_bytes: what the logits of a chunk may take; by default an eighth or so of what
            the gradients take.

    Returns:
        Log-probabilities, (..., K).

    Raises:
        IndexError: an entry of `index` is no class. On a GPU, a device-side assertion.
        TypeError: the arguments have different dtypes.
        RuntimeError: their shapes do not fit.

    Example:
        >>> import torch, memopt
        >>> x, weight = torch.zeros(2, 3), torch.ones(4, 3)
        >>> memopt.nn.functional.linear_log_probs(x, weight, torch.tensor([[0, 3], [1, -100]]))
        tensor([[-1.3863, -1.3863],
                [-1.3863,  0.0000]])
    """
    _linear.check_call(_OP, input, weight=weight, bias=bias)
    if not isinstance(index, Tensor):
        raise TypeError(f"{_OP}: index is a {type(index).__name__}, needs to be a Tensor")
    if index.dtype != torch.int64:
        raise RuntimeError(f"{_OP}: index has dtype {index.dtype}, needs torch.int64")
    if index.dim() == 0 or index.shape[:-1] != input.shape[:-1]:
        raise RuntimeError(
            f"{_OP}: index has shape {tuple(index.shape)}, needs {(*input.shape[:-1], 'K')}"
        )
    if max_chunk_bytes is not None and max_chunk_bytes < 1:
        raise ValueError(f"{_OP}: max_chunk_bytes is {max_chunk_bytes}, needs to be positive")
    if under_transform(input, weight, bias):
        return _stock(input, weight, index, bias, ignore_index)
    _linear.check_bounds(_OP, "index", index, weight.shape[0], ignore_index)
    rows = _linear.as_rows(input)
    chunk_rows = _linear.loss_rows_per_chunk(rows.shape[0], weight, max_chunk_bytes)
    indices = index.reshape(rows.shape[0], index.shape[-1])
    log_probs = _linear_log_probs(rows, weight, indices, bias, ignore_index, chunk_rows)[0]
    return log_probs.view(index.shape)
