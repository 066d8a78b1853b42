"""Packing a tensor and restoring it, against copying it twice: the speed of memory.

forward is the packing (stock: a copy), forward+backward both ways. `memopt` is 8 bit with
stochastic rounding, `memopt nearest` 8 bit without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import memopt
from harness import Case, main


def packed(bits: int, stochastic: bool = True) -> Callable[..., Tensor]:
    """A function that packs its argument in the forward pass and restores it in the backward."""

    class Packed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.q = memopt.quantize(x, bits, stochastic=stochastic)
            ctx.save_for_backward(ctx.q.packed, ctx.q.scale, ctx.q.minimum)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return memopt.dequantize(ctx.q)

    return Packed.apply


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        copy = x.clone()  # returned, so that torch.compile cannot drop it
        ctx.save_for_backward(copy)
        return copy

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0].clone()


def cases(quick: bool, device: torch.device) -> list[Case]:
    shapes = [(2, 300), (2, 3, 4, 5)] if quick else [(4096, 4096), (32, 64, 56, 56)]
    return [
        case(shape, dtype, device) for shape in shapes for dtype in (torch.float32, torch.bfloat16)
    ]


def case(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Case:
    def inputs() -> tuple[Tensor]:
        return (torch.randn(shape, dtype=dtype, device=device, requires_grad=True),)

    name = f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
    others = {f"memopt {bits} bit": packed(bits) for bits in (4, 2)}
    others["memopt nearest"] = packed(8, stochastic=False)
    return Case(name, inputs, stock=Copied.apply, memopt=packed(8), others=others, exact=False)


if __name__ == "__main__":
    main("quantize", cases)
