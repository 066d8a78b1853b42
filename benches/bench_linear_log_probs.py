"""Log-probabilities of four classes of each row against gather of the stock functions."""

import torch
import torch.nn.functional as F

import memopt.nn.functional as M
from harness import Case, main


def stock(x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(F.linear(x, weight), dim=-1).gather(-1, index)


def cases(quick: bool, device: torch.device) -> list[Case]:
    sizes = [(4, 5, 9)] if quick else [(2048, 768, 32000), (4096, 500, 10)]
    return [case(*size, device) for size in sizes]


def case(rows: int, features: int, classes: int, device: torch.device) -> Case:
    def inputs() -> tuple[torch.Tensor, ...]:
        x = torch.randn(rows, features, device=device, requires_grad=True)
        weight = (torch.randn(classes, features, device=device) / features**0.5).requires_grad_()
        return x, weight, torch.randint(classes, (rows, 4), device=device)

    return Case(f"{rows}x{features} to {classes}", inputs, stock=stock, memopt=M.linear_log_probs)


if __name__ == "__main__":
    main("linear_log_probs", cases)
