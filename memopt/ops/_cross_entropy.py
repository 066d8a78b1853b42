"""The formulas of cross-entropy in stock PyTorch, and what its ops check of their arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.ops import _linear

REDUCTIONS = ("none", "mean", "sum")


def logits_gradient(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    factors: Tensor,
) -> Tensor:
    """Gradient of Σ factors · (the rows' losses); differentiable in `logits` and `factors`."""
    classes = logits.shape[1]
    counted = (target != ignore_index)[:, None]
    index = torch.where(counted, target[:, None], 0)
    w = torch.ones_like(logits[0]) if weight is None else weight.to(logits.dtype)
    own = (1 - label_smoothing) * w[index]
    each = label_smoothing / classes * w
    dz = logits.softmax(-1) * (own + each.sum()) - each
    dz = dz.scatter_add(1, index, -own)
    return torch.where(counted, dz * factors[:, None], 0)


def what_counts(target: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """How many rows count, and the sum of their targets' class weights."""
    counted = target != ignore_index
    if weight is None:
        return counted.sum(), counted.sum()
    return counted.sum(), torch.where(counted, weight[torch.where(counted, target, 0)], 0).sum()


def reference(
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
    chunk_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    wanted = (want_input, want_weight, want_bias)
    check_arguments(
        "linear_cross_entropy", input, linear_weight, target, linear_bias, weight, chunk_rows
    )
    check_kept(reduction, keep_logits_grad, wanted)
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
            dz = logits_gradient(
                logits, target[chunk], class_weight, ignore_index, label_smoothing, ones
            ).to(input.dtype)
            gradients.add(chunk, dz)
            if keep_logits_grad:
                kept[chunk] = dz
    loss = losses if reduction == "none" else losses.sum()
    scale = input.new_ones((), dtype=sums)
    if reduction == "mean":
        counted, divisor = what_counts(target, class_weight, ignore_index)
        loss = loss / divisor
        # Where every row is ignored the mean is NaN, and its gradient 0.
        scale = torch.where(counted == 0, 0, 1 / divisor.to(sums))
    return loss, scale, kept, *gradients.finish(rounded=input.dtype != torch.float16)


def backward_reference(
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
    check_backward(grad, input, linear_weight, target, linear_bias, weight, chunk_rows)
    gradients = _linear.Gradients(input, linear_weight, (want_input, want_weight, want_bias))
    for chunk in _linear.chunks(input.shape[0], chunk_rows):
        logits = F.linear(input[chunk], linear_weight, linear_bias).to(grad.dtype)
        dz = logits_gradient(
            logits, target[chunk], weight, ignore_index, label_smoothing, grad[chunk]
        )
        gradients.add(chunk, dz.to(input.dtype))
    return gradients.finish()


def check_arguments(
    op: str,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    chunk_rows: int,
) -> None:
    _linear.check_linear(op, input, linear_weight, linear_bias, chunk_rows)
    if target.dtype != torch.int64 or tuple(target.shape) != (input.shape[0],):
        raise RuntimeError(
            f"{op}: target is {target.dtype} of shape {tuple(target.shape)}, needs torch.int64 of "
            f"shape ({input.shape[0]},)"
        )
    if linear_weight.shape[0] == 0:
        raise RuntimeError(f"{op}: the linear weight has no rows, needs one for each class")
    if weight is not None and tuple(weight.shape) != (linear_weight.shape[0],):
        raise RuntimeError(
            f"{op}: weight has shape {tuple(weight.shape)}, needs ({linear_weight.shape[0]},)"
        )
    for name, tensor in (("target", target), ("weight", weight)):
        if tensor is not None and tensor.device != input.device:
            raise RuntimeError(
                f"{op}: {name} is on {tensor.device}, needs to be on {input.device} as input is"
            )


def check_kept(reduction: str, keep_logits_grad: bool, wanted: Sequence[bool]) -> None:
    op = "linear_cross_entropy"
    if reduction not in REDUCTIONS:
        raise RuntimeError(f"{op}: reduction is {reduction!r}, needs one of {REDUCTIONS}")
    if (keep_logits_grad or any(wanted)) and (
        reduction == "none" or keep_logits_grad == any(wanted)
    ):
        raise RuntimeError(
            f"{op}: either the gradient of the logits can be kept or those of the linear layer, "
            "and with reduction 'none' neither"
        )


def check_backward(
    grad: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    chunk_rows: int,
) -> None:
    op = "linear_cross_entropy_backward"
    check_arguments(op, input, linear_weight, target, linear_bias, weight, chunk_rows)
    dtype = _linear.accumulator(input.dtype)
    if grad.shape != target.shape or grad.dtype != dtype or grad.device != input.device:
        raise RuntimeError(
            f"{op}: grad is {grad.dtype} of shape {tuple(grad.shape)} on {grad.device}, needs "
            f"{dtype} of shape {tuple(target.shape)} on {input.device}"
        )


def check_call(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
) -> None:
    """What the public function checks, with the errors of the stock functions."""
    op, instead = "linear_cross_entropy", "use torch.nn.functional.linear_cross_entropy"
    if linear_weight.dim() > 2:
        raise NotImplementedError(
            f"{op}: linear_weight has shape {tuple(linear_weight.shape)}, needs (V, H); for a "
            f"K-dimensional loss {instead}"
        )
    if linear_weight.dim() < 2 or linear_weight.shape[1] != input.shape[-1]:
        raise RuntimeError(
            f"{op}: linear_weight has shape {tuple(linear_weight.shape)}, needs "
            f"(V, {input.shape[-1]}): input has {input.shape[-1]} features"
        )
    classes = linear_weight.shape[0]
    if target.is_floating_point() and target.shape == (*input.shape[:-1], classes):
        raise NotImplementedError(
            f"{op}: target has class probabilities, needs class indices; for the former {instead}"
        )
    if target.dtype not in (torch.int64, torch.uint8):  # uint8: as eager
        raise RuntimeError(f"{op}: target has dtype {target.dtype}, needs torch.int64")
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"{op}: target has shape {tuple(target.shape)}, needs {tuple(input.shape[:-1])}: a "
            "class for each row of input"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction is {reduction!r}, needs one of {REDUCTIONS}")
    if not 0 <= label_smoothing <= 1:
        raise RuntimeError(
            f"{op}: label_smoothing is {label_smoothing}, needs to be between 0 and 1"
        )
    if weight is None:
        return
    if weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{op}: weight requires a gradient, which the loss has none of for it")
    if tuple(weight.shape) != (classes,):
        raise RuntimeError(f"{op}: weight has shape {tuple(weight.shape)}, needs ({classes},)")
    if weight.dtype not in (input.dtype, _linear.accumulator(input.dtype)):
        raise RuntimeError(f"{op}: weight has dtype {weight.dtype}, needs {input.dtype}")


def check_bounds(target: Tensor, classes: int, ignore_index: int) -> None:
    """Raise IndexError, as eager, for a target that is no class. Kernels check for themselves too.

    Reading values is cheap on the CPU only, and possible only where there are any.
    """
    if target.device.type != "cpu" or type(target) is not Tensor or not target.numel():
        return
    if torch.compiler.is_compiling():
        return
    low, high = (bound.item() for bound in target.aminmax())
    if low >= 0 and high < classes:
        return
    wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
    if wrong.numel():
        raise IndexError(
            f"linear_cross_entropy: target {wrong[0].item()} is out of bounds, needs to be in "
            f"[0, {classes}) or ignore_index {ignore_index}"
        )
