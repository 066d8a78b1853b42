"""conv_relu_pool1d, 2d and 3d with pool="avg", and their op conv_relu_avg_pool.

On small integers, and with divisors that are powers of two, arithmetic is exact in every dtype.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conv_pool_support import (
    ACTIVATIONS,
    activation_arguments,
    assert_like_stock,
    integers,
    ours,
    results,
    stock,
)
from memopt.nn import ConvReLUPool1d, ConvReLUPool2d, ConvReLUPool3d
from memopt.nn.functional import conv_relu_pool1d, conv_relu_pool2d
from memopt.ops import _bits
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
)

pytestmark = pytest.mark.portable

# Input, weight, convolution and pool; the windows hold 1, 2, 4 or 8 elements.
PROBLEMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = {
    "1d": ((3, 2, 13), (5, 2, 3), (), {}),
    "1d padded": ((2, 4, 12), (6, 2, 3), (2, 1, 1, 2), {"pool_kernel_size": 4, "pool_padding": 2}),
    "2d": ((3, 2, 9, 8), (21, 2, 3, 3), (), {}),
    "2d overlapping": (
        (2, 3, 8, 9),
        (4, 3, 2, 3),
        ((2, 1), 1),
        {"pool_kernel_size": (2, 4), "pool_stride": 1, "pool_padding": (1, 2)},
    ),
    "2d apart": (
        (2, 4, 9, 8),
        (6, 2, 1, 2),
        (1, 0, (1, 2), 2),
        {"pool_kernel_size": 2, "pool_stride": (3, 4), "ceil_mode": True},
    ),
    "2d divided by 8": (
        (2, 1, 10, 9),
        (3, 1, 3, 3),
        (),
        {"pool_kernel_size": 3, "pool_stride": 2, "ceil_mode": True, "divisor_override": 8},
    ),
    "2d divided by -2": ((2, 1, 6, 6), (1, 1, 1, 1), (), {"divisor_override": -2}),
    "3d": ((2, 2, 6, 7, 8), (5, 2, 3, 3, 3), (), {}),
    "3d without padding": (
        (2, 3, 6, 5, 6),
        (6, 1, 2, 1, 3),
        ((1, 2, 1), (1, 0, 1), 1, 3),
        {"pool_stride": 1, "pool_padding": (1, 1, 0), "count_include_pad": False},
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
def test_values_and_gradients_are_eagers(backend, problem, activation, dtype):
    shape, weight_shape, convolution, pool = problem
    of = {"device": backend.device, "dtype": dtype}
    x, w = integers(*shape, **of), integers(*weight_shape, **of, most=1)
    b = integers(weight_shape[0], **of)
    arguments = pool | activation_arguments(activation) | ACTIVATIONS[activation]
    assert_like_stock((x, w, b), *convolution, pool="avg", **arguments)


@given(
    axes=st.lists(
        st.tuples(st.integers(3, 9), *[st.integers(1, 3)] * 4, st.integers(0, 1)),
        min_size=2,
        max_size=3,
    ),
    filters=st.sampled_from([1, 3, 20]),
    activation=st.sampled_from(list(ACTIVATIONS)),
    options=st.fixed_dictionaries(
        {"ceil_mode": st.booleans(), "count_include_pad": st.booleans()},
        optional={"divisor_override": st.integers(-3, 12)},
    ),
    special=st.sampled_from([None, math.nan, math.inf]),
    channels_last=st.booleans(),
)
def test_every_combination_of_parameters(
    backend, axes, filters, activation, options, special, channels_last
):
    sizes, kernel, stride, pool, pool_stride, padding = zip(*axes, strict=True)
    x = torch.randn(2, 2, *sizes, device=backend.device, dtype=torch.float64)
    if special is not None:
        x.view(-1)[torch.randint(x.numel(), ())] = special
    if channels_last:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        x = x.contiguous(memory_format=formats[x.dim()])
    w = torch.randn(filters, 2, *kernel, device=backend.device, dtype=torch.float64)
    windows = {"pool_kernel_size": pool, "pool_stride": pool_stride, "pool_padding": padding}
    arguments = activation_arguments(activation) | ACTIVATIONS[activation] | windows | options
    call = ((x, w, None), stride, padding)
    try:
        expected = stock(*call[0], *call[1:], pool="avg", **arguments)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            ours(*call[0], *call[1:], pool="avg", **arguments)
        return
    grad = torch.randn_like(expected)
    theirs, mine = (
        results(f, call[0], grad, *call[1:], pool="avg", **arguments) for f in (stock, ours)
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES[1:])  # float64 is what they are held to
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "hardtanh"])
@pytest.mark.parametrize(
    ("shape", "filters", "pool"),
    [((5, 1, 28, 28), 10, 2), ((3, 3, 17, 17), 33, 3), ((2, 2, 8, 8, 8), 5, 3)],
)
def test_accuracy(backend, dtype, activation, shape, filters, pool):
    x = torch.randn(shape, device=backend.device).to(dtype)
    w = torch.randn(filters, *shape[1:2], *[3] * (len(shape) - 2), device=backend.device).to(dtype)
    b = torch.randn(filters, device=backend.device).to(dtype)
    arguments = {"pool": "avg", "activation": activation, "pool_kernel_size": pool}
    inputs = [(x, w, b)] * 2 + [(x.double(), w.double(), b.double())]
    grad = torch.ones_like(ours(x, w, b, **arguments))
    mine, theirs, exact = (
        results(f, tensors, grad.to(tensors[0].dtype), **arguments)
        for f, tensors in zip((ours, stock, stock), inputs, strict=True)
    )
    for k, values in enumerate(zip(mine, theirs, exact, strict=True)):
        assert_accurate(*values, factor=3 if k else 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_special_value_in_every_position(backend, activation, value):
    arguments = activation_arguments(activation) | ACTIVATIONS[activation]
    for channels, width in ((1, 33), (33, 6)):
        x = integers(1, channels, 4, width, device=backend.device)
        w = torch.ones(channels, 1, 1, 1, device=backend.device)
        for position in range(0, x.numel(), 17):
            planted = x.clone()
            planted.view(-1)[position] = value
            assert_like_stock((planted, w, None), 1, 0, 1, channels, pool="avg", **arguments)


def test_any_strides(backend):
    base = integers(1, 4, 6, 6, device=backend.device).expand(3, 4, 6, 6)
    weight = integers(1, 4, 3, 3, device=backend.device).expand(5, 4, 3, 3)
    grad = integers(3, 5, 2, 2, device=backend.device)
    grads = (*layouts(grad).values(), base.new_ones(()).expand(3, 5, 2, 2))
    for x in layouts(base).values():
        for w in layouts(weight).values():
            for grad in grads:
                theirs, mine = (results(f, (x, w, None), grad, pool="avg") for f in (stock, ours))
                assert_same_bits(mine, theirs)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("channels_last", [(False, False), (False, True), (True, False)])
def test_memory_formats_are_eagers(backend, dims, channels_last):
    last = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
    x = integers(2, 3, *[7] * dims, device=backend.device)
    w = integers(4, 3, *[3] * dims, device=backend.device)
    x, w = (
        t.contiguous(memory_format=last) if chosen else t
        for t, chosen in zip((x, w), channels_last, strict=True)
    )
    y = stock(x, w, None, pool="avg")
    theirs, mine = (results(f, (x, w, None), torch.ones_like(y), pool="avg") for f in (stock, ours))
    assert [t.stride() for t in mine[:2]] == [t.stride() for t in theirs[:2]]
    assert mine[2].stride() == w.stride()


def test_unbatched_and_empty(backend):
    for shape in ((2, 6, 6), (0, 2, 6, 6)):
        x, w = integers(*shape, device=backend.device), integers(3, 2, 3, 3, device=backend.device)
        theirs, mine = (
            results(f, (x, w, w[:, 0, 0, 0]), torch.ones_like(stock(x, w, None)), pool="avg")
            for f in (stock, ours)
        )
        assert_same_bits(mine, theirs)


# -- Memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "relu6", "hardtanh", "identity"])
def test_saves_its_input_its_weight_and_a_bit(backend, activation):
    x = torch.randn(2, 3, 15, 12, device=backend.device).requires_grad_()
    w = torch.randn(5, 3, 3, 3, device=backend.device).requires_grad_()

    def run() -> Tensor:
        return conv_relu_pool2d(x, w, pool="avg", activation=activation)

    mask = 0 if activation == "identity" else 2 * 5 * math.ceil(13 * 10 / 8)
    assert saved_bytes(run) == mask + 4 * (x.numel() + w.numel())
    with torch.no_grad():
        assert saved_bytes(run) == 0
    windows = [[1, 1], [0, 0], [1, 1], 1, [2, 2], [2, 2], [0, 0], False, True, None]
    forward = OPS["conv_relu_avg_pool"]
    output, bits = forward(x.detach(), w.detach(), None, *windows, activation, 0.0, 0.0, False)
    assert bits.numel() == 0
    assert_same_bits(output, run().detach()) if activation not in (
        "leaky_relu",
        "hardtanh",
    ) else None


def test_the_convolution_never_exists_in_full(backend):
    if backend.name == "reference":
        return  # readable rather than lean
    x = torch.randn(128, 1, 28, 28, device=backend.device)
    w = torch.randn(20, 1, 5, 5, device=backend.device).requires_grad_()
    convolved = 128 * 20 * 24 * 24 * 4
    assert peak_bytes(lambda: conv_relu_pool2d(x, w, pool="avg").sum().backward()) < convolved


# -- Autograd --------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "hardtanh", "identity"])
def test_gradcheck_to_second_order(backend, activation):
    of = {"device": backend.device, "dtype": torch.float64}
    x = torch.randn(2, 2, 5, 4, **of).requires_grad_()
    w, b = torch.randn(4, 1, 3, 2, **of).requires_grad_(), torch.randn(4, **of).requires_grad_()

    def function(x, w, b):
        pool = {"pool_kernel_size": 3, "pool_stride": 2, "pool_padding": 1, "ceil_mode": True}
        return conv_relu_pool2d(x, w, b, 1, 1, 1, 2, pool="avg", activation=activation, **pool)

    torch.autograd.gradcheck(function, (x, w, b))
    torch.autograd.gradgradcheck(function, (x, w, b))


@pytest.mark.parametrize("wanted", range(1, 8))
def test_every_subset_of_gradients(backend, wanted):
    shapes = ((2, 2, 6, 6), (3, 2, 3, 3), (3,))
    inputs = [integers(*shape, device=backend.device) for shape in shapes]
    for k, tensor in enumerate(inputs):
        tensor.requires_grad_(bool(wanted >> k & 1))
    leaves = [t for t in inputs if t.requires_grad]
    theirs, mine = (
        torch.autograd.grad(f(*inputs, pool="avg").sum(), leaves) for f in (stock, ours)
    )
    assert_same_bits(mine, theirs)


def test_backward_twice(backend):
    x = integers(2, 2, 6, 6, device=backend.device).requires_grad_()
    w = integers(3, 2, 3, 3, device=backend.device).requires_grad_()
    y = conv_relu_pool2d(x, w, pool="avg")
    first = torch.autograd.grad(y, (x, w), torch.ones_like(y), retain_graph=True)
    kept = [t.clone() for t in first]
    second = torch.autograd.grad(y, (x, w), 2 * torch.ones_like(y))
    assert_same_bits(first, tuple(kept))
    assert_same_bits(second, tuple(2 * t for t in kept))


def test_same_bits_for_any_number_of_threads(backend):
    # The convolution is exact here; across numbers of threads the stock one rounds differently.
    x = integers(9, 40, 16, 16, device=backend.device)
    w, b = torch.eye(40, device=backend.device).view(40, 40, 1, 1), torch.zeros(40)
    arguments = {"pool": "avg", "pool_kernel_size": 3, "activation": "leaky_relu"}
    grad = torch.ones_like(ours(x, w, None, **arguments))

    def run() -> tuple[Tensor, ...]:
        y, dx, _, db = results(ours, (x, w, b.to(x.device)), grad, **arguments)
        return y, dx, db

    assert_same_for_threads(run)


def raw_arguments(x: Tensor, activation: str) -> tuple[list[Any], list[Any]]:
    """Valid arguments of both raw ops."""
    w, b = torch.randn(6, 2, *[3] * (x.dim() - 2)), torch.randn(6)
    numbers = ([1, 1], [1, 1], [1, 1], 2, [3, 3], [2, 2], [1, 1])
    windows = [n * 3 if x.dim() == 5 and n == 1 else n for n in numbers]
    windows = [[n[0]] * (x.dim() - 2) if isinstance(n, list) else n for n in windows]
    windows += [True, False, None, activation, 0.1, 2.0]
    forward = [x, w.to(x.device), b.to(x.device), *windows, True]
    y, mask = OPS["conv_relu_avg_pool"](*forward)
    return forward, [torch.randn_like(y), x, forward[1], mask, *windows, *[True] * 3]


def test_opcheck(backend):
    base = torch.randn(1, 4, 6, 7, device=backend.device).expand(2, 4, 6, 7)
    strided = layouts(base)
    inputs = {
        "relu": strided["channels_last"],
        "leaky_relu": strided["sliced"],
        "identity": strided["expanded"],
        "hardtanh": torch.randn(2, 4, 4, 5, 3, device=backend.device),
        "relu6": torch.randn(0, 4, 6, 7, device=backend.device),
    }
    for activation, x in inputs.items():
        forward, backward = raw_arguments(x, activation)
        check_op(OPS["conv_relu_avg_pool_backward"], *backward[:-1], activation != "relu")
        if x.numel():
            forward[:3] = [t.requires_grad_() for t in forward[:3]]
        check_op(OPS["conv_relu_avg_pool"], *forward)


# -- Transforms, torch.compile, autocast ----------------------------------------------------------


def test_function_transforms_are_right(backend):
    x = torch.randn(3, 2, 6, 6, device=backend.device)
    w = torch.randn(3, 2, 3, 3, device=backend.device)
    tangents = (torch.randn_like(x), torch.randn_like(w))
    theirs, mine = (
        torch.func.jvp(lambda x, w, f=f: f(x, w, None, pool="avg"), (x, w), tangents)
        for f in (stock, ours)
    )
    assert_same_bits(mine, theirs)
    theirs, mine = (
        torch.func.vmap(
            torch.func.grad(lambda i, w, f=f: f(i, w, None, pool="avg").sum()), (0, None)
        )(x, w)
        for f in (stock, ours)
    )
    torch.testing.assert_close(mine, theirs)


def test_compiles_in_one_graph_without_recompiling(backend):
    w = torch.randn(4, 3, 3, 3, device=backend.device).requires_grad_()
    b = torch.randn(4, device=backend.device).requires_grad_()
    batches = [torch.randn(n, 3, 11, 11, device=backend.device).requires_grad_() for n in (5, 6)]

    def function(x, w, b):
        return conv_relu_pool2d(x, w, b, 1, 1, pool="avg", activation="relu6")

    assert_compiles(function, *((x, w, b) for x in batches))


@pytest.mark.parametrize("pool", ["avg", "max"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_autocast_is_eagers(backend, dims, pool):
    x = integers(2, 2, *[6] * dims, device=backend.device)
    w = integers(3, 2, *[3] * dims, device=backend.device, most=1)
    with torch.no_grad(), torch.autocast(backend.device.type, torch.bfloat16):
        grad = torch.ones_like(stock(x, w, None, pool=pool))
    with torch.autocast(backend.device.type, torch.bfloat16):
        theirs, mine = (results(f, (x, w, None), grad, pool=pool) for f in (stock, ours))
    assert_same_bits(mine, theirs)


# -- Bad inputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"divisor_override": 0},
        {"pool_padding": 2},
        {"pool_kernel_size": 9},
        {"pool_stride": 0},
        {"pool_stride": (1, 1, 1)},
    ],
    ids=str,
)
def test_bad_arguments_raise_as_stock(backend, bad):
    x, w = torch.ones(2, 2, 6, 6, device=backend.device), torch.ones(3, 2, 3, 3)
    args = (x, w.to(backend.device), None)
    assert_raises_same(
        lambda: stock(*args, pool="avg", **bad), lambda: ours(*args, pool="avg", **bad)
    )


@pytest.mark.parametrize(
    ("pool", "arguments", "message"),
    [
        ("max", {"count_include_pad": True}, "count_include_pad is True, but it belongs to 'avg'"),
        ("max", {"divisor_override": 2}, "divisor_override is 2, but it belongs to 'avg'"),
        ("avg", {"pool_dilation": 2}, "pool_dilation is 2, but it belongs to 'max'"),
        ("avg", {"pool_dilation": (1, 2)}, "pool_dilation is"),
        ("mean", {}, "pool is 'mean'"),
    ],
)
def test_arguments_of_the_other_pool_are_named(pool, arguments, message):
    x, w = torch.ones(2, 2, 6, 6), torch.ones(3, 2, 3, 3)
    with pytest.raises(ValueError, match=message):
        conv_relu_pool2d(x, w, pool=pool, **arguments)
    with pytest.raises(ValueError, match=message):
        ConvReLUPool2d(2, 3, 3, pool=pool, **arguments)


def test_one_dimension_has_no_divisor():
    x, w = torch.ones(2, 2, 6), torch.ones(3, 2, 3)
    with pytest.raises(TypeError, match="divisor_override"):
        conv_relu_pool1d(x, w, pool="avg", divisor_override=2)
    with pytest.raises(TypeError, match="divisor_override"):
        ConvReLUPool1d(2, 3, 3, pool="avg", divisor_override=2)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, torch.ones(2, 6, 3, 3)),
        (0, torch.ones(2, 6, 4, 4).double()),
        (0, torch.ones(2, 6, 4, 4, device="meta")),
        (1, torch.ones(2, 4, 6, 9)),
        (2, torch.ones(6, 2, 3)),
        (3, torch.zeros(2, 6, 5, dtype=torch.uint8)),
        (3, torch.zeros(2, 6, 6, dtype=torch.int8)),
        (3, torch.zeros(2, 6, 6, dtype=torch.uint8, device="meta")),
        (4, [1]),
        (4, [1, 1, 1]),
        (7, 2**62),
        (8, [2**40, 2**40]),
        (10, [2, 2]),
        (13, 0),
        (14, "tanh"),
    ],
)
def test_the_raw_backward_checks_everything(backend, index, value):
    _, args = raw_arguments(torch.randn(2, 4, 6, 7, device=backend.device), "relu")
    meta = isinstance(value, Tensor) and value.is_meta
    args[index] = value.to(backend.device) if isinstance(value, Tensor) and not meta else value
    with pytest.raises(RuntimeError, match="conv_relu_"):
        OPS["conv_relu_avg_pool_backward"](*args)


def test_the_raw_backward_has_no_derivative(backend):
    _, args = raw_arguments(torch.randn(2, 4, 6, 7, device=backend.device), "relu")
    args[0].requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph"):
        OPS["conv_relu_avg_pool_backward"](*args)[0].sum().backward()


# -- Bits and the layers ---------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(0, 99))
def test_planes_of_bits_survive_packing(numel, seed):
    flags = torch.randint(2, (2, 3, numel), generator=torch.manual_seed(seed)).bool()
    packed = _bits.pack_planes(flags)
    assert packed.shape == (2, 3, _bits.bytes_for(numel))
    assert_same_bits(_bits.unpack_planes(packed, numel), flags)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_layer_takes_the_place_of_three(backend, dims):
    layer = {1: ConvReLUPool1d, 2: ConvReLUPool2d, 3: ConvReLUPool3d}[dims]
    convolution = getattr(torch.nn, f"Conv{dims}d")(2, 4, 3, 1, 1)
    divisor = {} if dims == 1 else {"divisor_override": 3}
    average = getattr(torch.nn, f"AvgPool{dims}d")(3, 2, 1, True, False, **divisor)
    three = torch.nn.Sequential(convolution, torch.nn.LeakyReLU(0.2), average).to(backend.device)
    pool = {"pool_kernel_size": 3, "pool_stride": 2, "pool_padding": 1, "ceil_mode": True}
    pool |= {"pool": "avg", "count_include_pad": False} | divisor
    one = layer(2, 4, 3, 1, 1, activation="leaky_relu", negative_slope=0.2, **pool)
    one.to(backend.device).load_state_dict(three[0].state_dict())
    x = torch.randn(2, 2, *[9] * dims, device=backend.device)
    torch.testing.assert_close(one(x), three(x))
    assert "pool=avg" in repr(one)
    assert "count_include_pad=False" in repr(one)
