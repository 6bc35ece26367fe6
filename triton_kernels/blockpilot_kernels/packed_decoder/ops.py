"""The packed decoder's ops; `packed_decoder` says what they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.packed_decoder.plan import ROUNDINGS, Record


def decoder_forward(
    weights: Sequence[Tensor],
    plan: Tensor,
    scalars: Sequence[float],
    keys: Tensor,
    values: Tensor,
    rope: tuple[Tensor, Tensor],
    tokens: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    extent: Tensor,
    feature_layers: Sequence[int],
    head_rows: Tensor,
    path: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Embedding, every layer, final norm and head over the packed rows that exist.

    A row's result depends on its token, position, slot and the keys it may see, bit for bit; not on the rows
    beside it, on how many there are, or on the number of threads.

    Args:
        weights: byte tensors that the plan's records point into. plan: from `decoder_plan`.
        scalars: RMS epsilon, factor on embeddings, factor on logits.
        keys: [layers, slots, kv heads, C / 16, D, 16]; values: [layers, slots, kv heads, C, D padded to 16];
            both float32 or bfloat16, written in place at the rows' places.
        rope: cos and sin, [positions, D / 2] float32.
        tokens: [N] int64. rows: slot [N] int64, position [N] int64, exists [N] bool.
        extent: [slots] int64 keys per slot after this pass.
        feature_layers: hidden states to return (0 = embeddings, k = output of layer k − 1).
        head_rows: [M] int64 rows whose logits are wanted.
        path: [N, depths] int64 for rows in trees: column d is the place, in the cache, of the row's ancestor d below
            an anchor, rising up to its own; column 0, the anchor's, is also its position. A row sees the places
            before its anchor and its path, with the bits that it would have if they lay side by side. None: the
            place of every position has its number.

    Returns:
        logits [M, V] float32, V rows of the head, features [N, n·H] float32; 0 where a row does not exist.

    Raises:
        ValueError: a plan, shape, dtype, id or position out of range.
    """
    dispatch.count("decoder_forward", "cpp")
    cos_sin = (rope[0], rope[1])
    return torch.ops.blockpilot.decoder_forward(
        list(weights),
        plan,
        list(scalars),
        keys,
        values,
        *cos_sin,
        tokens,
        *rows,
        extent,
        list(feature_layers),
        head_rows,
        path,
    )


def verify_commit(
    weights: Sequence[Tensor],
    plan: Tensor,
    scalars: Sequence[float],
    keys: Tensor,
    values: Tensor,
    rope: tuple[Tensor, Tensor],
    state: Sequence[Tensor],
    members: tuple[Sequence[int], Sequence[int]],
    feature_layers: Sequence[int],
    noise: Tensor | None,
    *,
    bans: bool,
    filtered: bool,
    drafted: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, list[int]]:
    """One step of some slots: `decoder_forward` over their blocks, `choose` of every row, `accept_commit`.

    Each row's logits become its choice where they are made; the results are those of the three ops, bit for bit. Of
    trees the path that the target takes is committed, and its keys, values and features are moved together.

    Args:
        weights … rope, feature_layers: as in `decoder_forward`.
        state: `blockpilot.state.State.tensors`; `block` holds the drafts, its column 0 and `effective` are set here.
        members: slots and the widths or nodes they were given; their packed rows follow one another, N in all.
        noise: [N, V] float32 from `gumbel_noise`, or None: every row is greedy.
        bans: some slot may not choose its stop ids yet. filtered: some slot filters.
        drafted: of trees parent, depth [slots, W − 1] and nodes [slots], int64, as in `blockpilot.drafters.Proposal`;
            None: every block is a chain.

    Returns:
        features [N, n·H] float32, 0 where a row does not exist; and what was committed, slot after slot: count,
        accepted, effective width, finish code, `count` ids.

    Raises:
        ValueError: as in `decoder_forward`, or a state of other shapes, or no trees.
    """
    dispatch.count("verify_commit", "cpp")
    return torch.ops.blockpilot.verify_commit(
        weights, plan, scalars, keys, values, *rope, state, *members, feature_layers, noise, bans, filtered,
        list(drafted or ()),
    )  # fmt: skip


def draft_block(
    weights: Sequence[Tensor],
    plan: Tensor,
    scalars: Sequence[float],
    keys: Tensor,
    values: Tensor,
    rope: tuple[Tensor, Tensor],
    state: Sequence[Tensor],
    members: tuple[Sequence[int], Sequence[int], Sequence[int]],
    rules: tuple[int, Tensor | None, float],
    noise: Tensor | None,
    drafts: Tensor,
    *,
    bans: bool,
    copied: Tensor | None = None,
) -> int:
    """A block of [anchor, mask, …] per slot through a DFlash drafter; its choices of columns 1 … into `drafts`.

    Args:
        weights … rope: as in `decoder_forward`. state: as in `verify_commit`.
        members: slots, their widths, and the row of `noise` that each one's column 0 has.
        rules: mask id; ids of the head's columns, rising [V'] int64, or None; factor on a request's temperature.
        noise: [N, V] of the target's rows; column j takes that of row j − 1. None: every slot is greedy.
        drafts: [slots, at least W − 1] int64, written where a column exists.
        copied: [slots] bool, slots that take no part, whose drafts stay as they are; None: all do.

    Returns:
        how many columns had logits that are not finite; they say the first id.

    Raises:
        ValueError: as in `verify_commit`.
    """
    dispatch.count("draft_block", "cpp")
    mask, ids, temperature = rules
    slots, widths, sources = members
    return torch.ops.blockpilot.draft_block(
        weights, plan, scalars, keys, values, *rope, state, slots, widths, sources,
        mask, ids, noise, temperature, bans, drafts, copied,
    )  # fmt: skip


