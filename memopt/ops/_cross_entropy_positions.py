"""linear_cross_entropy of targets that do not lie beside their rows: shifted, or K-dimensional."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class LinearCrossEntropyOutput(NamedTuple):
    """What linear_cross_entropy returns beside the loss, None where it was not asked for."""

    loss: Tensor
    lse: Tensor | None
    entropy: Tensor | None
    argmax: Tensor | None


def shifted(call: Any, op: Callable[..., tuple[Tensor, ...]]) -> Any:
    ignore_index = -100 if call.ignore_index is None else call.ignore_index

    def next_of(tensor: Tensor, last: float) -> Tensor:
        return torch.cat([tensor[..., 1:], torch.full_like(tensor[..., :1], last)], -1)

    weight = call.token_weight
    shifted_call = dataclasses.replace(
        call,
        target=next_of(call.target.long(), ignore_index),
        token_weight=None if weight is None else next_of(weight, 0),
        shift=False,
    )
    result = shifted_call.run(op)
    if isinstance(result, Tensor):
        return result[..., :-1] if call.reduction == "none" else result
    loss, *others = result
    return LinearCrossEntropyOutput(
        loss[..., :-1] if call.reduction == "none" else loss,
        *(None if t is None else t[..., :-1] for t in others),
    )


def k_dimensional(call: Any, op: Callable[..., tuple[Tensor, ...]]) -> Any:
    """One loss for each position of `linear_weight`'s middle dimensions."""
    classes, *positions, features = call.linear_weight.shape
    lead = call.input.shape[:-1]
    soft = call.soft and call.target.is_floating_point()
    weights = call.linear_weight.reshape(classes, -1, features).unbind(1)
    biases = (
        [None] * len(weights)
        if call.linear_bias is None
        else call.linear_bias.reshape(classes, -1).unbind(1)
    )

    def by_position(tensor: Any, *before: int) -> list[Any]:
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            return [tensor] * len(weights)
        return list(tensor.reshape(*lead, *before, len(weights)).unbind(-1))

    targets = by_position(call.target, *((classes,) if soft else ()))
    parts = [
        dataclasses.replace(
            call,
            linear_weight=w,
            linear_bias=b,
            target=t,
            token_weight=tw,
            logit_scale=scale,
            reduction="none" if call.reduction == "none" else "sum",
        ).run(op)
        for w, b, t, tw, scale in zip(
            *(weights, biases, targets),
            *(by_position(call.token_weight), by_position(call.logit_scale)),
            strict=True,
        )
    ]
    outputs = [p if isinstance(p, tuple) else (p, None, None, None) for p in parts]
    shape = (*lead, *positions)

    def stacked(index: int) -> Tensor | None:
        tensors = [o[index] for o in outputs]
        return None if tensors[0] is None else torch.stack(tensors, -1).view(shape)

    loss: Any = stacked(0) if call.reduction == "none" else sum(o[0] for o in outputs)
    if call.reduction == "mean":
        ones = [
            dataclasses.replace(call, linear_weight=w, target=t, token_weight=tw, logit_scale=None)
            for w, t, tw in zip(weights, targets, by_position(call.token_weight), strict=True)
        ]
        divisor = torch.stack([c.rows().divisor(loss.dtype) for c in ones]).sum()
        # As for one loss: NaN where every row is ignored, with gradient 0.
        none = divisor == 0
        loss = torch.where(none, torch.nan, loss / torch.where(none, 1, divisor))
    if not isinstance(parts[0], tuple):
        return loss
    return LinearCrossEntropyOutput(loss, stacked(1), stacked(2), stacked(3))
