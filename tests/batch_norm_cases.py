"""What the tests of conv_batch_norm_relu_pool2d share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.nn.functional import conv_batch_norm_relu_pool2d
from support import OPS, unchanged


def stock(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    *convolution: Any,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    **pool: Any,
) -> Tensor:
    """The stock ops under conv_batch_norm_relu_pool2d's arguments."""
    pool = {"pool_kernel_size": 2} | pool
    named = {k: pool.pop(k) for k in ("stride", "padding", "dilation", "groups") if k in pool}
    convolved = F.conv2d(x, w, b, *convolution, **named)
    bn = (running_mean, running_var, bn_weight, bn_bias, training, momentum, eps)
    normalized = F.batch_norm(convolved, *bn)
    names = {k.removeprefix("pool_"): v for k, v in pool.items()}
    return F.max_pool2d(F.relu(normalized), **names)


FUNCTIONS = (stock, conv_batch_norm_relu_pool2d)


class Inputs:
    """Leaves and running estimates, so that each function gets its own."""

    def __init__(self, x: Tensor, w: Tensor, dtype: torch.dtype | None = None, bias: bool = True):
        of = {"device": x.device, "dtype": dtype or x.dtype}
        channels = w.shape[0]
        b = torch.randn(channels, device=x.device).to(x.dtype) if bias else None
        self.leaves = [x, w, b, 1 + torch.rand(channels, **of), torch.randn(channels, **of)]
        self.running = [torch.randn(channels, **of), 0.5 + torch.rand(channels, **of)]

    def run(
        self,
        function,
        *args: Any,
        to: torch.dtype | None = None,
        backward: bool = True,
        **kwargs: Any,
    ) -> list[Tensor]:
        """Output, gradients of all leaves, and the running estimates afterwards."""
        leaves = [None if t is None else t.detach().to(to or t.dtype) for t in self.leaves]
        wanted = [t.requires_grad_() for t in leaves if t is not None]
        running = [t.clone().to(to or t.dtype) for t in self.running]
        kwargs = {"training": True} | kwargs
        with unchanged(*wanted):
            output = function(*leaves[:3], *running, *leaves[3:], *args, **kwargs)
            if not backward:
                return [output.detach(), *running]
            slope = torch.linspace(-1, 1, max(1, output.numel()), device=output.device)
            grad = slope[: output.numel()].view(output.shape).to(output.dtype)
            grads = torch.autograd.grad(output, wanted, grad)
        return [output.detach(), *grads, *running]


def without_bias(results: list[Tensor]) -> list[Tensor]:
    """Batch norm in training takes the bias away: the stock gradient is rounding error."""
    return results[:3] + results[4:]


def raw_arguments(device, x: Tensor, filters: int = 6) -> tuple[list[Any], list[Any]]:
    """Valid arguments of both raw ops."""
    w = torch.randn(filters, 2, 3, 3, device=device)
    channel = [torch.randn(filters, device=device) for _ in range(3)]
    windows = [[1, 1], [1, 1], [1, 1], 2, [3, 3], [2, 2], [1, 1], [1, 1], True]
    forward = [x, w, *channel, *windows, 1e-5, True]
    y, codes, convolved, mean, invstd, _ = OPS["conv_batch_norm_relu_pool2d"](*forward)
    saved = [x, w, channel[1], convolved, codes, mean, invstd]
    return forward, [torch.randn_like(y), *saved, *windows, *[True] * 5]
