"""Convolution, ReLU and max-pooling as one op that saves one code per pooled element.

    c = conv2d(x, w) + b            y = max over window of relu(c)

    dL/dc = dL/dy at the position that won its window, where relu did not cut it; else 0
    dL/dx, dL/dw, dL/db = conv2d's gradients for dL/dc

Stock layers keep c (as ReLU's result and the pool's input) and an int64 index per pooled element;
this op keeps x, w and 4 bits per pooled element for windows of up to 15 positions. Pool-then-ReLU
is the same function, bit for bit, so both orders map to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt._registry import Op, cast_floating, under_transform
from memopt.ops import _pool_codes
from memopt.ops._conv_pool_windows import Pair, Windows, check, check_tensors, memory_format

__all__ = ["conv_relu_pool2d"]

_WINDOWS = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, "
    "SymInt[] pool_kernel_size, SymInt[] pool_stride, SymInt[] pool_padding, "
    "SymInt[] pool_dilation, bool ceil_mode, str activation"
)


# -- forward ----------------------------------------------------------------------------------


def _reference(
    input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    p, save_codes = Windows(*rest[:-1]), rest[-1]
    check(input, weight, bias, p)
    convolved_size, _ = p.sizes(input, weight)
    pooled, index = p.pool(F.relu(p.convolve(input, weight, bias)))
    if not save_codes:
        return pooled, pooled.new_empty((*pooled.shape[:2], 0), dtype=torch.uint8)
    # `<=` is false for NaN: it passes ReLU, and its gradient does.
    codes = torch.where(pooled <= 0, -1, p.winners(index, convolved_size))
    return pooled, _pool_codes.pack_codes(codes.contiguous().flatten(2), p.positions)


def _fake(input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    p, save_codes = Windows(*rest[:-1]), rest[-1]
    check(input, weight, bias, p)
    _, (height, width) = p.sizes(input, weight)
    planes = (input.shape[0], weight.shape[0])
    bytes_ = _pool_codes.plane_bytes(height * width, p.positions) if save_codes else 0
    output = torch.empty(
        (*planes, height, width),
        dtype=input.dtype,
        device=input.device,
        memory_format=memory_format(input, weight),
    )
    return output, input.new_empty((*planes, bytes_), dtype=torch.uint8)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, weight, bias, *ctx.windows, _ = inputs
    _, codes = output
    ctx.has_bias = bias is not None
    ctx.save_for_backward(input, weight, codes)
    ctx.mark_non_differentiable(codes)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    input, weight, codes = ctx.saved_tensors
    wanted = tuple(ctx.needs_input_grad[1:4])
    run = _gradients if torch.is_grad_enabled() else _conv_relu_pool2d_backward.on(ctx.namespace)
    grads = run(grad, input, weight, codes, *ctx.windows, *wanted)
    return tuple(g if want else None for g, want in zip(grads, wanted, strict=True))


# -- backward ---------------------------------------------------------------------------------


def _gradients(
    grad: Tensor, input: Tensor, weight: Tensor, codes: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients from stock ops: the definition, and differentiable to any order."""
    p, wanted = Windows(*rest[:-3]), rest[-3:]
    check(input, weight, None, p)
    convolved_size, pooled_size = p.sizes(input, weight)
    _check_saved(grad, input, weight, codes, p)
    unpacked = _pool_codes.unpack_codes(codes, pooled_size[0] * pooled_size[1], p.positions)
    index, live = p.indices(unpacked.unflatten(2, pooled_size), convolved_size)

    planes = grad.shape[:2]
    accumulate = torch.float64 if grad.dtype == torch.float64 else torch.float32
    kept = torch.where(live, grad, 0).to(accumulate)
    flat = torch.zeros(
        (*planes, convolved_size[0] * convolved_size[1]), dtype=accumulate, device=grad.device
    )
    dc = flat.scatter_add(2, index.flatten(2), kept.flatten(2))
    dc = dc.unflatten(2, convolved_size).to(grad.dtype)

    absent = grad.new_empty((0,))
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dc.contiguous(memory_format=memory_format(input, weight)),
        input,
        weight,
        None,
        p.stride,
        p.padding,
        p.dilation,
        False,
        [0, 0],
        p.groups,
        [wanted[0], wanted[1], False],
    )
    db = kept.sum((0, 2, 3)).to(grad.dtype) if wanted[2] else absent
    return dx if wanted[0] else absent, dw if wanted[1] else absent, db


