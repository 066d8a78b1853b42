"""Convolution, activation and max-pooling in three dimensions as one op: see `_conv_pool.py`.

y = max over window of act(conv3d(x, w) + b)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from memopt._registry import Op, cast_floating
from memopt.ops import _conv_pool
from memopt.ops._activations import parameters
from memopt.ops._conv_pool import call
from memopt.ops._conv_pool_arguments import check_pool
from memopt.ops.conv_relu_avg_pool import average

__all__ = ["conv_relu_pool3d"]


def _reference(*args: Any) -> tuple[Tensor, Tensor]:
    return _conv_pool.reference(3, *args)


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _conv_pool.fake(3, *args)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return _conv_pool.backward(ctx, grad, _conv_relu_pool3d_backward)


def _backward_reference(*args: Any) -> tuple[Tensor, ...]:
    return _conv_pool.backward_reference(3, *args)


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    return _conv_pool.backward_fake(3, *args)


_conv_relu_pool3d = Op(
    "conv_relu_pool3d",
    _conv_pool.SCHEMA,
    reference=_reference,
    fake=_fake,
    setup_context=_conv_pool.setup_context,
    backward=_backward,
    autocast=cast_floating,
)

_conv_relu_pool3d_backward = Op(
    "conv_relu_pool3d_backward",
    _conv_pool.BACKWARD_SCHEMA,
    reference=_backward_reference,
    fake=_backward_fake,
    not_differentiable=_conv_pool.not_differentiable("conv_relu_pool3d"),
)


def conv_relu_pool3d(
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
    pool: str = "max",
    count_include_pad: bool | None = None,
    divisor_override: int | None = None,
    activation: str = "relu",
    negative_slope: float | None = None,
    min_val: float | None = None,
    max_val: float | None = None,
) -> Tensor:
    """`max_pool3d(act(conv3d(input, weight, bias)))`, or with `avg_pool3d`, in little memory.

    The convolution's parameters are those of `torch.nn.functional.conv3d`, the pool's those of
    `torch.nn.functional.max_pool3d` or `avg_pool3d` with the prefix ``pool_``. Values, ties, NaN
    and gradients are the stock ops'. Saved for backward: input, weight, and for pool="max" 4 bits
    per pooled element for windows of up to 15 positions (7 with leaky_relu), 8 bits to 255, 16 to
    65535; for pool="avg" 1 bit per element of the convolution's output, none with identity.

    Args:
        input: (N, C, D, H, W) or (C, D, H, W), any strides; float32, float64, bfloat16 or float16.
        weight: (K, C / groups, Q, R, S).
        bias: (K,) or None.
        stride, dilation, groups: as in `conv3d`.
        padding: number(s), "same" (stride 1 only) or "valid".
        pool_kernel_size, pool_stride, pool_padding, pool_dilation, ceil_mode: as in `max_pool3d`;
            pool_stride defaults to pool_kernel_size.
        pool: "max" or "avg".
        count_include_pad, divisor_override: as in `avg_pool3d`, and only for it; True and None if
            not given.
        activation: "relu", "leaky_relu", "relu6", "hardtanh" or "identity".
        negative_slope: of leaky_relu; 0.01 if not given.
        min_val, max_val: of hardtanh; -1 and 1 if not given.

    Returns:
        (N, K, OD, OH, OW) or (K, OD, OH, OW), in the memory format of the stock ops.

    Raises:
        ValueError: an unknown `activation`, `pool` or `padding` string, or an argument of another
            activation or pool.
        RuntimeError: shapes, dtypes or parameters that the stock ops refuse.

    Example:
        >>> import torch, memopt
        >>> x, w = torch.randn(2, 1, 12, 12, 12), torch.randn(4, 1, 3, 3, 3)
        >>> memopt.nn.functional.conv_relu_pool3d(x, w).shape
        torch.Size([2, 4, 5, 5, 5])
    """
    name = "conv_relu_pool3d"
    check_pool(name, pool, pool_dilation, count_include_pad, divisor_override)
    arguments = (
        stride,
        padding,
        dilation,
        groups,
        pool_kernel_size,
        pool_stride,
        pool_padding,
        pool_dilation,
        ceil_mode,
        parameters(name, activation, negative_slope, min_val, max_val),
    )
    if pool == "max":
        return call(3, _conv_relu_pool3d, input, weight, bias, *arguments)
    return average(
        name,
        3,
        input,
        weight,
        bias,
        *arguments,
        count_include_pad=count_include_pad,
        divisor_override=divisor_override,
    )
