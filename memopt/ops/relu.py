"""ReLU that saves one bit per element.

    y = max(x, 0)          dL/dx = dL/dy where x > 0 or x is NaN, else 0

Stock ReLU keeps its result for backward: 32 bits per float32 element. The mask is exact.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt._registry import Op, under_transform
from memopt.ops import _bits

__all__ = ["relu"]


def _reference(input: Tensor) -> tuple[Tensor, Tensor]:
    _check(input)
    return F.relu(input), _bits.pack_bits(~(input <= 0))


def _fake(input: Tensor) -> tuple[Tensor, Tensor]:
    _check(input)
    mask = input.new_empty((_bits.bytes_for(input.numel()),), dtype=torch.uint8)
    return torch.empty_like(input), mask


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, mask = output
    ctx.save_for_backward(mask)
    ctx.mark_non_differentiable(mask)


def _backward(ctx: Any, grad: Tensor, _: None = None) -> Tensor:
    return _relu_backward.on(ctx.namespace)(grad, *ctx.saved_tensors)


def _backward_reference(grad: Tensor, mask: Tensor) -> Tensor:
    _check_mask(grad, mask)
    keep = _bits.unpack_bits(mask, grad.numel()).view(grad.shape)
    return grad.clone().masked_fill_(~keep, 0)


def _backward_fake(grad: Tensor, mask: Tensor) -> Tensor:
    _check_mask(grad, mask)
    return torch.empty_like(grad)


def _backward_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _check(input: Tensor) -> None:
    if not input.is_floating_point():
        raise RuntimeError(f"relu: input has dtype {input.dtype}, needs a floating-point dtype")


def _check_mask(grad: Tensor, mask: Tensor) -> None:
    needed = _bits.bytes_for(grad.numel())
    if mask.dtype != torch.uint8 or mask.dim() != 1 or mask.shape[0] != needed:
        raise RuntimeError(
            f"relu_backward: mask is {mask.dtype} of shape {tuple(mask.shape)}, needs torch.uint8 "
            f"of shape ({needed},): one bit for each element of grad"
        )
    if mask.device != grad.device:
        raise RuntimeError(f"relu_backward: mask is on {mask.device}, grad is on {grad.device}")


_relu = Op(
    "relu",
    "(Tensor input) -> (Tensor output, Tensor mask)",
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)

# Linear in grad, so it is its own derivative: right to any order.
_relu_backward = Op(
    "relu_backward",
    "(Tensor grad, Tensor mask) -> Tensor",
    reference=_backward_reference,
    fake=_backward_fake,
    setup_context=_backward_setup_context,
    backward=_backward,
)


def relu(input: Tensor) -> Tensor:
    """`torch.nn.functional.relu` that saves one bit per element for backward, exactly.

    Args:
        input: any shape and strides, floating point. (Integers, which need no gradient, and sparse
            and jagged tensors go to the stock function.)

    Returns:
        A tensor like `input`.

    Example:
        >>> import torch, memopt
        >>> x = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
        >>> memopt.nn.functional.relu(x).sum().backward()
        >>> x.grad
        tensor([0., 0., 1.])
    """
    wants_grad = isinstance(input, Tensor) and input.requires_grad and torch.is_grad_enabled()
    if not wants_grad or input.layout != torch.strided or under_transform(input):
        return F.relu(input)
    if input.is_contiguous():
        return _relu(input)[0]
    # The mask lies in row-major order of what the op is given; handing it channels_last and
    # transposed tensors in their memory order makes that a straight run through memory.
    order = _memory_order(input)
    output = _relu(input.permute(order))[0]
    return output.permute([order.index(d) for d in range(input.dim())])


def _memory_order(input: Tensor) -> list[int]:
    """The dimensions of `input` from the largest stride to the smallest."""
    order = list(range(input.dim()))
    # An insertion sort: torch.compile cannot trace sorted() by symbolic strides.
    for end in range(1, len(order)):
        k = end
        while k > 0 and input.stride(order[k - 1]) < input.stride(order[k]):
            order[k - 1], order[k] = order[k], order[k - 1]
            k -= 1
    return order
