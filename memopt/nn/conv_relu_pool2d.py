"""Convolution, activation and pooling in two dimensions as a layer."""

from __future__ import annotations

import torch

from memopt.nn._conv_relu_pool import ConvReLUPool
from memopt.ops.conv_relu_pool2d import conv_relu_pool2d

__all__ = ["ConvReLUPool2d"]


class ConvReLUPool2d(ConvReLUPool, torch.nn.Conv2d):
    """`torch.nn.Conv2d`, an activation and `torch.nn.MaxPool2d` in one, with Conv2d's state_dict.

    Takes the place of ``Sequential(Conv2d(...), ReLU(), MaxPool2d(...))`` and, since they are the
    same function, of ``Sequential(Conv2d(...), MaxPool2d(...), ReLU())``.

    Args:
        in_channels ... dtype: as in `torch.nn.Conv2d`.
        pool_kernel_size, pool_stride, pool_padding, pool_dilation, ceil_mode: as in
            `torch.nn.MaxPool2d`.
        pool: "max", or "avg" for `torch.nn.AvgPool2d`.
        count_include_pad, divisor_override: as in `torch.nn.AvgPool2d`, and only for it.
        activation: "relu", "leaky_relu", "relu6", "hardtanh" or "identity".
        negative_slope: of leaky_relu; 0.01 if not given.
        min_val, max_val: of hardtanh; -1 and 1 if not given.

    Shape:
        (N, C, H, W) or (C, H, W) -> (N, K, OH, OW) or (K, OH, OW).

    Example:
        >>> import torch, memopt
        >>> layer = memopt.nn.ConvReLUPool2d(1, 20, 5)
        >>> layer(torch.randn(8, 1, 28, 28)).shape
        torch.Size([8, 20, 12, 12])
    """

    _function = staticmethod(conv_relu_pool2d)
