"""Codes that say which position of a pooling window won: csrc/common/pool.h in Python.

A code is a position in the window, row by row, or the largest code (all bits set) where ReLU cut
the window. Codes take 4 bits for windows of up to 15 positions, 8 to 255, 16 to 65535, else 32,
and lie in planes of whole bytes: uint8 (N, C, ceil(OH * OW * bits / 8)).
"""

from __future__ import annotations

import torch
from torch import Tensor


def code_bits(positions: int) -> int:
    """Bits of a code for windows of so many positions."""
    return 4 if positions <= 15 else 8 if positions <= 255 else 16 if positions <= 65535 else 32


def plane_bytes(outputs: int, positions: int) -> int:
    """Bytes of one (image, channel) plane of codes."""
    return (outputs * code_bits(positions) + 7) // 8


def pack_codes(codes: Tensor, positions: int) -> Tensor:
    """Pack int64 codes (N, C, OH * OW), -1 where ReLU cut the window."""
    bits = code_bits(positions)
    codes = codes & ((1 << bits) - 1)
    if bits == 4:
        codes = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
        return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    shifts = torch.arange(0, bits, 8, device=codes.device)
    return (codes.unsqueeze(-1) >> shifts & 0xFF).flatten(-2).to(torch.uint8)


def unpack_codes(packed: Tensor, outputs: int, positions: int) -> Tensor:
    """The inverse of `pack_codes`: int64 (N, C, outputs), `positions` or more where cut."""
    bits = code_bits(positions)
    wide = packed.to(torch.int64)
    if bits == 4:
        return torch.stack((wide & 15, wide >> 4), dim=-1).flatten(-2)[..., :outputs]
    shifts = torch.arange(0, bits, 8, device=packed.device)
    return (wide.unflatten(-1, (outputs, bits // 8)) << shifts).sum(-1)
