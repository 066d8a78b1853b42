"""What ConvReLUPool1d, 2d and 3d share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.nn._fuse import fused_with_batch_norm
from memopt.ops._activations import parameters
from memopt.ops._conv_pool_arguments import check_pool

if TYPE_CHECKING:
    from typing_extensions import Self


class ConvReLUPool(torch.nn.modules.conv._ConvNd):
    """Stands before `torch.nn.ConvNd` among a layer's bases.

    Its constructor adds the pool's and the activation's arguments, its forward calls the fused
    function.
    """

    _function: ClassVar[Callable[..., Tensor]]

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
        pool: str = "max",
        count_include_pad: bool | None = None,
        divisor_override: int | None = None,
        activation: str = "relu",
        negative_slope: float | None = None,
        min_val: float | None = None,
        max_val: float | None = None,
    ) -> None:
        name = type(self).__name__
        check_pool(name, pool, pool_dilation, count_include_pad, divisor_override)
        if divisor_override is not None and isinstance(self, torch.nn.Conv1d):
            raise TypeError(f"{name}: divisor_override is {divisor_override}, AvgPool1d has none")
        parameters(name, activation, negative_slope, min_val, max_val)
        convolution: Any = super().__init__
        convolution(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device,
            dtype,
        )
        self.pool_kernel_size = pool_kernel_size
        self.pool_stride = pool_kernel_size if pool_stride is None else pool_stride
        self.pool_padding = pool_padding
        self.pool_dilation = pool_dilation
        self.ceil_mode = ceil_mode
        self.pool = pool
        self.count_include_pad = count_include_pad
        self.divisor_override = divisor_override
        self.activation = activation
        self.negative_slope = negative_slope
        self.min_val = min_val
        self.max_val = max_val

    def forward(self, input: Tensor) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        divisor = {}
        if self.divisor_override is not None:
            divisor["divisor_override"] = self.divisor_override
        return type(self)._function(
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
            pool=self.pool,
            count_include_pad=self.count_include_pad,
            **divisor,
            activation=self.activation,
            negative_slope=self.negative_slope,
            min_val=self.min_val,
            max_val=self.max_val,
        )

    def fuse_batch_norm(self, bn: torch.nn.modules.batchnorm._BatchNorm) -> Self:
        """A copy in eval mode that also does a batch norm's work between conv and activation.

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
        text = (
            f"{super().extra_repr()}, pool_kernel_size={self.pool_kernel_size}, "
            f"pool_stride={self.pool_stride}, pool_padding={self.pool_padding}, "
            f"pool_dilation={self.pool_dilation}, ceil_mode={self.ceil_mode}, "
            f"pool={self.pool}, activation={self.activation}"
        )
        optional = ("count_include_pad", "divisor_override", "negative_slope", "min_val", "max_val")
        for name in optional:
            if getattr(self, name) is not None:
                text += f", {name}={getattr(self, name)}"
        return text