def commit_context(
    weights: Sequence[Tensor],
    plan: Tensor,
    eps: float,
    keys: Tensor,
    values: Tensor,
    rope: tuple[Tensor, Tensor],
    state: Sequence[Tensor],
    members: tuple[Sequence[int], Sequence[int], Sequence[int]],
    features: Tensor,
) -> None:
    """`context_append` of what the last step committed in some slots.

    Args:
        weights … rope: as in `context_append`. state: as in `verify_commit`. members: as in `draft_block`.
        features: [N, n·H] float32 of the step's packed rows; row j of a slot is that of its column j.

    Raises:
        ValueError: as in `verify_commit`.
    """
    dispatch.count("commit_context", "cpp")
    torch.ops.blockpilot.commit_context(weights, plan, eps, keys, values, *rope, state, *members, features)


def move_places(keys: Tensor, values: Tensor, slot: Tensor, before: Tensor, after: Tensor) -> None:
    """Copy every layer's key and value of place `before[i]` of `slot[i]` to `after[i]`, i = 0 … N − 1 in turn.

    Args:
        keys, values: as in `decoder_forward`. slot, before, after: [N] int64.

    Raises:
        ValueError: a shape, dtype, slot or place out of range.
    """
    dispatch.count("move_places", "cpp")
    torch.ops.blockpilot.move_places(keys, values, slot, before, after)


def context_append(
    weights: Sequence[Tensor],
    plan: Tensor,
    eps: float,
    keys: Tensor,
    values: Tensor,
    rope: tuple[Tensor, Tensor],
    features: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write a DFlash drafter's context keys and values of target features (arXiv 2602.06036).

    Args:
        weights, keys, values, rope, rows: as in `decoder_forward`. plan: from `context_plan`.
        features: [N, n·H] float32.

    Raises:
        ValueError: as in `decoder_forward`.
    """
    dispatch.count("context_append", "cpp")
    torch.ops.blockpilot.context_append(list(weights), plan, eps, keys, values, *rope, features, *rows)


def packed_linear(x: Tensor, weights: Tensor, record: Record, rounding: str = "none") -> Tensor:
    """x [M, K] float32 · Wᵀ + b → [M, N] float32, for a matrix that `Weights.linear` packed.

    Args:
        rounding: of x: "none", "bfloat16", or "int8" and "int16" (one scale per 32 columns; block formats only).
    """
    return torch.ops.blockpilot.packed_linear(
        x, weights, torch.tensor(record, device="cpu"), ROUNDINGS[rounding]
    )


def weighted_rows(p: Tensor, weights: Tensor, record: Record) -> Tensor:
    """p [R, N] float32 · W [N, K] → [R, K] float32: mean embeddings, for policies."""
    return torch.ops.blockpilot.weighted_rows(p, weights, torch.tensor(record, device="cpu"))


if dispatch.extension_error() is None:

    @torch.library.register_fake("blockpilot::decoder_forward")
    def _(
        weights: list[Tensor],
        plan: Tensor,
        scalars: list[float],
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        tokens: Tensor,
        slot: Tensor,
        position: Tensor,
        exists: Tensor,
        extent: Tensor,
        feature_layers: list[int],
        head_rows: Tensor,
        path: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        vocabulary = torch.library.get_ctx().new_dynamic_size()
        hidden = torch.library.get_ctx().new_dynamic_size()
        return cos.new_empty(len(head_rows), vocabulary), cos.new_empty(len(tokens), hidden)

    @torch.library.register_fake("blockpilot::move_places")
    def _(keys: Tensor, values: Tensor, slot: Tensor, before: Tensor, after: Tensor) -> None:
        return None

    @torch.library.register_fake("blockpilot::context_append")
    def _(
        weights: list[Tensor],
        plan: Tensor,
        eps: float,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        features: Tensor,
        slot: Tensor,
        position: Tensor,
        exists: Tensor,
    ) -> None:
        return None

    @torch.library.register_fake("blockpilot::packed_linear")
    def _(x: Tensor, weights: Tensor, record: Tensor, rounding: int) -> Tensor:
        return x.new_empty(len(x), torch.library.get_ctx().new_dynamic_size())

    @torch.library.register_fake("blockpilot::weighted_rows")
    def _(p: Tensor, weights: Tensor, record: Tensor) -> Tensor:
        return p.new_empty(len(p), torch.library.get_ctx().new_dynamic_size())
