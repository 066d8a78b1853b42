"""conv_batch_norm_relu_pool2d against conv2d, batch_norm, relu and max_pool2d."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batch_norm_cases import FUNCTIONS, Inputs, raw_arguments, stock, without_bias
from memopt.nn.functional import conv_batch_norm_relu_pool2d
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

pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
small = st.tuples(st.integers(0, 1), st.integers(0, 1))


@st.composite
def problems(draw):
    groups = draw(st.integers(1, 3))
    return {
        "shape": (
            draw(st.integers(0, 4)),
            groups * draw(st.integers(1, 2)),
            *draw(st.tuples(st.integers(3, 11), st.integers(3, 11))),
        ),
        "filters": groups * draw(st.sampled_from([1, 2, 17])),
        "kernel": draw(pairs),
        "args": (draw(pairs), draw(small), draw(pairs), groups),
        "bias": draw(st.booleans()),
        "channels_last": draw(st.tuples(st.booleans(), st.booleans())),
        "special": draw(st.sampled_from([None, None, math.nan, math.inf])),
        "options": {
            "training": draw(st.booleans()),
            "momentum": draw(st.sampled_from([0.0, 0.1, 1.0])),
            "pool_kernel_size": draw(st.tuples(st.integers(1, 4), st.integers(1, 5))),
            "pool_stride": draw(st.one_of(st.none(), pairs)),
            "pool_padding": draw(small),
            "pool_dilation": draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
            "ceil_mode": draw(st.booleans()),
        },
        "seed": draw(st.integers(0, 2**16)),
    }


@given(problem=problems())
def test_every_combination_of_parameters(backend, problem):
    torch.manual_seed(problem["seed"])
    of = {"device": backend.device, "dtype": torch.float64}
    x = torch.randn(problem["shape"], **of)
    if problem["special"] is not None and x.numel():
        x.view(-1)[torch.randint(x.numel(), ())] = problem["special"]
    w = torch.randn(problem["filters"], x.shape[1] // problem["args"][3], *problem["kernel"], **of)
    x, w = (
        t.contiguous(memory_format=torch.channels_last) if last else t
        for t, last in zip((x, w), problem["channels_last"], strict=True)
    )
    inputs = Inputs(x, w, bias=problem["bias"])
    inputs.leaves[3][0] = 0  # all of a channel is equal then
    args, options = problem["args"], problem["options"]
    try:
        values = inputs.run(stock, *args, **options, backward=False)
    except (RuntimeError, ValueError) as error:
        with pytest.raises(type(error)):
            inputs.run(conv_batch_norm_relu_pool2d, *args, **options)
        return
    # A dilated window may hold no element at all: eager's index then lies outside, and its
    # backward pass writes there.
    backward = not bool((values[0] == -math.inf).any())
    actual, expected = (
        inputs.run(f, *args, **options, backward=backward)
        for f in (conv_batch_norm_relu_pool2d, stock)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES[1:])  # float64 is what they are held to
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("images", "channels", "filters", "size", "offset"),
    [(4, 3, 37, 19, 0.0), (3, 4, 8, 16, 30.0), (2, 1, 1, 33, 0.0)],
)
def test_accuracy(backend, dtype, mixed, training, images, channels, filters, size, offset):
    x = (offset + torch.randn(images, channels, size, size, device=backend.device)).to(dtype)
    w = torch.randn(filters, channels, 3, 3, device=backend.device).to(dtype)
    short = dtype in (torch.bfloat16, torch.float16)
    inputs = Inputs(x, w, dtype=torch.float32 if short and mixed else dtype)
    pool = {"pool_kernel_size": 3, "pool_stride": 2, "pool_padding": 1, "training": training}
    ours, theirs, exact = (
        inputs.run(function, 1, 1, to=to, **pool)
        for function, to in (
            (conv_batch_norm_relu_pool2d, None),
            (stock, None),
            (stock, torch.float64),
        )
    )
    if training:
        assert bool((ours[3].abs() <= theirs[3].abs().max()).all())
        ours, theirs, exact = map(without_bias, (ours, theirs, exact))
    for k, results in enumerate(zip(ours, theirs, exact, strict=True)):
        assert_accurate(*results, factor=2 if k == 0 or k >= len(ours) - 2 else 3)


def test_an_equal_channel_goes_to_the_first_position(backend):
    x = torch.ones(2, 1, 6, 6, device=backend.device)
    inputs = Inputs(x, torch.ones(3, 1, 1, 1, device=backend.device))
    theirs, ours = (without_bias(inputs.run(f)) for f in FUNCTIONS)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_any_strides(backend):
    base = torch.randn(1, 4, 6, 6, device=backend.device).expand(3, 4, 6, 6)
    w = torch.randn(5, 4, 3, 3, device=backend.device)
    for x in layouts(base).values():
        for v in layouts(w).values():
            inputs = Inputs(x, v)
            theirs, ours = (without_bias(inputs.run(f)) for f in FUNCTIONS)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            if x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last):
                assert ours[0].stride() == theirs[0].stride()


@pytest.mark.parametrize("training", [False, True])
def test_running_estimates_need_no_gradient(backend, training):
    inputs = Inputs(torch.randn(3, 2, 6, 6), torch.randn(4, 2, 3, 3))
    tensors = [t.to(backend.device) for t in (*inputs.leaves, *inputs.running)]
    results = []
    for function in FUNCTIONS:
        running = [t.clone() for t in tensors[5:]]
        with torch.no_grad():
            y = function(*tensors[:3], *running, *tensors[3:5], training=training)
        results.append([y, *running])
        assert (running[0] == tensors[5]).all() != training
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", [(False, False), (True, False), (False, True)])
def test_without_affine_parameters_or_estimates(backend, given):
    x, w = torch.randn(3, 2, 6, 6), torch.randn(4, 2, 3, 3)
    affine = [torch.randn(4, device=backend.device) if g else None for g in given]
    for x_ in (x.to(backend.device), torch.empty(0, 2, 6, 6, device=backend.device)):
        results = [
            f(x_, w.to(x_.device), None, None, None, *affine, training=True) for f in FUNCTIONS
        ]
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


# -- Memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_keeps_the_convolution_once(backend, dtype):
    x = torch.randn(2, 3, 34, 34, device=backend.device, dtype=dtype)
    inputs = Inputs(x, torch.randn(5, 3, 3, 3, device=backend.device, dtype=dtype))
    leaves = [t.requires_grad_() for t in inputs.leaves]

    def run(**options: Any) -> Tensor:
        options = {"training": True} | options
        return conv_batch_norm_relu_pool2d(*leaves[:3], *inputs.running, *leaves[3:], **options)

    size, statistic = x.element_size(), max(4, x.element_size())
    codes, convolved = 2 * 5 * 16 * 16 // 2, 2 * 5 * 32 * 32 * size
    kept = sum(t.numel() * t.element_size() for t in leaves[:4])
    assert saved_bytes(run) == codes + convolved + kept + 2 * 5 * statistic
    with torch.no_grad():
        assert saved_bytes(run) == saved_bytes(lambda: run(training=False)) == 0
    if size >= 4:  # shorter ones would lose digits in a folded weight
        assert saved_bytes(lambda: run(training=False)) < convolved


def test_no_second_tensor_of_the_convolutions_size(backend):
    if backend.name == "reference":
        return  # readable rather than lean
    x = torch.randn(64, 1, 28, 28, device=backend.device)
    w = torch.randn(20, 1, 5, 5, device=backend.device).requires_grad_()
    convolved = 64 * 20 * 24 * 24 * 4

    def run(function):
        return lambda: function(x, w, training=True).sum().backward()

    assert peak_bytes(run(conv_batch_norm_relu_pool2d)) < 1.9 * convolved < peak_bytes(run(stock))


# -- Autograd --------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("overlapping", [False, True])
def test_gradcheck_to_second_order(backend, training, overlapping):
    of = {"device": backend.device, "dtype": torch.float64}
    inputs = Inputs(torch.randn(2, 2, 5, 4, **of), torch.randn(4, 1, 3, 2, **of))
    pool = {"pool_kernel_size": 3, "pool_stride": 1, "pool_padding": 1} if overlapping else {}

    def function(x, w, b, bn_weight, bn_bias):
        running = [t.clone() for t in inputs.running]
        args = (x, w, b, *running, bn_weight, bn_bias, 1, 1, 1, 2)
        return conv_batch_norm_relu_pool2d(*args, training=training, **pool)

    leaves = [t.requires_grad_() for t in inputs.leaves]
    torch.autograd.gradcheck(function, leaves)
    torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("wanted", range(1, 32))
def test_every_subset_of_gradients(backend, wanted):
    of = {"device": backend.device, "dtype": torch.float64}
    inputs = Inputs(torch.randn(2, 2, 6, 6, **of), torch.randn(3, 2, 3, 3, **of)).leaves
    for k, tensor in enumerate(inputs):
        tensor.requires_grad_(bool(wanted >> k & 1))
    leaves = [t for t in inputs if t.requires_grad]
    theirs, ours = (
        torch.autograd.grad(f(*inputs[:3], None, None, *inputs[3:], training=True).sum(), leaves)
        for f in FUNCTIONS
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_backward_twice(backend):
    x = torch.randn(2, 2, 6, 6, device=backend.device).requires_grad_()
    w = torch.randn(3, 2, 3, 3, device=backend.device).requires_grad_()
    y = conv_batch_norm_relu_pool2d(x, w, training=True)
    first = torch.autograd.grad(y, (x, w), torch.ones_like(y), retain_graph=True)
    kept = [t.clone() for t in first]
    second = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    assert_same_bits((first, second), (tuple(kept), tuple(kept)))


def test_same_bits_for_any_number_of_threads(backend):
    # The convolution is exact here; across numbers of threads the stock one rounds differently.
    x = torch.randint(-3, 4, (9, 40, 16, 16), device=backend.device).float()
    inputs = Inputs(x, torch.eye(40, device=backend.device).view(40, 40, 1, 1))
    inputs.leaves[2] = torch.zeros_like(inputs.leaves[2])
    if backend.name == "reference":
        return  # the stock reductions are what they are
    assert_same_for_threads(lambda: inputs.run(conv_batch_norm_relu_pool2d)[0])
    windows = ([1, 1], [0, 0], [1, 1], 1, [3, 3], [2, 2], [1, 1], [1, 1], False)
    leaves = inputs.leaves

    def backward():
        y, codes, convolved, mean, invstd, _ = OPS["conv_batch_norm_relu_pool2d"](
            *leaves, *windows, 1e-5, True
        )
        saved = (leaves[0], leaves[1], leaves[3], convolved, codes, mean, invstd)
        grad = torch.linspace(-1, 1, y.numel()).view(y.shape)
        wanted = (False, False, True, True, True)
        return OPS["conv_batch_norm_relu_pool2d_backward"](grad, *saved, *windows, *wanted)

    assert_same_for_threads(backward)


def test_opcheck(backend):
    base = torch.randn(1, 4, 6, 7, device=backend.device).expand(2, 4, 6, 7)
    empty = torch.randn(0, 4, 6, 7, device=backend.device)
    strided = layouts(base)
    for x in (strided["channels_last"], strided["sliced"], strided["expanded"], empty):
        forward, backward = raw_arguments(backend.device, x)
        check_op(OPS["conv_batch_norm_relu_pool2d_backward"], *backward)
        if x is empty:
            check_op(OPS["conv_batch_norm_relu_pool2d_backward"], *backward[:-1], False)
            check_op(OPS["conv_batch_norm_relu_pool2d"], *forward[:-1], False)
        if x.numel():
            forward[:5] = [t.requires_grad_() for t in forward[:5]]
        check_op(OPS["conv_batch_norm_relu_pool2d"], *forward)
