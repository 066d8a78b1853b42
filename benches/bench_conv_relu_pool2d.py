"""conv_relu_pool2d against conv2d, relu and max_pool2d, in small and in known nets."""

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
    stride: int = 1
    padding: int = 0
    pool: tuple[int, int, int] = (2, 2, 0)  # kernel, stride, padding
    note: str = ""

    @property
    def name(self) -> str:
        text = f"{self.images}x {self.channels}->{self.filters} k{self.kernel} {self.size}^2"
        return f"{text} {self.note}".strip()


LAYERS = (
    Layer(512, 1, 10, 28, 5),
    Layer(512, 1, 20, 28, 5),
    Layer(512, 10, 20, 12, 5),
    Layer(512, 20, 50, 12, 5),
    Layer(64, 3, 64, 64, 3, padding=1),
    Layer(16, 64, 64, 56, 3, padding=1),
    Layer(16, 3, 64, 112, 7, stride=2, padding=3, pool=(3, 2, 1), note="ResNet stem"),
    Layer(16, 64, 192, 27, 5, padding=2, pool=(3, 2, 0), note="AlexNet"),
)
QUICK = (Layer(2, 1, 3, 8, 3), Layer(2, 3, 4, 9, 3, padding=1, pool=(3, 2, 1)))


def cases(quick: bool, device: torch.device) -> list[Case]:
    return [case(layer, device) for layer in (QUICK if quick else LAYERS)]


def case(layer: Layer, device: torch.device) -> Case:
    kernel, stride, padding = layer.pool

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        shape = (layer.images, layer.channels, layer.size, layer.size)
        # A first layer's input, images, needs no gradient.
        x = torch.randn(shape, device=device, requires_grad=layer.channels > 3)
        w = torch.randn(
            layer.filters, layer.channels, layer.kernel, layer.kernel, device=device
        ).requires_grad_()
        return x, w, torch.randn(layer.filters, device=device, requires_grad=True)

    def stock(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        convolved = F.conv2d(x, w, b, layer.stride, layer.padding)
        return F.max_pool2d(F.relu(convolved), kernel, stride, padding)

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return M.conv_relu_pool2d(
            x,
            w,
            b,
            layer.stride,
            layer.padding,
            pool_kernel_size=kernel,
            pool_stride=stride,
            pool_padding=padding,
        )

    return Case(layer.name, inputs, stock=stock, memopt=ours)


if __name__ == "__main__":
    main("conv_relu_pool2d", cases)
