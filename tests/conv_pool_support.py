"""conv_relu_pool in one, two and three dimensions against the stock ops it is made of."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import memopt.nn.functional as M
from support import assert_same_bits, unchanged

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGES = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
OURS = {1: M.conv_relu_pool1d, 2: M.conv_relu_pool2d, 3: M.conv_relu_pool3d}

#: Arguments of every activation, exact on small integers.
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "relu": {},
    "leaky_relu": {"negative_slope": 0.5},
    "leaky_relu_down": {"activation": "leaky_relu", "negative_slope": -2.0},
    "relu6": {},
    "hardtanh": {"min_val": -3.0, "max_val": 5.0},
    "identity": {},
}


def activation_arguments(name: str) -> dict[str, Any]:
    return {"activation": name} | ACTIVATIONS[name]


def activate(x: Tensor, activation: str = "relu", **arguments: float) -> Tensor:
    if activation == "identity":
        return x
    if activation in ("hardtanh", "relu6") and bool(x.isnan().any()):
        # Eager's derivative at NaN is 0 in the body of its loop over vectors and 1 in the rest.
        # Ours is 1 everywhere, as this formula's; its values are eager's.
        low, high = arguments.get("min_val", 0.0), arguments.get("max_val", 6.0)
        return torch.where(x <= low, low, torch.where(x >= high, high, x))
    return getattr(F, activation)(x, **arguments)


def stock(x: Tensor, w: Tensor, b: Tensor | None, *convolution: Any, **pool: Any) -> Tensor:
    """The stock ops under conv_relu_pool's arguments, by weight's dimensions."""
    dims = w.dim() - 2
    named = {k: v for k, v in pool.items() if k in ("activation", "negative_slope")}
    named |= {k: v for k, v in pool.items() if k in ("min_val", "max_val")}
    names = {k.removeprefix("pool_"): v for k, v in pool.items() if k.startswith("pool_")}
    names = {"kernel_size": 2, "ceil_mode": pool.get("ceil_mode", False)} | names
    activated = activate(CONVOLUTIONS[dims](x, w, b, *convolution), **named)
    if pool.get("pool", "max") == "max":
        return POOLS[dims](activated, **names)
    names |= {k: pool[k] for k in ("count_include_pad", "divisor_override") if k in pool}
    if dims == 3 and x.dtype in (torch.bfloat16, torch.float16):  # which it does not take on a CPU
        return AVERAGES[dims](activated.float(), **names).to(activated.dtype)
    return AVERAGES[dims](activated, **names)


def ours(x: Tensor, w: Tensor, b: Tensor | None, *convolution: Any, **pool: Any) -> Tensor:
    return OURS[w.dim() - 2](x, w, b, *convolution, **pool)


def integers(*shape: int, device: Any, dtype: torch.dtype = torch.float32, most: int = 3) -> Tensor:
    return torch.randint(-most, most + 1, shape, device=device).to(dtype)


def results(
    function: Any, inputs: Any, grad: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    """Output and gradients for a given upstream gradient."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    output = function(*leaves, *args, **kwargs)
    wanted = [t for t in leaves if t is not None]
    return output.detach(), *torch.autograd.grad(output, wanted, grad)


def assert_like_stock(inputs: Any, *args: Any, **kwargs: Any) -> None:
    """Values, winners and gradients bit for bit: inputs are small integers and special values."""
    with torch.no_grad():
        output = stock(*inputs, *args, **kwargs)
    grad = integers(*output.shape, device=output.device, dtype=output.dtype)
    expected = results(stock, inputs, grad, *args, **kwargs)
    with unchanged(*(t for t in inputs if t is not None)):
        actual = results(ours, inputs, grad, *args, **kwargs)
    assert_same_bits(actual, expected)
