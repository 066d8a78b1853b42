"""Storing a tensor in 2, 4 or 8 bits an element: docs/storage_format.md.

    m = bfloat16 below the group's minimum      s = bfloat16 above (maximum - m) / (2^bits - 1)
    code = floor(q) + (u < q - floor(q)),  q = (x - m) / s       decoded: m + s * code

with u uniform in [0, 1) for stochastic rounding, 1/2 for nearest. The codes are computed from the
rounded m and s, which cover the group: nothing is clamped, so stochastic rounding is unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memopt._registry import Op
from memopt.ops import _philox
from memopt.ops._packed import (
    DTYPES,
    check_format,
    check_input,
    check_packed,
    pack,
    packed_sizes,
    round_down,
    round_up,
    unpack,
)

# memopt exports these itself: they store tensors and are no counterparts of torch.nn.functional.
__all__: list[str] = []

_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False, repr=False)
class Quantized:
    """A tensor packed by `memopt.quantize`; `memopt.dequantize` restores it.

    Attributes:
        packed: uint8, the codes of all elements in row-major order, low bits first.
        scale, minimum: bfloat16, one for each group of `group_size` consecutive elements.
        shape, stride, dtype: of the tensor that was packed.
        bits, group_size: how it was packed.

    Example:
        >>> import torch, memopt
        >>> memopt.quantize(torch.zeros(4, 64), 2)
        Quantized(shape=(4, 64), dtype=torch.float32, bits=2, group_size=256, nbytes=68, device=cpu)
    """

    packed: Tensor
    scale: Tensor
    minimum: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    bits: int
    group_size: int

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors."""
        return self.packed.nbytes + self.scale.nbytes + self.minimum.nbytes

    def __repr__(self) -> str:
        return (
            f"Quantized(shape={tuple(self.shape)}, dtype={self.dtype}, bits={self.bits}, "
            f"group_size={self.group_size}, nbytes={self.nbytes}, device={self.packed.device})"
        )


def quantize(
    x: Tensor,
    bits: int,
    *,
    group_size: int = 256,
    stochastic: bool = True,
    generator: torch.Generator | None = None,
) -> Quantized:
    """Pack a floating-point tensor into 2, 4 or 8 bits an element.

    Every group of `group_size` consecutive elements, in row-major order whatever the strides, keeps
    its minimum and a scale in bfloat16: 2.125, 4.125 and 8.125 bits an element by default. A group
    that holds NaN or Inf is restored as NaN entirely. No gradient flows through the result.

    Args:
        x: float32, float64, bfloat16 or float16, any strides; it is not copied.
        bits: 2, 4 or 8.
        group_size: a positive multiple of 8.
        stochastic: round up or down at random so that the expected value is exact. Otherwise to
            nearest, which errs half as much but always to the same side.
        generator: draws the seed of the rounding, on x's device; by default torch's own, so
            `torch.manual_seed` reproduces the result.

    Returns:
        A `Quantized`.

    Example:
        >>> import torch, memopt
        >>> x = torch.randn(64, 256)
        >>> q = memopt.quantize(x, 4)
        >>> x.nbytes, q.nbytes
        (65536, 8448)
        >>> memopt.dequantize(q).shape
        torch.Size([64, 256])
    """
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"quantize: x is {got}, needs float32, float64, bfloat16 or float16")
    check_format("quantize", bits, group_size, ValueError)
    seed = draw_seed(x.device, generator) if stochastic else None
    compact = x.detach()
    for dim, (size, step) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if step == 0 and size > 1:
            compact = compact.narrow(dim, 0, 1)  # expanded: every entry is the same memory
    packed, scale, minimum = quantize_op(compact, bits, group_size, seed)
    stride = x.stride() if _is_disjoint(compact) else _row_major(x.shape)
    return Quantized(packed, scale, minimum, x.shape, stride, x.dtype, bits, group_size)


def dequantize(q: Quantized) -> Tensor:
    """The tensor that `memopt.quantize` packed, with its shape, strides, dtype and device.

    A tensor whose elements overlap in memory other than by expansion (`Tensor.unfold`) comes back
    contiguous.

    Example:
        >>> import torch, memopt
        >>> q = memopt.quantize(torch.zeros(3, 2).t(), 8)
        >>> memopt.dequantize(q)
        tensor([[0., 0., 0.],
                [0., 0., 0.]])
    """
    size = [1 if stride == 0 and n > 1 else n for n, stride in zip(q.shape, q.stride, strict=True)]
    compact = dequantize_op(
        q.packed, q.scale, q.minimum, size, q.stride, q.dtype, q.bits, q.group_size
    )
    return compact.expand(q.shape)


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """A seed for the rounding, from torch's generator of the device and left on the device."""
    like = torch.empty((), dtype=torch.int64, device=device)
    # random_ without the underscore: torch.compile takes it, and then draws eager's numbers.
    return torch.ops.aten.random.default(like, generator=generator)


