"""What linear_cross_entropy takes beside class indices, against the formulas in stock PyTorch."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import memopt
from cross_entropy_cases import REDUCTIONS, operands, set_chunk_rows
from memopt.nn.functional import linear_cross_entropy
from support import DTYPES, assert_accurate, assert_compiles, assert_same_bits, peak_bytes

pytestmark = pytest.mark.portable


def formula(
    x,
    linear_weight,
    target,
    *,
    linear_bias=None,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    softcap=None,
    logit_scale=None,
    z_loss=0.0,
    token_weight=None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, logsumexp, entropy), of inputs (N, H), written down anew with stock functions."""
    z = F.linear(x, linear_weight, linear_bias)
    z = z if z.dtype == torch.float64 else z.float()
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if logit_scale is not None:
        z = z * (logit_scale[:, None] if torch.is_tensor(logit_scale) else logit_scale)
    soft = target.is_floating_point()
    class_weight = None if weight is None else weight.to(z.dtype)
    losses = F.cross_entropy(
        z,
        target.to(z.dtype) if soft else target,
        class_weight,
        reduction="none",
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
    )
    counted = torch.ones_like(losses) if soft else (target != ignore_index).to(z.dtype)
    lse = torch.logsumexp(z, 1)
    losses = losses + z_loss * lse**2
    rows = counted if token_weight is None else counted * token_weight.to(z.dtype)
    losses = losses * rows
    entropy = torch.distributions.Categorical(logits=z).entropy()
    if class_weight is not None and not soft:
        rows = rows * class_weight[target.clamp(min=0)]
    loss = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / rows.sum()}[reduction]
    return loss, lse * counted, entropy * counted


def extras(seed: int, rows: int, classes: int, wide: torch.dtype, device) -> dict:
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=wide).to(device) + 0.1

    return {
        "weight": rand(classes),
        "label_smoothing": 0.2,
        "softcap": 2.5,
        "logit_scale": rand(rows).requires_grad_(),
        "z_loss": 0.3,
        "token_weight": rand(rows),
    }


def results(function, x, linear_weight, target, bias, mix, /, **settings) -> list[Tensor]:
    """The results and the gradients of a weighted sum of them."""
    outputs = function(x, linear_weight, target, linear_bias=bias, **settings)
    total = sum(
        m * (o * torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).view(o.shape)).sum()
        for m, o in zip(mix, outputs, strict=True)
    )
    scale = settings.get("logit_scale")
    leaves = [x, linear_weight, bias, *([scale] if torch.is_tensor(scale) else [])]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(total, leaves)]


def ours(*args, **settings) -> tuple[Tensor, ...]:
    return linear_cross_entropy(*args, return_lse=True, return_entropy=True, **settings)[:3]


def soft_targets(target: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(len(target), classes, generator=generator).softmax(1).to(target.device, dtype)


# -- Values ----------------------------------------------------------------------------------------


@given(
    names=st.sets(
        st.sampled_from(
            ["weight", "label_smoothing", "softcap", "logit_scale", "z_loss", "token_weight"]
        )
    ),
    soft=st.booleans(),
    reduction=st.sampled_from(REDUCTIONS),
    mix=st.sampled_from([(1.0, 0.0, 0.0), (0.7, 0.5, -0.8), (0.0, 0.0, 1.0)]),
    tiled=st.booleans(),
    shape=st.sampled_from([(9, 5, 13), (21, 3, 700), (3, 4, 1)]),
    chunk=st.integers(1, 25),
)
def test_any_options_together(backend, names, soft, reduction, mix, tiled, shape, chunk):
    rows, _, classes = shape
    x, weight, target, bias = operands(*shape, torch.float64, backend.device)
    target[0] = 0
    if soft:
        target = soft_targets(target, classes, torch.float64)
    settings = {
        k: v
        for k, v in extras(rows, rows, classes, torch.float64, backend.device).items()
        if k in names
    }
    args = (x, weight, target, bias, mix)
    expected = results(formula, *args, **settings, reduction=reduction)
    accumulate = "tiled" if tiled else "full"
    with pytest.MonkeyPatch.context() as patch:
        set_chunk_rows(patch, chunk)
        actual = results(ours, *args, **settings, reduction=reduction, accumulate=accumulate)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("size", [(40, 24, 90), (70, 8, 700)], ids=str)
def test_every_dtype_is_as_accurate_as_stock(backend, size, soft, dtype):
    x, weight, target, bias = operands(*size, dtype, backend.device)
    wide = torch.promote_types(dtype, torch.float32)
    if soft:
        target = soft_targets(target, size[2], dtype)
    settings = {**extras(0, size[0], size[2], wide, backend.device), "reduction": "none"}
    args, mix = (x, weight, target, bias), (1.0, 0.5, 0.5)
    doubles = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in args]
    exact_settings = {
        k: v.detach().double().requires_grad_(v.requires_grad) if torch.is_tensor(v) else v
        for k, v in settings.items()
    }
    if soft:
        doubles[2] = doubles[2].detach()
    actual = results(ours, *args, mix, **settings)
    stock = results(formula, *args, mix, **settings)
    exact = results(formula, *doubles, mix, **exact_settings)
    for got, theirs, right in zip(actual, stock, exact, strict=True):
        assert_accurate(got, theirs, right, factor=4)  # the tanh of softcap adds its own


