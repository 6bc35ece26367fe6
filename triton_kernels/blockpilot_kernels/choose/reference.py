"""`choose` in plain PyTorch: the meaning of the op. No value is read on the host.

Sums over the vocabulary are sums of integers, so their order cannot change a row's result.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASS_ONE = 2.0**40
"""Integer mass of the most probable id; an id 2⁻⁴⁰ times as probable or less has mass 0."""


def choose(
    logits: Tensor,
    noise: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    banned: Tensor | None,
    filtered: bool,
) -> tuple[Tensor, Tensor]:
    """See `blockpilot_kernels.choose.choose`."""
    finite = torch.isfinite(logits).all(-1)
    allowed = allowed_ids(logits, banned)
    masked = torch.where(allowed, logits + 0.0, -torch.inf)  # + 0.0 makes −0 and 0 one value
    score = masked
    if noise is not None:
        z = scaled_logits(masked, temperature)
        kept = allowed & kept_by_filters(masked, z, top_k, top_p, min_p) if filtered else allowed
        score = torch.where((temperature > 0)[:, None], torch.where(kept, z + noise, -torch.inf), masked)
    return torch.where(finite, lowest_argmax(score), 0), finite


def allowed_ids(logits: Tensor, banned: Tensor | None) -> Tensor:
    """[N, V] bool, false at the banned ids. Column V of the scratch takes what lies outside [0, V)."""
    rows, vocab = logits.shape
    allowed = torch.ones((rows, vocab + 1), dtype=torch.bool, device=logits.device)
    if banned is not None:
        inside = (banned >= 0) & (banned < vocab)
        allowed = allowed.scatter(1, torch.where(inside, banned, vocab), False)
    return allowed[:, :vocab]


def scaled_logits(masked: Tensor, temperature: Tensor) -> Tensor:
    """(logits − max) / temperature, [N, V], never below the lowest finite float32. Greedy rows: temperature
    1."""
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None]
    z = (masked - masked.amax(-1, keepdim=True)) / divisor
    return z.clamp(min=torch.finfo(torch.float32).min)


def kept_by_filters(masked: Tensor, z: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[N, V] bool: what top_k, then top_p, then min_p keep."""
    relative = torch.exp(z)  # probability relative to the most probable id's
    order = masked.sort(dim=-1, descending=True, stable=True).indices  # equal logits: lowest id first
    rank = torch.arange(masked.shape[1], device=masked.device)
    in_k = rank < torch.where(top_k > 0, top_k, masked.shape[1])[:, None]

    mass = torch.where(in_k, (relative * MASS_ONE).to(torch.int64).gather(1, order), 0)
    mass_through = mass.cumsum(-1)
    limit = (top_p[:, None] * mass_through[:, -1:].to(torch.float32)).to(torch.int64).clamp(min=1)
    in_p = (mass_through - mass < limit) | (top_p >= 1)[:, None]

    kept = torch.zeros_like(in_k).scatter(1, order, in_k & in_p)
    return kept & (relative >= min_p.clamp(max=1)[:, None])


def lowest_argmax(score: Tensor) -> Tensor:
    """[N, V] → [N] int64: the lowest id that holds the row's maximum, 0 if NaN does."""
    vocab = score.shape[1]
    ids = torch.arange(vocab, device=score.device)
    found = torch.where(score == score.amax(-1, keepdim=True), ids, vocab).amin(-1)
    return torch.where(found < vocab, found, 0)
