"""Does a loss curve leave another by more than rounding explains?

Two right float32 trainings do not stay together. A rounding error moves some ReLU's input across
zero, or the maximum of a pooling window to its neighbour; the gradient changes by a little that is
no longer rounding, and training at a useful learning rate multiplies such differences by ten in a
few steps. Within one hundred steps of the stock network in float32 and the same network in float64
the losses differ by as much as they fluctuate. When it starts is chance, so comparing whole curves
proves nothing: a bound that chance keeps would let a wrong gradient pass.

So the curves are compared over short stretches. Every `STRETCH` steps a memopt network takes over
the stock network's weights and optimizer state; in the steps that follow, its loss drifts from the
stock one by the rounding errors of a few steps, and by every error of its gradients. The yardstick
is measured and not assumed: a stock network of higher precision (float64 beside float32, float32
beside autocast) does the same, and what it drifts by is the stock network's own rounding error.

Per stretch the largest drift counts, and of all stretches the upper quartile: the few in which a
ReLU flips lie above it, and a fault in one batch of an epoch, such as the last, smaller one, lifts
it. Rounding explains

    quartile of memopt  <=  FACTOR x quartile of the higher precision + one rounding of the loss

since a result with the stock layers' accuracy is as far from the exact one as the stock result is,
hence at most twice as far from the stock result; the rest of the factor is margin. Measured in
float32, memopt reaches a quarter of what is allowed, and gradients that are 1 % off in the weights
of one layer exceed it 35 times or more. Under autocast rounding is coarse, and only gross faults
show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STRETCH = 8
FACTOR = 4.0
QUANTILE = 0.75


@dataclass(frozen=True)
class Drift:
    """How far losses drift from the stock ones within a stretch: the largest, for every stretch.

    Attributes:
        memopt: of the memopt network.
        precise: of the stock network of higher precision.
        scale: the size of the losses.
    """

    memopt: Tensor
    precise: Tensor
    scale: float

    @staticmethod
    def between(stock: Sequence[float], memopt: Sequence[float], precise: Sequence[float]) -> Drift:
        """From three loss curves, of which the last two start anew every `STRETCH` steps."""
        curve = torch.tensor(stock, dtype=torch.float64)

        def largest(other: Sequence[float]) -> Tensor:
            apart = (torch.tensor(other, dtype=torch.float64) - curve).abs()
            whole = len(apart) // STRETCH * STRETCH
            return apart[:whole].view(-1, STRETCH).amax(1) if whole else apart.amax(0, keepdim=True)

        return Drift(largest(memopt), largest(precise), curve.abs().median().item())

    @property
    def typical(self) -> float:
        """The upper quartile; NaN where a loss of memopt's is NaN."""
        return self.memopt.quantile(QUANTILE).item()

    @property
    def allowed(self) -> float:
        one_rounding = torch.finfo(torch.float32).eps * self.scale  # losses are float32
        return FACTOR * self.precise.quantile(QUANTILE).item() + one_rounding

    @property
    def explained(self) -> bool:
        """Whether rounding explains it; it does not explain NaN."""
        return self.typical <= self.allowed
