"""Linear layer and cross-entropy in one, without the logits.

    z = x Wᵀ + b        p = softmax(z)        loss = (1 - s) w[t] (-log p[t]) + s / V Σ w (-log p)

for target class t, class weights w and label smoothing s. z (N, V) exists a chunk of rows at a
time: the chunk becomes its rows' losses and, in its own memory, their gradient dz, which is
multiplied out at once. So the forward pass does the three matrix products of a training step, and
backward only scales their results. Two exceptions:

* reduction="none": backward brings a factor for each row, so it makes the chunks again.
* all of z fits one chunk and is smaller than the gradients of x, W and b: dz itself is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt._registry import Op, cast_floating, under_transform
from memopt.ops import _cross_entropy, _linear

__all__ = ["linear_cross_entropy"]


# -- Forward ---------------------------------------------------------------------------------------


def _reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    keep_logits_grad: bool,
    want_input: bool,
    want_weight: bool,
    want_bias: bool,
    overwrite_kept: bool,
    chunk_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    wanted = (want_input, want_weight, want_bias)
    _cross_entropy.check_arguments(
        "linear_cross_entropy", input, linear_weight, target, linear_bias, weight, chunk_rows
    )
    _cross_entropy.check_kept(reduction, keep_logits_grad, wanted)
    rows, classes = input.shape[0], linear_weight.shape[0]
    sums = _linear.accumulator(input.dtype)
    class_weight = None if weight is None else weight.to(sums)
    losses = input.new_empty((rows,), dtype=sums)
    kept = input.new_empty((rows, classes) if keep_logits_grad else (0, 0))
    gradients = _linear.Gradients(input, linear_weight, wanted)
    for chunk in _linear.chunks(rows, rows or 1 if keep_logits_grad else chunk_rows):
        logits = F.linear(input[chunk], linear_weight, linear_bias).to(sums)
        losses[chunk] = F.cross_entropy(
            logits,
            target[chunk],
            class_weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction="none",
        )
        if keep_logits_grad or any(wanted):
            ones = torch.ones_like(losses[chunk])
            dz = _cross_entropy.logits_gradient(
                logits, target[chunk], class_weight, ignore_index, label_smoothing, ones
            ).to(input.dtype)
            gradients.add(chunk, dz)
            if keep_logits_grad:
                kept[chunk] = dz
    loss = losses if reduction == "none" else losses.sum()
    scale = input.new_ones((), dtype=sums)
    if reduction == "mean":
        counted, divisor = _cross_entropy.what_counts(target, class_weight, ignore_index)
        loss = loss / divisor
        # Where every row is ignored the mean is NaN, and its gradient 0.
        scale = torch.where(counted == 0, 0, 1 / divisor.to(sums))
    return loss, scale, kept, *gradients.finish(rounded=input.dtype != torch.float16)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, linear_weight, target, linear_bias, weight, *rest = inputs
    ctx.reduction, ctx.ignore_index, ctx.label_smoothing = rest[:3]
    ctx.keeps_logits_grad, *ctx.formed, ctx.overwrite_kept, ctx.chunk_rows = rest[3:]
    ctx.save_for_backward(input, linear_weight, target, linear_bias, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


# -- Backward --------------------------------------------------------------------------------------


def _backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    input, linear_weight, target, linear_bias, weight, scale, dz, *formed = ctx.saved_tensors
    needs = ctx.needs_input_grad
    wanted = (needs[1], needs[2], needs[4])
    factor = grad * scale  # of one row with reduction="none", where scale is 1
    row_loss = (ctx.ignore_index, ctx.label_smoothing)
    # Backward may overwrite what is kept where it cannot run again.
    in_place = ctx.overwrite_kept and _linear.is_plain(factor) and not _linear.graph_is_retained()
    result: tuple[Tensor | None, ...]
    if torch.is_grad_enabled():
        logits = F.linear(input, linear_weight, linear_bias).to(scale.dtype)
        dz = _cross_entropy.logits_gradient(
            logits, target, weight, *row_loss, factor.expand(target.shape)
        )
        result = _linear.linear_backward(dz.to(input.dtype), input, linear_weight, wanted)
    elif ctx.keeps_logits_grad:
        dz = _scaled(dz, factor, input.dtype, in_place)
        result = _linear.linear_backward(dz, input, linear_weight, wanted)
    elif ctx.reduction != "none" and all(
        had or not want for had, want in zip(ctx.formed, wanted, strict=True)
    ):
        result = tuple(
            _scaled(g, factor, input.dtype, in_place) if want else None
            for g, want in zip(formed, wanted, strict=True)
        )
    else:
        result = _linear.only_wanted(
            _linear_cross_entropy_backward.on(ctx.namespace)(
                factor.expand(target.shape),
                input,
                linear_weight,
                target,
                linear_bias,
                weight,
                *row_loss,
                *wanted,
                ctx.chunk_rows,
            ),
            wanted,
        )
    grad_input, grad_weight, grad_bias = result
    return grad_input, grad_weight, None, grad_bias


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype, in_place: bool) -> Tensor:
    if gradient.dtype != factor.dtype:  # a factor such as a loss scale may not fit float16
        return (gradient.to(factor.dtype) * factor).to(dtype)
    return (gradient.mul_(factor) if in_place else gradient * factor).to(dtype)


def _backward_reference(
    grad: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    want_input: bool,
    want_weight: bool,
    want_bias: bool,
    chunk_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _cross_entropy.check_backward(
        grad, input, linear_weight, target, linear_bias, weight, chunk_rows
    )
    gradients = _linear.Gradients(input, linear_weight, (want_input, want_weight, want_bias))
    for chunk in _linear.chunks(input.shape[0], chunk_rows):
        logits = F.linear(input[chunk], linear_weight, linear_bias).to(grad.dtype)
        dz = _cross_entropy.logits_gradient(
            logits, target[chunk], weight, ignore_index, label_smoothing, grad[chunk]
        )
        gradients.add(chunk, dz.to(input.dtype))
    return gradients.finish()


# -- Registration ----------------------------------------------------------------------------------


def _autocast(args: Sequence[Any], dtype: torch.dtype) -> Sequence[Any]:
    # As eager: the linear layer in `dtype`, the loss in float32 (as it is always here).
    input, linear_weight, target, linear_bias, *rest = args
    input, linear_weight, linear_bias = cast_floating((input, linear_weight, linear_bias), dtype)
    return input, linear_weight, target, linear_bias, *rest


_linear_cross_entropy = Op(
    "linear_cross_entropy",
    "(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, "
    "str reduction, int ignore_index, float label_smoothing, bool keep_logits_grad, "
    "bool want_input, bool want_weight, bool want_bias, bool overwrite_kept, SymInt chunk_rows) -> "
    "(Tensor loss, Tensor scale, Tensor logits_grad, Tensor grad_input, Tensor grad_weight, "
    "Tensor grad_bias)",
    reference=_reference,
    fake=_cross_entropy.fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast=_autocast,
)

_linear_cross_entropy_backward = Op(
    "linear_cross_entropy_backward",
    "(Tensor grad, Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, "
    "Tensor? weight, int ignore_index, float label_smoothing, bool want_input, bool want_weight, "
    "bool want_bias, SymInt chunk_rows) -> (Tensor, Tensor, Tensor)",
    reference=_backward_reference,
    fake=_cross_entropy.backward_fake,
    not_differentiable="differentiate linear_cross_entropy itself, with create_graph=True",
)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor:
    """``cross_entropy(linear(input, linear_weight, linear_bias), target, ...)`` without the logits.

    Arguments as of `torch.nn.functional.linear_cross_entropy` (torch 2.13), which this takes the
    place of, with every torch: backward may run twice, gradients of gradients, forward-mode AD,
    `torch.func` and torch.compile are right. `input` may have any number of leading dimensions.
    Targets are class indices; class probabilities and K-dimensional losses are refused.

    The loss is float32 for inputs in float16 and bfloat16 too (float64 for float64). Rows whose
    target is ignored have gradient 0, also where every row is.

    Args:
        input: (..., H), floating point.
        linear_weight: (V, H).
        target: (...), int64 class indices.
        linear_bias: (V,).
        weight: (V,), a factor for each class's losses; in `input`'s dtype or the loss's.
        reduction: "mean" (over the class weights of the targets that count), "sum" or "none".
        ignore_index: the target of rows that do not count; None means -100.
        label_smoothing: from 0 to 1.
        options: a `torch.nn.LinearCrossEntropyOptions`, whose `batch_chunk_size` is followed.
            Its other fields choose nothing: sums are in float32, backward may run again.

    Returns:
        The loss: a scalar, or (...) with reduction="none".

    Raises:
        IndexError: a target is neither a class nor ignored. On a GPU, a device-side assertion.
        NotImplementedError: class probabilities, or a K-dimensional loss.
        TypeError: the arguments have different dtypes.
        ValueError, RuntimeError: other arguments that do not fit, as in the stock functions.

    Example:
        >>> import torch, memopt
        >>> x, weight = torch.zeros(2, 3), torch.ones(4, 3)
        >>> memopt.nn.functional.linear_cross_entropy(x, weight, torch.tensor([0, 3]))
        tensor(1.3863)
    """
    _linear.check_call(
        "linear_cross_entropy", input, linear_weight=linear_weight, linear_bias=linear_bias
    )
    _cross_entropy.check_call(input, linear_weight, target, weight, reduction, label_smoothing)
    target = target.long()
    if ignore_index is None:
        ignore_index = -100
    if under_transform(input, linear_weight, linear_bias):
        logits = F.linear(_linear.as_rows(input), linear_weight, linear_bias)
        loss = F.cross_entropy(
            logits.to(_linear.accumulator(logits.dtype)),
            target.flatten(),
            None if weight is None else weight.to(_linear.accumulator(logits.dtype)),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
        return loss.view(target.shape) if reduction == "none" else loss

    _cross_entropy.check_bounds(target, linear_weight.shape[0], ignore_index)
    rows = _linear.as_rows(input)
    chunk_rows = _cross_entropy.chunk_rows_of(options) or _linear.rows_per_chunk(
        linear_weight.shape[0], input.dtype
    )
    keep_logits_grad, wanted = False, (False, False, False)
    if reduction != "none":
        keep_logits_grad, wanted = _cross_entropy.plan(rows, linear_weight, linear_bias, chunk_rows)
    loss = _linear_cross_entropy(
        rows,
        linear_weight,
        target.flatten(),
        linear_bias,
        weight,
        reduction,
        ignore_index,
        label_smoothing,
        keep_logits_grad,
        *wanted,
        True,  # nobody else sees what is kept
        chunk_rows,
    )[0]
    return loss.view(target.shape) if reduction == "none" and target.dim() != 1 else loss
