"""Linear layer and log-softmax in one, against the two stock functions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import memopt
from memopt.nn.functional import linear_log_softmax
from memopt.ops import _linear
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
    saved_tensors,
    unchanged,
)

pytestmark = pytest.mark.portable

# (leading dimensions, H, V): tails of every vector width, one class, no rows, no features.
SIZES = (((7,), 5, 33), ((2, 3), 4, 16), ((), 3, 10), ((1,), 8, 1), ((0,), 5, 7), ((3,), 0, 4))


def stock(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.log_softmax(F.linear(x, weight, bias), dim=-1)


def operands(lead=(7,), features=5, classes=33, dtype=torch.float32, device="cpu", bias=True):
    """x, W and b, as leaves that require gradients."""
    x = torch.randn(*lead, features, device=device)
    weight = torch.randn(classes, features, device=device)
    b = torch.randn(classes, device=device)
    return [t.to(dtype).requires_grad_() for t in ([x, weight, b] if bias else [x, weight])]


def output_and_grads(function, args: list[Tensor], grad: Tensor) -> list[Tensor]:
    output = function(*args)
    wanted = [a for a in args if a.requires_grad]
    return [output.detach(), *torch.autograd.grad(output, wanted, grad.to(output.dtype))]


def assert_like_stock(args: list[Tensor], grad: Tensor | None = None) -> None:
    grad = torch.randn_like(stock(*args)) if grad is None else grad
    with unchanged(*args, grad):
        actual = output_and_grads(linear_log_softmax, args, grad)
    expected = output_and_grads(stock, args, grad)
    exact = [a.detach().double().requires_grad_(a.requires_grad) for a in args]
    exact = output_and_grads(stock, exact, grad)
    for k, results in enumerate(zip(actual, expected, exact, strict=True)):
        assert_accurate(*results, factor=3 if k else 2)


@pytest.fixture
def small_chunks(monkeypatch):
    """Three rows to a chunk, so that small tensors pass through several."""
    monkeypatch.setattr(_linear, "rows_per_chunk", lambda classes, dtype: 3)


# -- Values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients_are_stock(backend, size, dtype):
    for bias in (True, False):
        assert_like_stock(operands(*size, dtype, backend.device, bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_over_many_chunks(backend, dtype, small_chunks):
    assert_like_stock(operands((50,), 6, 21, dtype, backend.device))


@given(
    lead=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    features=st.integers(1, 9),
    classes=st.integers(1, 70),
    seed=st.integers(0, 2**16),
)
def test_any_shape(backend, lead, features, classes, seed):
    torch.manual_seed(seed)
    args = operands(lead, features, classes, device=backend.device)
    grad = torch.randn((*lead, classes), device=backend.device)
    actual = output_and_grads(linear_log_softmax, args, grad)
    torch.testing.assert_close(actual, output_and_grads(stock, args, grad), rtol=1e-4, atol=1e-5)


def test_long_rows(backend):
    """More than one stretch of the kernel's sums, and probabilities that underflow."""
    x, weight, bias = operands((3,), 4, 5003, device=backend.device)
    assert_like_stock([x.detach().mul(20).requires_grad_(), weight, bias])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_as_stock(backend, dtype):
    for position, value in itertools.product((0, 5, 17), (math.nan, math.inf, -math.inf)):
        x, weight, bias = operands((4,), 3, 18, dtype, backend.device)
        with torch.no_grad():
            bias[position] = value
        assert_like_stock([x, weight, bias])
    x, weight, bias = operands((4,), 3, 18, dtype, backend.device)
    with torch.no_grad():
        bias.fill_(-math.inf)
        x[1, 1] = math.nan
    assert_like_stock([x, weight, bias])


def test_any_strides(backend, small_chunks):
    x, weight, bias = operands((8,), 6, 9, device=backend.device)
    grad = torch.randn(1, 9, device=backend.device).expand(8, 9)
    x = x.detach()[:1].expand(8, 6)
    for x_, weight_, bias_, grad_ in itertools.product(
        layouts(x).values(),
        layouts(weight).values(),
        layouts(bias).values(),
        (grad, grad.contiguous(), grad.t().contiguous().t()),
    ):
        assert_like_stock([t.requires_grad_() for t in (x_, weight_, bias_)], grad_)


