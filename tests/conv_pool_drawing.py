"""Draws a case for the convolution-and-pool layers from a seed: parameters, layouts and values."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from support import DTYPES

#: Multiply-adds a case may cost, so that thousands of them fit into minutes.
BUDGET = 2_000_000
#: Up to here integers are exact in a dtype.
EXACT = {
    torch.float64: 2**40,
    torch.float32: 2**22,
    torch.float16: 2**11,
    torch.bfloat16: 2**8,
}
LAYOUTS = ("channels_last", "transposed", "sliced", "expanded", "overlapping", "scalar")
SPECIALS = (math.nan, math.inf, -math.inf, -0.0)


@dataclass(frozen=True)
class Case:
    """One call of a layer and its gradients; ``draw(seed)`` makes the same one again."""

    seed: int
    values: str
    dtype: torch.dtype
    batch: int | None  # None: unbatched
    channels: int
    filters: int
    groups: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    pool_kernel_size: tuple[int, ...]
    pool_stride: tuple[int, ...] | None
    pool_padding: tuple[int, ...]
    pool_dilation: tuple[int, ...]
    ceil_mode: bool
    bias: bool
    layouts: tuple[str, ...]  # of input, weight, bias and gradient
    specials: tuple[tuple[str, float], ...]  # planted: which tensor, which value
    wanted: tuple[bool, bool, bool]  # gradients of input, weight and bias
    without_grad: str  # "" | "no_grad" | "inference_mode"

    @property
    def dims(self) -> int:
        return len(self.size)

    @property
    def exact(self) -> bool:
        """Whether every sum is of integers small enough that no order of summation rounds."""
        return self.values != "real"

    def convolution(self) -> tuple[Any, ...]:
        """The layer's positional arguments after input, weight and bias."""
        return self.stride, self.padding, self.dilation, self.groups

    def pool(self) -> dict[str, Any]:
        """The stock pool's keywords."""
        return {
            "kernel_size": self.pool_kernel_size,
            "stride": self.pool_stride,
            "padding": self.pool_padding,
            "dilation": self.pool_dilation,
            "ceil_mode": self.ceil_mode,
        }

    def keywords(self) -> dict[str, Any]:
        """The layer's keywords."""
        named = {f"pool_{k}": v for k, v in self.pool().items() if k != "ceil_mode"}
        return {**named, "ceil_mode": self.ceil_mode}


# -- Parameters ------------------------------------------------------------------------------------


