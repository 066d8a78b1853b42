"""conv_relu_pool1d against conv1d, an activation and max_pool1d."""

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
    results,
    stock,
)
from memopt.nn import ConvReLUPool1d
from memopt.nn.functional import conv_relu_pool1d
from support import (
    DTYPES,
    assert_accurate,
    assert_compiles,
    assert_raises_same,
    assert_same_bits,
    assert_same_for_threads,
    layouts,
    saved_tensors,
)

pytestmark = pytest.mark.portable

PROBLEMS = {
    "plain": ((3, 2, 30), (5, 2, 3), (), {}),
    "stride and padding": ((33, 3, 29), (17, 3, 5), (2, 2), {}),
    "dilation and groups": ((2, 4, 40), (6, 2, 3), (1, 1, 2, 2), {}),
    "same": ((2, 4, 23), (6, 4, 4), (1, "same"), {}),
    "odd pool": (
        (2, 1, 41),
        (2, 1, 3),
        (),
        {
            "pool_kernel_size": 5,
            "pool_stride": 3,
            "pool_padding": 2,
            "pool_dilation": 2,
            "ceil_mode": True,
        },
    ),
    "many positions": ((2, 3, 64), (2, 3, 2), (), {"pool_kernel_size": 20, "pool_stride": 7}),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_values_winners_and_gradients_are_eagers(backend, name, dtype):
    shape, filters, convolution, pool = PROBLEMS[name]
    x = integers(*shape, device=backend.device, dtype=dtype)
    w = integers(*filters, device=backend.device, dtype=dtype, most=1)
    b = integers(filters[0], device=backend.device, dtype=dtype)
    for bias in (b, None):
        assert_like_stock((x, w, bias), *convolution, **pool)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_every_activation(backend, activation, value):
    x = integers(2, 2, 25, device=backend.device)
    if value is not None:
        x[1, 0, 12] = value
    w = integers(3, 2, 3, device=backend.device, most=1)
    assert_like_stock(
        (x, w, integers(3, device=backend.device)), **activation_arguments(activation)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(backend, dtype):
    x = torch.randn(20, 5, 50, device=backend.device, dtype=dtype)
    w = torch.randn(7, 5, 5, device=backend.device, dtype=dtype)
    y = stock(x, w, None)
    assert_accurate(ours(x, w, None), y, stock(x.double(), w.double(), None))


def test_any_strides(backend):
    x = integers(2, 3, 20, device=backend.device)
    w = integers(4, 3, 3, device=backend.device, most=1)
    for case in layouts(x).values():
        assert_like_stock((case, w, None))


def test_unbatched_and_empty(backend):
    x = integers(2, 20, device=backend.device)
    w = integers(3, 2, 3, device=backend.device)
    assert_like_stock((x, w, None))
    nothing = results(ours, (x.new_empty(0, 2, 20), w, w.new_zeros(3)), x.new_empty(0, 3, 9))
    assert nothing[0].shape == (0, 3, 9)
    assert_same_bits(nothing[2:], (torch.zeros_like(w), w.new_zeros(3)))


def test_saves_its_input_its_weight_and_the_codes(backend):
    x = torch.randn(4, 2, 42, device=backend.device)
    w = torch.randn(6, 2, 3, device=backend.device).requires_grad_()
    kept = saved_tensors(lambda: conv_relu_pool1d(x, w))
    assert sum(t.numel() for t in kept if t.dtype == torch.uint8) == 4 * 6 * 20 // 2


def test_gradcheck_to_second_order(backend):
    of = {"device": backend.device, "dtype": torch.float64}
    x = torch.randn(2, 2, 9, **of).requires_grad_()
    w, b = torch.randn(2, 2, 3, **of).requires_grad_(), torch.randn(2, **of).requires_grad_()
    torch.autograd.gradcheck(conv_relu_pool1d, (x, w, b))
    torch.autograd.gradgradcheck(conv_relu_pool1d, (x, w, b))


def test_same_bits_for_any_number_of_threads(backend):
    x = torch.randn(40, 3, 64, device=backend.device)
    w = torch.randn(18, 3, 5, device=backend.device)
    grad = torch.randn(40, 18, 30, device=backend.device)
    threads = (2,) if backend.name == "reference" else (1, 2, 3)
    assert_same_for_threads(lambda: results(ours, (x, w, None), grad), threads=threads)


def test_transforms_and_compile(backend):
    x = torch.randn(2, 2, 20, device=backend.device)
    w = torch.randn(3, 2, 3, device=backend.device)
    tangents = (torch.randn_like(x), torch.randn_like(w))
    _, actual = torch.func.jvp(conv_relu_pool1d, (x, w), tangents)
    _, expected = torch.func.jvp(lambda x, w: stock(x, w, None), (x, w), tangents)
    torch.testing.assert_close(actual, expected)
    batches = [torch.randn(n, 2, 23, device=backend.device).requires_grad_() for n in (5, 6)]
    assert_compiles(conv_relu_pool1d, *((x, w.requires_grad_()) for x in batches))


@pytest.mark.parametrize(
    "bad", [{"pool_padding": 2}, {"pool_stride": 0}, {"pool_kernel_size": 30}, {"pool_dilation": 0}]
)
def test_bad_arguments_raise_as_stock(backend, bad):
    x = torch.randn(2, 2, 20, device=backend.device)
    w = torch.randn(3, 2, 3, device=backend.device)
    assert_raises_same(lambda: stock(x, w, None, **bad), lambda: ours(x, w, None, **bad))


def test_bad_shapes_are_named(backend):
    w = torch.randn(3, 2, 3, device=backend.device)
    with pytest.raises(RuntimeError, match="conv_relu_pool1d: input has shape"):
        conv_relu_pool1d(torch.randn(2, 2, 20, 1, device=backend.device), w)
    with pytest.raises(RuntimeError, match="conv_relu_pool1d: weight has 4 dimensions"):
        conv_relu_pool1d(torch.randn(2, 2, 20, device=backend.device), w[None])
    with pytest.raises(RuntimeError, match="conv_relu_pool1d: stride is"):
        conv_relu_pool1d(torch.randn(2, 2, 20, device=backend.device), w, None, (1, 1))
    with pytest.raises(TypeError, match="conv_relu_pool1d: input is a list"):
        conv_relu_pool1d([1.0], w)


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
def test_layer_takes_the_place_of_three(backend, padding_mode):
    convolution = torch.nn.Conv1d(2, 3, 3, padding=1, padding_mode=padding_mode)
    theirs = torch.nn.Sequential(convolution, torch.nn.ReLU(), torch.nn.MaxPool1d(2))
    layer = ConvReLUPool1d(2, 3, 3, padding=1, padding_mode=padding_mode)
    layer.load_state_dict(convolution.state_dict())
    theirs, layer = theirs.to(backend.device), layer.to(backend.device)
    x = torch.randn(2, 2, 20, device=backend.device)
    torch.testing.assert_close(layer(x), theirs(x))
