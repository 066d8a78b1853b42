"""The activations of conv_relu_pool2d: values, ties, special values and derivatives are eager's."""

from __future__ import annotations

import math

import pytest
import torch

from conv_pool_support import (
    ACTIVATIONS,
    activation_arguments,
    assert_like_stock,
    integers,
    ours,
    stock,
)
from memopt.nn import ConvReLUPool2d
from memopt.nn.functional import conv_relu_pool2d
from support import (
    DTYPES,
    OPS,
    assert_accurate,
    assert_compiles,
    assert_raises_same,
    assert_same_for_threads,
    check_op,
    saved_tensors,
)

pytestmark = pytest.mark.portable

# Filters in the vector lanes, images in the lanes, and the stock convolution in chunks.
SHAPES = {"filters": (2, 3, 17), "images": (33, 2, 5), "chunks": (1, 2, 1)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pool", [(2, 2, 0), (3, 2, 1), (5, 4, 0)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_winners_and_gradients_are_eagers(backend, name, shape, pool, dtype):
    images, channels, filters = SHAPES[shape]
    x = integers(images, channels, 11, 12, device=backend.device, dtype=dtype)
    w = integers(filters, channels, 3, 3, device=backend.device, dtype=dtype, most=1)
    b = integers(filters, device=backend.device, dtype=dtype)
    kernel, stride, padding = pool
    windows = {"pool_kernel_size": kernel, "pool_stride": stride, "pool_padding": padding}
    assert_like_stock((x, w, b), 1, 1, **windows, **activation_arguments(name))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 0.0])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_special_values(backend, name, value):
    # The identity convolution shows the activation its input.
    w = torch.ones(1, 1, 1, 1, device=backend.device)
    for images in (1, 20):
        for position in range(0, 24, 5):
            x = integers(images, 1, 4, 6, device=backend.device)
            x.view(images, -1)[:, position] = value
            assert_like_stock((x, w, None), **activation_arguments(name))
        x = torch.full((images, 1, 4, 6), value, device=backend.device)
        assert_like_stock((x, w, None), **activation_arguments(name))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_accuracy_and_rounding(backend, name, dtype):
    """Also slopes and limits that the dtype does not hold exactly."""
    arguments = activation_arguments(name)
    arguments |= {"negative_slope": 0.01} if name == "leaky_relu" else {}
    arguments |= {"min_val": -0.3, "max_val": 0.7} if name == "hardtanh" else {}
    x = torch.randn(18, 3, 12, 12, device=backend.device, dtype=dtype)
    w = torch.randn(6, 3, 3, 3, device=backend.device, dtype=dtype)
    theirs = stock(x, w, None, **arguments)
    exact = stock(x.double(), w.double(), None, **arguments)
    assert_accurate(ours(x, w, None, **arguments), theirs, exact)


def test_a_slope_that_makes_neighbours_equal_keeps_the_first(backend):
    # 0.3 * x in bfloat16: unequal values that the activation rounds to equal ones.
    x = -torch.arange(1, 257, device=backend.device, dtype=torch.bfloat16).view(1, 1, 16, 16)
    w = torch.ones(1, 1, 1, 1, device=backend.device, dtype=torch.bfloat16)
    assert_like_stock((x, w, None), pool_kernel_size=4, activation="leaky_relu", negative_slope=0.3)
    assert_like_stock(
        (x.expand(20, 1, 16, 16), w, None),
        pool_kernel_size=4,
        activation="leaky_relu",
        negative_slope=0.3,
    )


@pytest.mark.parametrize(
    ("name", "pool", "bits"),
    [
        ("relu6", 3, 4),
        ("hardtanh", 4, 8),
        ("identity", 2, 4),
        ("leaky_relu", 2, 4),
        ("leaky_relu", 3, 8),
    ],
)
def test_bits_of_a_code(backend, name, pool, bits):
    x = torch.randn(2, 1, 14, 14, device=backend.device)
    w = torch.randn(3, 1, 3, 3, device=backend.device).requires_grad_()
    kept = saved_tensors(lambda: conv_relu_pool2d(x, w, pool_kernel_size=pool, activation=name))
    plane = ((12 // pool) ** 2 * bits + 7) // 8
    assert [t.shape for t in kept if t.dtype == torch.uint8] == [(2, 3, plane)]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradcheck_to_second_order(backend, name):
    of = {"device": backend.device, "dtype": torch.float64}
    x = torch.randn(2, 2, 6, 5, **of).requires_grad_()
    w, b = torch.randn(4, 2, 3, 2, **of).requires_grad_(), torch.randn(4, **of).requires_grad_()

    def function(x, w, b):
        return conv_relu_pool2d(x, w, b, **activation_arguments(name))

    torch.autograd.gradcheck(function, (x, w, b))
    torch.autograd.gradgradcheck(function, (x, w, b))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_transforms_and_compile(backend, name):
    arguments = activation_arguments(name)
    w = torch.randn(3, 2, 3, 3, device=backend.device).requires_grad_()
    x = torch.randn(2, 2, 6, 6, device=backend.device)
    tangents = (torch.randn_like(x), torch.randn_like(w))
    _, actual = torch.func.jvp(lambda x, w: ours(x, w, None, **arguments), (x, w), tangents)
    _, expected = torch.func.jvp(lambda x, w: stock(x, w, None, **arguments), (x, w), tangents)
    torch.testing.assert_close(actual, expected)
    batches = [torch.randn(n, 2, 9, 9, device=backend.device).requires_grad_() for n in (5, 6)]
    assert_compiles(
        lambda x, w: ours(x, w, None, **arguments), *((x, w) for x in batches), backend="aot_eager"
    )


@pytest.mark.parametrize("name", ["leaky_relu", "hardtanh"])
def test_opcheck(backend, name):
    ones, twos = [1, 1], [2, 2]
    windows = (ones, ones, ones, 1, twos, twos, [0, 0], ones, False, name, -0.5, 0.5)
    x = torch.randn(2, 2, 6, 6, device=backend.device).requires_grad_()
    w = torch.randn(3, 2, 3, 3, device=backend.device).requires_grad_()
    check_op(OPS["conv_relu_pool2d"], x, w, None, *windows, True)


def test_same_bits_for_any_number_of_threads(backend):
    x = torch.randn(20, 3, 16, 16, device=backend.device).requires_grad_()
    w = torch.randn(8, 3, 3, 3, device=backend.device).requires_grad_()

    def run():
        y = ours(x, w, None, activation="leaky_relu")
        return y.detach(), *torch.autograd.grad(y.square().sum(), (x, w))

    assert_same_for_threads(run, threads=(2,) if backend.name == "reference" else (1, 2, 3))


def test_arguments_of_another_activation_are_refused(backend):
    x, w = (torch.ones(1, 1, 4, 4, device=backend.device) for _ in range(2))
    for bad in (
        {"negative_slope": 0.1},
        {"activation": "hardtanh", "negative_slope": 0.1},
        {"activation": "relu6", "max_val": 5.0},
        {"activation": "leaky_relu", "min_val": 0.0},
        {"activation": "gelu"},
    ):
        with pytest.raises(ValueError, match="conv_relu_pool2d: "):
            conv_relu_pool2d(x, w, **bad)
        with pytest.raises(ValueError, match="ConvReLUPool2d: "):
            ConvReLUPool2d(1, 1, 1, **bad)
    crossed = {"activation": "hardtanh", "min_val": 1.0, "max_val": -1.0}
    assert_raises_same(lambda: stock(x, w, None, **crossed), lambda: ours(x, w, None, **crossed))
