"""Convolution, batch norm, ReLU and max-pooling as a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import BatchNorm2d, Conv2d, MaxPool2d, ReLU
from torch.nn.modules.lazy import LazyModuleMixin

from memopt.ops.conv_batch_norm_relu_pool2d import conv_batch_norm_relu_pool2d

__all__ = ["ConvBatchNormReLUPool2d"]


class ConvBatchNormReLUPool2d(torch.nn.Sequential):
    """``Sequential(Conv2d(...), BatchNorm2d(...), ReLU(), MaxPool2d(...))``, computed as one.

    It is that Sequential: the stock layers are its children 0 to 3, so its state_dict has their
    keys (``0.weight``, ``0.bias``, ``1.weight``, ``1.bias``, ``1.running_mean``,
    ``1.running_var``, ``1.num_batches_tracked``), and a checkpoint goes either way. The children
    hold the parameters but are not called: hooks on them do not run.

    In training it keeps the convolution's output once where the stock layers keep three tensors of
    its size; without training the batch norm is folded into the convolution.

    Args:
        in_channels ... dtype: as in `torch.nn.Conv2d`.
        eps, momentum, affine, track_running_stats: as in `torch.nn.BatchNorm2d`.
        pool_kernel_size, pool_stride, pool_padding, pool_dilation, ceil_mode: as in
            `torch.nn.MaxPool2d`.

    Shape:
        (N, C, H, W) -> (N, K, OH, OW).

    Example:
        >>> import torch, memopt
        >>> stem = memopt.nn.ConvBatchNormReLUPool2d(
        ...     3, 64, 7, 2, 3, bias=False, pool_kernel_size=3, pool_stride=2, pool_padding=1
        ... )
        >>> stem(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 64, 8, 8])
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
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        pool_kernel_size: int | Sequence[int] = 2,
        pool_stride: int | Sequence[int] | None = None,
        pool_padding: int | Sequence[int] = 0,
        pool_dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
    ) -> None:
        conv = Conv2d(
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
        bn = BatchNorm2d(
            out_channels, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        pool = MaxPool2d(
            pool_kernel_size,  # type: ignore[arg-type]
            pool_stride,  # type: ignore[arg-type]
            pool_padding,  # type: ignore[arg-type]
            pool_dilation,  # type: ignore[arg-type]
            ceil_mode=ceil_mode,
        )
        super().__init__(conv, bn, ReLU(), pool)

    @classmethod
    def from_modules(
        cls, conv: Conv2d, bn: BatchNorm2d, pool: MaxPool2d
    ) -> ConvBatchNormReLUPool2d:
        """One layer of three that exist and stay its children, such as a trained ResNet's stem.

        Raises:
            TypeError: a module of another kind. `torch.nn.SyncBatchNorm` is refused, since its
                statistics are those of all processes.
            ValueError: a pool that returns indices.

        Example:
            >>> import torch, memopt
            >>> conv, bn = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)
            >>> pool = torch.nn.MaxPool2d(2)
            >>> memopt.nn.ConvBatchNormReLUPool2d.from_modules(conv, bn, pool)[1] is bn
            True
        """
        _check_kinds(conv, bn, pool)
        layer = cls.__new__(cls)
        torch.nn.Sequential.__init__(layer, conv, bn, ReLU(), pool)
        layer.training = bn.training
        return layer

    def forward(self, input: Tensor) -> Tensor:
        conv, bn, pool = self._children()
        padding: Any = conv.padding
        if conv.padding_mode != "zeros":
            input = F.pad(input, conv._reversed_padding_repeated_twice, mode=conv.padding_mode)
            padding = 0
        momentum = 0.0 if bn.momentum is None else bn.momentum
        if bn.training and bn.track_running_stats and bn.num_batches_tracked is not None:
            bn.num_batches_tracked.add_(1)
            if bn.momentum is None:  # the average over all batches so far
                momentum = 1.0 / float(bn.num_batches_tracked)
        running = (bn.running_mean, bn.running_var)
        if bn.training and not bn.track_running_stats:
            running = (None, None)
        return conv_batch_norm_relu_pool2d(
            input,
            conv.weight,
            conv.bias,
            *running,
            bn.weight,
            bn.bias,
            conv.stride,
            padding,
            conv.dilation,
            conv.groups,
            training=bn.training or (bn.running_mean is None and bn.running_var is None),
            momentum=momentum,
            eps=bn.eps,
            pool_kernel_size=pool.kernel_size,
            pool_stride=pool.stride,
            pool_padding=pool.padding,
            pool_dilation=pool.dilation,
            ceil_mode=pool.ceil_mode,
        )

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):  # a part of the layer is stock layers again
            return torch.nn.Sequential(*list(self)[index])
        return super().__getitem__(index)

    def _children(self) -> tuple[Conv2d, BatchNorm2d, MaxPool2d]:
        """The layers as they are now: conversions such as SyncBatchNorm's replace them in place."""
        if len(self) != 4:
            raise RuntimeError(
                f"ConvBatchNormReLUPool2d: has {len(self)} children, needs the 4 it was made with"
            )
        conv, bn, _, pool = self._modules.values()
        _check_kinds(conv, bn, pool)
        return conv, bn, pool  # type: ignore[return-value]


def _check_kinds(conv: object, bn: object, pool: object) -> None:
    name = "ConvBatchNormReLUPool2d"
    if isinstance(bn, torch.nn.SyncBatchNorm):
        raise TypeError(
            f"{name}: bn is a SyncBatchNorm, whose statistics are those of all processes; needs a "
            "BatchNorm2d. Keep the stock layers here, or leave this layer out of the conversion"
        )
    for what, module, kind in (("conv", conv, Conv2d), ("bn", bn, BatchNorm2d)):
        if not isinstance(module, kind) or isinstance(module, LazyModuleMixin):
            raise TypeError(f"{name}: {what} is a {type(module).__name__}, needs a {kind.__name__}")
    if not isinstance(pool, MaxPool2d):
        raise TypeError(f"{name}: pool is a {type(pool).__name__}, needs a MaxPool2d")
    if pool.return_indices:
        raise ValueError(f"{name}: pool has return_indices=True, needs False")
