"""Cross-entropy of rows of logits in stock PyTorch: the formulas, for any part of the rows.

    a = scale cap tanh(z / cap)        p = softmax(a)        q = the target's weights of the classes
    loss = token weight (Σ q (-log p) + z_loss logsumexp(a)²)

With class weights w and label smoothing s, a target class t has the weights
q = (1 - s) w[t] onehot(t) + s / V w, and target probabilities Q have q = ((1 - s) Q + s / V) w.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

REDUCTIONS = ("none", "mean", "sum")
#: What backward needs to know of each row: the largest logit, the sum of exp(logit - largest), the
#: mean of (logit - largest) under p, and the sum of a soft target's weights.
STATISTICS = 4


@dataclass
class Rows:
    """Rows of a loss: their targets and all that is not the linear layer's."""

    target: Tensor  # (N,) int64, or (N, V) probabilities
    weight: Tensor | None  # (V,)
    token_weight: Tensor | None  # (N,)
    logit_scale: Tensor | None  # (N,)
    ignore_index: int
    label_smoothing: float
    softcap: float  # 0: none
    z_loss: float

    def part(self, rows: slice) -> Rows:
        names = ("target", "token_weight", "logit_scale")
        parts = {k: t[rows] for k in names if (t := getattr(self, k)) is not None}
        return replace(self, **parts)

    @property
    def soft(self) -> bool:
        return self.target.is_floating_point()

    def counted(self) -> Tensor:
        """(N,): whether a row counts."""
        if self.soft:
            return torch.ones_like(self.target[:, 0], dtype=torch.bool)
        return self.target != self.ignore_index

    def divisor(self, dtype: torch.dtype) -> Tensor:
        """The sum of the weights of the rows that count: what a mean divides by."""
        counted = self.counted()
        weights = counted.to(dtype)
        if self.token_weight is not None:
            weights = weights * self.token_weight
        if self.weight is not None and not self.soft:
            weights = weights * self.weight.to(dtype)[torch.where(counted, self.target, 0)]
        return torch.where(counted, weights, 0).sum()

    def logits(self, z: Tensor) -> Tensor:
        if self.softcap > 0:
            z = self.softcap * torch.tanh(z / self.softcap)
        return z if self.logit_scale is None else z * self.logit_scale[:, None]

    def losses(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, logsumexp, entropy) of every row, from raw logits; differentiable."""
        a = self.logits(z)
        counted = self.counted()
        losses = F.cross_entropy(
            a,
            self.target.to(a.dtype) if self.soft else self.target,
            None if self.weight is None else self.weight.to(a.dtype),
            reduction="none",
            # Without a meaning for probabilities, where a default is all that is accepted.
            ignore_index=-100 if self.soft else self.ignore_index,
            label_smoothing=self.label_smoothing,
        )
        lse = a.logsumexp(-1)
        if self.z_loss:
            losses = losses + self.z_loss * lse.square()
        if self.token_weight is not None:
            losses = losses * self.token_weight
        log_p = a.log_softmax(-1)
        entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(-1)
        return tuple(torch.where(counted, t, 0) for t in (losses, lse, entropy))  # type: ignore[return-value]

    def target_weights(self, classes: int, dtype: torch.dtype) -> Tensor:
        """q: (N, V)."""
        own, each = 1 - self.label_smoothing, self.label_smoothing / classes
        if self.soft:
            q = own * self.target.to(dtype) + each
        else:
            index = torch.where(self.counted(), self.target, 0)[:, None]
            q = torch.full((len(index), classes), each, dtype=dtype, device=index.device)
            q = q.scatter_add(1, index, torch.full_like(index, own, dtype=dtype))
        return q if self.weight is None else q * self.weight.to(dtype)

    def statistics(self, z: Tensor) -> Tensor:
        """(N, STATISTICS)."""
        a = self.logits(z)
        largest = a.amax(-1)
        y = a - largest[:, None]
        exp = y.exp()
        mean = torch.where(exp > 0, exp * y, 0).sum(-1) / exp.sum(-1)
        mass = self.target_weights(z.shape[1], z.dtype).sum(-1) if self.soft else 0 * mean
        return torch.stack([largest, exp.sum(-1), mean, mass], -1)

    def gradient(
        self,
        z: Tensor,
        grad_loss: Tensor | None,
        grad_lse: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Gradients in z (N, V) and in logit_scale (N,), for those in the results of `losses`."""
        a = self.logits(z)
        log_p = a.log_softmax(-1)
        p = log_p.exp()
        da = torch.zeros_like(a)
        if grad_loss is not None:
            factor = grad_loss if self.token_weight is None else grad_loss * self.token_weight
            q = self.target_weights(z.shape[1], z.dtype)
            loss = p * q.sum(-1, keepdim=True) - q
            if self.z_loss:
                loss = loss + 2 * self.z_loss * a.logsumexp(-1, keepdim=True) * p
            da = factor[:, None] * loss
        if grad_lse is not None:
            da = da + grad_lse[:, None] * p
        if grad_entropy is not None:
            plogp = torch.where(p > 0, p * log_p, 0)
            da = da + grad_entropy[:, None] * (p * plogp.sum(-1, keepdim=True) - plogp)
        da = torch.where(self.counted()[:, None], da, 0)
        capped = z if not self.softcap else self.softcap * torch.tanh(z / self.softcap)
        dscale = (da * capped).sum(-1)
        if self.logit_scale is not None:
            da = da * self.logit_scale[:, None]
        if self.softcap:
            da = da * (1 - (capped / self.softcap).square())
        return da, dscale
