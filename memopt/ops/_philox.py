"""Philox4x32-10 in plain PyTorch: csrc/common/philox.h, for any device."""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = 0xFFFFFFFF


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Random words of counters: the generator of Salmon et al. (SC'11), as in Random123.

    Args:
        counter: int64 of shape (4, N), every entry a 32-bit word.
        key: int64 of shape (2,), likewise.

    Returns:
        int64 of shape (4, N), every entry a 32-bit word.
    """
    a, b, c, d = counter
    key0, key1 = key
    for _ in range(_ROUNDS):
        p_high, p_low = _wide_product(a, _MULTIPLIERS[0])
        q_high, q_low = _wide_product(c, _MULTIPLIERS[1])
        a, b, c, d = q_high ^ b ^ key0, q_low, p_high ^ d ^ key1, p_low
        key0, key1 = (key0 + _WEYL[0]) & _LOW, (key1 + _WEYL[1]) & _LOW
    return torch.stack((a, b, c, d))


def uniform(seed: Tensor, numel: int) -> Tensor:
    """`numel` float32 numbers in [0, 1), each a function of the seed and its index alone.

    Element i takes word i mod 4 of counter i div 4, and of that the upper 24 bits.
    """
    block = torch.arange((numel + 3) // 4, device=seed.device)
    zero = torch.zeros_like(block)
    counter = torch.stack((block & _LOW, block >> 32, zero, zero))
    words = philox(counter, torch.stack((seed & _LOW, (seed >> 32) & _LOW)))
    return ((words >> 8).to(torch.float32) * 2**-24).t().reshape(-1)[:numel]


def _wide_product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The high and low 32 bits of the product, by halves of `b` so that int64 never overflows."""
    high, low = a * (b >> 16), a * (b & 0xFFFF)
    upper = (high + (low >> 16)) >> 16
    return upper, (((high & 0xFFFF) << 16) + low) & _LOW
