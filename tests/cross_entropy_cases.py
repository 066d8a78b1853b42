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
# Rows, features, classes.
SIZES = {"wide": (16, 40, 30), "long": (72, 12, 40)}


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
    if actual[0].dim() == 0:
        # A single number is as near as chance has it: within the roundings of its terms.
        dtypes = [a.dtype for a in args if a is not None and a.is_floating_point()]
        if torch.is_autocast_enabled(args[0].device.type):
            dtypes.append(torch.get_autocast_dtype(args[0].device.type))
        rounding = max(torch.finfo(d).eps for d in dtypes)
        torch.testing.assert_close(
            actual[0], expected[0], rtol=8 * rounding, atol=rounding, equal_nan=True
        )
    else:
        assert_accurate(actual[0], expected[0], exact[0])
    for results in zip(actual[1:], expected[1:], exact[1:], strict=True):
        assert_accurate(*results, factor=3)


def set_chunk_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(_linear, "loss_rows_per_chunk", lambda *sizes: rows)


def raw_arguments(x, linear_weight, target, linear_bias, /, **changes) -> list:
    """The arguments of torch.ops.memopt.linear_cross_entropy, some of them changed."""
    arguments = {
        "input": x,
        "linear_weight": linear_weight,
        "target": target,
        "linear_bias": linear_bias,
        "weight": None,
        "token_weight": None,
        "logit_scale": None,
        "reduction": "mean",
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "softcap": 0.0,
        "z_loss": 0.0,
        "with_entropy": False,
        "with_argmax": False,
        "want_input": False,
        "want_weight": False,
        "want_bias": False,
        "want_scale": False,
        "overwrite_kept": False,
        "by_classes": False,
        "chunk_rows": 4,
    }
    assert changes.keys() <= arguments.keys()
    return list((arguments | changes).values())


def raw_backward_arguments(x, linear_weight, target, linear_bias, /, **changes) -> list:
    """The same of torch.ops.memopt.linear_cross_entropy_backward."""
    wide = torch.promote_types(x.dtype, torch.float32)
    arguments = {
        "input": x,
        "linear_weight": linear_weight,
        "target": target,
        "linear_bias": linear_bias,
        "weight": None,
        "token_weight": None,
        "logit_scale": None,
        "statistics": torch.ones(len(x), 4, dtype=wide, device=x.device),
        "grad_loss": torch.rand(len(x), dtype=wide, device=x.device),
        "grad_lse": None,
        "grad_entropy": None,
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "softcap": 0.0,
        "z_loss": 0.0,
        "want_input": True,
        "want_weight": True,
        "want_bias": True,
        "want_scale": False,
        "by_classes": False,
        "chunk_rows": 4,
    }
    assert changes.keys() <= arguments.keys()
    return list((arguments | changes).values())
