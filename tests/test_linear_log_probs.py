"""Log-probabilities of chosen classes, against gather of the stock functions."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from memopt.nn.functional import linear_log_probs
from support import (
    DTYPES,
    OPS,
    assert_accurate,
    assert_compiles,
    assert_same_bits,
    assert_same_for_threads,
    check_op,
    layouts,
    peak_bytes,
    saved_bytes,
    unchanged,
)

pytestmark = pytest.mark.portable


def stock(x, weight, index, bias=None) -> Tensor:
    z = F.linear(x, weight, bias)
    log_probs = F.log_softmax(z if z.dtype == torch.float64 else z.float(), -1)
    counts = index != -100
    return log_probs.gather(-1, index.clamp(min=0)) * counts


def operands(rows=9, features=5, classes=13, k=4, dtype=torch.float32, device="cpu"):
    x = torch.randn(rows, features, device=device).to(dtype).requires_grad_()
    weight = torch.randn(classes, features, device=device).to(dtype).requires_grad_()
    bias = torch.randn(classes, device=device).to(dtype).requires_grad_()
    index = torch.randint(classes, (rows, k), device=device)
    index[1::4] = -100  # whole rows
    if k:
        index[2::3, 0] = -100
    return x, weight, index, bias


def values_and_grads(function, args, **settings) -> list[Tensor]:
    y = function(*args, **settings)
    grad = torch.linspace(-1, 2, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
    wanted = [a for a in args if a is not None and a.requires_grad]
    return [y.detach(), *(torch.autograd.grad(y, wanted, grad) if wanted else ())]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(70, 40, 90, 4), (24, 30, 700, 1), (700, 6, 9, 3)], ids=str)
def test_values_and_gradients_are_stock(backend, size, dtype):
    args = operands(*size, dtype, backend.device)
    with unchanged(*args):
        actual = values_and_grads(linear_log_probs, args)
    expected = values_and_grads(stock, args)
    wide = [a.detach().double().requires_grad_() if a.is_floating_point() else a for a in args]
    for k, results in enumerate(zip(actual, expected, values_and_grads(stock, wide), strict=True)):
        assert_accurate(*results, factor=3 if k else 2)


@given(
    rows=st.integers(0, 12),
    features=st.integers(0, 7),
    classes=st.integers(1, 70),
    k=st.integers(0, 5),
    chunk_bytes=st.integers(1, 4000),
    seed=st.integers(0, 2**16),
)
def test_any_shape(backend, rows, features, classes, k, chunk_bytes, seed):
    torch.manual_seed(seed)
    args = operands(rows, features, classes, k, device=backend.device)
    actual = values_and_grads(linear_log_probs, args, max_chunk_bytes=chunk_bytes)
    torch.testing.assert_close(actual, values_and_grads(stock, args), rtol=1e-4, atol=1e-5)


def test_the_same_class_twice_and_any_strides(backend):
    x, weight, index, bias = operands(8, 3, 11, 2, device=backend.device)
    index[0] = 5
    for x_, weight_, index_ in itertools.product(
        *(layouts(t).values() for t in (x, weight, index))
    ):
        args = (x_.requires_grad_(), weight_.requires_grad_(), index_, bias)
        torch.testing.assert_close(
            values_and_grads(linear_log_probs, args), values_and_grads(stock, args)
        )


def test_leading_dimensions(backend):
    x, weight, index, bias = operands(12, 5, 7, device=backend.device)
    flat = linear_log_probs(x, weight, index, bias)
    shaped = linear_log_probs(x.view(3, 4, 5), weight, index.view(3, 4, 4), bias)
    assert_same_bits(shaped, flat.view(3, 4, 4))
    torch.testing.assert_close(linear_log_probs(x[0], weight, index[0], bias), flat[0])


def test_every_subset_of_gradients_and_backward_twice(backend):
    for needs in itertools.product((False, True), repeat=3):
        x, weight, index, bias = operands(device=backend.device)
        for tensor, need in zip((x, weight, bias), needs, strict=True):
            tensor.requires_grad_(need)
        args = (x, weight, index, bias)
        torch.testing.assert_close(
            values_and_grads(linear_log_probs, args), values_and_grads(stock, args)
        )
    args = operands(device=backend.device)
    y = linear_log_probs(*args)
    leaves = (args[0], args[1], args[3])
    first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(y.square().sum(), leaves)
    torch.testing.assert_close(first, torch.autograd.grad(stock(*args).sum(), leaves))
    torch.testing.assert_close(second, torch.autograd.grad(stock(*args).square().sum(), leaves))


def test_gradcheck_to_second_order(backend):
    x, weight, index, bias = operands(6, 3, 11, dtype=torch.float64, device=backend.device)

    def function(x, weight, bias):
        return linear_log_probs(x, weight, index, bias)

    torch.autograd.gradcheck(function, (x, weight, bias))
    torch.autograd.gradgradcheck(function, (x, weight, bias))


def test_transforms_are_right(backend):
    x, weight, index, bias = (t.detach() for t in operands(device=backend.device))

    def both(function):
        def total(x):
            return function(x, weight, index, bias).square().sum()

        return [*torch.func.jvp(total, (x,), (torch.ones_like(x),)), torch.func.hessian(total)(x)]

    torch.testing.assert_close(both(linear_log_probs), both(stock))


def test_compiles_in_one_graph_without_recompiling(backend):
    _, weight, _, bias = operands(4, 5, 33, device=backend.device)
    calls = []
    for rows in (6, 8, 11):
        x, _, index, _ = operands(rows, 5, 33, device=backend.device)
        calls.append((x, weight, index, bias))
    assert_compiles(linear_log_probs, *calls, backend="aot_eager")


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
def test_autocast(backend, amp):
    args = operands(40, 8, 33, device=backend.device)
    with torch.autocast(backend.device.type, amp):
        actual, expected = (values_and_grads(f, args) for f in (linear_log_probs, stock))
    for got, right in zip(actual, expected, strict=True):
        assert got.dtype == right.dtype
        torch.testing.assert_close(got, right, rtol=3e-2, atol=3e-2)


def test_memory(backend):
    x, weight, index, _ = operands(1024, 8, 2048, device=backend.device)
    held = saved_bytes(lambda: linear_log_probs(x, weight, index), (x, weight, index))
    assert held == 4 * 2 * 1024

    def step(function):
        return torch.autograd.grad(function(x, weight, index).sum(), (x, weight))

    logits = 4 * 1024 * 2048
    peak = peak_bytes(lambda: step(linear_log_probs), backend.device)
    assert peak < (logits if backend.name == "reference" else logits / 8)


def test_same_bits_for_any_number_of_threads(backend):
    size = (300, 1, 300) if backend.name == "reference" else (150, 20, 700)
    args = operands(*size, device=backend.device)
    if backend.name == "reference":
        args = [a.detach() for a in args]
    assert_same_for_threads(lambda: values_and_grads(linear_log_probs, args))


def test_opcheck(backend):
    x, weight, index, bias = operands(device=backend.device)
    check_op(OPS["linear_log_probs"], x, weight, index, bias, -100, 4)
    check_op(OPS["linear_log_probs"], x.detach(), weight.detach(), index.clamp(min=0), None, 7, 4)
    x, weight, bias = (t.detach() for t in (x, weight, bias))
    statistics = torch.ones(9, 2, device=backend.device)
    args = (torch.rand(9, 4, device=backend.device), x, weight, index, bias, statistics, -100)
    check_op(OPS["linear_log_probs_backward"], *args, True, True, True, 4)
    check_op(OPS["linear_log_probs_backward"], *args, False, True, False, 4)


def test_bad_arguments(backend):
    x, weight, index, bias = operands(device=backend.device)
    for error, args, settings in (
        (IndexError, (x, weight, index + 200), {}),
        (IndexError, (x, weight, index.clamp(max=-1)), {"ignore_index": 0}),
        (RuntimeError, (x, weight, index.int()), {}),
        (RuntimeError, (x, weight, index[:4]), {}),
        (RuntimeError, (x, weight, index[0, 0]), {}),
        (TypeError, (x, weight, 3), {}),
        (TypeError, (x, weight.double(), index), {}),
        (RuntimeError, (x, weight[:, :4], index), {}),
        (RuntimeError, (x, weight, index, bias[:4]), {}),
        (ValueError, (x, weight, index), {"max_chunk_bytes": 0}),
    ):
        with pytest.raises(error):
            linear_log_probs(*args, **settings)
    x, weight, bias = (t.detach() for t in (x, weight, bias))
    op, backward = OPS["linear_log_probs"], OPS["linear_log_probs_backward"]
    for bad in (index[:4], index[0], index.int(), index.to("meta"), index + 200):
        with pytest.raises((RuntimeError, IndexError)):
            op(x, weight, bad, bias, -100, 4)
    good = {"grad": torch.ones(9, 4), "statistics": torch.ones(9, 2)}
    for name in good:
        for wrong in (torch.ones(9), torch.ones(8, 2), torch.ones(9, 3), torch.ones(9, 4).half()):
            grad, statistics = (good | {name: wrong}).values()
            with pytest.raises(RuntimeError, match=name):
                backward(grad, x, weight, index, bias, statistics, -100, True, True, True, 4)