def test_same_bits_for_any_number_of_threads(backend):
    # The row kernels' own work: the stock matrix product with one feature has no sum to reorder.
    args = operands((300,), 1, 300, device=backend.device)
    grad = torch.randn(300, 300, device=backend.device)
    assert_same_for_threads(lambda: linear_log_softmax(*args).detach())
    args[0].requires_grad_(False)
    args[1].requires_grad_(False)
    assert_same_for_threads(lambda: output_and_grads(linear_log_softmax, args, grad))


def test_low_precision_weight_gradient_does_not_drift_with_chunks(backend, monkeypatch):
    args = operands((256,), 4, 8, torch.bfloat16, backend.device)
    grad = torch.rand(256, 8, device=backend.device).to(torch.bfloat16)
    exact = output_and_grads(stock, [a.detach().double().requires_grad_() for a in args], grad)[2]

    def error(rows: int) -> float:
        monkeypatch.setattr(_linear, "rows_per_chunk", lambda classes, dtype: rows)
        weight_grad = output_and_grads(linear_log_softmax, args, grad)[2]
        return torch.linalg.vector_norm(weight_grad.double() - exact).item()

    assert error(1) <= 1.2 * error(256)


# -- Memory ----------------------------------------------------------------------------------------


def test_saves_only_its_result_and_the_operands(backend):
    x, weight, bias = operands((6,), 5, 40, device=backend.device)
    output = []
    saved = saved_tensors(lambda: output.append(linear_log_softmax(x, weight, bias)))
    addresses = sorted(t.data_ptr() for t in saved)
    assert addresses == sorted(t.data_ptr() for t in (output[0], x, weight))


def test_peak_has_no_logits_beside_the_result(backend, monkeypatch):
    monkeypatch.setattr(_linear, "rows_per_chunk", lambda classes, dtype: 64)
    args = operands((1024,), 8, 1024, device=backend.device)
    result = 4 * 1024 * 1024

    def step():
        output = linear_log_softmax(*args)
        torch.autograd.grad(output, args, torch.ones_like(output))

    with torch.no_grad():
        assert peak_bytes(lambda: linear_log_softmax(*args), backend.device) < 1.2 * result
    # Beside the result: its gradient, and what a chunk or two take.
    assert peak_bytes(step, backend.device) < 2.5 * result


# -- Autograd --------------------------------------------------------------------------------------


def test_gradcheck_to_second_order(backend, small_chunks):
    args = operands((5,), 3, 4, torch.float64, backend.device)
    torch.autograd.gradcheck(linear_log_softmax, args)
    torch.autograd.gradgradcheck(linear_log_softmax, args)


def test_every_subset_of_gradients(backend, small_chunks):
    for needs in itertools.product((False, True), repeat=3):
        args = operands(device=backend.device)
        for tensor, need in zip(args, needs, strict=True):
            tensor.requires_grad_(need)
        if any(needs):
            assert_like_stock(args)
        else:
            assert not linear_log_softmax(*args).requires_grad


def test_backward_twice(backend):
    args = operands(device=backend.device)
    output = linear_log_softmax(*args)
    grads = [torch.randn_like(output) for _ in range(2)]
    first = torch.autograd.grad(output, args, grads[0], retain_graph=True)
    before = [g.clone() for g in first]
    second = torch.autograd.grad(output, args, grads[1])
    assert_same_bits(first, before)
    for grad, got in zip(grads, (first, second), strict=True):
        assert_same_bits(list(got), output_and_grads(linear_log_softmax, args, grad)[1:])


def test_opcheck(backend):
    x, weight, bias = operands(device=backend.device)
    for x_ in layouts(x).values():
        check_op(OPS["linear_log_softmax"], x_.requires_grad_(), weight, bias, None, 3)
    x, weight, _ = operands(dtype=torch.bfloat16, device=backend.device)
    check_op(OPS["linear_log_softmax"], x, weight, None, torch.float32, 3)
    with torch.no_grad():
        output = linear_log_softmax(x, weight)
    args = (torch.randn_like(output), output, x.detach(), weight.detach())
    for wanted in ((True, True, True), (False, True, False)):
        check_op(OPS["linear_log_softmax_backward"], *args, *wanted, 3)


# -- Transforms, torch.compile, autocast -----------------------------------------------------------


def test_function_transforms_are_right(backend):
    args = [a.detach() for a in operands(device=backend.device)]
    tangents = [torch.randn_like(a) for a in args]
    ours = torch.func.jvp(linear_log_softmax, tuple(args), tuple(tangents))
    torch.testing.assert_close(ours, torch.func.jvp(stock, tuple(args), tuple(tangents)))

    def row_grads(function):
        square = torch.func.grad(lambda row, w: function(row, w).square().sum())
        return torch.func.vmap(square, in_dims=(0, None))(*args[:2])

    torch.testing.assert_close(row_grads(linear_log_softmax), row_grads(stock))


