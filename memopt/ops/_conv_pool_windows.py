"""The windows of conv_relu_pool2d: parameters, sizes, checks, and where a code points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format

Pair = tuple[int, int]


class Windows(NamedTuple):
    """The convolution's and the pool's parameters, in the order of the op's schema."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    pool_kernel_size: list[int] | Pair
    pool_stride: list[int] | Pair
    pool_padding: list[int] | Pair
    pool_dilation: list[int] | Pair
    ceil_mode: bool
    activation: str

    @property
    def positions(self) -> int:
        return self.pool_kernel_size[0] * self.pool_kernel_size[1]

    def convolve(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def pool(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return F.max_pool2d_with_indices(
            input,
            self.pool_kernel_size,
            self.pool_stride,
            self.pool_padding,
            self.pool_dilation,
            self.ceil_mode,
        )

    def sizes(self, input: Tensor, weight: Tensor) -> tuple[Pair, Pair]:
        """(H, W) of the convolution's output and of the pool's; raises where one is empty."""
        convolved, pooled = [], []
        for d in (0, 1):
            reach = self.dilation[d] * (weight.shape[2 + d] - 1) + 1
            out = (input.shape[2 + d] + 2 * self.padding[d] - reach) // self.stride[d] + 1
            if out <= 0:
                raise RuntimeError(
                    f"conv_relu_pool2d: the kernel reaches over {reach} of a padded input of "
                    f"{input.shape[2 + d] + 2 * self.padding[d]}; the convolution's output would "
                    "be empty"
                )
            convolved.append(out)
            pooled.append(self._pooled_size(out, d))
        return (convolved[0], convolved[1]), (pooled[0], pooled[1])

    def _pooled_size(self, size: int, d: int) -> int:
        reach = self.pool_dilation[d] * (self.pool_kernel_size[d] - 1) + 1
        step, pad = self.pool_stride[d], self.pool_padding[d]
        if pad > self.pool_kernel_size[d] // 2:
            raise RuntimeError(
                f"conv_relu_pool2d: pool_padding is {pad}, needs at most half of "
                f"pool_kernel_size, which is {self.pool_kernel_size[d]}"
            )
        out = (size + 2 * pad - reach + (step - 1 if self.ceil_mode else 0)) // step + 1
        if self.ceil_mode and (out - 1) * step >= size + pad:
            out -= 1  # a window that would start in the padding on the right
        if out <= 0:
            raise RuntimeError(
                f"conv_relu_pool2d: the pool's window reaches over {reach} of the convolution's "
                f"output of {size}; its output would be empty"
            )
        return out

    def winners(self, index: Tensor, convolved: Pair) -> Tensor:
        """max_pool2d's indices h * W + w (N, C, OH, OW) -> position in the window, row by row."""
        h, w = index // convolved[1], index % convolved[1]
        top, left = self._corners(index)
        row = torch.div(h - top, self.pool_dilation[0], rounding_mode="floor")
        column = torch.div(w - left, self.pool_dilation[1], rounding_mode="floor")
        return row * self.pool_kernel_size[1] + column

    def indices(self, codes: Tensor, convolved: Pair) -> tuple[Tensor, Tensor]:
        """Codes (N, C, OH, OW) -> index h * W + w of each winner, and whether it lives.

        A code that points out of the input, which no forward pass writes, counts as cut.
        """
        top, left = self._corners(codes)
        row = codes // self.pool_kernel_size[1]
        column = codes % self.pool_kernel_size[1]
        h = top + row * self.pool_dilation[0]
        w = left + column * self.pool_dilation[1]
        inside = (h >= 0) & (h < convolved[0]) & (w >= 0) & (w < convolved[1])
        live = (codes < self.positions) & inside
        return torch.where(live, h * convolved[1] + w, 0), live

    def _corners(self, like: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = (torch.arange(n, device=like.device) for n in like.shape[2:])
        top = rows * self.pool_stride[0] - self.pool_padding[0]
        left = columns * self.pool_stride[1] - self.pool_padding[1]
        return top.unsqueeze(1), left


def memory_format(input: Tensor, weight: Tensor) -> torch.memory_format:
    """Stock convolution's rule: channels_last if the input or the weight is, but for no images."""
    if input.shape[0] == 0:
        return torch.contiguous_format
    formats = (suggest_memory_format(input), suggest_memory_format(weight))
    last = torch.channels_last
    return last if last in formats else torch.contiguous_format


_LEAST = {
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "pool_kernel_size": 1,
    "pool_stride": 1,
    "pool_padding": 0,
    "pool_dilation": 1,
}


def check_tensors(input: object, weight: object) -> None:
    for name, value in (("input", input), ("weight", weight)):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"conv_relu_pool2d: {name} is a {type(value).__name__}, needs to be a Tensor"
            )


def check(input: Tensor, weight: Tensor, bias: Tensor | None, p: Windows) -> None:
    """What the stock ops do not check for us, and what fakes would otherwise not notice."""
    op = "conv_relu_pool2d"
    for name, tensor in (("input", input), ("weight", weight)):
        if tensor.dim() != 4:
            raise RuntimeError(f"{op}: {name} has {tensor.dim()} dimensions, needs 4")
    others = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    for name, tensor in others.items():
        if tensor.dtype != input.dtype:
            raise RuntimeError(
                f"{op}: input has dtype {input.dtype} and {name} {tensor.dtype}, needs the same"
            )
        if tensor.device != input.device:
            raise RuntimeError(
                f"{op}: input is on {input.device} and {name} on {tensor.device}, needs the same"
            )
    if p.groups <= 0 or weight.shape[0] % p.groups or not weight.shape[0]:
        raise RuntimeError(
            f"{op}: groups is {p.groups}, needs a positive divisor of weight's "
            f"{weight.shape[0]} filters"
        )
    if input.shape[1] != weight.shape[1] * p.groups or not input.shape[1]:
        raise RuntimeError(
            f"{op}: input has {input.shape[1]} channels, but weight expects {p.groups} groups of "
            f"{weight.shape[1]}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RuntimeError(f"{op}: bias has shape {tuple(bias.shape)}, needs ({weight.shape[0]},)")
    for name, least in _LEAST.items():
        values = getattr(p, name)
        if len(values) != 2 or min(values) < least:
            raise RuntimeError(
                f"{op}: {name} is {tuple(values)}, needs two integers of at least {least}"
            )
    if p.activation != "relu":
        raise RuntimeError(f"{op}: activation is {p.activation!r}, needs 'relu'")
