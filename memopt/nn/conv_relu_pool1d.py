"""Convolution, activation and pooling in one dimension as a layer."""

from __future__ import annotations

import torch

from memopt.nn._conv_relu_pool import ConvReLUPool
from memopt.ops.conv_relu_pool1d import conv_relu_pool1d

__all__ = ["ConvReLUPool1d"]


class ConvReLUPool1d(ConvReLUPool, torch.nn.Conv1d):
    """`torch.nn.Conv1d`, an activation and `torch.nn.MaxPool1d` in one, with Conv1d's state_dict.

    Takes the place of ``Sequential(Conv1d(...), ReLU(), MaxPool1d(...))`` and, since they are the
    same function, of ``Sequential(Conv1d(...), MaxPool1d(...), ReLU())``.

    Args:
        in_channels ... dtype: as in `torch.nn.Conv1d`.
        pool_kernel_size, pool_stride, pool_padding, pool_dilation, ceil_mode: as in
            `torch.nn.MaxPool1d`.
        pool: "max", or "avg" for `torch.nn.AvgPool1d`.
        count_include_pad: as in `torch.nn.AvgPool1d`, and only for it.
        activation: "relu", "leaky_relu", "relu6", "hardtanh" or "identity".
        negative_slope: of leaky_relu; 0.01 if not given.
        min_val, max_val: of hardtanh; -1 and 1 if not given.

    Shape:
        (N, C, L) or (C, L) -> (N, K, OL) or (K, OL).

    Example:
        >>> import torch, memopt
        >>> layer = memopt.nn.ConvReLUPool1d(3, 20, 5)
        >>> layer(torch.randn(8, 3, 28)).shape
        torch.Size([8, 20, 12])
    """

    _function = staticmethod(conv_relu_pool1d)
