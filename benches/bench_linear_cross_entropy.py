"""Linear layer and cross-entropy in one against the two stock functions, and torch's own chunks."""

import torch
import torch.nn.functional as F

import memopt.nn.functional as M
from harness import Case, main

Tensors = tuple[torch.Tensor, ...]


def stock(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def torch_chunked(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(x, weight, target, options=options)


def cases(quick: bool, device: torch.device) -> list[Case]:
    sizes = [(4, 5, 3)] if quick else [(4096, 500, 10), (2048, 768, 32000)]
    return [case(*size, device) for size in sizes]


def case(rows: int, features: int, classes: int, device: torch.device) -> Case:
    def inputs() -> Tensors:
        x = torch.randn(rows, features, device=device, requires_grad=True)
        weight = (torch.randn(classes, features, device=device) / features**0.5).requires_grad_()
        return x, weight, torch.randint(classes, (rows,), device=device)

    has_own = hasattr(torch.nn, "LinearCrossEntropyOptions")  # torch >= 2.13
    return Case(
        f"{rows}x{features} to {classes}",
        inputs,
        stock=stock,
        memopt=M.linear_cross_entropy,
        others={"torch chunked": torch_chunked} if has_own else {},
    )


if __name__ == "__main__":
    main("linear_cross_entropy", cases)
