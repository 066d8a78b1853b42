"""conv_batch_norm_relu_pool2d under transforms, torch.compile and autocast, and bad arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from batch_norm_cases import FUNCTIONS, Inputs, raw_arguments
from memopt.nn.functional import conv_batch_norm_relu_pool2d
from support import OPS, assert_compiles, assert_raises_same, assert_same_bits

pytestmark = pytest.mark.portable


# -- Transforms, torch.compile, autocast ----------------------------------------------------------


def test_function_transforms_are_right(backend):
    x = torch.randn(3, 2, 2, 6, 6, device=backend.device)
    w = torch.randn(3, 2, 3, 3, device=backend.device)

    def of(function):
        return lambda x, w: function(x, w, training=True)

    tangents = (torch.randn_like(x[0]), torch.randn_like(w))
    theirs, ours = (torch.func.jvp(of(f), (x[0], w), tangents) for f in FUNCTIONS)
    assert_same_bits(ours, theirs)
    theirs, ours = (
        torch.func.vmap(torch.func.grad(lambda i, w, f=f: of(f)(i, w).sum()), (0, None))(x, w)
        for f in FUNCTIONS
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("training", [False, True])
def test_compiles_in_one_graph_without_recompiling(backend, training):
    inputs = Inputs(torch.empty(1, 3, 1, 1), torch.randn(4, 3, 3, 3))
    _, *leaves = (t.to(backend.device).requires_grad_() for t in inputs.leaves)
    running = [t.to(backend.device) for t in inputs.running]
    batches = [torch.randn(n, 3, 11, 11, device=backend.device).requires_grad_() for n in (5, 6)]

    def function(x, w, b, bn_weight, bn_bias):
        mean, var = (t.clone() for t in running)
        args = (x, w, b, mean, var, bn_weight, bn_bias)
        return conv_batch_norm_relu_pool2d(*args, training=training) + mean.sum() + var.sum()

    assert_compiles(function, *((x, *leaves) for x in batches))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_eagers(backend, dtype, training):
    x = torch.randn(3, 2, 8, 8, device=backend.device).to(dtype)
    inputs = Inputs(x, torch.randn(4, 2, 3, 3, device=backend.device), dtype=torch.float32)
    with torch.autocast(backend.device.type, torch.bfloat16):
        theirs, ours = (inputs.run(f, training=training) for f in FUNCTIONS)
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    for k, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
        if k != 3 or not training:
            scale = expected.abs().max().item()
            torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05 * scale)


# -- Bad inputs ------------------------------------------------------------------------------------

BAD: dict[str, dict[str, Any]] = {
    "channels": {"weight": (3, 3, 3, 3)},
    "bias": {"bias": (4,)},
    "bn_weight": {"bn_weight": (4,)},
    "bn_bias": {"bn_bias": (1,)},
    "bn_weight of another dtype": {"bn_weight": torch.float64},
    "bn_bias of a shorter dtype": {"bn_bias": torch.bfloat16},
    "running_mean": {"running_mean": (2,)},
    "running_var of another dtype": {"running_var": torch.float64},
    "no running_var": {"running_var": None},
    "no running_mean": {"running_mean": None},
    "no running_mean without training": {"running_mean": None, "training": False},
    "eps 0": {"eps": 0.0},
    "negative eps without training": {"eps": -1.0, "training": False},
    "one value per channel": {"input": (1, 2, 3, 3), "pool_kernel_size": 1},
    "one value and no window": {"input": (1, 2, 3, 3)},
    "stride 0": {"stride": 0},
    "pool padding": {"pool_padding": 2},
    "pool beyond the output": {"pool_kernel_size": 9},
    "kernel beyond the input": {"weight": (3, 2, 9, 9)},
    "two dimensions of weight": {"weight": (3, 2)},
}
SHAPES = {
    "input": (2, 2, 6, 6),
    "weight": (3, 2, 3, 3),
    **dict.fromkeys(("bias", "running_mean", "running_var", "bn_weight", "bn_bias"), (3,)),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
def test_bad_arguments_raise_as_stock(backend, bad):
    bad = dict(bad)
    tensors = []
    for name, shape in SHAPES.items():
        value = bad.pop(name, shape)
        of = {"device": backend.device}
        if isinstance(value, torch.dtype):
            tensors.append(torch.ones(shape, dtype=value, **of))
        else:
            tensors.append(None if value is None else torch.ones(value, **of))
    options = {"training": True} | bad
    assert_raises_same(*(lambda f=f: f(*tensors, **options) for f in FUNCTIONS))


def test_what_is_not_2d_is_named(backend):
    w = torch.ones(3, 2, 3, 3, device=backend.device)
    with pytest.raises(ValueError, match="3 dimensions"):
        conv_batch_norm_relu_pool2d(w[0], w, training=True)
    with pytest.raises(TypeError, match="weight"):
        conv_batch_norm_relu_pool2d(w, 3, training=True)
    estimate = torch.ones(3, device=backend.device, requires_grad=True)
    with pytest.raises(RuntimeError, match="running_mean requires a gradient"):
        conv_batch_norm_relu_pool2d(w, w, None, estimate, estimate.detach(), training=True)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, torch.ones(2, 6, 3, 3)),
        (0, torch.ones(2, 6, 4, 4).double()),
        (0, torch.ones(2, 6, 4, 4, device="meta")),
        (1, torch.ones(2, 4, 6, 9)),
        (2, torch.ones(6, 2, 3)),
        (3, torch.ones(5)),
        (3, torch.ones(6).half()),
        (4, torch.ones(2, 6, 6, 8)),
        (4, torch.ones(2, 6, 6, 7).bfloat16()),
        (4, torch.ones(2, 6, 6, 7, device="meta")),
        (5, torch.zeros(2, 6, 7, dtype=torch.uint8)),
        (5, torch.zeros(2, 6, 8, dtype=torch.int8)),
        (6, torch.ones(6).double()),
        (7, torch.ones(6, 1)),
        (8, [1]),
        (11, 2**62),
        (12, [2**40, 2**40]),
        (14, [2, 2]),
    ],
)
def test_the_raw_backward_checks_everything(backend, index, value):
    _, args = raw_arguments(backend.device, torch.randn(2, 4, 6, 7, device=backend.device))
    meta = isinstance(value, Tensor) and value.is_meta
    args[index] = value.to(backend.device) if isinstance(value, Tensor) and not meta else value
    with pytest.raises(RuntimeError, match="conv_"):
        OPS["conv_batch_norm_relu_pool2d_backward"](*args)


def test_the_raw_forward_checks_everything(backend):
    args, _ = raw_arguments(backend.device, torch.randn(2, 4, 6, 7, device=backend.device))
    for index, value in ((2, torch.ones(5)), (3, torch.ones(6, 1)), (4, torch.ones(6).double())):
        bad = [*args[:index], value.to(backend.device), *args[index + 1 :]]
        with pytest.raises(RuntimeError, match="conv_"):
            OPS["conv_batch_norm_relu_pool2d"](*bad)


def test_codes_from_outside_cannot_point_outside(backend):
    _, args = raw_arguments(backend.device, torch.randn(2, 4, 6, 7, device=backend.device))
    for code in range(256):
        args[5] = torch.full_like(args[5], code)
        for grad in OPS["conv_batch_norm_relu_pool2d_backward"](*args):
            assert bool(grad.isfinite().all())


def test_the_raw_backward_has_no_derivative(backend):
    _, args = raw_arguments(backend.device, torch.randn(2, 4, 6, 7, device=backend.device))
    args[0].requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph"):
        OPS["conv_batch_norm_relu_pool2d_backward"](*args)[0].sum().backward()
