"""A call of linear_cross_entropy: its checks, the rows it means, the shapes it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt._registry import under_transform
from memopt.ops import _cross_entropy, _cross_entropy_positions, _linear
from memopt.ops._cross_entropy import Rows
from memopt.ops._cross_entropy_positions import LinearCrossEntropyOutput

OP = "linear_cross_entropy"


@dataclasses.dataclass
class Call:
    """The arguments of linear_cross_entropy, by their names there."""

    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None
    weight: Tensor | None
    reduction: str
    ignore_index: int | None
    label_smoothing: float
    options: Any
    softcap: float | None
    logit_scale: float | Tensor | None
    z_loss: float
    token_weight: Tensor | None
    shift: bool
    return_lse: bool
    return_entropy: bool
    return_argmax: bool
    max_chunk_bytes: int | None
    accumulate: str

    def run(self, op: Callable[..., tuple[Tensor, ...]]) -> Any:
        self.check()
        if self.linear_weight.dim() > 2:
            return _cross_entropy_positions.k_dimensional(self, op)
        if self.shift:
            return _cross_entropy_positions.shifted(self, op)
        rows = self.rows()
        x = _linear.as_rows(self.input)
        tensors = (self.input, self.linear_weight, self.linear_bias, rows.logit_scale, self.target)
        if under_transform(*tensors) or (self.target.requires_grad and torch.is_grad_enabled()):
            results = self.stock(rows, x)
        else:
            results = op(*self.op_arguments(rows, x))
        loss, lse, entropy, argmax = results[:4]
        shape = self.input.shape[:-1]
        if self.reduction == "none":
            loss = loss.view(shape)
        if not (self.return_lse or self.return_entropy or self.return_argmax):
            return loss
        return LinearCrossEntropyOutput(
            loss,
            lse.view(shape) if self.return_lse else None,
            entropy.view(shape) if self.return_entropy else None,
            argmax.view(shape) if self.return_argmax else None,
        )

    # -- Checks ------------------------------------------------------------------------------------

    @property
    def soft(self) -> bool:
        """Whether the target has probabilities. As eager: by its shape."""
        classes, *positions = self.linear_weight.shape[:-1]
        return self.target.shape == (*self.input.shape[:-1], classes, *positions)

    def check(self) -> None:
        """Raise, with the errors of the stock functions, what can be told from the arguments."""
        input, linear_weight = self.input, self.linear_weight
        _linear.check_call(OP, input, linear_weight=linear_weight, linear_bias=self.linear_bias)
        if linear_weight.dim() < 2 or linear_weight.shape[-1] != input.shape[-1]:
            raise RuntimeError(
                f"{OP}: linear_weight has shape {tuple(linear_weight.shape)}, needs "
                f"(V, {input.shape[-1]}): input has {input.shape[-1]} features"
            )
        classes, *positions = linear_weight.shape[:-1]
        if self.linear_bias is not None and self.linear_bias.shape != linear_weight.shape[:-1]:
            raise RuntimeError(
                f"{OP}: linear_bias has shape {tuple(self.linear_bias.shape)}, needs "
                f"{tuple(linear_weight.shape[:-1])}"
            )
        self._check_target((*input.shape[:-1], *positions))
        if self.reduction not in _cross_entropy.REDUCTIONS:
            raise ValueError(
                f"{OP}: reduction is {self.reduction!r}, needs one of {_cross_entropy.REDUCTIONS}"
            )
        if not 0 <= self.label_smoothing <= 1:
            raise RuntimeError(
                f"{OP}: label_smoothing is {self.label_smoothing}, needs to be between 0 and 1"
            )
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"{OP}: softcap is {self.softcap}, needs to be positive or None")
        if self.max_chunk_bytes is not None and self.max_chunk_bytes < 1:
            raise ValueError(
                f"{OP}: max_chunk_bytes is {self.max_chunk_bytes}, needs to be positive"
            )
        if self.accumulate not in ("full", "tiled"):
            raise ValueError(f"{OP}: accumulate is {self.accumulate!r}, needs 'full' or 'tiled'")
        self._check_weights(classes, (*input.shape[:-1], *positions))

    def _check_target(self, shape: tuple[int, ...]) -> None:
        target = self.target
        if self.soft and target.is_floating_point():
            if self.ignore_index is not None:
                raise RuntimeError(
                    f"{OP}: ignore_index cannot be given for a target of class probabilities"
                )
            if self.shift:
                raise ValueError(f"{OP}: shift needs a target of class indices")
            wide = _linear.accumulator(self.input.dtype)
            amp = torch.is_autocast_enabled(self.input.device.type)
            if target.dtype not in (self.input.dtype, wide) and not amp:
                raise RuntimeError(
                    f"{OP}: target has dtype {target.dtype}, needs {self.input.dtype}"
                )
            return
        if target.dtype not in (torch.int64, torch.uint8):  # uint8: as eager
            raise RuntimeError(f"{OP}: target has dtype {target.dtype}, needs torch.int64")
        if target.shape != shape:
            raise ValueError(
                f"{OP}: target has shape {tuple(target.shape)}, needs {tuple(shape)}: a class for "
                "each row of input"
            )
        if self.shift and not shape:
            raise ValueError(f"{OP}: shift needs a target with a dimension to shift along")

    def _check_weights(self, classes: int, shape: tuple[int, ...]) -> None:
        for name, tensor, needed in (
            ("weight", self.weight, (classes,)),
            ("token_weight", self.token_weight, shape),
        ):
            if tensor is None:
                continue
            if tensor.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{OP}: {name} requires a gradient, which the loss has none of for it"
                )
            if tensor.shape != needed:
                raise RuntimeError(
                    f"{OP}: {name} has shape {tuple(tensor.shape)}, needs {tuple(needed)}"
                )
        wide = _linear.accumulator(self.input.dtype)
        if self.weight is not None and self.weight.dtype not in (self.input.dtype, wide):
            raise RuntimeError(
                f"{OP}: weight has dtype {self.weight.dtype}, needs {self.input.dtype}"
            )
        scale = self.logit_scale
        if isinstance(scale, Tensor) and scale.shape not in ((), shape):
            raise RuntimeError(
                f"{OP}: logit_scale has shape {tuple(scale.shape)}, needs () or {tuple(shape)}"
            )

    # -- What the arguments mean -------------------------------------------------------------------

    def rows(self) -> Rows:
        classes = self.linear_weight.shape[0]
        ignore_index = -100 if self.ignore_index is None else self.ignore_index
        if self.soft and self.target.is_floating_point():
            target = self.target.reshape(-1, classes)
        else:
            target = self.target.long().flatten()
            if not under_transform(target):
                _linear.check_bounds(OP, "target", target, classes, ignore_index)
        count = target.shape[:1]
        wide = _linear.accumulator(self.input.dtype)
        scale = self.logit_scale
        if scale is not None and not isinstance(scale, Tensor):
            scale = None if scale == 1 else self.input.new_full((), scale, dtype=wide)
        if scale is not None:
            scale = scale.to(wide)
            scale = scale.expand(count) if scale.dim() == 0 else scale.flatten()
        token_weight = None if self.token_weight is None else self.token_weight.flatten().to(wide)
        return Rows(
            target,
            self.weight,
            token_weight,
            scale,
            ignore_index,
            self.label_smoothing,
            self.softcap or 0.0,
            self.z_loss,
        )

    def op_arguments(self, rows: Rows, x: Tensor) -> tuple[Any, ...]:
        learned = (x, self.linear_weight, self.linear_bias, rows.logit_scale)
        forms = self.reduction != "none" and torch.is_grad_enabled()
        return (
            *(x, self.linear_weight, rows.target, self.linear_bias),
            *(rows.weight, rows.token_weight, rows.logit_scale, self.reduction),
            *(rows.ignore_index, rows.label_smoothing, rows.softcap, rows.z_loss),
            *(self.return_entropy, self.return_argmax),
            *(forms and t is not None and t.requires_grad for t in learned),
            True,  # nobody else sees the gradients that are kept
            self.accumulate == "tiled",
            chunk_rows_of(self.options)
            or _linear.loss_rows_per_chunk(x.shape[0], self.linear_weight, self.max_chunk_bytes),
        )

    def stock(self, rows: Rows, x: Tensor) -> tuple[Tensor, ...]:
        """The same by stock functions on all of the logits."""
        z = F.linear(x, self.linear_weight, self.linear_bias)
        z = z.to(_linear.accumulator(z.dtype))
        losses, lse, entropy = rows.losses(z)
        loss = losses if self.reduction == "none" else losses.sum()
        if self.reduction == "mean":
            loss = loss / rows.divisor(z.dtype)
        return loss, lse, entropy, torch.where(rows.counted(), rows.logits(z).argmax(-1), -1)


def chunk_rows_of(options: object) -> int | None:
    """The rows per chunk that torch's options ask for."""
    if options is None:
        return None
    stock = getattr(torch.nn, "LinearCrossEntropyOptions", None)  # torch >= 2.13
    if stock is None or not isinstance(options, stock):
        raise TypeError(
            f"linear_cross_entropy: options is a {type(options).__name__}, needs to be None or a "
            "torch.nn.LinearCrossEntropyOptions (torch >= 2.13)"
        )
    return options.batch_chunk_size
