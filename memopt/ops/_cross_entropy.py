"""The formulas of cross-entropy in stock PyTorch, and what its ops check of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
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


def fake(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    reduction, _, _, keep_logits_grad, *wanted, _, chunk_rows = settings
    check_arguments(
        "linear_cross_entropy", input, linear_weight, target, linear_bias, weight, chunk_rows
    )
    check_kept(reduction, keep_logits_grad, wanted)
    sums = _linear.accumulator(input.dtype)
    rows, classes = input.shape[0], linear_weight.shape[0]
    loss = input.new_empty((rows,) if reduction == "none" else (), dtype=sums)
    kept = input.new_empty((rows, classes) if keep_logits_grad else (0, 0))
    dtype = sums if input.dtype == torch.float16 else input.dtype
    gradients = _linear.fake_gradients(input, linear_weight, wanted, dtype)
    return loss, input.new_empty((), dtype=sums), kept, *gradients


def backward_fake(
    grad: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    _, _, *wanted, chunk_rows = settings
    check_backward(grad, input, linear_weight, target, linear_bias, weight, chunk_rows)
    return _linear.fake_gradients(input, linear_weight, wanted, input.dtype)


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


def chunk_rows_of(options: Any) -> int | None:
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


def plan(
    rows: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, chunk_rows: int
) -> tuple[bool, tuple[bool, bool, bool]]:
    """What the forward pass keeps: the logits' gradient, or which of the linear layer's."""
    nothing = (False, False, False)
    if not torch.is_grad_enabled():
        return False, nothing
    wanted = (
        rows.requires_grad,
        linear_weight.requires_grad,
        linear_bias is not None and linear_bias.requires_grad,
    )
    classes = linear_weight.shape[0]
    elements = zip((rows.numel(), linear_weight.numel(), classes), wanted, strict=True)
    needed = sum(count for count, want in elements if want)
    if rows.shape[0] <= chunk_rows and rows.shape[0] * classes <= needed:
        return any(wanted), nothing
    return False, wanted
