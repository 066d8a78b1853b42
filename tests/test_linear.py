"""Linear with a quantised input: exact but for dW, which is right on average."""

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
from memopt.nn.functional import linear
from support import (
    DTYPES,
    OPS,
    assert_accurate,
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

QUANTISED = ("int8", "int4", "int2")
BITS = {"int8": 8, "int4": 4, "int2": 2}


def arguments(backend, rows: tuple[int, ...], in_: int, out: int, dtype=torch.float32):
    """Leaves x, W and b, and a gradient of the result."""
    shapes = ((*rows, in_), (out, in_), (out,), (*rows, out))
    x, w, b, g = (torch.randn(s, device=backend.device).to(dtype) for s in shapes)
    return x.requires_grad_(), w.requires_grad_(), b.requires_grad_(), g


def run(function, x: Tensor, w: Tensor, b: Tensor | None, g: Tensor) -> list[Tensor | None]:
    """The result and the gradients of what requires one."""
    leaves = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in (x, w, b)]
    output = function(*leaves)
    needs = [t is not None and t.requires_grad for t in leaves]
    wanted = [t for t, need in zip(leaves, needs, strict=True) if need]
    grads = iter(torch.autograd.grad(output, wanted, g) if wanted else ())
    return [output.detach(), *(next(grads) if need else None for need in needs)]


def stored(storage: str, **options):
    return lambda x, w, b=None: linear(x, w, b, storage=storage, **options)


def restored(x: Tensor, storage: str, group_size: int = 256) -> Tensor:
    """What linear restores of x after this seed."""
    return memopt.dequantize(memopt.quantize(x, BITS[storage], group_size=group_size))


# -- Values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", QUANTISED)
@pytest.mark.parametrize("rows", [(), (0,), (1,), (7,), (1500,), (3, 5), (2, 3, 4), (2, 0)])
def test_all_but_dw_is_stock_and_dw_is_stock_on_the_restored_input(backend, dtype, storage, rows):
    x, w, b, g = arguments(backend, rows, 37, 11, dtype)
    with unchanged(x, w, b, g):
        torch.manual_seed(5)
        output, dx, dw, db = run(stored(storage), x, w, b, g)
    stock = run(F.linear, x, w, b, g)
    assert_same_bits([output, dx, db], [stock[0], stock[1], stock[3]])
    torch.manual_seed(5)
    x = restored(x, storage).requires_grad_()
    expected, exact = (
        run(F.linear, *(t.to(d) for t in (x, w, b, g)))[2] for d in (dtype, torch.float64)
    )
    assert_accurate(dw, expected, exact, factor=3)


