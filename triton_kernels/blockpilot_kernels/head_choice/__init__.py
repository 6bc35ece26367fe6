"""LM head and choice of a drafter's guesses, without the logits of every id in memory where a kernel does both."""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.head_choice import reference
from blockpilot_kernels.tiled_linear import TILE, PackedLinear
from blockpilot_kernels.validate import expect, expect_dim

__all__ = ["head_choice"]


def head_choice(
    hidden: Tensor,
    head: PackedLinear,
    scale: float,
    ids: Tensor | None,
    noise: Tensor | None,
    source: Tensor,
    temperature: Tensor,
    banned: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The id with the highest score in each row of scale · head(hidden); the lowest id wins a tie.

    A score is logit / temperature + noise where the temperature is above 0, else the logit. Noise and bans go by
    target ids, whatever part of them the head has.

    Args:
        hidden: [M, H] float32 after the final norm, M a multiple of 16. head: [V', H] without a bias.
        ids: [V'] int64 rising target ids of the head's rows; None: their numbers.
        noise: [N, V] float32 by target id, or None: every row is then greedy. source: [M] int64 row of `noise`.
        temperature: [M] float32, 0 or at least 1e-5. banned: [M, S] int64 target ids that cannot be chosen, or None.

    Returns:
        target ids [M] int64 and finite [M] bool, false where a logit is not finite; the id is the head's first there.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    _validate(hidden, head, ids, noise, source, temperature, banned)
    given = (hidden, head, scale, ids, noise, source, temperature, banned)
    if dispatch.backend_for("head_choice", hidden) == "triton":
        from blockpilot_kernels.head_choice import kernel

        return kernel.head_choice(*given)
    return reference.head_choice(*given)


def _validate(
    hidden: Tensor,
    head: PackedLinear,
    ids: Tensor | None,
    noise: Tensor | None,
    source: Tensor,
    temperature: Tensor,
    banned: Tensor | None,
) -> None:
    op = "head_choice"
    expect_dim(op, "hidden", hidden, 2)
    rows = hidden.shape[0]
    expect(op, "hidden", hidden, torch.float32, (-(-rows // TILE) * TILE, head.in_features), hidden)
    expect(op, "source", source, torch.int64, (rows,), hidden)
    expect(op, "temperature", temperature, torch.float32, (rows,), hidden)
    if ids is not None:
        expect(op, "ids", ids, torch.int64, (head.out_features,), hidden)
    if noise is not None:
        expect_dim(op, "noise", noise, 2)
        known = noise.shape[1] if ids is not None else head.out_features
        expect(op, "noise", noise, torch.float32, (noise.shape[0], known), hidden)
    if banned is not None:
        expect_dim(op, "banned", banned, 2)
        expect(op, "banned", banned, torch.int64, (rows, banned.shape[1]), hidden)
