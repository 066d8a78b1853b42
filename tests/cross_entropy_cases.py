"""What the test files of linear_cross_entropy share: operands, and the comparison with stock."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.nn.functional import linear_cross_entropy
from memopt.ops import _linear
from support import assert_accurate, unchanged

REDUCTIONS = ("mean", "sum", "none")
# Rows, features, classes, and what the forward pass then keeps for backward.
SIZES = {"the logits' gradient": (16, 40, 30), "the gradients of x, W and b": (40, 3, 33)}


def stock(x, linear_weight, target, *, linear_bias=None, **settings) -> Tensor:
    """The two stock functions; the loss of low-precision logits in float32, as memopt's is."""
    logits = F.linear(x, linear_weight, linear_bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, target, **settings)


def operands(rows=9, features=5, classes=13, dtype=torch.float32, device="cpu"):
    """x, W, target, b; those of a floating dtype are leaves that require gradients."""
    x = torch.randn(rows, features, device=device).to(dtype).requires_grad_()
    weight = torch.randn(classes, features, device=device).to(dtype).requires_grad_()
    bias = torch.randn(classes, device=device).to(dtype).requires_grad_()
    target = torch.randint(classes, (rows,), device=device)
    target[1::4] = -100
    return x, weight, target, bias


def loss_and_grads(function, args, grad=None, **settings) -> list[Tensor]:
    x, weight, target, bias = args
    loss = function(x, weight, target, linear_bias=bias, **settings)
    grad = torch.ones_like(loss) if grad is None else grad.to(loss.dtype)
    wanted = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
    return [loss.detach(), *(torch.autograd.grad(loss, wanted, grad) if wanted else ())]


def assert_like_stock(args, grad=None, **settings) -> None:
    with unchanged(*(a for a in args if a is not None)):
        actual = loss_and_grads(linear_cross_entropy, args, grad, **settings)
    expected = loss_and_grads(stock, args, grad, **settings)
    wide = [
        a.detach().double().requires_grad_(a.requires_grad)
        if a is not None and a.is_floating_point()
        else a
        for a in args
    ]
    if (weight := settings.get("weight")) is not None:
        settings["weight"] = weight.double()
    exact = loss_and_grads(stock, wide, grad, **settings)
    for k, results in enumerate(zip(actual, expected, exact, strict=True)):
        assert_accurate(*results, factor=3 if k else 2)


def set_chunk_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(_linear, "rows_per_chunk", lambda classes, dtype: rows)