def _is_disjoint(x: Tensor) -> bool:
    """Whether every dimension steps over all that the smaller ones reach: no shared memory."""
    if x.is_contiguous() or x.numel() == 0:
        return True
    # By pairs: torch.compile cannot trace sorted() by symbolic strides.
    dims = [(n, step) for n, step in zip(x.shape, x.stride(), strict=True) if n > 1]
    return all(
        step > sum((n - 1) * s for e, (n, s) in enumerate(dims) if e != d and s <= step)
        for d, (_, step) in enumerate(dims)
    )


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(shape)]))


# -- The raw ops -----------------------------------------------------------------------------------


def quantize_reference(
    input: Tensor, bits: int, group_size: int, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of the format, in float32; csrc/common/quantize.h in Python."""
    check_input("quantize", input, bits, group_size, seed)
    numel = input.numel()
    _, groups = packed_sizes(numel, bits, group_size)
    x = input.reshape(-1).to(torch.float32) + 0.0  # -0 is +0
    if numel == 0:
        return _quantize_fake(input, bits, group_size, seed)
    rows = torch.nn.functional.pad(x, (0, groups * group_size - numel)).view(groups, group_size)
    filled = torch.arange(groups * group_size, device=x.device).view_as(rows) < numel
    finite = torch.where(filled, rows.isfinite(), True).all(dim=1)
    rows = torch.where(finite.unsqueeze(1), rows, 0.0)
    low = torch.where(filled, rows, math.inf).amin(dim=1)
    high = torch.where(filled, rows, -math.inf).amax(dim=1)

    levels = x.new_tensor(2**bits - 1)  # a tensor on the device: true division, not by reciprocal
    minimum = round_down(low)
    half_minimum = minimum.float() * 0.5
    half_range = (high * 0.5 - half_minimum).clamp_min(0.0)
    is_constant = low == high
    scale = torch.where(
        is_constant, (2.0 * half_range).bfloat16(), round_up(2.0 * (half_range / levels))
    )
    half_step = torch.where(is_constant, half_range, scale.float() * 0.5)
    half_step = torch.where(half_step > 0, half_step, 1.0)

    position = (rows * 0.5 - half_minimum.unsqueeze(1)) / half_step.unsqueeze(1)
    position = position.clamp(0.0, 2.0**bits - 1)
    below = position.floor()
    u = 0.5 if seed is None else _philox.uniform(seed, rows.numel()).view_as(rows)
    codes = (below + (u < position - below)).to(torch.uint8)
    codes = torch.where(finite.unsqueeze(1), codes, 0).view(-1)[:numel]
    scale, minimum = (torch.where(finite, t, math.nan) for t in (scale, minimum))
    return pack(codes, bits), scale, minimum


def dequantize_reference(
    packed: Tensor,
    scale: Tensor,
    minimum: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    bits: int,
    group_size: int,
) -> Tensor:
    output = _dequantize_fake(packed, scale, minimum, size, stride, dtype, bits, group_size)
    numel = output.numel()
    codes = unpack(packed, numel, bits).float()
    half_scale, half_minimum = (
        (t.float() * 0.5).repeat_interleave(group_size)[:numel] for t in (scale, minimum)
    )
    values = (half_minimum + half_scale * codes) * 2.0
    limit = min(torch.finfo(dtype).max, _FLOAT32_MAX)
    return output.copy_(values.clamp(-limit, limit).to(dtype).view(size))


def _quantize_fake(
    input: Tensor, bits: int, group_size: int, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    check_input("quantize", input, bits, group_size, seed)
    nbytes, groups = packed_sizes(input.numel(), bits, group_size)
    scale, minimum = (input.new_empty((groups,), dtype=torch.bfloat16) for _ in range(2))
    return input.new_empty((nbytes,), dtype=torch.uint8), scale, minimum


def _dequantize_fake(
    packed: Tensor,
    scale: Tensor,
    minimum: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    bits: int,
    group_size: int,
) -> Tensor:
    if dtype not in DTYPES:
        raise RuntimeError(
            f"dequantize: dtype is {dtype}, needs float32, float64, bfloat16 or float16"
        )
    if len(size) != len(stride):
        raise RuntimeError(
            f"dequantize: size has {len(size)} dimensions and stride {len(stride)}, "
            "needs the same number"
        )
    for dim, (n, step) in enumerate(zip(size, stride, strict=True)):
        if n < 0 or step < 0:
            raise RuntimeError(
                f"dequantize: dimension {dim} has size {n} and stride {step}, "
                "needs neither negative"
            )
        if step == 0 and n > 1:
            raise RuntimeError(
                f"dequantize: dimension {dim} has size {n} and stride 0, needs memory of its own "
                "for each element"
            )
    check_packed("dequantize", packed, scale, minimum, math.prod(size), bits, group_size)
    return torch.empty_strided(size, stride, dtype=dtype, device=packed.device)


quantize_op = Op(
    "quantize",
    "(Tensor input, int bits, int group_size, Tensor? seed)"
    " -> (Tensor packed, Tensor scale, Tensor minimum)",
    reference=quantize_reference,
    fake=_quantize_fake,
    not_differentiable="",
)

dequantize_op = Op(
    "dequantize",
    "(Tensor packed, Tensor scale, Tensor minimum, SymInt[] size, SymInt[] stride,"
    " ScalarType dtype, int bits, int group_size) -> Tensor",
    reference=dequantize_reference,
    fake=_dequantize_fake,
    not_differentiable="",
)
