"""The best tree of drafts under a node budget, from the candidates of each position (DDTree, arXiv 2604.12989)."""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.draft_tree import reference
from blockpilot_kernels.validate import expect, expect_dim

__all__ = ["draft_tree", "largest"]


def draft_tree(
    score: Tensor, deepest: Tensor, budget: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of all trees of at most `budget` nodes the one with the largest Σ exp(path score), for R slots.

    A path's score is the sum of its candidates' scores: with log-probabilities of positions that are independent,
    Σ exp over the nodes is the expected number of accepted drafts. Scores never rise along a path or from a
    candidate to the next, so the best prefixes are a tree, and are found one after the other. Of equal ones the
    child of the earlier node comes first.

    Args:
        score: [R, D, K] float32 ≤ 0 of candidate k at depth d + 1, falling along K; −inf and NaN are never taken.
        deepest: [R] int64 depths that count. budget: [R] int64 nodes, the anchor included. nodes: highest budget.

    Returns:
        candidate, parent, depth [R, nodes − 1] int64 of the drafted nodes in the order they were found: parent −1 is
        the anchor, others are numbered from 0; and count [R] int64, the anchor included, 0 for a budget of 0.
        Columns at and beyond count − 1 hold 0, −1, 0.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    _validate(score, deepest, budget, nodes)
    backend = dispatch.backend_for("draft_tree", score)
    if backend == "cpp":
        return torch.ops.blockpilot.draft_tree(score, deepest, budget, nodes)
    if backend == "triton":
        from blockpilot_kernels.draft_tree import kernel

        return kernel.draft_tree(score, deepest, budget, nodes)
    return reference.draft_tree(score, deepest, budget, nodes)


def largest(scores: Tensor, count: int) -> Tensor:
    """scores [M, V] float32 → [M, count] int64 columns of the largest, falling; the lower first among equals.

    A row that holds NaN may give any columns.

    Raises:
        ValueError: wrong shape or dtype, or a count outside 1 … V.
    """
    expect_dim("largest", "scores", scores, 2)
    expect("largest", "scores", scores, torch.float32, tuple(scores.shape), scores)
    if not 1 <= count <= scores.shape[1]:
        raise ValueError(f"largest: count: expected 1 … {scores.shape[1]}, got {count}")
    if dispatch.backend_for("largest", scores) == "cpp":
        return torch.ops.blockpilot.largest(scores, count)
    return reference.largest(scores, count)


def _validate(score: Tensor, deepest: Tensor, budget: Tensor, nodes: int) -> None:
    expect_dim("draft_tree", "score", score, 3)
    slots = score.shape[0]
    expect("draft_tree", "score", score, torch.float32, tuple(score.shape), score)
    expect("draft_tree", "deepest", deepest, torch.int64, (slots,), score)
    expect("draft_tree", "budget", budget, torch.int64, (slots,), score)
    if nodes < 1:
        raise ValueError(f"draft_tree: nodes: expected at least 1, the anchor, got {nodes}")


if dispatch.extension_error() is None:

    @torch.library.register_fake("blockpilot::largest")
    def _(scores: Tensor, count: int) -> Tensor:
        return scores.new_empty((len(scores), count), dtype=torch.int64)

    @torch.library.register_fake("blockpilot::draft_tree")
    def _(
        score: Tensor, deepest: Tensor, budget: Tensor, nodes: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        made = [deepest.new_empty(len(deepest), nodes - 1) for _ in range(3)]
        return made[0], made[1], made[2], torch.empty_like(deepest)