def _backward_reference(*args: Any) -> tuple[Tensor, ...]:
    input, weight = args[1], args[2]
    dx, dw, db = _gradients(*args)
    dx = dx.contiguous(memory_format=memory_format(input, weight)) if dx.dim() == 4 else dx
    return dx, torch.empty_like(weight).copy_(dw) if dw.dim() == 4 else dw, db


def _backward_fake(
    grad: Tensor, input: Tensor, weight: Tensor, codes: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    p, wanted = Windows(*rest[:-3]), rest[-3:]
    check(input, weight, None, p)
    _check_saved(grad, input, weight, codes, p)
    format_ = memory_format(input, weight)
    absent = grad.new_empty((0,))
    dx = torch.empty(input.shape, dtype=input.dtype, device=input.device, memory_format=format_)
    return (
        dx if wanted[0] else absent,
        torch.empty_like(weight) if wanted[1] else grad.new_empty((0,)),
        grad.new_empty((weight.shape[0],)) if wanted[2] else grad.new_empty((0,)),
    )


def _check_saved(grad: Tensor, input: Tensor, weight: Tensor, codes: Tensor, p: Windows) -> None:
    op = "conv_relu_pool2d_backward"
    _, pooled_size = p.sizes(input, weight)
    planes = (input.shape[0], weight.shape[0])
    if grad.dtype != input.dtype or grad.shape != (*planes, *pooled_size):
        raise RuntimeError(
            f"{op}: grad is {grad.dtype} of shape {tuple(grad.shape)}, needs {input.dtype} of "
            f"shape {(*planes, *pooled_size)}"
        )
    for name, tensor in (("grad", grad), ("codes", codes)):
        if tensor.device != input.device:
            raise RuntimeError(f"{op}: {name} is on {tensor.device}, needs input's {input.device}")
    bytes_ = _pool_codes.plane_bytes(pooled_size[0] * pooled_size[1], p.positions)
    if codes.dtype != torch.uint8 or codes.shape != (*planes, bytes_):
        raise RuntimeError(
            f"{op}: codes is {codes.dtype} of shape {tuple(codes.shape)}, needs torch.uint8 of "
            f"shape {(*planes, bytes_)}; the forward pass makes them with save_codes=True"
        )


_conv_relu_pool2d = Op(
    "conv_relu_pool2d",
    f"(Tensor input, Tensor weight, Tensor? bias, {_WINDOWS}, bool save_codes) "
    "-> (Tensor output, Tensor codes)",
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    autocast=cast_floating,
)

_conv_relu_pool2d_backward = Op(
    "conv_relu_pool2d_backward",
    f"(Tensor grad, Tensor input, Tensor weight, Tensor codes, {_WINDOWS}, "
    "bool input_grad, bool weight_grad, bool bias_grad) -> (Tensor, Tensor, Tensor)",
    reference=_backward_reference,
    fake=_backward_fake,
    not_differentiable="the raw backward op has no derivative; differentiate conv_relu_pool2d with "
    "create_graph=True instead",
)


# -- public -----------------------------------------------------------------------------------


def conv_relu_pool2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    pool_kernel_size: int | Sequence[int] = 2,
    pool_stride: int | Sequence[int] | None = None,
    pool_padding: int | Sequence[int] = 0,
    pool_dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    activation: str = "relu",
) -> Tensor:
    """`max_pool2d(relu(conv2d(input, weight, bias)))`, saving one code per pooled element.

    The convolution's parameters are those of `torch.nn.functional.conv2d`, the pool's those of
    `torch.nn.functional.max_pool2d` with the prefix ``pool_``. Values, ties, NaN and gradients are
    the stock ops'. Saved for backward: input, weight, and 4 bits per pooled element for windows of
    up to 15 positions (8 bits to 255, 16 to 65535).

    Args:
        input: (N, C, H, W) or (C, H, W), any strides; float32, float64, bfloat16 or float16.
        weight: (K, C / groups, R, S).
        bias: (K,) or None.
        stride, dilation, groups: as in `conv2d`.
        padding: number(s), "same" (stride 1 only) or "valid".
        pool_kernel_size, pool_stride, pool_padding, pool_dilation, ceil_mode: as in `max_pool2d`;
            pool_stride defaults to pool_kernel_size.
        activation: "relu".

    Returns:
        (N, K, OH, OW) or (K, OH, OW), in the memory format of the stock ops.

    Raises:
        ValueError: an unknown `activation` or `padding` string.
        RuntimeError: shapes, dtypes or parameters that the stock ops refuse.

    Example:
        >>> import torch, memopt
        >>> x, w = torch.randn(8, 1, 28, 28), torch.randn(20, 1, 5, 5)
        >>> memopt.nn.functional.conv_relu_pool2d(x, w).shape
        torch.Size([8, 20, 12, 12])
    """
    if activation != "relu":
        raise ValueError(f"conv_relu_pool2d: activation is {activation!r}, needs 'relu'")
    check_tensors(input, weight)
    if input.dim() not in (3, 4):
        raise RuntimeError(
            f"conv_relu_pool2d: input has shape {tuple(input.shape)}, needs (N, C, H, W) or "
            "(C, H, W)"
        )
    steps, spread = _pair(stride, "stride"), _pair(dilation, "dilation")
    if isinstance(padding, str):
        input, pads = _pad_by_name(input, weight, padding, steps, spread)
    else:
        pads = _pair(padding, "padding")
    kernel = _pair(pool_kernel_size, "pool_kernel_size")
    windows = Windows(
        steps,
        pads,
        spread,
        groups,
        kernel,
        kernel if pool_stride is None else _pair(pool_stride, "pool_stride"),
        _pair(pool_padding, "pool_padding"),
        _pair(pool_dilation, "pool_dilation"),
        ceil_mode,
        activation,
    )
    if under_transform(input, weight, bias):
        return windows.pool(F.relu(windows.convolve(input, weight, bias)))[0]
    save_codes = torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    batch = input if input.dim() == 4 else input.unsqueeze(0)
    output, _ = _conv_relu_pool2d(batch, weight, bias, *windows, save_codes)
    return output if input.dim() == 4 else output.squeeze(0)


def _pair(value: int | Sequence[int], name: str) -> Pair:
    if isinstance(value, int):
        return value, value
    if len(value) not in (1, 2):
        raise RuntimeError(f"conv_relu_pool2d: {name} is {tuple(value)}, needs 1 or 2 integers")
    return value[0], value[-1]


def _pad_by_name(
    input: Tensor, weight: Tensor, padding: str, stride: Pair, dilation: Pair
) -> tuple[Tensor, Pair]:
    """Numbers for "valid" and "same"; where "same" is uneven, the odd pixel is padded first."""
    if padding == "valid":
        return input, (0, 0)
    if padding != "same":
        raise ValueError(
            f"conv_relu_pool2d: padding is {padding!r}, needs integers, 'same' or 'valid'"
        )
    if stride != (1, 1):
        raise RuntimeError(
            f"conv_relu_pool2d: padding='same' needs stride 1, but stride is {stride}"
        )
    total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if total[0] % 2 or total[1] % 2:  # as in eager the odd pixel goes right and below
        input = F.pad(input, (0, total[1] % 2, 0, total[0] % 2))
    return input, (total[0] // 2, total[1] // 2)
