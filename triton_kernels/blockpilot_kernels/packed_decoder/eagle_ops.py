"""The packed EAGLE-3 layer's ops (arXiv 2503.01840); `packed_decoder` says what they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockpilot_kernels import dispatch


def eagle_forward(
    weights: Sequence[Tensor],
    plan: Tensor,
    eps: float,
    keys: Tensor,
    values: Tensor,
    rope: tuple[Tensor, Tensor],
    x: Tensor,
    tokens: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    extent: Tensor,
    head_rows: Tensor,
    path: Tensor | None = None,
    *,
    fuse: bool,
) -> tuple[Tensor, Tensor]:
    """The layer over the packed pairs that exist; a row's bits depend on no other row.

    Args:
        weights, keys … rope, tokens, rows, extent, head_rows, path: as in `decoder_forward`. plan: from `eagle3_plan`.
        x: [N, K] float32: to `fuse`, features, otherwise hidden states.

    Returns:
        hidden [N, H] float32 before the final norm, 0 where a row does not exist; logits [M, V'] of `head_rows`.

    Raises:
        ValueError: as in `decoder_forward`.
    """
    dispatch.count("eagle_forward", "cpp")
    return torch.ops.blockpilot.eagle_forward(
        weights, plan, eps, keys, values, *rope, x, fuse, tokens, *rows, extent, head_rows, path
    )


def draft_chain(
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
    """A block per slot, token after token: the pairs that wait, then a pass for each depth beyond the first.

    Args:
        weights … rope: as in `eagle_forward`. state, members, noise, bans: as in `draft_block`.
        pending: [slots, at least W, n·H] float32, of which a slot's first `count` rows are features.
        rules: ids of the head's columns, rising [V'] int64, or None; factor on a request's temperature.
        drafts: [slots, at least W − 1] int64, written where a column exists.
        copied: [slots] bool, slots whose waiting pairs are run and no more, and whose drafts stay as they are; None: no
            slot.

    Returns:
        how many drafts had logits that are not finite; they say the first id.

    Raises:
        ValueError: as in `draft_block`.
    """
    dispatch.count("draft_chain", "cpp")
    ids, temperature = rules
    return torch.ops.blockpilot.draft_chain(
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

    @torch.library.register_fake("blockpilot::eagle_forward")
    def _(
        weights: list[Tensor],
        plan: Tensor,
        eps: float,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        x: Tensor,
        fuse: bool,
        tokens: Tensor,
        slot: Tensor,
        position: Tensor,
        exists: Tensor,
        extent: Tensor,
        head_rows: Tensor,
        path: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        hidden, vocabulary = (torch.library.get_ctx().new_dynamic_size() for _ in range(2))
        return x.new_empty(len(x), hidden), x.new_empty(len(head_rows), vocabulary)
