"""ConvBatchNormReLUPool2d against the Sequential that it is, and fuse_batch_norm."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from memopt.nn import ConvBatchNormReLUPool2d, ConvReLUPool2d
from support import assert_accurate, assert_same_bits

pytestmark = pytest.mark.portable

POOL = {"pool_kernel_size": 3, "pool_stride": 2, "pool_padding": 1}


def both(backend, padding_mode: str = "zeros", **batch_norm) -> tuple[nn.Module, nn.Module]:
    """The stock layers and ours, with the same parameters."""
    args = (2, 4, 3, 1, 1, 1, 2, True, padding_mode)
    stock = nn.Sequential(
        nn.Conv2d(*args), nn.BatchNorm2d(4, **batch_norm), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    )
    ours = ConvBatchNormReLUPool2d(*args, **batch_norm, **POOL)
    ours.load_state_dict(stock.state_dict())
    return stock.to(backend.device), ours.to(backend.device)


def step(layer: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """One training step: the output, then gradients and buffers by name."""
    layer.zero_grad()
    y = layer(x)
    (y * torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)).sum().backward()
    grads = {n: p.grad for n, p in layer.named_parameters() if n != "0.bias"}
    return {"y": y.detach(), **grads, **dict(layer.named_buffers())}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": None},
        {"momentum": 0.5, "eps": 0.1},
        {"affine": False},
        {"track_running_stats": False},
        {"padding_mode": "reflect"},
    ],
    ids=str,
)
def test_takes_the_place_of_four(backend, options):
    stock, ours = both(backend, **options)
    assert list(ours.state_dict()) == list(stock.state_dict())
    for batch in (5, 3):
        x = torch.randn(batch, 2, 9, 9, device=backend.device)
        torch.testing.assert_close(step(ours, x), step(stock, x), rtol=1e-4, atol=1e-4)
    stock.load_state_dict(ours.state_dict())
    torch.testing.assert_close(step(ours.eval(), x), step(stock.eval(), x), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), stock(x), rtol=1e-4, atol=1e-4)


def test_estimates_are_not_updated_when_they_are_not_tracked_anymore(backend):
    for layer in (layers := both(backend)):
        layer[1].track_running_stats = False
    x = torch.randn(3, 2, 9, 9, device=backend.device)
    stock, ours = (step(layer, x) for layer in layers)
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)
    assert ours["1.num_batches_tracked"] == 0


def test_from_modules_shares_them(backend):
    stock, _ = both(backend)
    conv, bn, _, pool = stock.eval()
    layer = ConvBatchNormReLUPool2d.from_modules(conv, bn, pool)
    assert layer[0] is conv
    assert not layer.training
    x = torch.randn(3, 2, 9, 9, device=backend.device)
    torch.testing.assert_close(layer(x), stock(x), rtol=1e-4, atol=1e-4)
    assert_same_bits(copy.deepcopy(layer)(x), layer(x))
    assert type(layer[:2]) is nn.Sequential
    assert "MaxPool2d" in repr(layer)


def test_compiles_with_its_estimates(backend):
    stock, ours = both(backend)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (5, 3):
            x = torch.randn(batch, 2, 9, 9, device=backend.device)
            expected = step(stock, x)
            y = compiled(x)
            torch.testing.assert_close(y, expected["y"], rtol=1e-4, atol=1e-4)
            buffers = dict(ours.named_buffers())
            wanted = {name: expected[name] for name in buffers}
            torch.testing.assert_close(buffers, wanted, rtol=1e-4, atol=1e-4)


def test_other_modules_are_refused():
    conv, bn, pool = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2)
    make = ConvBatchNormReLUPool2d.from_modules
    with pytest.raises(TypeError, match="SyncBatchNorm"):
        make(conv, nn.SyncBatchNorm(4), pool)
    for args, name in (
        ((nn.Conv1d(2, 4, 3), bn, pool), "conv is a Conv1d"),
        ((nn.LazyConv2d(4, 3), bn, pool), "conv is a LazyConv2d"),
        ((conv, nn.BatchNorm1d(4), pool), "bn is a BatchNorm1d"),
        ((conv, bn, nn.AvgPool2d(2)), "pool is a AvgPool2d"),
    ):
        with pytest.raises(TypeError, match=name):
            make(*args)
    with pytest.raises(ValueError, match="return_indices"):
        make(conv, bn, nn.MaxPool2d(2, return_indices=True))


def test_a_conversion_afterwards_is_refused():
    x = torch.randn(2, 2, 8, 8)
    layer = nn.SyncBatchNorm.convert_sync_batchnorm(ConvBatchNormReLUPool2d(2, 4, 3))
    with pytest.raises(TypeError, match="SyncBatchNorm"):
        layer(x)
    layer = ConvBatchNormReLUPool2d(2, 4, 3).append(nn.ReLU())
    with pytest.raises(RuntimeError, match="5 children"):
        layer(x)


# -- fuse_batch_norm -------------------------------------------------------------------------------


def trained_batch_norm(channels: int, dtype: torch.dtype) -> nn.BatchNorm2d:
    bn = nn.BatchNorm2d(channels)
    with torch.no_grad():
        for tensor in (bn.weight, bn.bias, bn.running_mean):
            tensor.copy_(torch.randn(channels))
        bn.running_var.uniform_(0.5, 2)
    return bn.eval().to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fuse_batch_norm(backend, dtype, bias):
    layer = ConvReLUPool2d(2, 6, 3, 1, 1, 1, 2, bias, dtype=dtype, **POOL).to(backend.device)
    bn = trained_batch_norm(6, dtype).to(backend.device)
    x = torch.randn(3, 2, 9, 9, device=backend.device, dtype=dtype)

    def stock(layer, bn, x):
        convolved = layer._conv_forward(x, layer.weight, layer.bias)
        return nn.functional.max_pool2d(bn(convolved).relu(), 3, 2, 1)

    before = {name: t.clone() for name, t in layer.state_dict().items()}
    fused = layer.fuse_batch_norm(bn)
    exact = stock(*(copy.deepcopy(m).double() for m in (layer, bn)), x.double())
    if dtype == torch.bfloat16:  # a folded weight is rounded once more
        assert_accurate(fused(x), stock(layer, bn, x), exact, factor=4)
    else:
        assert_accurate(fused(x), stock(layer, bn, x), exact)
    assert not fused.training
    assert type(fused) is ConvReLUPool2d
    assert fused.weight.dtype == dtype
    assert_same_bits(dict(layer.state_dict()), before)


def test_fuse_batch_norm_refuses():
    layer = ConvReLUPool2d(2, 6, 3)
    with pytest.raises(TypeError, match="needs a batch norm"):
        layer.fuse_batch_norm(nn.GroupNorm(2, 6))
    with pytest.raises(ValueError, match="training mode"):
        layer.fuse_batch_norm(nn.BatchNorm2d(6))
    with pytest.raises(ValueError, match="5 features"):
        layer.fuse_batch_norm(nn.BatchNorm2d(5).eval())
    with pytest.raises(ValueError, match="no running statistics"):
        layer.fuse_batch_norm(nn.BatchNorm2d(6, track_running_stats=False).eval())
