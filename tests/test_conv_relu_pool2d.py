"""conv_relu_pool2d against conv2d, relu and max_pool2d.

On small integers arithmetic is exact in every dtype, so values, winners and gradients are eager's
bit for bit; on random reals the accuracy rule holds.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from memopt.nn import ConvReLUPool2d
from memopt.nn.functional import conv_relu_pool2d
from memopt.ops import _pool_codes
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
    unchanged,
)

pytestmark = pytest.mark.portable


def stock(x: Tensor, w: Tensor, b: Tensor | None = None, *convolution: Any, **pool: Any) -> Tensor:
    """The stock ops under conv_relu_pool2d's arguments; ``relu_first=False`` swaps the last two."""
    pool = {"pool_kernel_size": 2} | pool
    relu_first = pool.pop("relu_first", True)
    names = {k.removeprefix("pool_"): v for k, v in pool.items() if k.startswith("pool_")}
    named = {k: v for k, v in pool.items() if not k.startswith("pool_") and k != "ceil_mode"}
    convolved = F.conv2d(x, w, b, *convolution, **named)
    names["ceil_mode"] = pool.get("ceil_mode", False)
    if relu_first:
        return F.max_pool2d(F.relu(convolved), **names)
    return F.relu(F.max_pool2d(convolved, **names))


def integers(*shape: int, device: Any, dtype: torch.dtype = torch.float32, most: int = 3) -> Tensor:
    return torch.randint(-most, most + 1, shape, device=device).to(dtype)


def output_and_grads(function, inputs, grad, *args, **kwargs):
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    output = function(*leaves, *args, **kwargs)
    wanted = [t for t in leaves if t is not None]
    return output.detach(), *torch.autograd.grad(output, wanted, grad(output))


def assert_like_stock(inputs, *args, grad=None, relu_first=True, **kwargs) -> None:
    """Bit for bit: inputs are small integers and special values."""
    grads: list[Tensor] = []

    def same_grad(output: Tensor) -> Tensor:
        if not grads:
            grads.append(integers(*output.shape, device=output.device, dtype=output.dtype))
        return grads[0] if grad is None else grad(output)

    order = {"relu_first": relu_first}
    expected = output_and_grads(stock, inputs, same_grad, *args, **kwargs, **order)
    with unchanged(*(t for t in inputs if t is not None)):
        actual = output_and_grads(conv_relu_pool2d, inputs, same_grad, *args, **kwargs)
    assert_same_bits(actual, expected)


# -- Values ----------------------------------------------------------------------------------------

pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
small = st.tuples(st.integers(0, 1), st.integers(0, 1))


@st.composite
def problems(draw):
    """Arguments of every kind; some are impossible, and then eager raises too."""
    groups = draw(st.integers(1, 3))
    return {
        "groups": groups,
        "shape": (
            draw(st.integers(0, 4)),
            groups * draw(st.integers(1, 2)),
            *draw(st.tuples(st.integers(1, 11), st.integers(1, 11))),
        ),
        "filters": groups * draw(st.integers(1, 3)),
        "kernel": draw(pairs),
        "stride": draw(pairs),
        "padding": draw(small),
        "dilation": draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        "bias": draw(st.booleans()),
        "channels_last": draw(st.tuples(st.booleans(), st.booleans())),
        "dtype": draw(st.sampled_from(DTYPES)),
        "specials": draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), max_size=2)),
        "pool": {
            "pool_kernel_size": draw(st.tuples(st.integers(1, 4), st.integers(1, 5))),
            "pool_stride": draw(st.one_of(st.none(), pairs)),
            "pool_padding": draw(small),
            "pool_dilation": draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
            "ceil_mode": draw(st.booleans()),
        },
        "relu_first": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }


