"""ReLU with a 1-bit mask against the stock one, which keeps its whole result."""

import torch
import torch.nn.functional as F

import memopt.nn.functional as M
from harness import Case, main


def cases(quick: bool, device: torch.device) -> list[Case]:
    shapes = [(2, 3), (2, 3, 4, 4)] if quick else [(4096, 4096), (32, 64, 56, 56)]
    return [
        case(shape, dtype, device) for shape in shapes for dtype in (torch.float32, torch.bfloat16)
    ]


def case(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Case:
    def inputs() -> tuple[torch.Tensor]:
        return (torch.randn(shape, dtype=dtype, device=device, requires_grad=True),)

    name = f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
    return Case(name, inputs, stock=F.relu, memopt=M.relu)


if __name__ == "__main__":
    main("relu", cases)
