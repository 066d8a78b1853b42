"""Linear layer and cross-entropy in one, without the logits.

    z = x Wᵀ + b        p = softmax(z)        loss = (1 - s) w[t] (-log p[t]) + s / V Σ w (-log p)

for target class t, class weights w and label smoothing s; `_cross_entropy` has all of the formula.
z (N, V) exists a chunk of rows at a time: the chunk becomes its rows' losses and, in its own
memory, their gradient dz, which is multiplied out at once. So the forward pass does the three
matrix products of a training step, and backward only scales their results.

Where backward brings a factor for each row (reduction="none"), or a gradient for the other results,
it makes the logits again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt._registry import Op, cast_floating
from memopt.ops import _cross_entropy_call, _cross_entropy_fakes, _linear
from memopt.ops._cross_entropy import Rows

__all__ = ["linear_cross_entropy"]

Results = tuple[Tensor, ...]


# -- Forward ---------------------------------------------------------------------------------------


def _reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    token_weight: Tensor | None,
    logit_scale: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    with_entropy: bool,
    with_argmax: bool,
    *settings: Any,
) -> Results:
    *wanted, _, _, chunk_rows = settings
    fake = _cross_entropy_fakes.fake(
        *(input, linear_weight, target, linear_bias, weight, token_weight, logit_scale, reduction),
        *(ignore_index, label_smoothing, softcap, z_loss, with_entropy, with_argmax, *settings),
    )
    rows = Rows(
        target, weight, token_weight, logit_scale, ignore_index, label_smoothing, softcap, z_loss
    )
    sums = _linear.accumulator(input.dtype)
    losses, lse, entropy = (input.new_empty((len(input),), dtype=sums) for _ in range(3))
    largest, statistics, grad_scale = fake[3], fake[5], fake[9]
    gradients = _linear.Gradients(input, linear_weight, wanted[:3])
    divisor = rows.divisor(sums) if reduction == "mean" else input.new_ones((), dtype=sums)
    # Where every row is ignored the mean is NaN, and its gradient 0.
    factor = torch.where(rows.counted().any(), 1 / divisor, 0) if reduction == "mean" else divisor
    unit = torch.ones_like(factor) if input.dtype == torch.float16 else factor
    for chunk in _linear.chunks(len(input), chunk_rows):
        z = F.linear(input[chunk], linear_weight, linear_bias).to(sums)
        part = rows.part(chunk)
        losses[chunk], lse[chunk], entropy[chunk] = part.losses(z)
        statistics[chunk] = part.statistics(z)
        if with_argmax:
            largest[chunk] = torch.where(part.counted(), part.logits(z).argmax(-1), -1)
        if any(wanted):
            dz, dscale = part.gradient(z, unit.expand(len(z)), None, None)
            gradients.add(chunk, dz.to(input.dtype))
            if wanted[3]:
                grad_scale[chunk] = dscale
    loss = losses if reduction == "none" else losses.sum() / divisor
    formed = gradients.finish(rounded=input.dtype != torch.float16)
    entropy = entropy if with_entropy else fake[2]
    return loss, lse, entropy, largest, factor, statistics, *formed, grad_scale


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    tensors = inputs[:7]
    ctx.reduction, *ctx.row_loss = inputs[7:12]
    *ctx.formed, ctx.overwrite_kept, ctx.by_classes, ctx.chunk_rows = inputs[14:]
    ctx.save_for_backward(*tensors, *output[4:])
    with_entropy = inputs[12]
    ctx.mark_non_differentiable(*output[3 if with_entropy else 2 :])


# -- Backward --------------------------------------------------------------------------------------


def _backward(
    ctx: Any,
    grad_loss: Tensor | None,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    *_: None,
) -> tuple[Tensor | None, ...]:
    *tensors, factor, statistics = ctx.saved_tensors[:9]
    input = tensors[0]
    formed = ctx.saved_tensors[9:]
    needs = ctx.needs_input_grad
    wanted = (needs[1], needs[2], needs[4], needs[7])
    of_loss = None if grad_loss is None else grad_loss * factor
    result: list[Tensor | None] = [None] * 4
    if torch.is_grad_enabled():

        def losses(x: Tensor, w: Tensor, target: Any, b: Any, *of_rows: Any) -> Sequence[Tensor]:
            z = F.linear(x, w, b).to(factor.dtype)
            return Rows(target, *of_rows, *ctx.row_loss).losses(z)

        differentiable = _linear.differentiable_gradients(
            losses, tensors, (0, 1, 3, 6), wanted, (of_loss, grad_lse, grad_entropy)
        )
        return _by_argument(differentiable)
    if grad_loss is not None and of_loss is not None and ctx.reduction != "none":
        if all(had or not want for had, want in zip(ctx.formed, wanted, strict=True)):
            # What is kept may be overwritten where backward cannot run again.
            in_place = ctx.overwrite_kept and not _linear.graph_is_retained()
            dtypes = (input.dtype,) * 3 + (factor.dtype,)
            scale = of_loss if input.dtype == torch.float16 else grad_loss
            result = [
                _linear.scaled(g, scale, dtype, in_place) if want else None
                for g, want, dtype in zip(formed, wanted, dtypes, strict=True)
            ]
            of_loss = None
        else:
            of_loss = of_loss.expand(len(input))
    if of_loss is not None or grad_lse is not None or grad_entropy is not None:
        more = _linear_cross_entropy_backward.on(ctx.namespace)(
            *(*tensors, statistics, of_loss, grad_lse, grad_entropy, *ctx.row_loss, *wanted),
            *(ctx.by_classes, ctx.chunk_rows),
        )
        result = [
            None if not want else m if r is None else r + m
            for r, m, want in zip(result, more, wanted, strict=True)
        ]
    return _by_argument(result)


def _by_argument(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    grad_input, grad_weight, grad_bias, grad_scale = gradients
    return grad_input, grad_weight, None, grad_bias, None, None, grad_scale


def _backward_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, grad_scale = _cross_entropy_fakes.backward_fake(
        input, linear_weight, target, linear_bias, *rest
    )
    *of_rows, _, grad_loss, grad_lse, grad_entropy = rest[:7]
    rows = Rows(target, *of_rows, *rest[7:11])
    *wanted, _, chunk_rows = rest[11:]
    sums = _linear.accumulator(input.dtype)
    gradients = _linear.Gradients(input, linear_weight, wanted[:3])
    for chunk in _linear.chunks(len(input), chunk_rows):
        z = F.linear(input[chunk], linear_weight, linear_bias).to(sums)
        grads = (None if g is None else g[chunk] for g in (grad_loss, grad_lse, grad_entropy))
        dz, dscale = rows.part(chunk).gradient(z, *grads)
        gradients.add(chunk, dz.to(input.dtype))
        if wanted[3]:
            grad_scale[chunk] = dscale
    return *gradients.finish(), grad_scale


# -- Registration ----------------------------------------------------------------------------------


def _autocast(args: Sequence[Any], dtype: torch.dtype) -> Sequence[Any]:
    # As eager: the linear layer in `dtype`, the loss in float32 (as it is always here).
    input, linear_weight, target, linear_bias, *rest = args
    input, linear_weight, linear_bias = cast_floating((input, linear_weight, linear_bias), dtype)
    if target.is_floating_point() and target.dtype != torch.float64:
        target = target.float()
    return input, linear_weight, target, linear_bias, *rest


_TENSORS = (
    "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, "
    "Tensor? token_weight, Tensor? logit_scale"
)
_ROW_LOSS = "int ignore_index, float label_smoothing, float softcap, float z_loss"
_WANTED = "bool want_input, bool want_weight, bool want_bias, bool want_scale"

_linear_cross_entropy = Op(
    "linear_cross_entropy",
    f"({_TENSORS}, str reduction, {_ROW_LOSS}, bool with_entropy, bool with_argmax, {_WANTED}, "
    "bool overwrite_kept, bool by_classes, SymInt chunk_rows) -> (Tensor loss, Tensor lse, "
    "Tensor entropy, Tensor argmax, Tensor factor, Tensor statistics, Tensor grad_input, "
    "Tensor grad_weight, Tensor grad_bias, Tensor grad_scale)",
    reference=_reference,
    fake=_cross_entropy_fakes.fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast=_autocast,
)

_linear_cross_entropy_backward = Op(
    "linear_cross_entropy_backward",
    f"({_TENSORS}, Tensor statistics, Tensor? grad_loss, Tensor? grad_lse, Tensor? grad_entropy, "
    f"{_ROW_LOSS}, {_WANTED}, bool by_classes, SymInt chunk_rows) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    reference=_backward_reference,
    fake=_cross_entropy_fakes.backward_fake,
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
    softcap: float | None = None,
    logit_scale: float | Tensor | None = None,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    shift: bool = False,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_argmax: bool = False,
    max_chunk_bytes: int | None = None,
    accumulate: str = "full",
) -> Any:
    """``cross_entropy(linear(input, linear_weight, linear_bias), target, ...)`` without the logits.

    The arguments up to `options` are those of `torch.nn.functional.linear_cross_entropy` (torch
    2.13), which this takes the place of, with every torch: backward may run twice, gradients of
    gradients, forward-mode AD, `torch.func` and torch.compile are right. `input` may have any
    number of leading dimensions.

    The loss is float32 for inputs in float16 and bfloat16 too (float64 for float64). Rows whose
    target is ignored cost nothing and have gradient 0, also where every row is ignored.

    Args:
        input: (..., H), floating point.
        linear_weight: (V, H); or (V, d1, ..., dK, H) for a K-dimensional loss.
        target: (...), int64 class indices; or (..., V) class probabilities. For a K-dimensional
            loss with d1, ..., dK after the last of these.
        linear_bias: (V,), or (V, d1, ..., dK).
        weight: (V,), a factor for each class's losses; in `input`'s dtype or the loss's.
        reduction: "mean" (over the class weights and token weights of the targets that count),
            "sum" or "none".
        ignore_index: the target of rows that do not count; None means -100.
        label_smoothing: from 0 to 1.
        options: a `torch.nn.LinearCrossEntropyOptions`, whose `batch_chunk_size` is followed.
            Its other fields choose nothing: sums are in float32, backward may run again.
        softcap: the logits z become ``softcap * tanh(z / softcap)``.
        logit_scale: a factor for the logits, after `softcap`: a number, or a tensor () or (...),
            which gets a gradient where it requires one.
        z_loss: ``z_loss * logsumexp(logits)²`` is added to each row's loss.
        token_weight: (...), a factor for each row's loss. It gets no gradient.
        shift: each position predicts the target (and has the token weight) of the next one along
            the last dimension of `target`; the last position predicts nothing.
        return_lse, return_entropy: also return each row's logsumexp of its logits, or entropy of
            its softmax, through which gradients flow too. 0 for ignored rows.
        return_argmax: also return each row's largest class. -1 for ignored rows.
        max_chunk_bytes: what the logits of a chunk may take; by default, about an eighth of what
            the gradients take.
        accumulate: "full" sums the gradient of `linear_weight` in a float32 tensor of its size.
            "tiled" sums a part of it at a time, for a third more arithmetic: less memory where
            `linear_weight` is float16 or bfloat16.

    Returns:
        The loss: a scalar, or (...) with reduction="none". Where any of lse, entropy and argmax is
        wanted, a named tuple (loss, lse, entropy, argmax), with None for those that are not.

    Raises:
        IndexError: a target is neither a class nor ignored. On a GPU, a device-side assertion.
        TypeError: the arguments have different dtypes.
        ValueError, RuntimeError: other arguments that do not fit, as in the stock functions.

    Example:
        >>> import torch, memopt
        >>> x, weight = torch.zeros(2, 3), torch.ones(4, 3)
        >>> memopt.nn.functional.linear_cross_entropy(x, weight, torch.tensor([0, 3]))
        tensor(1.3863)
    """
    call = _cross_entropy_call.Call(
        *(input, linear_weight, target, linear_bias, weight, reduction, ignore_index),
        *(label_smoothing, options, softcap, logit_scale, z_loss, token_weight, shift),
        *(return_lse, return_entropy, return_argmax, max_chunk_bytes, accumulate),
    )
    return call.run(_linear_cross_entropy)