def test_compiles_in_one_graph_without_recompiling(backend):
    weight, bias = operands(device=backend.device)[1:]
    batches = [operands((n,), device=backend.device)[0] for n in (4, 6, 9)]
    assert_compiles(linear_log_softmax, *((x, weight, bias) for x in batches))


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_autocast_as_stock(backend, amp, bias):
    args = operands((9,), 6, 20, device=backend.device, bias=bias)
    with torch.autocast(backend.device.type, amp):
        assert_like_stock(args)
        wide = [a.detach().double() for a in args]
        assert linear_log_softmax(*wide).dtype == stock(*wide).dtype
        mixed = [args[0].to(torch.bfloat16), *args[1:]]
        assert linear_log_softmax(*mixed).dtype == stock(*mixed).dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_result_of_low_precision_operands(backend, dtype):
    """What autocast asks for on devices where it widens log_softmax, over several chunks."""
    x, weight, bias = operands((10,), 6, 20, dtype, backend.device)
    args, grad = [x, weight, bias], torch.randn(10, 20, device=backend.device)

    def wide(*tensors):
        return F.log_softmax(F.linear(*tensors).float(), dim=-1)

    actual = output_and_grads(
        lambda *t: OPS["linear_log_softmax"](*t, torch.float32, 3), args, grad
    )
    expected = output_and_grads(wide, args, grad)
    exact = output_and_grads(stock, [a.detach().double().requires_grad_() for a in args], grad)
    for k, results in enumerate(zip(actual, expected, exact, strict=True)):
        assert_accurate(*results, factor=3 if k else 2)


# -- Bad inputs ------------------------------------------------------------------------------------


def test_bad_shapes_raise_as_stock(backend):
    x, weight, bias = (a.detach() for a in operands(device=backend.device))
    for args in (
        (x, weight[:, :4], bias),
        (x, weight, bias[:6]),
        (x[0, 0], weight, bias),
        (x, weight[None], bias),
        (None, weight),
        (x, None),
        (x, weight.sum()),
    ):
        with pytest.raises((RuntimeError, TypeError)):
            stock(*args)
        with pytest.raises((RuntimeError, TypeError), match="linear_log_softmax: "):
            linear_log_softmax(*args)
    assert_raises_same(
        lambda: stock(x, weight[:, :4]), lambda: linear_log_softmax(x, weight[:, :4])
    )


def test_mixed_dtypes_raise_and_name_both(backend):
    x, weight, _ = operands(dtype=torch.float16, device=backend.device)
    with pytest.raises(TypeError, match=r"weight has dtype torch\.bfloat16.*torch\.float16"):
        linear_log_softmax(x, weight.to(torch.bfloat16))


def test_the_raw_ops_check_their_arguments(backend):
    x, weight, bias = (a.detach() for a in operands(device=backend.device))
    y = torch.zeros(7, 33, device=backend.device)
    raw, backward = OPS["linear_log_softmax"], OPS["linear_log_softmax_backward"]
    for args in (
        (x[0], weight, bias, None, 1),
        (x.long(), weight.long(), None, None, 1),
        (x, weight[:, :4], bias, None, 1),
        (x, weight.double(), bias, None, 1),
        (x, weight, bias[:4], None, 1),
        (x, weight, bias.double(), None, 1),
        (x, weight, bias.to("meta"), None, 1),
        (x, weight.to("meta"), bias, None, 1),
        (x, weight, bias, torch.float16, 1),
        (x, weight, bias, None, 0),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            raw(*args)
    for grad, output in ((y[:6], y), (y, y[:, :4]), (y.double(), y), (y.half(), y.half())):
        with pytest.raises(RuntimeError, match="linear_log_softmax_backward: "):
            backward(grad, output, x, weight, True, True, True, 1)


# -- The layer -------------------------------------------------------------------------------------


def test_layer_is_a_linear_layer(backend):
    layer = memopt.nn.LinearLogSoftmax(5, 33, device=backend.device)
    linear = torch.nn.Linear(5, 33, device=backend.device)
    assert isinstance(layer, torch.nn.Linear)
    layer.load_state_dict(linear.state_dict())
    x = torch.randn(7, 5, device=backend.device)
    torch.testing.assert_close(layer(x), linear(x).log_softmax(-1))
    assert memopt.nn.LinearLogSoftmax(5, 3, bias=False, dtype=torch.float64).bias is None