@given(problem=problems())
def test_every_combination_of_parameters(backend, problem):
    torch.manual_seed(problem["seed"])
    of = {"device": backend.device, "dtype": problem["dtype"]}
    x = integers(*problem["shape"], **of)
    for value in problem["specials"] if x.numel() else ():
        x.view(-1)[torch.randint(x.numel(), ())] = value
    filters, groups = problem["filters"], problem["groups"]
    w = integers(filters, x.shape[1] // groups, *problem["kernel"], **of, most=2)
    b = integers(filters, **of) if problem["bias"] else None
    x, w = (
        t.contiguous(memory_format=torch.channels_last) if last else t
        for t, last in zip((x, w), problem["channels_last"], strict=True)
    )
    args = (problem["stride"], problem["padding"], problem["dilation"], groups)
    try:
        expected = stock(x, w, b, *args, **problem["pool"])
    except RuntimeError:
        with pytest.raises(RuntimeError, match="conv_relu_pool2d"):
            conv_relu_pool2d(x, w, b, *args, **problem["pool"])
        return
    if bool((expected == -math.inf).any()):
        # A dilated window may hold no element at all. Eager's pool then writes an index outside the
        # input; only the value can be compared, and it is -inf because the pool comes last.
        assert_same_bits(conv_relu_pool2d(x, w, b, *args, **problem["pool"]), expected)
        return
    assert_like_stock((x, w, b), *args, **problem["pool"], relu_first=problem["relu_first"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("images", "channels", "filters", "size", "kernel", "padding"),
    [(5, 1, 10, 28, 5, 0), (3, 10, 20, 12, 5, 0), (2, 3, 33, 17, 3, 1)],
)
def test_accuracy(backend, dtype, images, channels, filters, size, kernel, padding):
    x = torch.randn(images, channels, size, size, device=backend.device).to(dtype)
    w = torch.randn(filters, channels, kernel, kernel, device=backend.device).to(dtype) / kernel
    b = torch.randn(filters, device=backend.device).to(dtype)

    def results(function, *inputs):
        return output_and_grads(function, inputs, torch.ones_like, 1, padding)

    ours, theirs = results(conv_relu_pool2d, x, w, b), results(stock, x, w, b)
    exact = results(stock, x.double(), w.double(), b.double())
    assert_accurate(ours[0], theirs[0], exact[0])
    for got, reference, right in zip(ours[1:], theirs[1:], exact[1:], strict=True):
        assert_accurate(got, reference, right, factor=3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_special_value_in_every_position(backend, value, channels_last):
    # The identity convolution shows the pool its input; widths and channels cross the vector sizes.
    for channels, width in ((1, 33), (33, 6), (2, 17)):
        w = torch.eye(channels, device=backend.device).view(channels, channels, 1, 1)
        x = integers(1, channels, 4, width, device=backend.device)
        for position in range(0, x.numel(), 7):
            planted = x.clone()
            planted.view(-1)[position] = value
            if not channels_last:
                # 0 * inf is NaN: keep other channels out of the sum.
                args = (planted, torch.ones(channels, 1, 1, 1, device=backend.device), None)
                assert_like_stock(args, 1, 0, 1, channels)
            elif not math.isinf(value):
                planted = planted.contiguous(memory_format=torch.channels_last)
                assert_like_stock((planted, w, None))


def test_windows_of_equal_values_go_to_the_first(backend):
    x = torch.zeros(2, 1, 8, 8, device=backend.device)
    w = torch.ones(3, 1, 3, 3, device=backend.device)
    assert_like_stock((x, w, torch.tensor([1.0, 0.0, -1.0], device=backend.device)))


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "expected"),
    [((6, 7), 1, 2, 0, (3, 4)), ((5, 5), 2, 2, 1, (3, 3)), ((8, 10), 3, 4, 0, (2, 3))],
)
def test_ceil_mode_drops_windows_that_start_outside(
    backend, size, kernel, stride, padding, expected
):
    x, w = integers(1, 1, *size, device=backend.device), torch.ones(1, 1, 1, 1)
    pool = {"pool_kernel_size": kernel, "pool_stride": stride, "pool_padding": padding}
    inputs = (x, w.to(backend.device), None)
    assert conv_relu_pool2d(*inputs, **pool, ceil_mode=True).shape[2:] == expected
    assert_like_stock(inputs, **pool, ceil_mode=True)


@pytest.mark.parametrize("pool", [(3, 5), (4, 4), (15, 17), (16, 16), (255, 257), (256, 257)])
def test_windows_of_every_code_size(backend, pool):
    # 15, 16, 255, 256, 65535 and 65792 positions: both sides of every change of code size.
    x = torch.randint(-3, 100, (1, 2, pool[0] + 1, pool[1] + 1), device=backend.device).float()
    w = integers(3, 2, 1, 1, device=backend.device)
    assert_like_stock((x, w, None), pool_kernel_size=pool, pool_stride=1)


def test_long_sums_do_not_drift(backend):
    # 4096 ones: an accumulator in bfloat16 stops at 256, one in float16 at 2048.
    for dtype in (torch.bfloat16, torch.float16):
        x, w = (torch.ones(1, 1024, 4, 4, device=backend.device, dtype=dtype) for _ in range(2))
        assert conv_relu_pool2d(x, w[:, :, :2, :2]).item() == 4096


# -- Layouts, shapes ------------------------------------------------------------------------------


def test_any_strides(backend):
    base = integers(1, 4, 6, 6, device=backend.device).expand(3, 4, 6, 6)
    for x in layouts(base).values():
        for w in layouts(integers(1, 4, 3, 3, device=backend.device).expand(5, 4, 3, 3)).values():
            assert_like_stock((x, w, None), grad=torch.ones_like)
    x, w = integers(3, 4, 6, 6, device=backend.device), integers(5, 4, 3, 3, device=backend.device)
    for name in ("channels_last", "transposed", "sliced"):
        assert_like_stock((x, w, None), grad=lambda y, name=name: layouts(torch.ones_like(y))[name])
    # sum() sends back a gradient of stride 0
    assert_like_stock((x, w, None), grad=lambda y: torch.ones((), device=y.device).expand(y.shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [(False, False), (False, True), (True, False)])
def test_memory_formats_are_eagers(backend, dtype, channels_last):
    formats = [torch.channels_last if last else torch.contiguous_format for last in channels_last]
    x = integers(2, 3, 7, 8, device=backend.device, dtype=dtype).to(memory_format=formats[0])
    w = integers(4, 3, 3, 3, device=backend.device, dtype=dtype).to(memory_format=formats[1])
    ours = output_and_grads(conv_relu_pool2d, (x, w, None), torch.ones_like)
    theirs = output_and_grads(stock, (x, w, None), torch.ones_like)
    assert [t.stride() for t in ours[:2]] == [t.stride() for t in theirs[:2]]
    assert ours[2].stride() == w.stride()  # where eager's optimizer step has to copy


def test_unbatched(backend):
    x, w = integers(2, 6, 6, device=backend.device), integers(3, 2, 3, 3, device=backend.device)
    assert_like_stock((x, w, None))
    assert_compiles(conv_relu_pool2d, (x.requires_grad_(), w), backend="aot_eager")


def test_empty_batch(backend):
    x = torch.empty(0, 2, 6, 6, device=backend.device)
    w, b = integers(3, 2, 3, 3, device=backend.device), integers(3, device=backend.device)
    output, dx, dw, db = output_and_grads(conv_relu_pool2d, (x, w, b), torch.ones_like)
    assert output.shape == (0, 3, 2, 2)
    assert dx.shape == x.shape
    assert_same_bits((dw, db), (torch.zeros_like(w), torch.zeros_like(b)))


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kernel", [(3, 3), (2, 4), (4, 3)])
def test_padding_by_name(backend, padding, kernel):
    x = integers(2, 2, 7, 8, device=backend.device)
    w = integers(3, 2, *kernel, device=backend.device)
    assert_like_stock((x, w, None), 1, padding, (1, 2))


# -- Memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pool", "bits"), [(2, 4), (4, 8), (16, 16)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_saves_its_input_its_weight_and_the_codes(backend, dtype, pool, bits):
    x = torch.randn(2, 3, 34, 34, device=backend.device, dtype=dtype).requires_grad_()
    w = torch.randn(5, 3, 3, 3, device=backend.device, dtype=dtype).requires_grad_()
    b = torch.randn(5, device=backend.device, dtype=dtype).requires_grad_()

    def run() -> Tensor:
        return conv_relu_pool2d(x, w, b, pool_kernel_size=pool)

    outputs = (32 // pool) ** 2
    codes = 2 * 5 * math.ceil(outputs * bits / 8)
    assert saved_bytes(run) == codes + sum(t.numel() * t.element_size() for t in (x, w))
    storages = {t.untyped_storage().data_ptr() for t in saved_tensors(run)}
    assert {t.untyped_storage().data_ptr() for t in (x, w)} <= storages


def test_keeps_no_codes_where_no_gradient_is_wanted(backend):
    x, w = integers(2, 2, 8, 8, device=backend.device), integers(3, 2, 3, 3, device=backend.device)
    expected = conv_relu_pool2d(x.requires_grad_(), w)
    with torch.no_grad():
        assert saved_bytes(lambda: conv_relu_pool2d(x, w)) == 0
        assert_same_bits(conv_relu_pool2d(x, w), expected.detach())
    windows = [[1, 1], [0, 0], [1, 1], 1, [2, 2], [2, 2], [0, 0], [1, 1], False, "relu", 0.0, 0.0]
    assert OPS["conv_relu_pool2d"](x, w, None, *windows, False)[1].numel() == 0


def test_the_convolution_never_exists_in_full(backend):
    if backend.name == "reference":
        return  # readable rather than lean
    x = torch.randn(128, 1, 28, 28, device=backend.device)
    w = torch.randn(20, 1, 5, 5, device=backend.device).requires_grad_()
    convolved = 128 * 20 * 24 * 24 * 4
    assert peak_bytes(lambda: conv_relu_pool2d(x, w).sum().backward()) < convolved


# -- Autograd --------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlapping", [False, True])
def test_gradcheck_to_second_order(backend, overlapping):
    of = {"device": backend.device, "dtype": torch.float64}
    x = torch.randn(2, 2, 6, 5, **of).requires_grad_()
    w, b = torch.randn(4, 1, 3, 2, **of).requires_grad_(), torch.randn(4, **of).requires_grad_()

    def function(x, w, b):
        pool = {"pool_kernel_size": 3, "pool_stride": 1, "pool_padding": 1} if overlapping else {}
        return conv_relu_pool2d(x, w, b, 1, 1, 1, 2, **pool)

    torch.autograd.gradcheck(function, (x, w, b))
    torch.autograd.gradgradcheck(function, (x, w, b))


@pytest.mark.parametrize("wanted", range(1, 8))
def test_every_subset_of_gradients(backend, wanted):
    inputs = [
        integers(2, 2, 6, 6, device=backend.device),
        integers(3, 2, 3, 3, device=backend.device),
        integers(3, device=backend.device),
    ]
    for k, tensor in enumerate(inputs):
        tensor.requires_grad_(bool(wanted >> k & 1))
    leaves = [t for t in inputs if t.requires_grad]
    ours = torch.autograd.grad(conv_relu_pool2d(*inputs).sum(), leaves)
    assert_same_bits(ours, torch.autograd.grad(stock(*inputs).sum(), leaves))


def test_backward_twice(backend):
    x = integers(2, 2, 6, 6, device=backend.device).requires_grad_()
    w = integers(3, 2, 3, 3, device=backend.device).requires_grad_()
    y = conv_relu_pool2d(x, w)
    first = torch.autograd.grad(y, (x, w), torch.ones_like(y), retain_graph=True)
    kept = [t.clone() for t in first]
    second = torch.autograd.grad(y, (x, w), 2 * torch.ones_like(y))
    assert_same_bits(first, tuple(kept))
    assert_same_bits(second, tuple(2 * t for t in kept))


def test_same_bits_for_any_number_of_threads(backend):
    x = torch.randn(9, 3, 16, 16, device=backend.device)
    w = torch.randn(8, 3, 3, 3, device=backend.device)
    pool = {"pool_kernel_size": 3, "pool_stride": 2}
    args = (conv_relu_pool2d, (x, w, None), torch.ones_like)
    # Across numbers of threads the stock convolution, which the reference is made of, rounds
    # differently.
    threads = (2,) if backend.name == "reference" else (1, 2, 3)
    assert_same_for_threads(lambda: output_and_grads(*args, **pool), threads=threads)


def test_opcheck(backend):
    base = torch.randn(1, 4, 6, 7, device=backend.device).expand(2, 4, 6, 7)
    w = torch.randn(6, 2, 3, 3, device=backend.device).requires_grad_()
    b = torch.randn(6, device=backend.device).requires_grad_()
    windows = ([1, 1], [1, 1], [1, 1], 2, [3, 3], [2, 2], [1, 1], [1, 1], True, "relu", 0.0, 0.0)
    for x in (*layouts(base).values(), torch.randn(0, 4, 6, 7, device=backend.device)):
        check_op(OPS["conv_relu_pool2d"], x.requires_grad_(), w, b, *windows, True)
        y, codes = OPS["conv_relu_pool2d"](x.detach(), w.detach(), None, *windows, True)
        args = (torch.randn_like(y), x.detach(), w.detach(), codes, *windows)
        check_op(OPS["conv_relu_pool2d_backward"], *args, True, True, False)
        check_op(OPS["conv_relu_pool2d_backward"], *args, False, True, True)


# -- Transforms, torch.compile, autocast ----------------------------------------------------------


def test_function_transforms_are_right(backend):
    x = torch.randn(2, 2, 6, 6, device=backend.device)
    w = torch.randn(3, 2, 3, 3, device=backend.device)
    tangents = (torch.randn_like(x), torch.randn_like(w))
    ours = torch.func.jvp(conv_relu_pool2d, (x, w), tangents)
    assert_same_bits(ours, torch.func.jvp(stock, (x, w), tangents))

    def per_image(function):
        return torch.func.vmap(torch.func.grad(lambda i, w: function(i, w).sum()), (0, None))(x, w)

    torch.testing.assert_close(per_image(conv_relu_pool2d), per_image(stock))


def test_compiles_in_one_graph_without_recompiling(backend):
    w = torch.randn(4, 3, 3, 3, device=backend.device).requires_grad_()
    b = torch.randn(4, device=backend.device).requires_grad_()
    batches = [torch.randn(n, 3, 11, 11, device=backend.device).requires_grad_() for n in (5, 6, 8)]
    assert_compiles(lambda x, w, b: conv_relu_pool2d(x, w, b, 1, 1), *((x, w, b) for x in batches))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_autocast_is_eagers(backend, dtype, bias):
    x = integers(2, 2, 6, 6, device=backend.device, dtype=dtype).requires_grad_()
    w = integers(3, 2, 3, 3, device=backend.device).requires_grad_()
    b = integers(3, device=backend.device).requires_grad_() if bias else None

    def run(function):
        with torch.autocast(backend.device.type, torch.bfloat16):
            output = function(x, w, b)
        wanted = [t for t in (x, w, b) if t is not None]
        return output.detach(), *torch.autograd.grad(output, wanted, torch.ones_like(output))

    if dtype == torch.float64:  # which autocast leaves alone, and the dtypes then differ
        assert_raises_same(lambda: run(stock), lambda: run(conv_relu_pool2d))
    else:
        assert_same_bits(run(conv_relu_pool2d), run(stock))


# -- Bad inputs ------------------------------------------------------------------------------------

BAD = {
    "channels": {"weight": (3, 3, 3, 3)},
    "filters": {"groups": 2},
    "bias": {"bias": (4,)},
    "kernel beyond the input": {"weight": (3, 2, 9, 9)},
    "stride 0": {"stride": 0},
    "negative padding": {"padding": -1},
    "dilation 0": {"dilation": 0},
    "groups 0": {"groups": 0},
    "negative groups": {"groups": -1},
    "pool stride 0": {"pool_stride": 0},
    "pool dilation 0": {"pool_dilation": 0},
    "pool kernel 0": {"pool_kernel_size": 0},
    "pool beyond the output": {"pool_kernel_size": 9},
    "pool padding": {"pool_padding": 2},
    "two dimensions": {"input": (6, 6)},
    "padding same with stride": {"padding": "same", "stride": 2},
    "three strides": {"stride": (1, 1, 1)},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
def test_bad_arguments_raise_as_stock(backend, bad):
    bad = dict(bad)
    x = torch.ones(bad.pop("input", (2, 2, 6, 6)), device=backend.device)
    w = torch.ones(bad.pop("weight", (3, 2, 3, 3)), device=backend.device)
    b = torch.ones(bad.pop("bias", (3,)), device=backend.device)
    assert_raises_same(lambda: stock(x, w, b, **bad), lambda: conv_relu_pool2d(x, w, b, **bad))


@pytest.mark.parametrize("bad", [None, 3, "x", [1.0]])
def test_what_is_no_tensor_is_named_as_stock(backend, bad):
    x = torch.ones(2, 2, 6, 6, device=backend.device)
    for args in ((bad, x), (x, bad)):
        assert_raises_same(lambda a=args: stock(*a), lambda a=args: conv_relu_pool2d(*a))


def test_an_output_too_large_to_count_raises(backend):
    # 2^32 x 2^32 outputs of the convolution, whose number is 0 modulo 2^64, and 3 x 3 of the pool.
    x, w = torch.ones(1, 1, 4, 4, device=backend.device), torch.ones(1, 1, 3, 3)
    huge = {"padding": 2**31 - 1, "pool_kernel_size": 1, "pool_stride": 2**31 - 1}
    with pytest.raises(RuntimeError):
        conv_relu_pool2d(x, w.to(x.device), **huge)


def test_mixed_dtypes_are_named(backend):
    x = torch.ones(2, 2, 6, 6, device=backend.device)
    w = torch.ones(3, 2, 3, 3, device=backend.device)
    b = torch.ones(3, device=backend.device)
    for args in ((x, w.double()), (x.bfloat16(), w), (x, w, b.half())):
        assert_raises_same(lambda a=args: stock(*a), lambda a=args: conv_relu_pool2d(*a))
    with pytest.raises(RuntimeError, match=r"(?i)float.*double|float32.*float64"):
        conv_relu_pool2d(x, w.double())


@pytest.mark.parametrize("name", ["gelu", "", None])
def test_an_unknown_activation_is_named(backend, name):
    x, w = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 1, 1)
    with pytest.raises(ValueError, match="activation is"):
        conv_relu_pool2d(x, w, activation=name)
    with pytest.raises(ValueError, match="activation is"):
        ConvReLUPool2d(1, 1, 1, activation=name)
    with pytest.raises(ValueError, match="padding is"):
        conv_relu_pool2d(x, w, padding="full")


def raw_arguments(device) -> list[Any]:
    """Valid ones of the raw backward op: a pool of 2x2 over 4x4 outputs."""
    x, w = torch.ones(2, 2, 6, 6, device=device), torch.ones(3, 2, 3, 3, device=device)
    windows = [[1, 1], [0, 0], [1, 1], 1, [2, 2], [2, 2], [0, 0], [1, 1], False, "relu", 0.0, 0.0]
    codes = torch.zeros(2, 3, 2, dtype=torch.uint8, device=device)
    grad = torch.ones(2, 3, 2, 2, device=device)
    return [grad, x, w, codes, *windows, True, True, True]


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, torch.ones(2, 3, 2, 3)),
        (0, torch.ones(2, 3, 2, 2).double()),
        (0, torch.ones(3)),
        (1, torch.ones(2, 2, 7, 9)),
        (1, torch.ones(2, 4, 6, 6)),
        (2, torch.ones(3, 2, 3)),
        (3, torch.zeros(2, 3, 1, dtype=torch.uint8)),
        (3, torch.zeros(2, 3, 2, dtype=torch.int32)),
        (3, torch.zeros(12, dtype=torch.uint8)),
        (4, [1]),
        (4, [2**62, 2**62]),
        (7, 2**62),
        (8, [2**40, 2**40]),
        (8, [2, 2, 2]),
        (10, [-1, -1]),
        (13, "tanh"),
    ],
)
def test_the_raw_backward_checks_everything(backend, index, value):
    args = raw_arguments(backend.device)
    args[index] = value.to(backend.device) if isinstance(value, Tensor) else value
    with pytest.raises(RuntimeError, match="conv_relu_pool2d"):
        OPS["conv_relu_pool2d_backward"](*args)