def draw(seed: int) -> Case:
    r = random.Random(seed)
    dims = 2
    sized = _channels_and_size(r, dims)
    kernel = _several(r, dims, (1, 2, 3, 3, 3, 4, 5, 5, 7))
    stride = _several(r, dims, (1, 1, 1, 1, 2, 3))
    dilation = _several(r, dims, (1, 1, 1, 1, 1, 2, 3))
    padding: tuple[int, ...] | str = _several(r, dims, (0, 0, 0, 1, 1, 2, 3))
    if r.random() < 0.15:
        padding = r.choice(("same", "same", "valid"))
        stride = (1,) * dims if padding == "same" else stride
    pool_kernel = _several(r, dims, (1, 2, 2, 2, 3, 3, 4, 5))
    pool_stride = None if r.random() < 0.5 else _several(r, dims, (1, 2, 2, 3, 4))
    pool_padding = tuple(r.choice((0, 0, r.randint(0, k // 2))) for k in pool_kernel)
    pool_dilation = _several(r, dims, (1, 1, 1, 1, 1, 1, 2, 3))
    case = Case(
        seed=seed,
        values=r.choice(("integers",) * 4 + ("ties", "constant") + ("real",) * 4),
        dtype=r.choice(DTYPES + (torch.float32,) * 3),
        **sized,
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        pool_kernel_size=pool_kernel,
        pool_stride=pool_stride,
        pool_padding=pool_padding,
        pool_dilation=pool_dilation,
        ceil_mode=r.random() < 0.3,
        bias=r.random() < 0.7,
        layouts=tuple(_layout(r, name) for name in ("input", "weight", "bias", "grad")),
        specials=(),
        wanted=(r.random() < 0.7, r.random() < 0.7, r.random() < 0.7),
        without_grad=r.choice(("",) * 8 + ("no_grad", "inference_mode")),
    )
    case = dataclasses.replace(case, specials=_specials(r, case))
    return _affordable(_possible(case))


def _several(r: random.Random, count: int, choices: tuple[int, ...]) -> tuple[int, ...]:
    """Most often the same number in every dimension."""
    if r.random() < 0.6:
        return (r.choice(choices),) * count
    return tuple(r.choice(choices) for _ in range(count))


def _channels_and_size(r: random.Random, dims: int) -> dict[str, Any]:
    """Kernels put images, filters or columns into vector lanes: one of them is drawn wide."""
    around = lambda: max(1, r.choice((8, 16, 16, 32, 48, 64)) + r.randint(-2, 2))  # noqa: E731
    wide = lambda most: r.choice((r.randint(1, most), min(around(), most)))  # noqa: E731
    batch, channels, filters, groups = r.randint(1, 3), r.randint(1, 4), r.randint(1, 5), 1
    size = tuple(r.randint(1, 14) for _ in range(dims))
    theme = r.choice(("images", "filters", "channels", "width", "groups", "depthwise", "small"))
    if theme == "images":
        batch = wide(40)
    elif theme == "filters":
        filters = wide(70)
    elif theme == "channels":
        channels = wide(70)
    elif theme == "width":
        size = (*size[:-1], wide(40))
    elif theme == "groups":
        groups = r.randint(2, 5)
        channels, filters = groups * r.randint(1, 6), groups * r.randint(1, 18)
    elif theme == "depthwise":
        groups = channels = wide(40)
        filters = channels * r.choice((1, 1, 2, 3))
    if r.random() < 0.3:
        filters = groups * max(1, wide(70) // groups)
    number: int | None = batch
    if r.random() < 0.06:
        number = r.choice((None, None, 0))
    return {
        "batch": number,
        "channels": channels,
        "filters": filters,
        "groups": groups,
        "size": size,
    }


def _layout(r: random.Random, name: str) -> str:
    """`sum()` sends back a gradient that is one number; nothing else often has that layout."""
    layout = r.choice(("contiguous",) * 6 + ("channels_last",) * 2 + LAYOUTS)
    return "expanded" if layout == "scalar" and name != "grad" else layout


def _specials(r: random.Random, case: Case) -> tuple[tuple[str, float], ...]:
    if r.random() < 0.7:
        return ()
    values = list(SPECIALS)
    if not case.exact:
        info = torch.finfo(case.dtype)
        values += [info.max / 4, -info.max / 4, info.max**0.5, info.tiny / 4, -info.tiny]
    return tuple(
        (r.choice(("input", "input", "weight", "bias", "grad")), r.choice(values))
        for _ in range(r.randint(1, 4))
    )


def convolved_size(case: Case) -> tuple[int, ...]:
    if case.padding == "same":
        return case.size
    padding = (0,) * case.dims if isinstance(case.padding, str) else case.padding
    return tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(
            case.size, padding, case.dilation, case.kernel, case.stride, strict=True
        )
    )


def _possible(case: Case) -> Case:
    """Grows the input until a window of the pool fits."""
    while True:
        short = [
            out < 1 or out + 2 * p < d * (k - 1) + 1
            for out, p, d, k in zip(
                convolved_size(case),
                case.pool_padding,
                case.pool_dilation,
                case.pool_kernel_size,
                strict=True,
            )
        ]
        if not any(short):
            return case
        case = dataclasses.replace(
            case, size=tuple(n + s for n, s in zip(case.size, short, strict=True))
        )


def _affordable(case: Case) -> Case:
    """Shrinks what is largest until the convolution is within the budget."""
    while True:
        cost = (
            (case.batch or 1)
            * case.filters
            * (case.channels // case.groups)
            * math.prod(case.kernel)
            * math.prod(convolved_size(case))
        )
        if cost <= BUDGET:
            return case
        longest = max(range(case.dims), key=lambda d: case.size[d])
        size = list(case.size)
        size[longest] = max(1, size[longest] - 3)
        smaller = _possible(dataclasses.replace(case, size=tuple(size)))
        if smaller.size != case.size:
            case = smaller
        elif (case.batch or 1) > 1:
            case = dataclasses.replace(case, batch=(case.batch or 1) - 1)
        else:
            per_group = case.filters // case.groups
            if per_group == 1:
                return case
            case = dataclasses.replace(case, filters=case.groups * (per_group // 2))


# -- Values ----------------------------------------------------------------------------------------


def tensors(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input, weight and bias with the case's values, dtype and layouts."""
    g = torch.Generator().manual_seed(case.seed)
    batch = () if case.batch is None else (case.batch,)
    x = _values(case, g, (*batch, case.channels, *case.size))
    w = _values(case, g, (case.filters, case.channels // case.groups, *case.kernel))
    b = _values(case, g, (case.filters,)) if case.bias else None
    if case.exact:
        while _largest_sum(case, x, w, b) > EXACT[case.dtype]:
            w = _thinned(w, g)
    else:
        w /= math.sqrt(max(1, math.prod(w.shape[1:])))
    made = [
        None if t is None else lay_out(t.to(case.dtype).to(device), layout)
        for t, layout in zip((x, w, b), case.layouts[:3], strict=True)
    ]
    for name, tensor in zip(("input", "weight", "bias"), made, strict=True):
        _plant(case, name, tensor, g)
    x, w, b = made
    return x, w, b


def gradient(case: Case, output: Tensor, *, thinned: int = 0) -> Tensor:
    """A gradient of the output's shape; each time it is thinned, half of it becomes zero."""
    g = torch.Generator().manual_seed(case.seed + 1)
    values = _values(case, g, tuple(output.shape))
    for _ in range(thinned):
        values = _thinned(values, g)
    grad = lay_out(values.to(case.dtype).to(output.device), case.layouts[3])
    _plant(case, "grad", grad, g)
    return grad


def _values(case: Case, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    if case.values == "real":
        return torch.randn(shape, generator=g, dtype=torch.float64)
    if case.values == "constant":  # every window is full of equal values
        return torch.randint(-1, 3, (), generator=g).expand(shape).double()
    most = 1 if case.values == "ties" else 3
    return torch.randint(-most, most + 1, shape, generator=g).double()


def _thinned(values: Tensor, g: torch.Generator) -> Tensor:
    return values * torch.randint(2, values.shape, generator=g)


def _largest_sum(case: Case, x: Tensor, w: Tensor, b: Tensor | None) -> float:
    sums = convolve(case, x.abs(), w.abs(), None if b is None else b.abs())
    return sums.max().item() if sums.numel() else 0.0


def convolve(case: Case, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    # A kernel of 1 has no dilation. To oneDNN, which runs into foreign memory when a float16 one is
    # given a dilation and padding, it must not be shown.
    spread = [1 if k == 1 else d for k, d in zip(case.kernel, case.dilation, strict=True)]
    function = getattr(F, f"conv{case.dims}d")
    return function(x, w, b, case.stride, case.padding, spread, case.groups)


def _plant(case: Case, name: str, tensor: Tensor | None, g: torch.Generator) -> None:
    for where, value in case.specials:
        if where == name and tensor is not None and tensor.numel():
            index = [int(torch.randint(n, (), generator=g)) for n in tensor.shape]
            tensor[tuple(index)] = value


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """The tensor with other strides; expanded and overlapping ones repeat a part of its values."""
    if layout == "channels_last" and tensor.dim() in (4, 5):
        last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        return tensor.contiguous(memory_format=last)
    if layout == "transposed":
        order = tuple(reversed(range(tensor.dim())))
        return tensor.permute(order).contiguous().permute(order)
    if layout == "sliced":
        wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3), math.nan)
        wide[..., 3::2] = tensor
        return wide[..., 3::2]
    if not tensor.numel():
        return tensor
    if layout == "scalar":
        return tensor[(0,) * tensor.dim()].clone().expand(tensor.shape)
    if layout == "expanded":
        dim = tensor.numel() % tensor.dim()
        return tensor.narrow(dim, 0, 1).contiguous().expand(tensor.shape)
    if layout == "overlapping" and tensor.dim() > 1:  # each row starts one element after the last
        strides = [*tensor.stride()[:-2], 1, 1]
        return tensor.contiguous().as_strided(tensor.shape, strides)
    return tensor.contiguous()
