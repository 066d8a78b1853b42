"""Linear layer that keeps its input in 8, 4 or 2 bits an element for backward.

    y = x W^T + b        dx = g W        dW = g^T dequantize(quantize(x))        db = sum of g

The result and dx are the stock layer's bit for bit, db but for the order of the sum. dW has the
noise of the stochastic rounding, of mean zero. Stock keeps x: 32 bits per float32 element.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt._registry import Op, cast_floating, under_transform
from memopt.ops._packed import check_format, check_input, check_packed, packed_sizes
from memopt.ops.quantize import dequantize_reference, draw_seed, quantize_reference

__all__ = ["linear"]

#: Bits an element under each storage; "keep" is the stock layer.
STORAGES = {"keep": 0, "int8": 8, "int4": 4, "int2": 2}
_TILE_ROWS = 512
_ONCE = (
    "the weight's gradient cannot be differentiated again, because the input is stored only "
    "approximately; use storage='keep' for that"
)


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    storage: str = "keep",
    group_size: int = 256,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`torch.nn.functional.linear` that may keep its input quantised for backward.

    Args:
        input: (..., in_features), any strides.
        weight: (out_features, in_features).
        bias: (out_features,).
        storage: how the input waits for backward: "keep" is the stock op; "int8", "int4" and
            "int2" keep so many bits an element (`memopt.quantize`, stochastic). The result and the
            gradients of input and bias stay exact; the weight's is right on average. Where the
            weight needs no gradient nothing of the input is kept anyway.
        group_size: elements that share a scale, a positive multiple of 8.
        generator: draws the seed of the rounding; torch's own by default.

    Returns:
        (..., out_features).

    Example:
        >>> import torch, memopt
        >>> x, w = torch.randn(8, 64), torch.randn(2, 64, requires_grad=True)
        >>> memopt.nn.functional.linear(x, w, storage="int8").sum().backward()
        >>> bool((w.grad - x.sum(0)).abs().max() < 0.2)
        True
    """
    bits = check_storage(storage, group_size)
    needs_input = bits and torch.is_grad_enabled() and getattr(weight, "requires_grad", False)
    if not needs_input or not _storable(input, bias) or under_transform(input, weight, bias):
        return F.linear(input, weight, bias)
    seed = draw_seed(input.device, generator)
    return _linear(input, weight, bias, bits, group_size, seed)[0]


def check_storage(storage: str, group_size: int) -> int:
    """The bits of a storage; raises where it does not exist."""
    if storage not in STORAGES:
        names = ", ".join(map(repr, STORAGES))
        raise ValueError(f"linear: storage is {storage!r}, needs one of {names}")
    bits = STORAGES[storage]
    if bits:
        check_format("linear", bits, group_size, ValueError)
    return bits


def _storable(input: Any, bias: Tensor | None) -> bool:
    """Whether this is a plain linear layer: what is not, the stock op computes or refuses."""
    if not isinstance(input, Tensor) or input.layout != torch.strided or input.dim() == 0:
        return False
    return input.is_floating_point() and (bias is None or bias.dim() == 1)


# -- Forward ---------------------------------------------------------------------------------------


