"""conv_relu_pool3d against conv3d, relu and max_pool3d."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import memopt.nn.functional as M
from harness import Case, main


@dataclass(frozen=True)
class Layer:
    images: int
    channels: int
    filters: int
    size: int
    kernel: int
    padding: int = 0

    @property
    def name(self) -> str:
        return f"{self.images}x {self.channels}->{self.filters} k{self.kernel} {self.size}^3"


LAYERS = (Layer(8, 1, 16, 32, 3), Layer(8, 16, 32, 16, 3, padding=1))
QUICK = (Layer(2, 1, 3, 8, 3), Layer(2, 3, 4, 8, 3, padding=1))


def cases(quick: bool, device: torch.device) -> list[Case]:
    return [case(layer, device) for layer in (QUICK if quick else LAYERS)]


def case(layer: Layer, device: torch.device) -> Case:
    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        shape = (layer.images, layer.channels, *(layer.size,) * 3)
        # A first layer's input, data, needs no gradient.
        x = torch.randn(shape, device=device, requires_grad=layer.channels > 3)
        kernel = (layer.filters, layer.channels, *(layer.kernel,) * 3)
        w = torch.randn(kernel, device=device, requires_grad=True)
        return x, w, torch.randn(layer.filters, device=device, requires_grad=True)

    def stock(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.max_pool3d(F.relu(F.conv3d(x, w, b, 1, layer.padding)), 2)

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return M.conv_relu_pool3d(x, w, b, 1, layer.padding)

    return Case(layer.name, inputs, stock=stock, memopt=ours)


if __name__ == "__main__":
    main("conv_relu_pool3d", cases)