def test_a_number_as_scale_and_scale_one(backend):
    x, weight, target, _ = operands(device=backend.device)
    expected = formula(x, weight, target, logit_scale=0.3)[0]
    torch.testing.assert_close(linear_cross_entropy(x, weight, target, logit_scale=0.3), expected)
    one = torch.tensor(0.3, device=backend.device, requires_grad=True)
    loss = linear_cross_entropy(x, weight, target, logit_scale=one)
    torch.testing.assert_close(loss, expected)
    (grad,) = torch.autograd.grad(loss, one)
    each = torch.full((len(x),), 0.3, device=backend.device, requires_grad=True)
    (grads,) = torch.autograd.grad(formula(x, weight, target, logit_scale=each)[0], each)
    torch.testing.assert_close(grad, grads.sum())
    assert_same_bits(
        linear_cross_entropy(x, weight, target, logit_scale=1.0),
        linear_cross_entropy(x, weight, target),
    )


def test_masked_logits_have_entropy_and_argmax(backend):
    x, weight, target, bias = operands(9, 5, 200, device=backend.device)
    with torch.no_grad():
        bias[100:] = -torch.inf  # whole blocks of classes
    target = target % 100
    args = (x, weight, target, bias)
    outputs = linear_cross_entropy(
        x, weight, target, linear_bias=bias, return_entropy=True, return_argmax=True
    )
    few = [x, weight[:100], target, bias[:100]]
    expected = formula(*few[:3], linear_bias=few[3])
    torch.testing.assert_close(outputs.loss, expected[0])
    torch.testing.assert_close(outputs.entropy, expected[2])
    assert_same_bits(outputs.argmax, F.linear(x, weight, bias).argmax(1))
    grads = torch.autograd.grad(outputs.entropy.sum() + outputs.loss, args[:2])
    stock = torch.autograd.grad(expected[2].sum() + expected[0], args[:2])
    torch.testing.assert_close(grads, stock)