def _reference(
    input: Tensor, weight: Tensor, bias: Tensor | None, bits: int, group_size: int, seed: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(input, weight, bias, bits, group_size, seed)
    return (F.linear(input, weight, bias), *quantize_reference(input, bits, group_size, seed))


def _fake(
    input: Tensor, weight: Tensor, bias: Tensor | None, bits: int, group_size: int, seed: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(input, weight, bias, bits, group_size, seed)
    nbytes, groups = packed_sizes(input.numel(), bits, group_size)
    output = input.new_empty((*input.shape[:-1], weight.shape[0]))
    scale, minimum = (input.new_empty((groups,), dtype=torch.bfloat16) for _ in range(2))
    return output, input.new_empty((nbytes,), dtype=torch.uint8), scale, minimum


def _check(
    input: Tensor, weight: Tensor, bias: Tensor | None, bits: int, group_size: int, seed: Any
) -> None:
    if weight.dim() != 2:
        raise RuntimeError(f"linear: weight has {weight.dim()} dimensions, needs 2")
    if input.dim() < 1:
        raise RuntimeError("linear: input has no dimensions, needs at least 1")
    if input.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"linear: input has {input.shape[-1]} features, needs the weight's {weight.shape[1]}"
        )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise RuntimeError(
            f"linear: bias has shape {tuple(bias.shape)}, needs ({weight.shape[0]},)"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != input.dtype:
            raise RuntimeError(
                f"linear: {name} has dtype {tensor.dtype}, needs that of input, {input.dtype}"
            )
        if tensor.device != input.device:
            raise RuntimeError(f"linear: {name} is on {tensor.device}, input on {input.device}")
    check_input("linear", input, bits, group_size, seed)


# -- Backward --------------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, weight, _, ctx.bits, ctx.group_size, _ = inputs
    packed = output[1:]
    ctx.mark_non_differentiable(*packed)
    ctx.in_features = weight.shape[1]
    ctx.save_for_backward(
        weight if input.requires_grad else None, *(packed if weight.requires_grad else (None,) * 3)
    )


def _backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    weight, packed, scale, minimum = ctx.saved_tensors
    _, wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:4]
    grad_input = grad_weight = grad_bias = None
    if wants_input:
        grad_input = grad.matmul(weight)
    if wants_weight:
        grad_weight = _linear_backward_weight.on(ctx.namespace)(
            # No detach where it is none: for a batch of gradients (is_grads_batched) it is refused.
            grad.detach() if grad.requires_grad else grad,
            packed,
            scale,
            minimum,
            ctx.in_features,
            ctx.bits,
            ctx.group_size,
        )
        if torch.is_grad_enabled():
            grad_weight = _DifferentiatedOnce.apply(grad_weight, grad, weight)
    if wants_bias:
        # Not by flatten, which is_grads_batched refuses as well.
        grad_bias = grad.sum(tuple(range(grad.dim() - 1))) if grad.dim() > 1 else grad
    return grad_input, grad_weight, grad_bias


class _DifferentiatedOnce(torch.autograd.Function):
    """Ties the weight's gradient to what it depends on, to refuse a derivative through it.

    (With create_graph the gradients of input and bias are differentiable, by stock formulas.)
    """

    @staticmethod
    def forward(ctx: Any, grad_weight: Tensor, grad: Tensor, weight: Tensor | None) -> Tensor:
        return grad_weight.view_as(grad_weight)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(f"linear: {_ONCE}")


def _backward_weight_reference(
    grad: Tensor,
    packed: Tensor,
    scale: Tensor,
    minimum: Tensor,
    in_features: int,
    bits: int,
    group_size: int,
) -> Tensor:
    rows = _check_backward_weight(grad, packed, scale, minimum, in_features, bits, group_size)
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    grad_rows = grad.reshape(rows, grad.shape[-1])
    total = grad.new_zeros((grad.shape[-1], in_features), dtype=dtype)
    # Tiles of rows that begin at a group's first element.
    step = group_size // math.gcd(group_size, in_features) if in_features else 1
    step *= -(-_TILE_ROWS // step)
    for row in range(0, rows if total.numel() else 0, step):
        tile = grad_rows[row : row + step].to(dtype)
        first, last = row * in_features, (row + tile.shape[0]) * in_features
        nbytes, groups = packed_sizes(last, bits, group_size)
        x = dequantize_reference(
            packed[first * bits // 8 : nbytes],
            scale[first // group_size : groups],
            minimum[first // group_size : groups],
            (tile.shape[0], in_features),
            (in_features, 1),
            dtype,
            bits,
            group_size,
        )
        total.addmm_(tile.t(), x)
    return total.to(grad.dtype)


def _backward_weight_fake(
    grad: Tensor,
    packed: Tensor,
    scale: Tensor,
    minimum: Tensor,
    in_features: int,
    bits: int,
    group_size: int,
) -> Tensor:
    _check_backward_weight(grad, packed, scale, minimum, in_features, bits, group_size)
    return grad.new_empty((grad.shape[-1], in_features))


def _check_backward_weight(
    grad: Tensor,
    packed: Tensor,
    scale: Tensor,
    minimum: Tensor,
    in_features: int,
    bits: int,
    group_size: int,
) -> int:
    op = "linear_backward_weight"
    if grad.dim() < 1:
        raise RuntimeError(f"{op}: grad has no dimensions, needs 1 or more")
    if not grad.is_floating_point():
        raise RuntimeError(f"{op}: grad has dtype {grad.dtype}, needs a floating-point dtype")
    if in_features < 0:
        raise RuntimeError(f"{op}: in_features is {in_features}, needs to be at least 0")
    rows = math.prod(grad.shape[:-1])
    check_packed(op, packed, scale, minimum, rows * in_features, bits, group_size)
    if packed.device != grad.device:
        raise RuntimeError(f"{op}: packed is on {packed.device}, grad is on {grad.device}")
    return rows


_linear = Op(
    "linear",
    "(Tensor input, Tensor weight, Tensor? bias, int bits, int group_size, Tensor? seed)"
    " -> (Tensor output, Tensor packed, Tensor scale, Tensor minimum)",
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast=cast_floating,
)

_linear_backward_weight = Op(
    "linear_backward_weight",
    "(Tensor grad, Tensor packed, Tensor scale, Tensor minimum, SymInt in_features, int bits,"
    " int group_size) -> Tensor",
    reference=_backward_weight_reference,
    fake=_backward_weight_fake,
    not_differentiable=_ONCE,
)
