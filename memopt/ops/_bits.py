"""Booleans eight to a byte, the first in the lowest bit: csrc/common/bits.h in Python."""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_for(numel: int) -> int:
    """Bytes that hold one bit for each of `numel` elements."""
    return (numel + 7) // 8


def pack_bits(flags: Tensor) -> Tensor:
    """Pack booleans of any shape, in row-major order, into uint8 of shape (ceil(numel / 8),)."""
    flat = flags.reshape(-1).to(torch.uint8)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    return (padded << _shifts(padded.device)).sum(dim=1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """The first `numel` booleans of `packed`: the inverse of `pack_bits`."""
    bits = (packed.unsqueeze(1) >> _shifts(packed.device)) & 1
    return bits.view(-1)[:numel].bool()


def pack_planes(flags: Tensor) -> Tensor:
    """Pack each plane of booleans (..., numel) into whole bytes: uint8 (..., ceil(numel / 8))."""
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -flags.shape[-1] % 8))
    bits = padded.unflatten(-1, (bytes_for(flags.shape[-1]), 8)) << _shifts(flags.device)
    return bits.sum(dim=-1, dtype=torch.uint8)


def unpack_planes(packed: Tensor, numel: int) -> Tensor:
    """The inverse of `pack_planes`."""
    bits = (packed.unsqueeze(-1) >> _shifts(packed.device)) & 1
    return bits.flatten(-2)[..., :numel].bool()


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
