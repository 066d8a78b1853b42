"""Linear layer and log-softmax as one layer."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.ops.linear_log_softmax import linear_log_softmax

__all__ = ["LinearLogSoftmax"]


class LinearLogSoftmax(torch.nn.Linear):
    """`torch.nn.Linear` and `torch.nn.LogSoftmax` (dim=-1) in one, without memory for the logits.

    Constructor, parameters and state_dict are those of `torch.nn.Linear`.

    Example:
        >>> import torch, memopt
        >>> memopt.nn.LinearLogSoftmax(8, 3)(torch.randn(2, 8)).exp().sum(1)
        tensor([1.0000, 1.0000], grad_fn=<SumBackward1>)
    """

    def forward(self, input: Tensor) -> Tensor:
        return linear_log_softmax(input, self.weight, self.bias)
