"""Philox4x32-10 (Salmon et al., SC 2011) and the Gumbel transform in plain PyTorch: the meaning of the op."""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK = 0xFFFFFFFF

LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def gumbel_noise(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """[N] int64, [N] int64 → [N, vocab] float32."""
    return gumbel_from_integers(philox(seed, position, vocab))


def philox(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """[N] int64, [N] int64 → [N, vocab] int64 in [0, 2³²). All four lanes of a counter are used."""
    counters = torch.arange((vocab + 3) // 4, dtype=torch.int64, device=seed.device)[None]  # [1, C]
    place = (position & MASK)[:, None]  # [N, 1]
    nothing = torch.zeros_like(place)
    lanes = philox_4x32(
        (counters, place, nothing, nothing), ((seed & MASK)[:, None], (seed >> 32 & MASK)[:, None])
    )
    return torch.stack(lanes, -1).flatten(1)[:, :vocab]


def philox_4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Four counter words and two key words, 32-bit values held in int64 → four random words, as int64.

    A 32 × 32-bit product may pass 2⁶³ and wraps; its two halves are right all the same once masked.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (b >> 32 & MASK) ^ c1 ^ k0, b & MASK, (a >> 32 & MASK) ^ c3 ^ k1, a & MASK
        k0, k1 = k0 + KEY_STEPS[0] & MASK, k1 + KEY_STEPS[1] & MASK
    return c0, c1, c2, c3


def gumbel_from_integers(integers: Tensor) -> Tensor:
    """int64 in [0, 2³²) → standard Gumbel float32 of the same shape, always finite.

    The largest integers round to u = 1 in float32, which would give −inf: u is kept below 1. Small u, and so
    the large g that decide a draw, keep the full resolution.
    """
    u = ((integers.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=LARGEST_BELOW_ONE)
    return -torch.log(-torch.log1p(-u))