@given(
    rows=st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    in_=st.integers(0, 40),
    out=st.integers(0, 9),
    group_size=st.sampled_from((8, 24, 256, 1024)),
    storage=st.sampled_from(QUANTISED),
)
def test_any_sizes(backend, rows, in_, out, group_size, storage):
    x, w, b, g = arguments(backend, rows, in_, out)
    torch.manual_seed(5)
    output, dx, dw, db = run(stored(storage, group_size=group_size), x, w, b, g)
    stock = run(F.linear, x, w, b, g)
    assert_same_bits([output, dx, db], [stock[0], stock[1], stock[3]])
    torch.manual_seed(5)
    x = restored(x, storage, group_size).view(math.prod(rows), in_)
    expected = g.view(math.prod(rows), out).t() @ x
    torch.testing.assert_close(dw, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_", [3, 8, 241, 1030])
def test_many_tiles(backend, in_):
    x, w, _, g = arguments(backend, (2200,), in_, 5)
    torch.manual_seed(5)
    dw = run(stored("int2", group_size=1024), x, w, None, g)[2]
    torch.manual_seed(5)
    x = restored(x, "int2", 1024)
    assert_accurate(dw, g.t() @ x, g.double().t() @ x.double(), factor=3)


def test_dw_is_unbiased(backend):
    x, w, _, g = arguments(backend, (64,), 32, 4)
    exact = g.double().t() @ x.detach().double()
    step = memopt.quantize(x, 4).scale.double().repeat_interleave(256).view_as(x)
    # A sum over rows of g times roundings of standard deviation at most step / 2.
    deviation = (g.double().square().t() @ (step / 2).square()).sqrt()
    draws, total = 300, torch.zeros_like(exact)
    for _ in range(draws):
        total += run(stored("int4"), x, w, None, g)[2].double()
    assert ((total / draws - exact) / deviation * math.sqrt(draws)).abs().max() < 5


def test_strided_inputs_and_gradients(backend):
    x, w, b, g = arguments(backend, (6, 10), 12, 4)
    w = w.detach()[:1].expand(4, 12)
    for (name, x2), w2, g2 in itertools.product(
        layouts(x).items(), layouts(w).values(), layouts(g[..., :1].expand_as(g)).values()
    ):
        x2, w2 = x2.requires_grad_(), w2.requires_grad_()
        torch.manual_seed(5)
        output, dx, dw, db = run(stored("int8"), x2, w2, b, g2)
        stock = run(F.linear, x2, w2, b, g2)
        assert_same_bits([output, dx], stock[:2])
        torch.testing.assert_close(db, stock[3])
        torch.manual_seed(5)
        expected = run(F.linear, restored(x, "int8").requires_grad_(), w2, b, g2)[2]
        torch.testing.assert_close(dw, expected, rtol=1e-5, atol=1e-5, msg=name)


def test_values_that_are_not_finite_reach_dw(backend):
    for bad in (math.nan, math.inf):
        x, w, _, g = arguments(backend, (8,), 16, 4)
        with torch.no_grad():
            x[3, 5] = bad
        assert run(stored("int8"), x, w, None, g)[2].isnan().any()


def test_keep_is_the_stock_op(backend):
    args = arguments(backend, (5, 3), 12, 4)
    assert_same_bits(run(stored("keep"), *args), run(F.linear, *args))
    x, w, b, _ = args
    assert saved_bytes(lambda: linear(x, w, b)) == saved_bytes(lambda: F.linear(x, w, b))


def test_same_bits_for_any_number_of_threads(backend):
    x, w, _, _ = (t.detach() for t in arguments(backend, (1200,), 70, 9))
    # The products are the stock library's: their bits may depend on its threads.
    assert_same_for_threads(lambda: OPS["linear"](x, w, None, 8, 64, None)[1:])


# -- Memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", QUANTISED)
def test_saves_the_packed_input_and_the_weight(backend, storage):
    x, w, b, _ = arguments(backend, (32, 4), 64, 8)
    nbytes = x.numel() * BITS[storage] // 8 + 2 * 2 * x.numel() // 256
    function = stored(storage)
    assert saved_bytes(lambda: function(x, w, b), ignore=[w]) == nbytes
    assert all(t.data_ptr() != x.data_ptr() for t in saved_tensors(lambda: function(x, w, b)))
    assert saved_bytes(lambda: function(x.detach(), w, b)) == nbytes  # not even the weight
    with torch.no_grad():
        assert saved_bytes(lambda: function(x, w, b)) == 0


def test_a_frozen_weight_saves_no_input(backend):
    x, w, b, _ = arguments(backend, (32,), 64, 8)
    w = w.detach()
    assert saved_bytes(lambda: linear(x, w, b, storage="int8"), ignore=[w]) == 0


def test_the_peak_falls():
    x = torch.randn(2048, 512)

    def peak(storage):
        layers = [memopt.nn.Linear(512, 512, bias=False, storage=storage) for _ in range(6)]
        for layer in layers:
            layer.weight.grad = torch.zeros_like(layer.weight)
        model = torch.nn.Sequential(*layers)
        with memopt.backend("cpu"):
            return peak_bytes(lambda: model(x).sum().backward())

    # Stock holds six activations and then some; ours two at a time, a tile, and six packed ones.
    assert peak("int8") < 0.75 * peak("keep")
    assert peak("int2") < peak("int8")


# -- Autograd --------------------------------------------------------------------------------------


def assert_within_noise(actual, stock, x, g, rounding=2.0**-20) -> None:
    """The weight's gradient errs by one step of the int8 grid an element at most, and rounding."""
    rows, factors = (t.detach().double().flatten(0, -2) for t in (x, g))
    step = (1 + 2**-6) * (rows.max() - rows.min() + 2**-7 * rows.abs().max()) / 255
    sizes = factors.abs().t()
    allowed = sizes.sum(1, keepdim=True) * step + rounding * (sizes @ rows.abs())
    error = (actual.double() - stock.double()).abs()
    assert bool((error <= allowed).all()), f"errs by {error.max():.3g} of {allowed.min():.3g}"


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_every_subset_of_gradients(backend, wanted):
    x, w, b, g = arguments(backend, (9,), 12, 4)
    for tensor, needs in zip((x, w, b), wanted, strict=True):
        tensor.requires_grad_(needs)
    torch.manual_seed(5)
    ours = run(stored("int8"), x, w, b, g)
    stock = run(F.linear, x, w, b, g)
    for k, (actual, expected) in enumerate(zip(ours, stock, strict=True)):
        assert (actual is None) == (expected is None)
        if k == 2 and actual is not None:
            assert_within_noise(actual, expected, x, g)
        elif actual is not None:
            assert_same_bits(actual, expected)


def test_backward_twice(backend):
    x, w, b, g = arguments(backend, (9,), 12, 4)
    output = linear(x, w, b, storage="int2")
    first = torch.autograd.grad(output, (x, w, b), g, retain_graph=True)
    copies = [t.clone() for t in first]
    second = torch.autograd.grad(output, (x, w, b), 2 * g)
    assert_same_bits(list(first), copies)
    torch.testing.assert_close(list(second), [2 * t for t in copies])


def test_a_batch_of_gradients(backend):
    x, w, b, g = arguments(backend, (3, 4), 12, 5)
    output = linear(x, w, b, storage="int8")
    both = torch.stack((g, 2 * g))
    each = [torch.autograd.grad(output, (x, w, b), g, retain_graph=True) for g in both]
    batch = torch.autograd.grad(output, (x, w, b), both, is_grads_batched=True)
    torch.testing.assert_close(list(batch), [torch.stack(t) for t in zip(*each, strict=True)])


def test_gradcheck_of_what_is_exact(backend):
    x, w, b, _ = arguments(backend, (3,), 4, 2, torch.float64)
    torch.autograd.gradcheck(lambda x, b: linear(x, w, b, storage="int8"), (x, b))


def test_double_backward_is_exact_or_refused(backend):
    x, w, b, g = arguments(backend, (9,), 12, 4)

    def penalty(function):
        (dx,) = torch.autograd.grad(function(x, w, b), x, g, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), w)[0]

    assert_same_bits(penalty(stored("int8")), penalty(F.linear))
    for inputs in ((x, w, b), (x.detach(), w, b)):
        grad = g.clone().requires_grad_()
        (dw,) = torch.autograd.grad(linear(*inputs, storage="int8"), w, grad, create_graph=True)
        with pytest.raises(RuntimeError, match=r"differentiated again.*storage='keep'"):
            dw.sum().backward()


