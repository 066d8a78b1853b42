"""The quantised format of docs/storage_format.md: its sizes, its checks, its bits and roundings."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = (2, 4, 8)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_BFLOAT16_MAX = torch.finfo(torch.bfloat16).max


def packed_sizes(numel: int, bits: int, group_size: int) -> tuple[int, int]:
    """The length of `packed`, and that of `scale` and `minimum`."""
    return (numel * bits + 7) // 8, (numel + group_size - 1) // group_size


def check_format(
    op: str, bits: int, group_size: int, error: type[Exception] = RuntimeError
) -> None:
    """Raise unless the format exists."""
    if bits not in BITS:
        raise error(f"{op}: bits is {bits}, needs 2, 4 or 8")
    if group_size <= 0 or group_size % 8 != 0:
        raise error(f"{op}: group_size is {group_size}, needs a positive multiple of 8")


def check_input(op: str, input: Tensor, bits: int, group_size: int, seed: Tensor | None) -> None:
    """Raise unless `input` can be quantised so."""
    if input.dtype not in DTYPES:
        raise RuntimeError(
            f"{op}: input has dtype {input.dtype}, needs float32, float64, bfloat16 or float16"
        )
    check_format(op, bits, group_size)
    if seed is None:
        return
    if seed.dtype != torch.int64 or seed.dim() != 0 or seed.device != input.device:
        raise RuntimeError(
            f"{op}: seed is {seed.dtype} with {seed.dim()} dimensions on {seed.device}, needs "
            f"torch.int64 with none on {input.device}"
        )


def check_packed(
    op: str, packed: Tensor, scale: Tensor, minimum: Tensor, numel: int, bits: int, group_size: int
) -> None:
    """Raise unless the three tensors can hold `numel` elements."""
    check_format(op, bits, group_size)
    nbytes, groups = packed_sizes(numel, bits, group_size)
    for name, tensor, dtype, needed in (
        ("packed", packed, torch.uint8, nbytes),
        ("scale", scale, torch.bfloat16, groups),
        ("minimum", minimum, torch.bfloat16, groups),
    ):
        if tensor.dtype != dtype or tensor.dim() != 1 or tensor.shape[0] != needed:
            raise RuntimeError(
                f"{op}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, needs {dtype} of "
                f"shape ({needed},), for {numel} elements of {bits} bits in groups of {group_size}"
            )
        if tensor.device != packed.device:
            raise RuntimeError(f"{op}: {name} is on {tensor.device}, packed is on {packed.device}")


def round_down(x: Tensor) -> Tensor:
    """To bfloat16 toward minus infinity, saturating at the smallest finite value."""
    return _directed(x, x < 0)


def round_up(x: Tensor) -> Tensor:
    """To bfloat16 toward infinity, saturating at the largest finite value."""
    return _directed(x, x > 0)


def _directed(x: Tensor, away: Tensor) -> Tensor:
    bits = x.view(torch.int32) & 0x7FFFFFFF
    magnitude = (torch.where(away, bits + 0xFFFF, bits) & -0x10000).view(torch.float32)
    return torch.where(x < 0, -magnitude, magnitude).clamp(-_BFLOAT16_MAX, _BFLOAT16_MAX).bfloat16()


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes to bytes, low bits first."""
    per_byte = 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.numel() % per_byte)).view(-1, per_byte)
    return (codes << _shifts(bits, codes.device)).sum(dim=1, dtype=torch.uint8)


def unpack(packed: Tensor, numel: int, bits: int) -> Tensor:
    codes = (packed.unsqueeze(1) >> _shifts(bits, packed.device)) & (2**bits - 1)
    return codes.view(-1)[:numel]


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)
