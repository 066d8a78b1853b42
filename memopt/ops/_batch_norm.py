"""The batch norm of conv_batch_norm_relu_pool2d: its arithmetic, its arguments and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memopt.ops import _pool_codes
from memopt.ops._conv_pool_windows import Windows, check

OP = "conv_batch_norm_relu_pool2d"
KEPT = torch.channels_last  # of the convolution's output: the stock convolution's fastest


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """What statistics are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def per_channel(values: Tensor) -> Tensor:
    """(C,) to be broadcast against (N, C, H, W)."""
    return values.view(-1, 1, 1)


def statistics(input: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, 1 / sqrt(variance + eps), and the unbiased variance, (C,) each."""
    values = input.to(accumulate_dtype(input.dtype))
    if not input.numel():
        zeros = values.new_zeros(input.shape[1])
        return zeros, torch.rsqrt(zeros + eps), zeros.clone()
    variance, mean = torch.var_mean(values, (0, 2, 3), correction=0)
    unbiased = torch.var(values, (0, 2, 3), correction=1)
    return mean, torch.rsqrt(variance + eps), unbiased


def normalize(
    input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """(input - mean) * invstd * weight + bias, with the stock op's roundings."""
    scale = invstd if weight is None else invstd * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return (input.to(mean.dtype) * per_channel(scale) + per_channel(shift)).to(input.dtype)


def input_gradient(
    grad: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, the weight and the bias; all tensors in the accumulator's dtype."""
    normalized = (input - per_channel(mean)) * per_channel(invstd)
    bias_grad = grad.sum((0, 2, 3))
    weight_grad = (grad * normalized).sum((0, 2, 3))
    count = max(1, grad.shape[0] * grad.shape[2] * grad.shape[3])
    centered = grad - per_channel(bias_grad / count) - normalized * per_channel(weight_grad / count)
    scale = invstd if weight is None else invstd * weight
    return centered * per_channel(scale), weight_grad, bias_grad


def update_running(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, variance: Tensor, momentum: float
) -> None:
    """The stock op's moving average, in place and rounded once."""
    for running, new in ((running_mean, mean), (running_var, variance)):
        running.copy_(momentum * new + (1 - momentum) * running.to(new.dtype))


def fold(
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Weight and bias of the convolution that does a batch norm's work too; computed in `dtype`."""
    if running_mean is None or running_var is None:
        raise RuntimeError("fold: running_mean and running_var are None, needs both")
    scale = torch.rsqrt(running_var.to(dtype) + eps)
    if bn_weight is not None:
        scale = scale * bn_weight.to(dtype)
    shift = -running_mean.to(dtype) if bias is None else bias.to(dtype) - running_mean.to(dtype)
    shift = shift * scale
    if bn_bias is not None:
        shift = shift + bn_bias.to(dtype)
    scaled = weight.to(dtype) * scale.view(-1, *[1] * (weight.dim() - 1))
    return scaled.to(weight.dtype), shift.to(weight.dtype)


def check_parameters(op: str, channels: int, input: Tensor, **tensors: Tensor | None) -> None:
    """Each is (channels,), all of one dtype: the input's, or float32 where that is shorter."""
    dtype = convolved_dtype(input)
    allowed = [dtype] if dtype == torch.float64 else [dtype, torch.float32]
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.shape != (channels,):
            raise RuntimeError(f"{op}: {name} has shape {tuple(tensor.shape)}, needs ({channels},)")
        if tensor.dtype not in allowed:
            raise RuntimeError(
                f"{op}: {name} has dtype {tensor.dtype}, needs {' or '.join(map(str, allowed))}"
            )
        allowed = [tensor.dtype]
        if tensor.device != input.device:
            raise RuntimeError(f"{op}: {name} is on {tensor.device}, needs input's {input.device}")


def convolved_dtype(input: Tensor) -> torch.dtype:
    """What the convolution makes of `input`, also under autocast."""
    device = input.device.type
    if torch.is_autocast_enabled(device) and input.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return input.dtype


def check_call(
    input: Tensor,
    weight: Tensor,
    p: Windows,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    training: bool,
    eps: float,
) -> None:
    """What `torch.nn.functional.batch_norm` checks, with its error types."""
    if eps < 0 or (training and eps == 0):
        raise ValueError(f"{OP}: eps is {eps}, needs to be positive")
    running = {"running_mean": running_mean, "running_var": running_var}
    if not training and None in running.values():
        raise RuntimeError(f"{OP}: running_mean and running_var are needed without training")
    if (running_mean is None) != (running_var is None):
        raise ValueError(f"{OP}: give both running_mean and running_var, or neither")
    for name, tensor in running.items():
        if tensor is not None and tensor.requires_grad:
            raise RuntimeError(f"{OP}: {name} requires a gradient, and has none")
    check_parameters(OP, weight.shape[0], input, **running, bn_weight=bn_weight, bn_bias=bn_bias)
    if training and _one_value_per_channel(input, weight, p):
        raise ValueError(
            f"{OP}: the convolution's output is (1, {weight.shape[0]}, 1, 1), needs more than one "
            "value per channel in training"
        )


def _one_value_per_channel(input: Tensor, weight: Tensor, p: Windows) -> bool:
    if input.shape[0] != 1 or weight.dim() != 4 or min(p.stride) < 1:
        return False  # impossible arguments are refused later on
    room = (
        input.shape[2 + d] + 2 * p.padding[d] - p.dilation[d] * (weight.shape[2 + d] - 1) - 1
        for d in (0, 1)
    )
    return all(0 <= r < step for r, step in zip(room, p.stride, strict=True))


# -- the raw ops' arguments ---------------------------------------------------------------------


def windows(args: Sequence[Any]) -> Windows:
    """From the raw ops' arguments, which name no activation."""
    return Windows._make([*args, "relu", 0.0, 0.0])


class Arguments(NamedTuple):
    """The forward op's."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    bn_weight: Tensor | None
    bn_bias: Tensor | None
    p: Windows
    eps: float
    save_codes: bool

    @classmethod
    def checked(cls, args: Sequence[Any]) -> Arguments:
        a = cls(*[*args[:5], windows(args[5:-2]), *args[-2:]])
        check(OP, 2, a.input, a.weight, a.bias, a.p)
        check_parameters(OP, a.weight.shape[0], a.input, bn_weight=a.bn_weight, bn_bias=a.bn_bias)
        return a


class Saved(NamedTuple):
    """The backward op's arguments."""

    grad: Tensor
    input: Tensor
    weight: Tensor
    bn_weight: Tensor | None
    convolved: Tensor
    codes: Tensor
    mean: Tensor
    invstd: Tensor
    p: Windows
    wanted: Sequence[bool]  # input, weight, bias, bn_weight, bn_bias

    @classmethod
    def checked(cls, args: Sequence[Any]) -> Saved:
        s = cls(*[*args[:8], windows(args[8:-5]), args[-5:]])
        op = f"{OP}_backward"
        check(op, 2, s.input, s.weight, None, s.p)
        channels, dtype = s.weight.shape[0], s.input.dtype
        check_parameters(op, channels, s.input, bn_weight=s.bn_weight)
        convolved_size, pooled_size = s.p.sizes(s.input, s.weight)
        planes = (s.input.shape[0], channels)
        bytes_ = _pool_codes.plane_bytes(pooled_size[0] * pooled_size[1], s.p.positions)
        statistic = accumulate_dtype(dtype)
        for name, needed, shape in (
            ("grad", dtype, (*planes, *pooled_size)),
            ("convolved", dtype, (*planes, *convolved_size)),
            ("codes", torch.uint8, (*planes, bytes_)),
            ("mean", statistic, (channels,)),
            ("invstd", statistic, (channels,)),
        ):
            t = getattr(s, name)
            if t.dtype != needed or t.shape != shape:
                raise RuntimeError(
                    f"{op}: {name} is {t.dtype} of shape {tuple(t.shape)}, needs {needed} of "
                    f"shape {shape}; the forward pass keeps it with save_codes=True"
                )
            if t.device != s.input.device:
                raise RuntimeError(f"{op}: {name} is on {t.device}, needs {s.input.device}")
        return s

    def only_wanted(self, *grads: Tensor | None) -> tuple[Tensor, ...]:
        """Those that are asked for, and empty tensors in place of the others."""
        like = (self.grad, self.grad, self.grad, self.mean, self.mean)
        return tuple(
            g if wanted and g is not None else t.new_empty((0,))
            for g, t, wanted in zip(grads, like, self.wanted, strict=True)
        )
