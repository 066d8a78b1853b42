"""conv_relu_pool3d against conv3d, an activation and max_pool3d."""

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
from memopt.nn import ConvReLUPool3d
from memopt.nn.functional import conv_relu_pool3d
from support import (
    DTYPES,
    OPS,
    assert_accurate,
    assert_compiles,
    assert_raises_same,
    assert_same_bits,
    assert_same_for_threads,
    check_op,
    layouts,
    peak_bytes,
    saved_bytes,
    saved_tensors,
)

pytestmark = pytest.mark.portable

PROBLEMS = {
    "plain": ((3, 2, 6, 7, 8), (5, 2, 3, 3, 3), (), {}),
    "stride and padding": ((2, 3, 9, 8, 7), (4, 3, 3, 2, 3), ((2, 1, 2), (1, 0, 1)), {}),
    "dilation and groups": ((2, 4, 8, 7, 9), (6, 2, 2, 3, 2), (1, 1, (2, 1, 2), 2), {}),
    "depthwise": ((2, 3, 6, 6, 6), (3, 1, 3, 3, 3), (1, 1, 1, 3), {}),
    "overlapping pool": (
        (2, 2, 8, 8, 9),
        (3, 2, 2, 2, 2),
        (),
        {"pool_kernel_size": 3, "pool_stride": 2, "pool_padding": 1},
    ),
    "odd pool": (
        (2, 1, 9, 8, 10),
        (2, 1, 1, 2, 3),
        (),
        {
            "pool_kernel_size": (3, 2, 4),
            "pool_stride": (1, 3, 2),
            "pool_padding": (1, 0, 2),
            "pool_dilation": (2, 1, 1),
            "ceil_mode": True,
        },
    ),
    "many positions": ((1, 1, 9, 9, 9), (2, 1, 2, 2, 2), (), {"pool_kernel_size": 7}),
}


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
    x = integers(2, 2, 5, 5, 6, device=backend.device)
    if value is not None:
        x[1, 0, 2, 2, 3] = value
    w = integers(3, 2, 2, 2, 2, device=backend.device, most=1)
    b = integers(3, device=backend.device)
    assert_like_stock((x, w, b), **activation_arguments(activation))


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(backend, dtype):
    x = torch.randn(2, 5, 8, 9, 10, device=backend.device, dtype=dtype)
    w = torch.randn(7, 5, 3, 3, 3, device=backend.device, dtype=dtype)
    b = torch.randn(7, device=backend.device, dtype=dtype)
    y = stock(x, w, b)
    assert_accurate(ours(x, w, b), y, stock(x.double(), w.double(), b.double()))


def test_any_strides_and_eagers_memory_format(backend):
    x = integers(2, 3, 6, 6, 6, device=backend.device)
    w = integers(4, 3, 3, 3, 3, device=backend.device, most=1)
    last = x.contiguous(memory_format=torch.channels_last_3d)
    for case in (*layouts(x).values(), last):
        assert_like_stock((case, w, None))
    for case in (x, last):
        assert ours(case, w, None).stride() == stock(case, w, None).stride()


def test_unbatched_and_empty(backend):
    x = integers(2, 6, 6, 6, device=backend.device)
    w = integers(3, 2, 3, 3, 3, device=backend.device)
    assert_like_stock((x, w, None))
    nothing = results(
        ours, (x.new_empty(0, 2, 6, 6, 6), w, w.new_zeros(3)), x.new_empty(0, 3, 2, 2, 2)
    )
    assert nothing[0].shape == (0, 3, 2, 2, 2)
    assert_same_bits(nothing[2:], (torch.zeros_like(w), w.new_zeros(3)))


def test_saves_its_input_its_weight_and_the_codes(backend):
    x = torch.randn(4, 2, 10, 10, 10, device=backend.device)
    w = torch.randn(6, 2, 3, 3, 3, device=backend.device).requires_grad_()
    kept = saved_tensors(lambda: conv_relu_pool3d(x, w))
    assert sum(t.numel() for t in kept if t.dtype == torch.uint8) == 4 * 6 * 4**3 // 2
    with torch.no_grad():
        assert saved_bytes(lambda: conv_relu_pool3d(x, w)) == 0


def test_the_convolution_never_exists_in_full(backend):
    if backend.name == "reference":
        return  # readable rather than lean
    x = torch.randn(32, 1, 18, 18, 18, device=backend.device)
    w = torch.randn(16, 1, 3, 3, 3, device=backend.device).requires_grad_()
    convolved = 32 * 16 * 16**3 * 4
    assert peak_bytes(lambda: conv_relu_pool3d(x, w).sum().backward()) < convolved


def test_gradcheck_to_second_order(backend):
    of = {"device": backend.device, "dtype": torch.float64}
    x = torch.randn(1, 2, 4, 4, 4, **of).requires_grad_()
    w, b = torch.randn(2, 2, 2, 2, 2, **of).requires_grad_(), torch.randn(2, **of).requires_grad_()
    torch.autograd.gradcheck(conv_relu_pool3d, (x, w, b))
    torch.autograd.gradgradcheck(conv_relu_pool3d, (x, w, b))


