"""Folding a batch norm into the layer before it, for inference."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from memopt.ops._batch_norm import fold


def fused_with_batch_norm(layer: Any, bn: _BatchNorm) -> Any:
    """A copy of a convolution layer, in eval mode, that does the work of `bn` after it too."""
    name = f"{type(layer).__name__}.fuse_batch_norm"
    if not isinstance(bn, _BatchNorm):
        raise TypeError(f"{name}: bn is a {type(bn).__name__}, needs a batch norm")
    if bn.training:
        raise ValueError(f"{name}: bn is in training mode, needs bn.eval()")
    if bn.running_mean is None or bn.running_var is None:
        raise ValueError(f"{name}: bn has no running statistics, and then uses each batch's")
    if bn.num_features != layer.out_channels:
        raise ValueError(
            f"{name}: bn has {bn.num_features} features, needs the layer's {layer.out_channels}"
        )
    low = layer.weight.dtype in (torch.bfloat16, torch.float16)
    with torch.no_grad():
        weight, bias = fold(
            layer.weight,
            layer.bias,
            bn.running_mean,
            bn.running_var,
            bn.weight,
            bn.bias,
            bn.eps,
            torch.float32 if low else torch.float64,
        )
    fused = copy.deepcopy(layer).eval()
    fused.weight = torch.nn.Parameter(weight, layer.weight.requires_grad)
    fused.bias = torch.nn.Parameter(bias, layer.weight.requires_grad)
    return fused