@pytest.mark.parametrize(("index", "name"), [(0, "grad"), (3, "codes")])
def test_the_raw_backward_names_a_tensor_elsewhere(backend, index, name):
    # A meta tensor among them would take the call to the fake, whose results hold no data.
    args = raw_arguments(backend.device)
    args[index] = args[index].to("meta")
    for op in (torch.ops.memopt, torch.ops.memopt_reference):
        with pytest.raises(RuntimeError, match=f"{name} is on meta"):
            op.conv_relu_pool2d_backward(*args)


def test_codes_from_outside_cannot_point_outside(backend):
    # Padded windows reach over the border; every code is tried, also those that no forward writes.
    args = raw_arguments(backend.device)
    args[8:12] = [3, 3], [2, 2], [1, 1], [1, 1]
    for code in range(256):
        args[3] = torch.full((2, 3, 2), code, dtype=torch.uint8, device=backend.device)
        dx, dw, _ = OPS["conv_relu_pool2d_backward"](*args)
        assert bool(dx.isfinite().all())
        assert bool(dw.isfinite().all())


def test_the_raw_backward_has_no_derivative(backend):
    args = raw_arguments(backend.device)
    args[0].requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph"):
        OPS["conv_relu_pool2d_backward"](*args)[0].sum().backward()