def test_what_is_returned(backend):
    x, weight, target, _ = operands(12, 5, 13, device=backend.device)
    x, target = x.view(3, 4, 5), target.view(3, 4)
    plain = linear_cross_entropy(x, weight, target)
    out = linear_cross_entropy(x, weight, target, return_lse=True, return_argmax=True)
    assert_same_bits(out.loss, plain)
    assert out.entropy is None
    assert out.lse.shape == out.argmax.shape == (3, 4)
    ignored = target == -100
    assert bool((out.argmax[ignored] == -1).all())
    assert_same_bits(out.lse[ignored], torch.zeros_like(out.lse[ignored]))
    expected = F.linear(x, weight).argmax(-1)
    assert_same_bits(out.argmax[~ignored], expected[~ignored])
    ties = linear_cross_entropy(x, torch.ones_like(weight), target, return_argmax=True)
    assert_same_bits(ties.argmax[~ignored], torch.zeros_like(expected)[~ignored])  # the first
    assert not out.argmax.requires_grad


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_shift_is_next_token_prediction(backend, reduction):
    x, weight, target, bias = operands(24, 5, 13, device=backend.device)
    token_weight = torch.rand(4, 6, device=backend.device)
    settings = {"linear_bias": bias, "reduction": reduction}
    lead, cut = (4, 6), (4, 5)
    out = linear_cross_entropy(
        x.view(*lead, 5),
        weight,
        target.view(lead),
        token_weight=token_weight,
        shift=True,
        return_lse=True,
        **settings,
    )
    rows = x.view(*lead, 5)[:, :-1].reshape(-1, 5)
    expected = formula(
        rows,
        weight,
        target.view(lead)[:, 1:].reshape(-1),
        token_weight=token_weight[:, 1:].reshape(-1),
        **settings,
    )
    loss = expected[0].view(cut) if reduction == "none" else expected[0]
    torch.testing.assert_close(out.loss, loss)
    torch.testing.assert_close(out.lse, expected[1].view(cut))
    ours = torch.autograd.grad(out.loss.sum(), (x, weight))
    torch.testing.assert_close(ours, torch.autograd.grad(loss.sum(), (x, weight)))


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("positions", [(3,), (2, 3)])
def test_k_dimensional_loss(backend, positions, reduction, soft):
    x = torch.randn(6, 5, device=backend.device, requires_grad=True)
    weight = torch.randn(7, *positions, 5, device=backend.device, requires_grad=True)
    bias = torch.randn(7, *positions, device=backend.device, requires_grad=True)
    target = torch.randint(7, (6, *positions), device=backend.device)
    target[0] = -100
    class_weight = torch.rand(7, device=backend.device)
    if soft:
        target = torch.rand(6, 7, *positions, device=backend.device).softmax(1)
    settings = {"weight": class_weight, "reduction": reduction, "label_smoothing": 0.1}
    loss = linear_cross_entropy(x, weight, target, linear_bias=bias, **settings)
    z = torch.einsum("nh,c...h->nc...", x, weight) + bias
    expected = F.cross_entropy(z, target, **settings)
    torch.testing.assert_close(loss, expected)
    grad, args = torch.rand_like(loss), (x, weight, bias)
    torch.testing.assert_close(
        torch.autograd.grad(loss, args, grad), torch.autograd.grad(expected, args, grad)
    )
    layer = memopt.nn.LinearCrossEntropyLoss(
        5, 7, out_features=positions, bias=True, device=backend.device, reduction=reduction
    )
    z = torch.einsum("nh,c...h->nc...", x, layer.linear.weight.view(7, *positions, 5))
    expected = F.cross_entropy(
        z + layer.linear.bias.view(7, *positions), target, reduction=reduction
    )
    torch.testing.assert_close(layer(x, target), expected)


def test_every_position_ignored_in_a_k_dimensional_loss(backend):
    x = torch.randn(6, 5, device=backend.device, requires_grad=True)
    weight = torch.randn(7, 2, 5, device=backend.device)
    loss = linear_cross_entropy(x, weight, torch.full((6, 2), -100, device=backend.device))
    assert bool(loss.isnan())
    assert_same_bits(torch.autograd.grad(loss, x)[0], torch.zeros_like(x))


# -- Autograd, transforms, torch.compile -----------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("soft", [False, True])
def test_gradcheck_of_all_options(backend, soft, reduction):
    x, weight, target, bias = operands(6, 3, 11, torch.float64, backend.device)
    settings = extras(3, 6, 11, torch.float64, backend.device)
    scale = settings.pop("logit_scale")
    if soft:
        target = soft_targets(target, 11, torch.float64)

    def function(x, weight, bias, scale):
        return ours(
            x, weight, target, linear_bias=bias, logit_scale=scale, reduction=reduction, **settings
        )

    torch.autograd.gradcheck(function, (x, weight, bias, scale))
    torch.autograd.gradgradcheck(function, (x, weight, bias, scale))


def test_a_target_that_learns(backend):
    x, weight, target, _ = operands(6, 3, 11, torch.float64, backend.device)
    soft = soft_targets(target, 11, torch.float64).requires_grad_()
    torch.autograd.gradcheck(lambda q: linear_cross_entropy(x, weight, q), soft)


