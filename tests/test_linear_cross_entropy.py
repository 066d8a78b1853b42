"""Linear layer and cross-entropy in one, against the two stock functions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from cross_entropy_cases import (
    REDUCTIONS,
    SIZES,
    assert_like_stock,
    loss_and_grads,
    operands,
    raw_arguments,
    raw_backward_arguments,
    set_chunk_rows,
    stock,
)
from memopt.nn.functional import linear_cross_entropy
from support import (
    DTYPES,
    OPS,
    assert_accurate,
    assert_same_bits,
    assert_same_for_threads,
    check_op,
    layouts,
    peak_bytes,
    saved_bytes,
)

pytestmark = pytest.mark.portable

# -- Values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_values_and_gradients_are_stock(backend, size, reduction, dtype, monkeypatch):
    set_chunk_rows(monkeypatch, 16)
    args = operands(*size, dtype, backend.device)
    # A gradient that differs from row to row; a mask among others.
    grad = torch.rand(size[0] if reduction == "none" else (), device=backend.device)
    grad = grad * (grad > 0.2)
    class_weight = torch.rand(size[2], device=backend.device)
    class_weight = class_weight.to(torch.promote_types(dtype, torch.float32))
    assert_like_stock(args, grad, reduction=reduction)
    some_class = (*args[:2], args[2].clamp(min=0), None)
    assert_like_stock(some_class, grad, reduction=reduction, ignore_index=3)
    assert_like_stock(args, grad, reduction=reduction, weight=class_weight, label_smoothing=0.1)
    assert_like_stock(args, grad, reduction=reduction, label_smoothing=1.0)


@given(
    rows=st.integers(0, 12),
    features=st.integers(0, 7),
    classes=st.integers(1, 70),
    chunk=st.integers(1, 14),
    reduction=st.sampled_from(REDUCTIONS),
    smoothing=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**16),
)
def test_any_shape(backend, rows, features, classes, chunk, reduction, smoothing, seed):
    torch.manual_seed(seed)
    args = operands(rows, features, classes, device=backend.device)
    settings = {"reduction": reduction, "label_smoothing": smoothing}
    expected = loss_and_grads(stock, args, **settings)
    with pytest.MonkeyPatch.context() as patch:
        set_chunk_rows(patch, chunk)
        actual = loss_and_grads(linear_cross_entropy, args, **settings)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=1e-5, equal_nan=True)
    for got, right in zip(actual[1:], expected[1:], strict=True):
        if bool((args[2] == -100).all()):  # eager's mean gives NaN here; ours is exactly 0
            right = torch.zeros_like(right)
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("features", [256, 257, 512, 4096])
def test_the_bias_counts_once(backend, features):
    assert_like_stock(operands(5, features, 6, device=backend.device))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_square_of_the_losses(backend, reduction):
    args = operands(device=backend.device)

    def squared(function):
        return lambda *a, **s: function(*a, reduction=reduction, **s).square().sum()

    actual = loss_and_grads(squared(linear_cross_entropy), args)
    torch.testing.assert_close(actual, loss_and_grads(squared(stock), args))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_every_target_ignored(backend, size, reduction):
    x, weight, target, bias = operands(*size, device=backend.device)
    target = torch.full_like(target, -100)
    loss, *grads = loss_and_grads(
        linear_cross_entropy, (x, weight, target, bias), reduction=reduction
    )
    assert bool(loss.isnan().all() if reduction == "mean" else (loss == 0).all())
    for grad in grads:
        assert_same_bits(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_result_does_not_depend_on_the_chunks(backend, reduction, monkeypatch):
    args = operands(40, 3, 33, torch.float64, backend.device)
    results = []
    for rows in (1, 7, 40, 100):
        set_chunk_rows(monkeypatch, rows)
        results.append(loss_and_grads(linear_cross_entropy, args, reduction=reduction))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-12, atol=1e-12)


def test_low_precision_weight_gradient_does_not_drift_with_chunks(backend, monkeypatch):
    args = operands(256, 4, 8, torch.bfloat16, backend.device)
    wide = [a.detach().double().requires_grad_() if a.is_floating_point() else a for a in args]
    exact = loss_and_grads(stock, wide)[2]

    def error(rows: int) -> float:
        set_chunk_rows(monkeypatch, rows)
        grad = loss_and_grads(linear_cross_entropy, args)[2]
        return torch.linalg.vector_norm(grad.double() - exact).item()

    assert error(1) <= 1.2 * error(256)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_float16_gradients_survive_small_and_large_factors(backend, size):
    """The mean over N rows must not underflow before a loss scale lifts it, nor a sum overflow."""
    args = operands(*size, torch.float16, backend.device)
    scaled = loss_and_grads(linear_cross_entropy, args, torch.tensor(2.0**12))
    expected = loss_and_grads(stock, args, torch.tensor(2.0**12))
    wide = [a.detach().double().requires_grad_() if a.is_floating_point() else a for a in args]
    exact = loss_and_grads(stock, wide, torch.tensor(2.0**12))
    for ours, theirs, right in zip(scaled[1:], expected[1:], exact[1:], strict=True):
        assert_accurate(ours, theirs, right, factor=3)
    x = torch.full((4096, 2), 100.0, dtype=torch.float16, device=backend.device)
    weight = torch.zeros(40, 2, dtype=torch.float16, device=backend.device, requires_grad=True)
    target = torch.zeros(4096, dtype=torch.long, device=backend.device)
    linear_cross_entropy(x, weight, target).backward()
    torch.testing.assert_close(
        weight.grad[0].float(), torch.tensor([-97.5, -97.5]), rtol=1e-2, atol=0
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nan_and_infinity_as_stock(backend, reduction):
    for value, row in itertools.product((math.nan, math.inf, -math.inf), (0, 5)):
        x, weight, target, bias = operands(6, 5, 18, device=backend.device)
        target = target.clamp(min=0)
        with torch.no_grad():
            bias[17] = value
            x[row, 2] = math.nan
        assert_like_stock((x, weight, target, bias), reduction=reduction)


def test_any_strides(backend, monkeypatch):
    set_chunk_rows(monkeypatch, 3)
    x, weight, target, bias = operands(8, 3, 11, device=backend.device)
    x = x.detach()[:1].expand(8, 3)
    for x_, weight_, target_ in itertools.product(
        layouts(x).values(), layouts(weight).values(), layouts(target).values()
    ):
        assert_like_stock((x_.requires_grad_(), weight_.requires_grad_(), target_, bias))
    grad = torch.ones((), device=backend.device).expand(8)
    assert_like_stock(operands(8, 3, 11, device=backend.device), grad, reduction="none")


def test_leading_dimensions(backend):
    x, weight, target, bias = operands(12, 5, 7, device=backend.device)
    flat = linear_cross_entropy(x, weight, target, linear_bias=bias, reduction="none")
    for lead in ((3, 4), (2, 3, 2)):
        args = (x.view(*lead, 5), weight, target.view(lead))
        losses = linear_cross_entropy(*args, linear_bias=bias, reduction="none")
        assert_same_bits(losses, flat.view(lead))
        assert linear_cross_entropy(*args).shape == ()
    one = linear_cross_entropy(x[0], weight, target[0], linear_bias=bias)
    torch.testing.assert_close(one, flat[0])
    assert_same_bits(
        linear_cross_entropy(x, weight, target.clamp(min=0).byte()).isfinite().item(), True
    )


@pytest.mark.parametrize("accumulate", ["full", "tiled"])
def test_same_bits_for_any_number_of_threads(backend, accumulate):
    # The reference's stock product with one feature has no sum to reorder.
    size = (300, 1, 300) if backend.name == "reference" else (150, 20, 700)
    args = operands(*size, device=backend.device)
    if backend.name == "reference":
        for tensor in args[:2]:
            tensor.requires_grad_(False)
    assert_same_for_threads(
        lambda: loss_and_grads(linear_cross_entropy, args, accumulate=accumulate)
    )


def test_the_same_value_with_and_without_gradients(backend):
    x, weight, target, bias = operands(40, 3, 33, device=backend.device)
    with_grad = linear_cross_entropy(x, weight, target, linear_bias=bias)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            loss = linear_cross_entropy(x, weight, target, linear_bias=bias)
        assert_same_bits(loss.clone(), with_grad.detach())
        assert not loss.requires_grad


# -- Memory ----------------------------------------------------------------------------------------


def test_saves_the_gradients_that_are_wanted(backend):
    x, weight, target, bias = operands(40, 3, 33, device=backend.device)

    def saved(args=(x, weight, target, bias), **settings) -> int:
        *positional, bias = args
        return saved_bytes(
            lambda: linear_cross_entropy(*positional, linear_bias=bias, **settings), args
        )

    of_rows = 4 * (4 * len(x) + 1)  # what the rows' softmaxes need, and a factor
    assert saved() == of_rows + 4 * (x.numel() + weight.numel() + bias.numel())
    assert saved(reduction="none") == of_rows
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    assert saved() == of_rows + 4 * x.numel()  # a frozen head has no (V, H) gradient
    with torch.no_grad():
        assert saved() == 0


@pytest.mark.parametrize("settings", [{}, {"accumulate": "tiled"}], ids=str)
def test_peak_is_that_of_the_gradients_and_a_chunk(backend, settings):
    x, weight, target, _ = operands(1024, 64, 4096, device=backend.device)

    def step(function, args=(x, weight, target), **settings):
        wanted = [a for a in args if a.requires_grad]
        return torch.autograd.grad(function(*args, **settings), wanted)

    chunk, gradients = 4 * 64 * 4096, 4 * (x.numel() + weight.numel())
    chunks = 10 if backend.name == "reference" else 1.3
    peak = peak_bytes(
        lambda: step(linear_cross_entropy, max_chunk_bytes=chunk, **settings), backend.device
    )
    assert peak < 1.1 * gradients + chunks * chunk
    assert peak < peak_bytes(lambda: step(stock), backend.device) / 2
    if backend.name == "reference":
        return
    for args, gradients in (
        ((x.detach(), weight, target), 4 * weight.numel()),
        ((x, weight.detach(), target), 4 * x.numel()),
    ):
        peak = peak_bytes(
            lambda args=args: step(linear_cross_entropy, args, max_chunk_bytes=chunk, **settings),
            backend.device,
        )
        assert peak < 1.1 * gradients + chunks * chunk
    with torch.no_grad():
        assert peak_bytes(lambda: linear_cross_entropy(x, weight, target)) < 2**20


def test_tiled_accumulation_holds_no_float32_gradient_of_the_weight(backend):
    if backend.name == "reference":
        return  # has one way only
    args = operands(256, 64, 65536, torch.bfloat16, backend.device)[:3]

    def peak(**settings) -> int:
        return peak_bytes(
            lambda: torch.autograd.grad(
                linear_cross_entropy(*args, max_chunk_bytes=2**20, **settings), args[:2]
            )
        )

    gradients = 2 * (args[0].numel() + args[1].numel())
    assert peak(accumulate="tiled") < 1.9 * gradients < 2.9 * gradients < peak() < 3.2 * gradients


# -- Autograd --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_gradcheck_to_second_order(backend, size, reduction, monkeypatch):
    set_chunk_rows(monkeypatch, 16)
    rows, features, classes = (max(3, n // 4) for n in size)
    x, weight, target, bias = operands(rows, features, classes, torch.float64, backend.device)
    class_weight = torch.rand(classes, dtype=torch.float64, device=backend.device)

    def function(x, weight, bias):
        return linear_cross_entropy(
            x,
            weight,
            target,
            linear_bias=bias,
            weight=class_weight,
            reduction=reduction,
            label_smoothing=0.2,
        )

    torch.autograd.gradcheck(function, (x, weight, bias))
    torch.autograd.gradgradcheck(function, (x, weight, bias))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_subset_of_gradients(backend, reduction):
    for size, needs in itertools.product(
        SIZES.values(), itertools.product((False, True), repeat=3)
    ):
        x, weight, target, bias = operands(*size, device=backend.device)
        for tensor, need in zip((x, weight, bias), needs, strict=True):
            tensor.requires_grad_(need)
        args = (x, weight, target, bias)
        actual = loss_and_grads(linear_cross_entropy, args, reduction=reduction)
        expected = loss_and_grads(stock, args, reduction=reduction)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_backward_twice(backend, size, reduction, dtype):
    x, weight, target, bias = args = operands(*size, dtype, backend.device)
    loss = linear_cross_entropy(x, weight, target, linear_bias=bias, reduction=reduction)
    grads = [torch.rand_like(loss) for _ in range(2)]
    first = torch.autograd.grad(loss, (x, weight, bias), grads[0], retain_graph=True)
    before = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (x, weight, bias), grads[1])
    assert_same_bits(list(first), before)
    for grad, got in zip(grads, (first, second), strict=True):
        fresh = loss_and_grads(linear_cross_entropy, args, grad, reduction=reduction)
        assert_same_bits(list(got), fresh[1:])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_batch_of_gradients(backend, size, reduction):
    x, weight, target, bias = operands(*size, device=backend.device)
    wanted = (x, weight, bias)
    batches = []
    for function in (linear_cross_entropy, stock):
        loss = function(x, weight, target, linear_bias=bias, reduction=reduction)
        grads = torch.arange(1.0, 3.0, device=x.device)[(...,) + (None,) * loss.dim()]
        grads = grads.expand(2, *loss.shape)
        batches.append(torch.autograd.grad(loss, wanted, grads, is_grads_batched=True))
    torch.testing.assert_close(*batches, rtol=1e-5, atol=1e-5)


def test_the_loss_may_be_scaled_in_place(backend):
    for size in SIZES.values():
        x, weight, target, _ = operands(*size, device=backend.device)
        loss = linear_cross_entropy(x, weight, target)
        loss *= 3
        loss.backward()
        expected = torch.autograd.grad(3 * stock(x, weight, target), x)[0]
        torch.testing.assert_close(x.grad, expected)


def test_tied_weight_gets_both_gradients(backend):
    _, weight, target, _ = operands(9, 5, 13, device=backend.device)

    def loss(function):
        return function(F.embedding(target.clamp(min=0), weight), weight, target)

    ours, expected = (torch.autograd.grad(loss(f), weight) for f in (linear_cross_entropy, stock))
    torch.testing.assert_close(ours, expected)


def test_opcheck(backend):
    x, weight, target, _ = args = operands(device=backend.device)
    op, backward = OPS["linear_cross_entropy"], OPS["linear_cross_entropy_backward"]
    class_weight, soft = torch.rand(13, device=backend.device), torch.rand(9, 13)
    rows = {k: torch.rand(9, device=backend.device) for k in ("token_weight", "logit_scale")}
    wanted = dict.fromkeys(("want_input", "want_weight", "want_bias"), True)
    for changes in (
        {"reduction": "none", "weight": class_weight, "label_smoothing": 0.1},
        {"reduction": "sum", **wanted, "softcap": 3.0, "z_loss": 0.1, **rows, "want_scale": True},
        {"with_entropy": True, "with_argmax": True, "want_bias": True},
        {"target": soft.to(backend.device), "want_weight": True, "by_classes": True},
    ):
        check_op(op, *raw_arguments(*args, **changes))
    half = [t.detach().half() for t in (x, weight)]
    check_op(op, *raw_arguments(*half, target, None, want_weight=True))
    plain = [t.detach() for t in args]
    lse = {"grad_lse": rows["token_weight"], "grad_entropy": rows["logit_scale"]}
    for changes in ({}, {**lse, "want_bias": False}, {**rows, "want_scale": True}):
        check_op(backward, *raw_backward_arguments(*plain, **changes))
