"""Convolution, activation and pooling in three dimensions as a layer."""

from __future__ import annotations

import torch

from memopt.nn._conv_relu_pool import ConvReLUPool
from memopt.ops.conv_relu_pool3d import conv_relu_pool3d

__all__ = ["ConvReLUPool3d"]


class ConvReLUPool3d(ConvReLUPool, torch.nn.Conv3d):
    """`torch.nn.Conv3d`, an activation and `torch.nn.MaxPool3d` in one, with Conv3d's state_dict.

    Takes the place of ``Sequential(Conv3d(...), ReLU(), MaxPool3d(...))`` and, since they are the
    same function, of ``Sequential(Conv3d(...), MaxPool3d(...), ReLU())``.

    Args:
        in_channels ... dtype: as in `torch.nn.Conv3d`.
        pool_kernel_size, pool_stride, pool_padding, pool_dilation, ceil_mode: as in
            `torch.nn.MaxPool3d`.
        pool: "max", or "avg" for `torch.nn.AvgPool3d`.
        count_include_pad, divisor_override: as in `torch.nn.AvgPool3d`, and only for it.
        activation: "relu", "leaky_relu", "relu6", "hardtanh" or "identity".
        negative_slope: of leaky_relu; 0.01 if not given.
        min_val, max_val: of hardtanh; -1 and 1 if not given.

    Shape:
        (N, C, D, H, W) or (C, D, H, W) -> (N, K, OD, OH, OW) or (K, OD, OH, OW).

    Example:
        >>> import torch, memopt
        >>> layer = memopt.nn.ConvReLUPool3d(1, 4, 3)
        >>> layer(torch.randn(2, 1, 12, 12, 12)).shape
        torch.Size([2, 4, 5, 5, 5])
    """

    _function = staticmethod(conv_relu_pool3d)