def test_gradients_through_lse_add_up(backend):
    x, weight, target, _ = operands(device=backend.device)
    out = linear_cross_entropy(x, weight, target, return_lse=True)
    both = torch.autograd.grad(out.loss + out.lse.square().sum(), (x, weight), retain_graph=True)
    one = torch.autograd.grad(out.loss, (x, weight), retain_graph=True)
    other = torch.autograd.grad(out.lse.square().sum(), (x, weight))
    torch.testing.assert_close(both, tuple(a + b for a, b in zip(one, other, strict=True)))


def test_transforms_take_every_option(backend):
    x, weight, target, bias = (
        t.detach() for t in operands(6, 3, 11, torch.float64, backend.device)
    )
    settings = extras(3, 6, 11, torch.float64, backend.device)
    settings["logit_scale"] = settings["logit_scale"].detach()

    def both(function):
        def total(x):
            return sum(o.sum() for o in function(x, weight, target, linear_bias=bias, **settings))

        return [*torch.func.jvp(total, (x,), (torch.ones_like(x),)), torch.func.grad(total)(x)]

    torch.testing.assert_close(both(ours), both(formula))


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiles_with_every_option(backend, reduction, soft):
    _, weight, _, bias = operands(4, 5, 33, device=backend.device)
    calls = []
    for rows in (4, 6, 9):
        x, _, target, _ = operands(rows, 5, 33, device=backend.device)
        settings = extras(3, rows, 33, torch.float32, backend.device)
        if soft:
            target = soft_targets(target, 33, torch.float32)
        calls.append((x, weight, target, bias, settings["logit_scale"], settings["token_weight"]))

    def function(x, weight, target, bias, scale, token_weight):
        out = linear_cross_entropy(
            *(x, weight, target),
            linear_bias=bias,
            reduction=reduction,
            softcap=5.0,
            logit_scale=scale,
            z_loss=0.1,
            token_weight=token_weight,
            shift=not soft,
            return_lse=True,
            return_entropy=True,
            return_argmax=True,
        )
        return out.loss.sum() + (out.lse * out.entropy).sum() + out.argmax.sum()

    assert_compiles(function, *calls, backend="aot_eager")


def test_k_dimensional_loss_compiles(backend):
    weight = torch.randn(7, 3, 5, device=backend.device, requires_grad=True)
    calls = []
    for rows in (4, 6):
        x = torch.randn(rows, 5, device=backend.device, requires_grad=True)
        calls.append((x, weight, torch.randint(7, (rows, 3), device=backend.device)))
    assert_compiles(linear_cross_entropy, *calls, backend="aot_eager")


@pytest.mark.parametrize("soft", [False, True])
def test_autocast_of_options(backend, soft):
    x, weight, target, bias = operands(20, 8, 33, device=backend.device)
    if soft:
        target = soft_targets(target, 33, torch.float32)
    settings = extras(3, 20, 33, torch.float32, backend.device)
    with torch.autocast(backend.device.type, torch.bfloat16):
        actual = results(ours, x, weight, target, bias, (1.0, 0.1, 0.1), **settings)
        expected = results(formula, x, weight, target, bias, (1.0, 0.1, 0.1), **settings)
    for got, right in zip(actual, expected, strict=True):
        assert got.dtype == right.dtype
        torch.testing.assert_close(got, right, rtol=3e-2, atol=3e-2)


# -- Memory ----------------------------------------------------------------------------------------


def test_the_budget_is_kept(backend):
    if backend.name == "reference":
        return  # needs several times the logits of a chunk
    x, weight, target, _ = operands(512, 8, 4096, device=backend.device)
    gradients = 4 * (x.numel() + weight.numel())
    for budget in (2**18, 2**20, 2**22):
        peak = peak_bytes(
            lambda budget=budget: torch.autograd.grad(
                linear_cross_entropy(x, weight, target, max_chunk_bytes=budget), (x, weight)
            )
        )
        assert gradients + 0.8 * budget < peak < 1.3 * gradients + 1.3 * budget
    for tiled, entropy in itertools.product(("full", "tiled"), (False, True)):
        loss = linear_cross_entropy(
            x, weight, target, max_chunk_bytes=1, accumulate=tiled, return_entropy=entropy
        )
        loss = loss.loss if entropy else loss
        torch.testing.assert_close(loss, formula(x, weight, target)[0])
