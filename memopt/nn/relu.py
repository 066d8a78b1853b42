"""ReLU as a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.ops.relu import relu

__all__ = ["ReLU"]


class ReLU(torch.nn.ReLU):
    """`torch.nn.ReLU` that saves one bit per element for backward, exactly.

    With ``inplace=True`` it is the stock layer: the result then takes the input's place and is what
    backward needs.

    Example:
        >>> import torch, memopt
        >>> memopt.nn.ReLU()(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else relu(input)
