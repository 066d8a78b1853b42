"""linear_cross_entropy under transforms, torch.compile and autocast; bad calls; and the layer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor

import memopt
from cross_entropy_cases import (
    REDUCTIONS,
    SIZES,
    assert_like_stock,
    operands,
    raw_arguments,
    raw_backward_arguments,
    set_chunk_rows,
    stock,
)
from memopt.nn.functional import linear_cross_entropy
from memopt.ops import _cross_entropy_call
from support import OPS, assert_compiles, assert_raises_same

pytestmark = pytest.mark.portable


# -- Transforms, torch.compile, autocast -----------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_function_transforms_are_right(backend, reduction):
    x, weight, target, _ = (t.detach() for t in operands(device=backend.device))
    target = target.clamp(min=0)
    tangents = (torch.randn_like(x), torch.randn_like(weight))

    def both(function):
        def loss(x, weight, target=target):
            return function(x, weight, target, reduction=reduction)

        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangents[0])
            forward = torch.autograd.forward_ad.unpack_dual(loss(dual, weight)).tangent
        row_grad = torch.func.grad(lambda x, t: loss(x, weight, t).sum())
        return [
            forward,
            *torch.func.jvp(loss, (x, weight), tangents),
            torch.func.vmap(row_grad)(x, target),
            torch.func.hessian(lambda x: loss(x, weight).sum())(x),
        ]

    torch.testing.assert_close(both(linear_cross_entropy), both(stock))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiles_in_one_graph_without_recompiling(backend, reduction, monkeypatch):
    set_chunk_rows(monkeypatch, 16)
    for features, batches in ((40, (4, 6, 9)), (3, (24, 36, 52))):
        _, weight, _, bias = operands(4, features, 33, device=backend.device)
        calls = []
        for rows in batches:
            x, _, target, _ = operands(rows, features, 33, device=backend.device)
            calls.append((x, weight, target, bias))
        assert_compiles(
            lambda x, w, t, b: linear_cross_entropy(
                x, w, t, linear_bias=b, reduction=reduction, label_smoothing=0.1
            ),
            *calls,
            backend="aot_eager",
        )


def test_compiled_code_generation(backend):
    x, weight, target, _ = operands(device=backend.device)
    assert_compiles(linear_cross_entropy, (x, weight, target))


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_autocast_as_stock(backend, amp, reduction):
    for size in SIZES.values():
        x, weight, target, bias = operands(*size, device=backend.device)
        for args in ((x, weight, target, bias), (x, weight, target, None)):
            with torch.autocast(backend.device.type, amp):
                assert_like_stock(args, reduction=reduction)
        with torch.autocast(backend.device.type, amp):
            mixed = linear_cross_entropy(x.to(torch.bfloat16), weight, target)
            assert mixed.dtype == torch.float32


# -- Bad inputs ------------------------------------------------------------------------------------


def test_targets_out_of_range_raise_as_stock(backend):
    x, weight, target, _ = operands(device=backend.device)
    for wrong in (13, -1, 2**32 + 3, -(2**63)):
        bad = target.clone()
        bad[3] = wrong
        if backend.device.type == "cpu":
            assert_raises_same(
                lambda bad=bad: stock(x, weight, bad),
                lambda bad=bad: linear_cross_entropy(x, weight, bad),
            )
            raw = raw_arguments(x.detach(), weight.detach(), bad, None)
            with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
                OPS["linear_cross_entropy"](*raw)
        if wrong == -1:
            linear_cross_entropy(x, weight, bad.clamp(min=-1), ignore_index=-1)


def test_bad_arguments_raise_as_stock(backend):
    x, weight, target, bias = operands(device=backend.device)
    for args, settings in (
        ((x, weight, target.int()), {}),
        ((x, weight, target.float()), {}),
        ((x, weight, target[:5]), {}),
        ((x, weight, target[None]), {}),
        ((x, weight[:, :4], target), {}),
        ((x, weight[0], target), {}),
        ((x, weight[:0], target), {}),
        ((x, weight, target), {"linear_bias": bias[:5]}),
        ((x, weight, target), {"reduction": "median"}),
        ((x, weight, target), {"label_smoothing": 1.5}),
        ((x, weight, target), {"weight": bias.detach()[:5]}),
        ((x, weight, target), {"weight": bias.detach().double()}),
        ((x, weight, target), {"weight": bias}),
        ((x, weight, target), {"capped": 30.0}),
        ((x, weight, torch.rand(9, 13)), {"ignore_index": 3}),
    ):
        assert_raises_same(
            lambda a=args, s=settings: stock(*a, **s),
            lambda a=args, s=settings: linear_cross_entropy(*a, **s),
        )


def test_bad_values_of_its_own_arguments(backend):
    x, weight, target, _ = operands(device=backend.device)
    learned = torch.ones(9, device=backend.device, requires_grad=True)
    for error, settings in (
        (TypeError, {"options": {"batch_chunk_size": 4}}),
        (ValueError, {"softcap": 0.0}),
        (ValueError, {"softcap": -1.0}),
        (ValueError, {"max_chunk_bytes": 0}),
        (ValueError, {"accumulate": "half"}),
        (RuntimeError, {"token_weight": torch.ones(8)}),
        (RuntimeError, {"token_weight": learned}),
        (RuntimeError, {"logit_scale": torch.ones(3)}),
    ):
        (name,) = settings
        with pytest.raises(error, match=name):
            linear_cross_entropy(x, weight, target, **settings)
    with pytest.raises(ValueError, match="shift"):
        linear_cross_entropy(x, weight, torch.rand(9, 13), shift=True)
    with pytest.raises(ValueError, match="shift"):
        linear_cross_entropy(x[0], weight, target[0], shift=True)


def test_mixed_dtypes_raise_and_name_both(backend):
    x, weight, target, _ = operands(dtype=torch.float16, device=backend.device)
    with pytest.raises(TypeError, match=r"linear_weight has dtype torch\.bfloat16.*torch\.float16"):
        linear_cross_entropy(x, weight.to(torch.bfloat16), target)


def test_a_distributed_tensor_is_refused_by_name(backend):
    x, weight, target, _ = operands(device=backend.device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh(backend.device.type, (1,))
        sharded = distribute_tensor(weight.detach(), mesh, [Shard(0)])
        with pytest.raises(TypeError, match="linear_weight is a DTensor"):
            linear_cross_entropy(x, sharded, target)
    finally:
        dist.destroy_process_group()


def test_the_raw_ops_check_their_arguments(backend):
    x, weight, target, bias = (t.detach() for t in operands(device=backend.device))
    for change in (
        {"input": x[0]},
        {"input": x.long()},
        {"linear_weight": weight.t()},
        {"linear_weight": weight.double()},
        {"linear_weight": weight[:0], "linear_bias": None},
        {"linear_bias": bias[:4]},
        {"linear_bias": bias.half()},
        {"target": target[:4]},
        {"target": target.int()},
        {"target": target.to("meta")},
        {"target": torch.rand(9, 12)},
        {"target": torch.rand(9, 13).to("meta")},
        {"weight": bias[:4]},
        {"weight": bias.to("meta")},
        {"token_weight": bias},
        {"token_weight": torch.rand(9).half()},
        {"logit_scale": torch.rand(9, 1)},
        {"logit_scale": torch.rand(9).to("meta")},
        {"want_scale": True},
        {"reduction": "median"},
        {"label_smoothing": 2.0},
        {"softcap": -1.0},
        {"reduction": "none", "want_weight": True},
        {"chunk_rows": 0},
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            OPS["linear_cross_entropy"](*raw_arguments(x, weight, target, bias, **change))
    for name in ("grad_loss", "grad_lse", "grad_entropy", "statistics"):
        for bad in (torch.ones(4), torch.ones(9, 1), torch.ones(9).double(), torch.ones(9, 3)):
            args = raw_backward_arguments(x, weight, target, bias, **{name: bad})
            with pytest.raises(RuntimeError, match=name):
                OPS["linear_cross_entropy_backward"](*args)


# -- The layer -------------------------------------------------------------------------------------


def test_layer_is_like_the_stock_one(backend):
    class_weight = torch.rand(13, device=backend.device)
    settings = {"bias": True, "reduction": "sum", "weight": class_weight, "label_smoothing": 0.1}
    layer = memopt.nn.LinearCrossEntropyLoss(5, 13, device=backend.device, **settings)
    assert list(layer.state_dict()) == ["weight", "linear.weight", "linear.bias"]
    x, _, target, _ = operands(device=backend.device)
    expected = F.cross_entropy(
        layer.linear(x), target, class_weight, reduction="sum", label_smoothing=0.1
    )
    torch.testing.assert_close(layer(x, target), expected)
    if hasattr(torch.nn, "LinearCrossEntropyLoss"):  # torch >= 2.13
        theirs = torch.nn.LinearCrossEntropyLoss(5, 13, device=backend.device, **settings)
        assert list(theirs.state_dict()) == list(layer.state_dict())
        layer.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(layer(x, target), theirs(x, target))
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2, chunking_method=None)
        assert _cross_entropy_call.chunk_rows_of(options) == 2
        layer.options = options
        torch.testing.assert_close(layer(x, target), theirs(x, target))
    with pytest.raises(RuntimeError, match="weight"):
        memopt.nn.LinearCrossEntropyLoss(5, 13, weight=torch.ones(4))
