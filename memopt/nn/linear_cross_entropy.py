"""Linear layer and cross-entropy loss as one layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.loss import _WeightedLoss

from memopt.ops.linear_cross_entropy import linear_cross_entropy

__all__ = ["LinearCrossEntropyLoss"]


class LinearCrossEntropyLoss(_WeightedLoss):
    """`torch.nn.LinearCrossEntropyLoss` (torch 2.13) without the logits, with every torch.

    Constructor, parameters and state_dict are the stock layer's: `linear.weight`, `linear.bias` and
    the buffer `weight`. `memopt.nn.functional.linear_cross_entropy` tells what the arguments do.

    Example:
        >>> import torch, memopt
        >>> loss = memopt.nn.LinearCrossEntropyLoss(8, 3)
        >>> loss(torch.randn(2, 8), torch.tensor([0, 2])).shape
        torch.Size([])
    """

    __constants__ = ("num_classes", "out_features", "reduction", "ignore_index", "label_smoothing")

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: Any = None,
        softcap: float | None = None,
        z_loss: float = 0.0,
        shift: bool = False,
        max_chunk_bytes: int | None = None,
        accumulate: str = "full",
    ) -> None:
        if weight is not None and tuple(weight.shape) != (num_classes,):
            raise RuntimeError(
                f"LinearCrossEntropyLoss: weight has shape {tuple(weight.shape)}, needs "
                f"({num_classes},)"
            )
        if not 0 <= label_smoothing <= 1:
            raise RuntimeError(
                f"LinearCrossEntropyLoss: label_smoothing is {label_smoothing}, needs to be "
                "between 0 and 1"
            )
        super().__init__(weight=weight, reduction=reduction)
        self.num_classes = num_classes
        self.out_features = tuple(out_features)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.linear = torch.nn.Linear(
            in_features,
            math.prod(self.out_features, start=num_classes),
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.options = options
        self.softcap = softcap
        self.z_loss = z_loss
        self.shift = shift
        self.max_chunk_bytes = max_chunk_bytes
        self.accumulate = accumulate

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        token_weight: Tensor | None = None,
        logit_scale: float | Tensor | None = None,
    ) -> Tensor:
        weight: Tensor = self.linear.weight
        bias: Tensor | None = self.linear.bias
        if self.out_features:
            weight = weight.view(self.num_classes, *self.out_features, -1)
            bias = None if bias is None else bias.view(weight.shape[:-1])
        loss: Tensor = linear_cross_entropy(
            input,
            weight,
            target,
            linear_bias=bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            options=self.options,
            softcap=self.softcap,
            z_loss=self.z_loss,
            shift=self.shift,
            max_chunk_bytes=self.max_chunk_bytes,
            accumulate=self.accumulate,
            token_weight=token_weight,
            logit_scale=logit_scale,
        )
        return loss

    def extra_repr(self) -> str:
        return (
            f"out_features={self.out_features}, reduction={self.reduction!r}, "
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, "
            f"softcap={self.softcap}, z_loss={self.z_loss}, shift={self.shift}, "
            f"accumulate={self.accumulate!r}"
        )
