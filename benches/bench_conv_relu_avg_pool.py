"""conv_relu_pool2d with pool="avg" against conv2d, relu and avg_pool2d."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import memopt.nn.functional as M
from harness import Case, main

# Images, channels, filters, size, kernel.
LAYERS = ((512, 1, 6, 28, 5), (512, 6, 16, 12, 5), (64, 3, 64, 64, 3), (16, 64, 64, 56, 3))
QUICK = ((2, 1, 3, 8, 3),)


def cases(quick: bool, device: torch.device) -> list[Case]:
    return [case(*layer, device) for layer in (QUICK if quick else LAYERS)]


def case(
    images: int, channels: int, filters: int, size: int, kernel: int, device: torch.device
) -> Case:
    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        # A first layer's input, images, needs no gradient.
        x = torch.randn(images, channels, size, size, device=device, requires_grad=channels > 3)
        w = torch.randn(filters, channels, kernel, kernel, device=device).requires_grad_()
        return x, w, torch.randn(filters, device=device, requires_grad=True)

    def stock(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.avg_pool2d(F.relu(F.conv2d(x, w, b)), 2)

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return M.conv_relu_pool2d(x, w, b, pool="avg")

    name = f"{images}x {channels}->{filters} k{kernel} {size}^2"
    return Case(name, inputs, stock=stock, memopt=ours)


if __name__ == "__main__":
    main("conv_relu_avg_pool", cases)
