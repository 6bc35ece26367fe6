"""Gumbel noise shared by drafter and target, keyed by (request seed, position of the chosen token)."""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.gumbel_noise import reference
from blockpilot_kernels.validate import expect, expect_dim

__all__ = ["gumbel_noise", "philox"]

MAX_VOCAB = 2**22


def gumbel_noise(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel variates g(seed, position, id) for every id.

    `argmax(log p + g)` over the ids is a draw from p; drafter and target that use the same g for the same
    position draw the same token whenever their distributions allow it (drafter-invariant sampling).

    Args:
        seed: [N] int64, any value; the request's seed.
        position: [N] int64, absolute position of the token being chosen (its low 32 bits count).
        vocab: number of ids V.

    Returns:
        [N, V] float32, always finite. Philox4x32-10 with key (seed mod 2³², seed div 2³²) and counter
        (id // 4, position, 0, 0), lane id mod 4, gives i; u = (i + ½)·2⁻³² below 1; g = −log(−log1p(−u)).

    Raises:
        ValueError: wrong shape, dtype or device, or a vocabulary size out of range.
    """
    _validate("gumbel_noise", seed, position, vocab)
    backend = dispatch.backend_for("gumbel_noise", seed)
    if backend == "cpp":
        return torch.ops.blockpilot.gumbel_noise(seed, position, vocab)
    if backend == "triton":
        from blockpilot_kernels.gumbel_noise import kernel

        return kernel.gumbel_noise(seed, position, vocab)
    return reference.gumbel_noise(seed, position, vocab)


def philox(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """The integers i behind `gumbel_noise` → [N, V] int64 in [0, 2³²). The same in every backend."""
    _validate("philox", seed, position, vocab)
    backend = dispatch.backend_for("philox", seed)
    if backend == "cpp":
        return torch.ops.blockpilot.philox(seed, position, vocab)
    if backend == "triton":
        from blockpilot_kernels.gumbel_noise import kernel

        return kernel.philox(seed, position, vocab)
    return reference.philox(seed, position, vocab)


def _validate(op: str, seed: Tensor, position: Tensor, vocab: int) -> None:
    expect_dim(op, "seed", seed, 1)
    expect(op, "seed", seed, torch.int64, tuple(seed.shape), seed)
    expect(op, "position", position, torch.int64, tuple(seed.shape), seed)
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(
            f"{op}: vocab: expected 1 … {MAX_VOCAB}, got {vocab}; pass the number of logits a row has"
        )


if dispatch.extension_error() is None:

    @torch.library.register_fake("blockpilot::gumbel_noise")
    def _(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
        return seed.new_empty((seed.shape[0], vocab), dtype=torch.float32)

    @torch.library.register_fake("blockpilot::philox")
    def _(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
        return seed.new_empty((seed.shape[0], vocab))

    @torch.library.register_fake("blockpilot::gumbel_from_integers")
    def _(integers: Tensor) -> Tensor:
        return integers.new_empty(integers.shape, dtype=torch.float32)
