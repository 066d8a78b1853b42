"""conv_batch_norm_relu_pool2d in training against the stock layers, on a ResNet's stem."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import memopt.nn.functional as M
from harness import Case, main


def cases(quick: bool, device: torch.device) -> list[Case]:
    sizes = ((2, 8, 16),) if quick else ((16, 64, 112), (16, 64, 224))
    dtypes = (torch.float32,) if quick else (torch.float32, torch.bfloat16)
    return [case(*size, dtype, device) for dtype in dtypes for size in sizes]


def case(images: int, filters: int, size: int, dtype: torch.dtype, device: torch.device) -> Case:
    def inputs() -> tuple[Tensor, ...]:
        x = torch.randn(images, 3, size, size, device=device, dtype=dtype)
        w = torch.randn(filters, 3, 7, 7, device=device, dtype=dtype).div_(12)
        channel = [torch.ones(filters, device=device), torch.zeros(filters, device=device)]
        running = [torch.zeros(filters, device=device), torch.ones(filters, device=device)]
        return x, *(t.requires_grad_() for t in (w, *channel)), *running

    def stock(
        x: Tensor, w: Tensor, bn_weight: Tensor, bn_bias: Tensor, mean: Tensor, var: Tensor
    ) -> Tensor:
        convolved = F.conv2d(x, w, None, 2, 3)
        normalized = F.batch_norm(convolved, mean, var, bn_weight, bn_bias, training=True)
        return F.max_pool2d(F.relu(normalized), 3, 2, 1)

    def ours(
        x: Tensor, w: Tensor, bn_weight: Tensor, bn_bias: Tensor, mean: Tensor, var: Tensor
    ) -> Tensor:
        channel = (mean, var, bn_weight, bn_bias)
        pool = {"pool_kernel_size": 3, "pool_stride": 2, "pool_padding": 1}
        return M.conv_batch_norm_relu_pool2d(x, w, None, *channel, 2, 3, training=True, **pool)

    name = f"{images}x 3->{filters} k7 {size}^2 {str(dtype).removeprefix('torch.')} ResNet stem"
    return Case(name, inputs, stock=stock, memopt=ours, exact=dtype == torch.float32)


if __name__ == "__main__":
    main("conv_batch_norm_relu_pool2d", cases)
