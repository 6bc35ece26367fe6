"""The best tree of drafts under a node budget, from the candidates of each position (DDTree, arXiv 2604.12989)."""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.draft_tree import reference
from blockpilot_kernels.validate import expect, expect_dim

__all__ = ["draft_tree", "largest", "worthwhile"]

MOST = 1024  # nodes: on a GPU one warp holds a slot's tree in its registers


def draft_tree(
    score: Tensor, deepest: Tensor, budget: Tensor, nodes: int, cost: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of all trees of at most `budget` nodes the one with the largest Σ exp(path score), for R slots.

    A path's score is the sum of its candidates' scores: with log-probabilities of positions that are independent,
    Σ exp over the nodes is the expected number of accepted drafts. Scores never rise along a path or from a
    candidate to the next, so the best prefixes are a tree, and are found one after the other. Of equal ones the
    child of the earlier node comes first.

    Args:
        score: [R, D, K] float32 ≤ 0 of candidate k at depth d + 1, falling along K; −inf and NaN are never taken.
        deepest: [R] int64 depths that count. budget: [R] int64 nodes, the anchor included. nodes: highest budget.
        cost: [nodes] float32 > 0, of a step that verifies 1, 2, … nodes: the tree is cut as `worthwhile` says.

    Returns:
        candidate, parent, depth [R, nodes − 1] int64 of the drafted nodes in the order they were found: parent −1 is
        the anchor, others are numbered from 0; and count [R] int64, the anchor included, 0 for a budget of 0.
        Columns at and beyond count − 1 hold 0, −1, 0.

    Raises:
        ValueError: wrong shape, dtype or device, or more than `MOST` nodes.
    """
    _validate(score, deepest, budget, nodes)
    if cost is not None:
        expect("draft_tree", "cost", cost, torch.float32, (nodes,), score)
    backend = dispatch.backend_for("draft_tree", score)
    if backend == "cpp":
        return torch.ops.blockpilot.draft_tree(score, deepest, budget, nodes, cost)
    if backend == "triton":
        from blockpilot_kernels.draft_tree import kernel

        return kernel.draft_tree(score, deepest, budget, nodes, cost)
    return reference.draft_tree(score, deepest, budget, nodes, cost)


def worthwhile(total: Tensor, count: Tensor, cost: Tensor) -> Tensor:
    """How many nodes of trees, which are found best first, make the most tokens per second (CaDDTree, 2606.01813).

    n nodes are expected to yield 1 + Σ exp(total) tokens, the bonus included, in `cost` of n. The paper stops where
    that pace no longer rises; the best of all prefixes is the same where cost is convex, and never worse.

    Args:
        total: [R, N − 1] float32 path scores of the drafted nodes, falling. count: [R] int64 nodes that there are, the
            anchor included; 0 stays 0. cost: [N] float32 > 0.

    Returns:
        [R] int64, at most `count`; the fewest of equals.
    """
    return reference.worthwhile(total, count, cost)


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
    if not 1 <= nodes <= MOST:
        raise ValueError(f"draft_tree: nodes: expected 1, the anchor alone, … {MOST}, got {nodes}")


if dispatch.extension_error() is None:

    @torch.library.register_fake("blockpilot::largest")
    def _(scores: Tensor, count: int) -> Tensor:
        return scores.new_empty((len(scores), count), dtype=torch.int64)

    @torch.library.register_fake("blockpilot::draft_tree")
    def _(
        score: Tensor, deepest: Tensor, budget: Tensor, nodes: int, cost: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        made = [deepest.new_empty(len(deepest), nodes - 1) for _ in range(3)]
        return made[0], made[1], made[2], torch.empty_like(deepest)
