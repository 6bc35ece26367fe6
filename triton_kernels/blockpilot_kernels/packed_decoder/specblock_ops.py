"""The packed SpecBlock layers' ops (arXiv 2605.07243); `packed_decoder` says what they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockpilot_kernels import dispatch


def specblock_forward(
    weights: Sequence[Tensor],
    plan: Tensor,
    eps: float,
    keys: Tensor,
    values: Tensor,
    rope: tuple[Tensor, Tensor],
    x: Tensor,
    tokens: Tensor,
    where: tuple[Tensor, Tensor, Tensor, Tensor],
    exists: Tensor,
    extent: Tensor,
    head_rows: Tensor,
    *,
    features: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The layers over the blocks of K slots that exist; a row's bits depend on no row of another block.

    Args:
        weights, keys … rope, extent: as in `decoder_forward`. plan: from `specblock_plan`.
        x: [B, ·] float32: `features`, or the hidden states that the blocks go on from. tokens: [B] int64 input ids.
        where: [B] int64 each: slot of the cache; position of the block's first slot, as attention counts; its place in
            the cache, the same or, in a tree, behind it; number of its pair. exists: [B] bool.
        head_rows: [M] int64 rows that are wanted, row b·K + k being slot k of block b.

    Returns:
        hidden [M, H] float32 before the final norm, the same normed, and logits [M, V'] of `head_rows`; 0 where a
        block does not exist.

    Raises:
        ValueError: as in `decoder_forward`.
    """
    dispatch.count("specblock_forward", "cpp")
    return torch.ops.blockpilot.specblock_forward(
        weights, plan, eps, keys, values, *rope, x, features, tokens, where, exists, extent, head_rows
    )


def specblock_chain(
    weights: Sequence[Tensor],
    plan: Tensor,
    eps: float,
    keys: Tensor,
    values: Tensor,
    rope: tuple[Tensor, Tensor],
    state: Sequence[Tensor],
    members: tuple[Sequence[int], Sequence[int], Sequence[int]],
    pending: Tensor,
    rules: tuple[Tensor | None, float],
    noise: Tensor | None,
    drafts: Tensor,
    *,
    bans: bool,
    copied: Tensor | None = None,
) -> int:
    """A block per slot: the pairs that wait, and a second pass where it is wider than K + 1.

    Args:
        weights … rope: as in `specblock_forward`. state … copied: as in `draft_chain`; widths are at most 2·K + 1.

    Returns:
        as `draft_chain` does.

    Raises:
        ValueError: as in `draft_chain`.
    """
    dispatch.count("specblock_chain", "cpp")
    ids, temperature = rules
    return torch.ops.blockpilot.specblock_chain(
        weights,
        plan,
        eps,
        keys,
        values,
        *rope,
        state,
        *members,
        pending,
        ids,
        noise,
        temperature,
        bans,
        drafts,
        copied,
    )


if dispatch.extension_error() is None:

    @torch.library.register_fake("blockpilot::specblock_forward")
    def _(
        weights: list[Tensor],
        plan: Tensor,
        eps: float,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        x: Tensor,
        features: bool,
        tokens: Tensor,
        where: list[Tensor],
        exists: Tensor,
        extent: Tensor,
        head_rows: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden, vocabulary = (torch.library.get_ctx().new_dynamic_size() for _ in range(2))
        states = x.new_empty(len(head_rows), hidden)
        return states, torch.empty_like(states), x.new_empty(len(head_rows), vocabulary)
