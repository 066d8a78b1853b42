"""ReLU with a 1-bit mask: the model for the test file of an op."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import memopt
from memopt.nn.functional import relu
from support import (
    DTYPES,
    OPS,
    assert_compiles,
    assert_raises_same,
    assert_same_bits,
    assert_same_for_threads,
    check_op,
    layouts,
    saved_bytes,
    unchanged,
)

pytestmark = pytest.mark.portable

SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0)
SHAPES = ((), (0,), (1,), (7,), (8,), (9,), (3, 5), (0, 4), (2, 3, 5, 7), (2, 8, 4, 4))


def sample(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32):
    """Random values, half of them cut, with the special ones among them."""
    x = torch.randn(shape, device=device).to(dtype)
    flat = x.view(-1)
    for k, value in enumerate(SPECIAL[: flat.numel() // 2]):
        flat[2 * k] = value
    return x


def output_and_grad(function, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    output = function(leaf)
    return output.detach(), torch.autograd.grad(output, leaf, grad)[0]


def assert_like_stock(x: Tensor, grad: Tensor | None = None) -> None:
    grad = torch.randn_like(x) if grad is None else grad
    with unchanged(x, grad):
        actual = output_and_grad(relu, x, grad)
    expected = output_and_grad(F.relu, x, grad)
    assert_same_bits(actual[0], expected[0])
    # Eager passes the gradient of a NaN; so do we.
    assert_same_bits(actual[1], expected[1])


# -- Values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_stock(backend, dtype, shape):
    assert_like_stock(sample(shape, backend.device, dtype))


@given(shape=st.lists(st.integers(0, 9), max_size=4).map(tuple), seed=st.integers(0, 2**16))
def test_any_shape(backend, shape, seed):
    torch.manual_seed(seed)
    assert_like_stock(sample(shape, backend.device))


@pytest.mark.parametrize("shape", [(6, 10), (2, 3, 5, 7)])
def test_any_strides(backend, shape):
    x = sample((1, *shape[1:]), backend.device).expand(shape)
    for x_name, x_layout in layouts(x).items():
        for grad_name, grad in layouts(torch.randn_like(x)[:1].expand(shape)).items():
            assert_like_stock(x_layout, grad)
            if x_name != "expanded":
                stock = F.relu(x_layout).stride()
                assert relu(x_layout.requires_grad_()).stride() == stock, (x_name, grad_name)


def test_more_than_one_task_of_the_kernel(backend):
    x = sample((50_001,), backend.device)
    assert_like_stock(x)
    assert_like_stock(x[1::2])


def test_same_bits_for_any_number_of_threads(backend):
    x, grad = (torch.randn(100_003, device=backend.device) for _ in range(2))
    assert_same_for_threads(lambda: output_and_grad(relu, x, grad))


# -- Memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7,), (8,), (3, 5, 7), (0,)])
def test_saves_one_bit_for_each_element(backend, shape):
    x = sample(shape, backend.device).requires_grad_()
    assert saved_bytes(lambda: relu(x)) == (x.numel() + 7) // 8


def test_saves_nothing_where_no_gradient_is_wanted(backend):
    x = sample((8,), backend.device)
    assert saved_bytes(lambda: relu(x)) == 0
    with torch.no_grad():
        assert saved_bytes(lambda: relu(x.requires_grad_())) == 0


# -- Autograd --------------------------------------------------------------------------------------


def test_gradcheck_to_second_order(backend):
    x = torch.tensor([[-2.0, -1.0, 1.5], [0.5, -0.25, 3.0]], dtype=torch.float64)
    for layout in layouts(x.to(backend.device)).values():
        layout.requires_grad_()
        torch.autograd.gradcheck(relu, layout)
        torch.autograd.gradgradcheck(relu, layout)


def test_backward_twice(backend):
    x = sample((9,), backend.device).requires_grad_()
    total = relu(x).sum()
    (first,) = torch.autograd.grad(total, x, retain_graph=True)
    (second,) = torch.autograd.grad(total, x)
    assert_same_bits(first, second)


@pytest.mark.parametrize("name", ["relu", "relu_backward"])
def test_opcheck(backend, name):
    for x in layouts(torch.randn(2, 3, 4, 5, device=backend.device)).values():
        if name == "relu":
            check_op(OPS[name], x.requires_grad_())
        else:
            mask = torch.randint(256, (15,), dtype=torch.uint8, device=backend.device)
            check_op(OPS[name], x.requires_grad_(), mask)
    check_op(OPS["relu"], torch.empty(0, 4, device=backend.device))


# -- Transforms, torch.compile, autocast -----------------------------------------------------------


def test_function_transforms_are_right(backend):
    x, tangent = (torch.randn(5, 4, device=backend.device) for _ in range(2))
    assert_same_bits(
        torch.func.jvp(relu, (x,), (tangent,)), torch.func.jvp(F.relu, (x,), (tangent,))
    )
    ours = torch.func.vmap(torch.func.grad(lambda row: relu(row).square().sum()))(x)
    stock = torch.func.vmap(torch.func.grad(lambda row: F.relu(row).square().sum()))(x)
    assert_same_bits(ours, stock)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.requires_grad_(), tangent)
        assert_same_bits(
            torch.autograd.forward_ad.unpack_dual(relu(dual)).tangent, tangent * (x > 0)
        )


def test_the_raw_op_refuses_transforms(backend):
    raw = OPS["relu"]
    x, tangent = (torch.randn(4, device=backend.device) for _ in range(2))
    with pytest.raises(RuntimeError, match=r"torch\.func gradient.*memopt\.nn\.functional"):
        torch.func.grad(lambda v: raw(v)[0].sum())(x)
    with pytest.raises(RuntimeError, match=r"forward-mode.*memopt\.nn\.functional"):
        torch.func.jvp(lambda v: raw(v)[0], (x,), (tangent,))


def test_compiles_in_one_graph_without_recompiling(backend):
    batches = [sample((n, 3, 5), backend.device).requires_grad_() for n in (4, 6, 9)]
    assert_compiles(relu, *((x,) for x in batches))


def test_compiles_on_channels_last(backend):
    images = (sample((n, 2, 3, 5), backend.device) for n in (4, 6))
    images = [x.contiguous(memory_format=torch.channels_last).requires_grad_() for x in images]
    assert_compiles(relu, *((x,) for x in images), backend="aot_eager")


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_leaves_the_dtype_alone(backend, dtype):
    x = sample((9,), backend.device, dtype).requires_grad_()
    with torch.autocast(backend.device.type, torch.bfloat16):
        assert relu(x).dtype == F.relu(x).dtype == dtype


# -- Bad inputs ------------------------------------------------------------------------------------


def test_integers_go_to_the_stock_op(backend):
    x = torch.tensor([-1, 2], device=backend.device)
    assert_same_bits(relu(x), F.relu(x))


def test_sparse_tensors_go_to_the_stock_op(backend):
    x = torch.tensor([[-1.0, 2.0], [0.0, -3.0]], device=backend.device)
    output = relu(x.to_sparse().requires_grad_())
    assert output.layout == torch.sparse_coo
    assert_same_bits(output.detach().to_dense(), F.relu(x))


def test_bad_inputs_raise_as_stock(backend):
    assert_raises_same(lambda: F.relu(None), lambda: relu(None))
    assert_raises_same(lambda: F.relu(torch.tensor([True])), lambda: relu(torch.tensor([True])))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_the_raw_op_names_a_bad_dtype(backend, dtype):
    with pytest.raises(RuntimeError, match=r"relu: input has dtype .*, needs .*float"):
        OPS["relu"](torch.ones(4, device=backend.device).to(dtype))


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(1, dtype=torch.uint8),
        torch.zeros(3, dtype=torch.uint8),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, 1, dtype=torch.uint8),
        torch.zeros(2, dtype=torch.uint8, device="meta"),
    ],
    ids=["short", "long", "dtype", "dim", "device"],
)
def test_the_raw_backward_checks_the_mask(backend, mask):
    mask = mask if mask.is_meta else mask.to(backend.device)
    with pytest.raises(RuntimeError, match="mask"):
        OPS["relu_backward"](torch.ones(9, device=backend.device), mask)


# -- The layer -------------------------------------------------------------------------------------


def test_layer(backend):
    x = sample((9,), backend.device).requires_grad_()
    layer = memopt.nn.ReLU()
    assert isinstance(layer, torch.nn.ReLU)
    assert_same_bits(layer(x), F.relu(x))
    assert saved_bytes(lambda: layer(x)) == 2


def test_inplace_layer_is_the_stock_one(backend):
    x = sample((9,), backend.device)
    result = memopt.nn.ReLU(inplace=True)(x)
    assert result is x
