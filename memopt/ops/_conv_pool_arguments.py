"""The public functions' arguments: numbers or lists and named paddings, as the stock ops take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.ops._conv_pool_windows import Windows


def parse(
    name: str,
    dims: int,
    input: Tensor,
    weight: Tensor,
    stride: int | Sequence[int],
    padding: int | Sequence[int] | str,
    dilation: int | Sequence[int],
    groups: int,
    pool_kernel_size: int | Sequence[int],
    pool_stride: int | Sequence[int] | None,
    pool_padding: int | Sequence[int],
    pool_dilation: int | Sequence[int],
    ceil_mode: bool,
    activation: tuple[str, float, float],
) -> tuple[Tensor, Windows]:
    """The input, padded where padding="same" is uneven, and the raw op's parameters."""
    for argument, value in (("input", input), ("weight", weight)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: {argument} is a {type(value).__name__}, needs to be a Tensor")
    if input.dim() not in (dims + 1, dims + 2):
        sizes = ", ".join("DHW"[3 - dims :])
        raise RuntimeError(
            f"{name}: input has shape {tuple(input.shape)}, needs (N, C, {sizes}) or (C, {sizes})"
        )

    def numbers(value: int | Sequence[int], argument: str) -> tuple[int, ...]:
        return _numbers(name, value, argument, dims)

    steps, spread = numbers(stride, "stride"), numbers(dilation, "dilation")
    if weight.dim() == dims + 2 and min(spread) > 0:
        # A kernel of 1 has none; oneDNN's float16 convolution crashes when it is given one.
        spread = tuple(1 if k == 1 else d for k, d in zip(weight.shape[2:], spread, strict=True))
    if isinstance(padding, str):
        input, pads = _pad_by_name(name, input, weight, padding, steps, spread)
    else:
        pads = numbers(padding, "padding")
    kernel = numbers(pool_kernel_size, "pool_kernel_size")
    return input, Windows(
        steps,
        pads,
        spread,
        groups,
        kernel,
        kernel if pool_stride is None else numbers(pool_stride, "pool_stride"),
        numbers(pool_padding, "pool_padding"),
        numbers(pool_dilation, "pool_dilation"),
        ceil_mode,
        *activation,
    )


def check_pool(
    op: str,
    pool: str,
    pool_dilation: int | Sequence[int],
    count_include_pad: bool | None,
    divisor_override: int | None = None,
) -> None:
    """Raise ValueError for an unknown pool, or for an argument that belongs to the other one."""
    if pool not in ("max", "avg"):
        raise ValueError(f"{op}: pool is {pool!r}, needs 'max' or 'avg'")
    given = {"count_include_pad": count_include_pad, "divisor_override": divisor_override}
    for name, value in given.items():
        if pool == "max" and value is not None:
            raise ValueError(f"{op}: {name} is {value}, but it belongs to 'avg' and pool is 'max'")
    dilations = (pool_dilation,) if isinstance(pool_dilation, int) else pool_dilation
    if pool == "avg" and any(d != 1 for d in dilations):
        raise ValueError(
            f"{op}: pool_dilation is {pool_dilation}, but it belongs to 'max' and pool is 'avg'"
        )


def widens(dims: int, input: Tensor) -> bool:
    """Whether autocast makes the stock pool work in float32: on a CPU those of three dimensions."""
    return dims == 3 and input.device.type == "cpu" and torch.is_autocast_enabled("cpu")


def _numbers(op: str, value: int | Sequence[int], name: str, dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    if len(value) not in (1, dims):
        raise RuntimeError(f"{op}: {name} is {tuple(value)}, needs 1 or {dims} integers")
    return tuple(value) * dims if len(value) == 1 else tuple(value)


def _pad_by_name(
    op: str,
    input: Tensor,
    weight: Tensor,
    padding: str,
    stride: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Tensor, tuple[int, ...]]:
    """Numbers for "valid" and "same"; where "same" is uneven, the odd pixel is padded last."""
    if padding == "valid":
        return input, (0,) * len(stride)
    if padding != "same":
        raise ValueError(f"{op}: padding is {padding!r}, needs integers, 'same' or 'valid'")
    if any(s != 1 for s in stride):
        raise RuntimeError(f"{op}: padding='same' needs stride 1, but stride is {tuple(stride)}")
    total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if any(t % 2 for t in total):  # as in eager the odd pixel goes to the end
        extra = [n for t in reversed(total) for n in (0, t % 2)]
        input = F.pad(input, extra)
    return input, tuple(t // 2 for t in total)
