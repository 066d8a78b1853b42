"""Convolution, activation and pooling in one dimension: conv_relu_pool2d of images of height 1.

y = max or mean over window of act(conv1d(x, w) + b)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from memopt.ops._conv_pool_arguments import check_pool
from memopt.ops.conv_relu_pool2d import conv_relu_pool2d

__all__ = ["conv_relu_pool1d"]


def conv_relu_pool1d(
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
    activation: str = "relu",
    negative_slope: float | None = None,
    min_val: float | None = None,
    max_val: float | None = None,
) -> Tensor:
    """`max_pool1d(act(conv1d(input, weight, bias)))`, or with `avg_pool1d`, in little memory.

    The convolution's parameters are those of `torch.nn.functional.conv1d`, the pool's those of
    `torch.nn.functional.max_pool1d` or `avg_pool1d` with the prefix ``pool_``. Values, ties, NaN
    and gradients are the stock ops'. Saved for backward: input, weight, and for pool="max" 4 bits
    per pooled element for windows of up to 15 positions (7 with leaky_relu), 8 bits to 255, 16 to
    65535; for pool="avg" 1 bit per element of the convolution's output, none with identity.

    Args:
        input: (N, C, L) or (C, L), any strides; float32, float64, bfloat16 or float16.
        weight: (K, C / groups, S).
        bias: (K,) or None.
        stride, dilation, groups: as in `conv1d`.
        padding: number(s), "same" (stride 1 only) or "valid".
        pool_kernel_size, pool_stride, pool_padding, pool_dilation, ceil_mode: as in `max_pool1d`;
            pool_stride defaults to pool_kernel_size.
        pool: "max" or "avg".
        count_include_pad: as in `avg_pool1d`, and only for it; True if not given.
        activation: "relu", "leaky_relu", "relu6", "hardtanh" or "identity".
        negative_slope: of leaky_relu; 0.01 if not given.
        min_val, max_val: of hardtanh; -1 and 1 if not given.

    Returns:
        (N, K, OL) or (K, OL).

    Raises:
        ValueError: an unknown `activation`, `pool` or `padding` string, or an argument of another
            activation or pool.
        RuntimeError: shapes, dtypes or parameters that the stock ops refuse.

    Example:
        >>> import torch, memopt
        >>> x, w = torch.randn(8, 3, 28), torch.randn(20, 3, 5)
        >>> memopt.nn.functional.conv_relu_pool1d(x, w).shape
        torch.Size([8, 20, 12])
    """
    for name, value in (("input", input), ("weight", weight)):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"conv_relu_pool1d: {name} is a {type(value).__name__}, needs to be a Tensor"
            )
    if input.dim() not in (2, 3):
        raise RuntimeError(
            f"conv_relu_pool1d: input has shape {tuple(input.shape)}, needs (N, C, L) or (C, L)"
        )
    if weight.dim() != 3:
        raise RuntimeError(
            f"conv_relu_pool1d: weight has {weight.dim()} dimensions, needs (K, C / groups, S)"
        )
    check_pool("conv_relu_pool1d", pool, pool_dilation, count_include_pad)
    kernel = _one(pool_kernel_size, "pool_kernel_size")
    output = conv_relu_pool2d(
        input.unsqueeze(-2),
        weight.unsqueeze(-2),
        bias,
        (1, _one(stride, "stride")),
        padding if isinstance(padding, str) else (0, _one(padding, "padding")),
        (1, _one(dilation, "dilation")),
        groups,
        pool_kernel_size=(1, kernel),
        pool_stride=(1, kernel if pool_stride is None else _one(pool_stride, "pool_stride")),
        pool_padding=(0, _one(pool_padding, "pool_padding")),
        pool_dilation=(1, _one(pool_dilation, "pool_dilation")),
        ceil_mode=ceil_mode,
        pool=pool,
        count_include_pad=count_include_pad,
        activation=activation,
        negative_slope=negative_slope,
        min_val=min_val,
        max_val=max_val,
    )
    return output.squeeze(-2)


def _one(value: int | Sequence[int], name: str) -> int:
    if isinstance(value, int):
        return value
    if len(value) != 1:
        raise RuntimeError(f"conv_relu_pool1d: {name} is {tuple(value)}, needs 1 integer")
    return value[0]