def test_opcheck(backend):
    x, w, b, g = arguments(backend, (4, 6), 16, 3)
    seed = torch.tensor(3, device=backend.device)
    for layout in layouts(x).values():
        check_op(OPS["linear"], layout.requires_grad_(), w, b, 8, 64, seed)
    check_op(OPS["linear"], x, w, None, 2, 64, None)
    packed = OPS["linear"](x.detach(), w, b, 4, 64, seed)[1:]
    for layout in layouts(g).values():
        check_op(OPS["linear_backward_weight"], layout, *(t.detach() for t in packed), 16, 4, 64)


def test_function_transforms_are_stock(backend):
    x, w, b, _ = (t.detach() for t in arguments(backend, (5,), 6, 3))
    ours, stock = stored("int8"), F.linear
    assert_same_bits(
        torch.func.jvp(lambda w: ours(x, w, b), (w,), (w,)),
        torch.func.jvp(lambda w: stock(x, w, b), (w,), (w,)),
    )
    assert_same_bits(
        torch.func.grad(lambda w: ours(x, w, b).square().sum())(w),
        torch.func.grad(lambda w: stock(x, w, b).square().sum())(w),
    )


# -- The module ------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["keep", *QUANTISED])
def test_module_is_the_stock_one(backend, storage):
    torch.manual_seed(1)
    stock = torch.nn.Linear(12, 4, device=backend.device)
    torch.manual_seed(1)
    ours = memopt.nn.Linear(12, 4, device=backend.device, storage=storage)
    assert isinstance(ours, torch.nn.Linear)
    assert_same_bits(list(ours.state_dict().values()), list(stock.state_dict().values()))
    stock.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5, 12, device=backend.device)
    assert_same_bits(ours(x), stock(x))
    assert f"storage='{storage}'" in repr(ours)
    double = memopt.nn.Linear(3, 2, False, backend.device, torch.float64, storage=storage)
    assert double.bias is None and double.weight.dtype == torch.float64


