"""Linear layer and log-softmax in one against the two stock functions."""

import torch
import torch.nn.functional as F

import memopt.nn.functional as M
from harness import Case, main


def stock(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(F.linear(x, weight, bias), dim=-1)


def cases(quick: bool, device: torch.device) -> list[Case]:
    sizes = [(4, 5, 3)] if quick else [(4096, 500, 10), (2048, 768, 32000)]
    return [case(*size, device) for size in sizes]


def case(rows: int, features: int, classes: int, device: torch.device) -> Case:
    def inputs() -> tuple[torch.Tensor, ...]:
        shapes = ((rows, features), (classes, features), (classes,))
        scales = (1.0, features**-0.5, 1.0)
        return tuple(
            (torch.randn(shape, device=device) * scale).requires_grad_()
            for shape, scale in zip(shapes, scales, strict=True)
        )

    name = f"{rows}x{features} to {classes}"
    return Case(name, inputs, stock=stock, memopt=M.linear_log_softmax)


if __name__ == "__main__":
    main("linear_log_softmax", cases)
