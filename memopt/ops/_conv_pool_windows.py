"""The windows of conv_relu_pool in any number of dimensions: parameters, sizes, checks, and where a
code points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format

from memopt.ops import _activations

Numbers = Sequence[int]


class Windows(NamedTuple):
    """The convolution's and the pool's parameters, in the order of the op's schema."""

    stride: Numbers
    padding: Numbers
    dilation: Numbers
    groups: int
    pool_kernel_size: Numbers
    pool_stride: Numbers
    pool_padding: Numbers
    pool_dilation: Numbers
    ceil_mode: bool
    activation: str
    alpha: float
    beta: float

    @property
    def positions(self) -> int:
        return math.prod(self.pool_kernel_size)

    @property
    def states(self) -> int:
        return self.positions * _activations.branches(self.activation)

    def convolve(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolution = F.conv2d if weight.dim() == 4 else F.conv3d
        return convolution(
            input,
            weight,
            bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )

    def activate(self, convolved: Tensor) -> Tensor:
        return _activations.apply(convolved, self.activation, self.alpha, self.beta)

    def pool(self, input: Tensor) -> tuple[Tensor, Tensor]:
        two = len(self.pool_kernel_size) == 2
        pool = F.max_pool2d_with_indices if two else F.max_pool3d_with_indices
        pooled, index = pool(
            input,
            list(self.pool_kernel_size),
            list(self.pool_stride),
            list(self.pool_padding),
            list(self.pool_dilation),
            self.ceil_mode,
        )
        return pooled, index

    def sizes(self, input: Tensor, weight: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of the convolution's output and of the pool's; raises where one is empty."""
        convolved, pooled = [], []
        for d in range(weight.dim() - 2):
            reach = self.dilation[d] * (weight.shape[2 + d] - 1) + 1
            out = (input.shape[2 + d] + 2 * self.padding[d] - reach) // self.stride[d] + 1
            if out <= 0:
                raise RuntimeError(
                    f"{op_name(weight)}: the kernel reaches over {reach} of a padded input of "
                    f"{input.shape[2 + d] + 2 * self.padding[d]}; the convolution's output would "
                    "be empty"
                )
            convolved.append(out)
            pooled.append(self._pooled_size(op_name(weight), out, d))
        return tuple(convolved), tuple(pooled)

    def _pooled_size(self, op: str, size: int, d: int) -> int:
        reach = self.pool_dilation[d] * (self.pool_kernel_size[d] - 1) + 1
        step, pad = self.pool_stride[d], self.pool_padding[d]
        if pad > self.pool_kernel_size[d] // 2:
            raise RuntimeError(
                f"{op}: pool_padding is {pad}, needs at most half of pool_kernel_size, which is "
                f"{self.pool_kernel_size[d]}"
            )
        out = (size + 2 * pad - reach + (step - 1 if self.ceil_mode else 0)) // step + 1
        if self.ceil_mode and (out - 1) * step >= size + pad:
            out -= 1  # a window that would start in the padding on the right
        if out <= 0:
            raise RuntimeError(
                f"{op}: the pool's window reaches over {reach} of the convolution's output of "
                f"{size}; its output would be empty"
            )
        return out

    def winners(self, index: Tensor, convolved: Numbers) -> Tensor:
        """max_pool's flat indices (N, C, *out) -> position in the window, row by row."""
        position = torch.zeros_like(index)
        places = torch.unravel_index(index, tuple(convolved))
        for d, (place, corner) in enumerate(zip(places, self._corners(index), strict=True)):
            step = torch.div(place - corner, self.pool_dilation[d], rounding_mode="floor")
            position = position * self.pool_kernel_size[d] + step
        return position

    def indices(self, codes: Tensor, convolved: Numbers) -> tuple[Tensor, Tensor, Tensor]:
        """Codes (N, C, *out) -> flat index of each winner, whether it lives, and its branch.

        A code that points out of the input, which no forward pass writes, counts as dead.
        """
        position, branch = codes % self.positions, codes // self.positions
        live = codes < self.states
        index, rest = torch.zeros_like(codes), position
        scale = 1
        corners = self._corners(codes)
        for d in reversed(range(len(convolved))):
            step, rest = rest % self.pool_kernel_size[d], rest // self.pool_kernel_size[d]
            place = corners[d] + step * self.pool_dilation[d]
            live = live & (place >= 0) & (place < convolved[d])
            index = index + place * scale
            scale *= convolved[d]
        return torch.where(live, index, 0), live, branch

    def not_empty(self, like: Tensor, convolved: Numbers) -> Tensor:
        """Whether the window of each output (*out) holds a value: padding does not count."""
        found = torch.ones((), dtype=torch.bool, device=like.device)
        for d, corner in enumerate(self._corners(like)):
            steps = torch.arange(self.pool_kernel_size[d], device=like.device)
            places = corner.unsqueeze(-1) + steps * self.pool_dilation[d]
            found = found & ((places >= 0) & (places < convolved[d])).any(-1)
        return found

    def _corners(self, like: Tensor) -> list[Tensor]:
        """First place of every output's window in each dimension, to broadcast over (*out)."""
        dims = like.dim() - 2
        corners = []
        for d, size in enumerate(like.shape[2:]):
            corner = torch.arange(size, device=like.device) * self.pool_stride[d]
            corner = corner - self.pool_padding[d]
            corners.append(corner.view(-1, *(1,) * (dims - 1 - d)))
        return corners


def op_name(weight: Tensor) -> str:
    return f"conv_relu_pool{weight.dim() - 2}d"


def memory_format(input: Tensor, weight: Tensor) -> torch.memory_format:
    """Stock convolution's rule: channels_last if the input or the weight is, but for no images."""
    if input.shape[0] == 0:
        return torch.contiguous_format
    last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
    formats = (suggest_memory_format(input), suggest_memory_format(weight))
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


def check(
    op: str, dims: int, input: Tensor, weight: Tensor, bias: Tensor | None, p: Windows
) -> None:
    """What the stock ops do not check for us, and what fakes would otherwise not notice."""
    for name, tensor in (("input", input), ("weight", weight)):
        if tensor.dim() != dims + 2:
            raise RuntimeError(f"{op}: {name} has {tensor.dim()} dimensions, needs {dims + 2}")
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
        if len(values) != dims or min(values) < least:
            raise RuntimeError(
                f"{op}: {name} is {tuple(values)}, needs {dims} integers of at least {least}"
            )
    if p.activation not in _activations.ACTIVATIONS:
        raise RuntimeError(
            f"{op}: activation is {p.activation!r}, needs one of {_activations.ACTIVATIONS}"
        )