def test_manual_seed_reproduces_a_step(backend):
    layer = memopt.nn.Linear(12, 4, device=backend.device, storage="int2")
    x = torch.randn(9, 12, device=backend.device)
    grads = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        grads.append(torch.autograd.grad(layer(x).sum(), layer.weight)[0])
    assert torch.equal(grads[0], grads[1]) and not torch.equal(grads[0], grads[2])


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_module_compiles_once(backend, compiler):
    layer = memopt.nn.Linear(70, 4, device=backend.device, storage="int8")
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=compiler)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (8, 12, 17):
            x = torch.randn(rows, 70, device=backend.device, requires_grad=True)
            results = []
            for function in (compiled, layer):
                torch.manual_seed(5)
                output = function(x)
                wanted = (x, layer.weight, layer.bias)
                results.append([output, *torch.autograd.grad(output.square().sum(), wanted)])
            torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_autocast_is_stock(backend, dtype, with_bias):
    x, w, b, g = arguments(backend, (9,), 12, 4, dtype)
    b = b if with_bias else None

    def cast(function):
        def run_cast(*args):
            with torch.autocast(backend.device.type, torch.bfloat16):
                return function(*args)

        return run_cast

    g = g.to(dtype if dtype == torch.float64 else torch.bfloat16)
    ours, stock = (run(cast(f), x, w, b, g) for f in (stored("int8"), F.linear))
    assert_same_bits([*ours[:2], *ours[3:]], [*stock[:2], *stock[3:]])
    assert ours[2].dtype == stock[2].dtype == dtype
    assert_within_noise(ours[2], stock[2], x, g, rounding=2.0**-7)


# -- Bad inputs ------------------------------------------------------------------------------------


def test_unknown_storage_and_format():
    with pytest.raises(ValueError, match="storage is 'int3', needs one of 'keep', 'int8', 'int4'"):
        memopt.nn.Linear(3, 2, storage="int3")
    with pytest.raises(ValueError, match="group_size is 12"):
        memopt.nn.Linear(3, 2, storage="int8", group_size=12)
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    with pytest.raises(ValueError, match="storage is None"):
        linear(x, w, storage=None)


def test_bad_inputs_raise_as_stock(backend):
    x, w, b, _ = arguments(backend, (5,), 6, 3)
    bad = (
        (x[:, :5], w, b),
        (x, w, b[:2]),
        (x.double(), w, b),
        (x.to(torch.bfloat16), w.to(torch.float16).detach().requires_grad_(), None),
        (x.detach().int(), w, b),
        (None, w, b),
        (x, None, b),
        (x, w.view(3, 6, 1, 1), b),
    )
    for args in bad:
        assert_raises_same(lambda: F.linear(*args), lambda: linear(*args, storage="int8"))  # noqa: B023


def test_raw_ops_check_their_arguments(backend):
    x, w, b, g = (t.detach() for t in arguments(backend, (5,), 16, 3))
    seed = torch.tensor(3, device=backend.device)
    for args in (
        (x, w, b, 3, 64, seed),
        (x, w, b, 8, 7, seed),
        (x, w, b, 8, 64, seed.float()),
        (x, w.double(), b, 8, 64, seed),
        (x, w, b.double(), 8, 64, seed),
        (x, w[0], b, 8, 64, seed),
        (x, w, b[:1], 8, 64, seed),
        (x[0, 0], w, b, 8, 64, seed),
        (x.int(), w.int(), None, 8, 64, seed),
    ):
        with pytest.raises(RuntimeError, match="linear: "):
            OPS["linear"](*args)
    packed, scale, minimum = OPS["linear"](x, w, b, 8, 16, seed)[1:]
    for args in (
        (g, packed[1:], scale, minimum, 16, 8, 16),
        (g, packed, scale[1:], minimum, 16, 8, 16),
        (g, packed, scale, minimum.float(), 16, 8, 16),
        (g, packed, scale, minimum, 17, 8, 16),
        (g, packed, scale, minimum, -16, 8, 16),
        (g, packed, scale, minimum, 2**62, 8, 16),
        (g, packed, scale, minimum, 16, 4, 16),
        (g, packed, scale, minimum, 16, 8, 24),
        (g[0, 0], packed, scale, minimum, 16, 8, 16),
        (g.int(), packed, scale, minimum, 16, 8, 16),
    ):
        with pytest.raises(RuntimeError, match="linear_backward_weight: "):
            OPS["linear_backward_weight"](*args)
