"""Convolution, ReLU and max-pooling as a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.nn._fuse import fused_with_batch_norm
from memopt.ops.conv_relu_pool2d import conv_relu_pool2d

__all__ = ["ConvReLUPool2d"]


class ConvReLUPool2d(torch.nn.Conv2d):
    """`torch.nn.Conv2d`, ReLU and `torch.nn.MaxPool2d` in one, with Conv2d's state_dict.

    Takes the place of ``Sequential(Conv2d(...), ReLU(), MaxPool2d(...))`` and, since they are the
    same function, of ``Sequential(Conv2d(...), MaxPool2d(...), ReLU())``.

    Args:
        in_channels ... dtype: as in `torch.nn.Conv2d`.
        pool_kernel_size, pool_stride, pool_padding, pool_dilation, ceil_mode: as in
            `torch.nn.MaxPool2d`.
        activation: "relu".

    Shape:
        (N, C, H, W) or (C, H, W) -> (N, K, OH, OW) or (K, OH, OW).

    Example:
        >>> import torch, memopt
        >>> layer = memopt.nn.ConvReLUPool2d(1, 20, 5)
        >>> layer(torch.randn(8, 1, 28, 28)).shape
        torch.Size([8, 20, 12, 12])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        pool_kernel_size: int | Sequence[int] = 2,
        pool_stride: int | Sequence[int] | None = None,
        pool_padding: int | Sequence[int] = 0,
        pool_dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        activation: str = "relu",
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,  # type: ignore[arg-type]
            stride,  # type: ignore[arg-type]
            padding,  # type: ignore[arg-type]
            dilation,  # type: ignore[arg-type]
            groups,
            bias,
            padding_mode,  # type: ignore[arg-type]
            device,
            dtype,
        )
        if activation != "relu":
            raise ValueError(f"ConvReLUPool2d: activation is {activation!r}, needs 'relu'")
        self.pool_kernel_size = pool_kernel_size
        self.pool_stride = pool_kernel_size if pool_stride is None else pool_stride
        self.pool_padding = pool_padding
        self.pool_dilation = pool_dilation
        self.ceil_mode = ceil_mode
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        return conv_relu_pool2d(
            input,
            self.weight,
            self.bias,
            self.stride,
            padding,
            self.dilation,
            self.groups,
            pool_kernel_size=self.pool_kernel_size,
            pool_stride=self.pool_stride,
            pool_padding=self.pool_padding,
            pool_dilation=self.pool_dilation,
            ceil_mode=self.ceil_mode,
            activation=self.activation,
        )

    def fuse_batch_norm(self, bn: torch.nn.modules.batchnorm._BatchNorm) -> ConvReLUPool2d:
        """A copy in eval mode that also does the work of a batch norm between conv and ReLU.

        Args:
            bn: in eval mode, with running statistics and as many features as out_channels.

        Raises:
            TypeError, ValueError: bn is something else.

        Example:
            >>> import torch, memopt
            >>> layer, bn = memopt.nn.ConvReLUPool2d(1, 4, 3), torch.nn.BatchNorm2d(4).eval()
            >>> layer.fuse_batch_norm(bn).training
            False
        """
        return fused_with_batch_norm(self, bn)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, pool_kernel_size={self.pool_kernel_size}, "
            f"pool_stride={self.pool_stride}, pool_padding={self.pool_padding}, "
            f"pool_dilation={self.pool_dilation}, ceil_mode={self.ceil_mode}"
        )