# -- Codes and the layer --------------------------------------------------------------------------


@given(st.sampled_from([2, 15, 16, 255, 256, 65535, 65536]), st.integers(0, 9), st.integers(0, 99))
def test_codes_survive_packing(positions, outputs, seed):
    codes = torch.randint(-1, positions, (2, 3, outputs), generator=torch.manual_seed(seed))
    packed = _pool_codes.pack_codes(codes, positions)
    assert packed.shape[-1] == _pool_codes.plane_bytes(outputs, positions)
    unpacked = _pool_codes.unpack_codes(packed, outputs, positions)
    assert_same_bits(torch.where(unpacked >= positions, -1, unpacked), codes)


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
def test_layer_takes_the_place_of_three(backend, padding_mode):
    args = (2, 4, 3, 1, 2, 1, 2, True, padding_mode)
    three = torch.nn.Sequential(
        torch.nn.Conv2d(*args), torch.nn.ReLU(), torch.nn.MaxPool2d(3, 2, 1, ceil_mode=True)
    ).to(backend.device)
    pool = {"pool_kernel_size": 3, "pool_stride": 2, "pool_padding": 1, "ceil_mode": True}
    one = ConvReLUPool2d(*args, **pool).to(backend.device)
    assert isinstance(one, torch.nn.Conv2d)
    one.load_state_dict(three[0].state_dict())
    x = torch.randn(2, 2, 9, 9, device=backend.device)
    torch.testing.assert_close(one(x), three(x))
    assert "pool_kernel_size=3" in repr(one)
