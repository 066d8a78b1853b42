"""A chain of linear layers that keep their inputs quantised, against the stock ones.

One layer alone frees nothing while its caller holds the input; in a chain every layer's input is
the result of the one before, and dies when it has been packed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import memopt.nn.functional as M
from harness import Case, main

LAYERS = 8


def chain(linear: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = linear(x, weight)
        return x

    return run


def stored(storage: str) -> Callable[..., Tensor]:
    return chain(lambda x, weight: M.linear(x, weight, storage=storage))


def cases(quick: bool, device: torch.device) -> list[Case]:
    if quick:
        return [case(3, 8, torch.float32, device)]
    sizes = ((8192, 256), (4096, 768))
    return [case(*s, dtype, device) for s in sizes for dtype in (torch.float32, torch.bfloat16)]


def case(rows: int, features: int, dtype: torch.dtype, device: torch.device) -> Case:
    def inputs() -> tuple[Tensor, ...]:
        x = torch.randn(rows, features, dtype=dtype, device=device)
        weights = (torch.randn(features, features, device=device) for _ in range(LAYERS))
        return (x, *((w * features**-0.5).to(dtype).requires_grad_() for w in weights))

    name = f"{LAYERS} x {rows}x{features} {str(dtype).removeprefix('torch.')}"
    others = {f"memopt {storage}": stored(storage) for storage in ("int4", "int2")}
    return Case(name, inputs, chain(F.linear), stored("int8"), others=others, exact=False)


if __name__ == "__main__":
    main("linear", cases)