@pytest.mark.parametrize("wanted", range(1, 8))
def test_every_subset_of_gradients(backend, wanted):
    inputs = [
        integers(2, 2, 5, 5, 5, device=backend.device),
        integers(3, 2, 2, 2, 2, device=backend.device),
        integers(3, device=backend.device),
    ]
    for k, tensor in enumerate(inputs):
        tensor.requires_grad_(bool(wanted >> k & 1))
    leaves = [t for t in inputs if t.requires_grad]
    assert_same_bits(
        torch.autograd.grad(ours(*inputs).sum(), leaves),
        torch.autograd.grad(stock(*inputs).sum(), leaves),
    )


def test_same_bits_from_run_to_run(backend):
    x = torch.randn(5, 2, 8, 8, 8, device=backend.device)
    w = torch.randn(4, 2, 3, 3, 3, device=backend.device)
    grad = torch.randn(5, 4, 3, 3, 3, device=backend.device)
    # One number of threads: across numbers the stock convolution itself rounds differently.
    assert_same_for_threads(lambda: results(ours, (x, w, None), grad), threads=(2,))


def test_opcheck(backend):
    base = torch.randn(1, 4, 5, 6, 5, device=backend.device).expand(2, 4, 5, 6, 5)
    w = torch.randn(6, 2, 2, 3, 2, device=backend.device).requires_grad_()
    b = torch.randn(6, device=backend.device).requires_grad_()
    ones, twos = [1, 1, 1], [2, 2, 2]
    windows = (ones, ones, ones, 2, twos, twos, ones, ones, True, "leaky_relu", 0.1, 0.0)
    for x in (base, base.clone(), base.contiguous(memory_format=torch.channels_last_3d)):
        check_op(OPS["conv_relu_pool3d"], x.detach().requires_grad_(), w, b, *windows, True)
        y, codes = OPS["conv_relu_pool3d"](x.detach(), w.detach(), None, *windows, True)
        args = (torch.randn_like(y), x.detach(), w.detach(), codes, *windows)
        check_op(OPS["conv_relu_pool3d_backward"], *args, True, True, False)
        check_op(OPS["conv_relu_pool3d_backward"], *args, False, True, True)


def test_function_transforms_are_right(backend):
    x = torch.randn(2, 2, 5, 5, 5, device=backend.device)
    w = torch.randn(3, 2, 2, 2, 2, device=backend.device)
    tangents = (torch.randn_like(x), torch.randn_like(w))
    actual = torch.func.jvp(conv_relu_pool3d, (x, w), tangents)
    assert_same_bits(actual, torch.func.jvp(lambda x, w: stock(x, w, None), (x, w), tangents))


def test_compiles_in_one_graph_without_recompiling(backend):
    w = torch.randn(4, 3, 2, 2, 2, device=backend.device).requires_grad_()
    batches = [torch.randn(n, 3, 7, 7, 7, device=backend.device).requires_grad_() for n in (5, 6)]
    assert_compiles(lambda x, w: conv_relu_pool3d(x, w), *((x, w) for x in batches))


@pytest.mark.parametrize(
    "bad",
    [
        {"pool_padding": 2},
        {"pool_stride": 0},
        {"pool_kernel_size": 9},
        {"pool_kernel_size": (2, 2)},
        {"pool_dilation": 0},
    ],
)
def test_bad_arguments_raise_as_stock(backend, bad):
    x = torch.randn(2, 2, 6, 6, 6, device=backend.device)
    w = torch.randn(3, 2, 3, 3, 3, device=backend.device)
    assert_raises_same(lambda: stock(x, w, None, **bad), lambda: ours(x, w, None, **bad))
    with pytest.raises(RuntimeError, match="conv_relu_pool3d: input has shape"):
        conv_relu_pool3d(x[0, 0], w)


def test_codes_from_outside_cannot_point_outside(backend):
    x = torch.randn(2, 2, 6, 6, 6, device=backend.device)
    w = torch.randn(3, 2, 3, 3, 3, device=backend.device)
    ones, threes = [1, 1, 1], [3, 3, 3]
    windows = (ones, ones, ones, 1, threes, ones, ones, ones, False, "leaky_relu", 0.5, 0.0)
    y, codes = OPS["conv_relu_pool3d"](x, w, None, *windows, True)
    wild = torch.randint(0, 256, codes.shape, dtype=torch.uint8, device=backend.device)
    grads = OPS["conv_relu_pool3d_backward"](y, x, w, wild, *windows, True, True, True)
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
def test_layer_takes_the_place_of_three(backend, padding_mode):
    convolution = torch.nn.Conv3d(2, 3, 3, padding=1, padding_mode=padding_mode)
    theirs = torch.nn.Sequential(convolution, torch.nn.ReLU(), torch.nn.MaxPool3d(2))
    layer = ConvReLUPool3d(2, 3, 3, padding=1, padding_mode=padding_mode)
    layer.load_state_dict(convolution.state_dict())
    theirs, layer = theirs.to(backend.device), layer.to(backend.device)
    x = torch.randn(2, 2, 6, 6, 6, device=backend.device)
    torch.testing.assert_close(layer(x), theirs(x))
