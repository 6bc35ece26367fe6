"""EAGLE's dynamic tree: the best few nodes of a depth grow on, and of all the best are kept (arXiv 2406.16858)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockpilot.drafters import Proposal
from blockpilot.drafters.candidates import Candidates, tree_of
from blockpilot.drafters.draws import likeliest
from blockpilot.drafters.levels import Level, level_of
from blockpilot.plan import StepPlan
from blockpilot.state import State
from blockpilot_kernels.draft_tree import largest

if TYPE_CHECKING:
    from blockpilot.drafters.eagle3 import Eagle3Drafter

BEAM = 8  # nodes of a depth that grow on, and children of each: a tree of 16 has seldom more side by side


@dataclass(frozen=True)
class Front:
    """The nodes whose children come next, F of each of S slots.

    Attributes:
        score: [S, F] Σ log q along the path, −inf where there is none. number: [S, F] among the candidates, −1 is the
            anchor. token: [S, F]. row: [S, F] which row of its slot guessed it. path: [S, F, D] places of the pairs
            down to it, the last committed one first.
    """

    score: Tensor
    number: Tensor
    token: Tensor
    row: Tensor
    path: Tensor

    @classmethod
    def root(cls, cached: Tensor, beam: int) -> Front:
        """The anchor alone; cached [S] positions before it."""
        nothing = cached.new_zeros(len(cached), beam)
        score = torch.full((beam,), -torch.inf, dtype=torch.float32, device=cached.device)
        score[0] = 0.0
        path = (cached - 1)[:, None, None].expand(-1, beam, 1)
        return cls(score.expand(len(cached), -1), nothing - 1, nothing, nothing, path)


def add_children(
    found: Candidates, front: Front, at: Tensor, ids: Tensor, total: Tensor, depth: int, cached: Tensor
) -> Front:
    """Children ids, total [N, k] of the front's nodes `at` [N] → the best of them, the next front."""
    slots, beam = front.score.shape
    k, before = ids.shape[1], found.count
    empty = (slots * beam, k)
    score = total.new_full(empty, -torch.inf).index_copy_(0, at, total).view(slots, -1)
    token = ids.new_zeros(empty).index_copy_(0, at, ids).view(slots, -1)
    found.add(score, token, front.number.repeat_interleave(k, 1), torch.full_like(token, depth))
    best = largest(score, beam)
    row = best // k
    place = cached[:, None] + (depth - 1) * beam + torch.arange(beam, device=best.device)
    above = front.path.gather(1, row[..., None].expand(-1, -1, depth))
    path = torch.cat([above, place[..., None]], -1)
    return Front(score.gather(1, best), best + before, token.gather(1, best), row, path)


def grow(
    drafter: Eagle3Drafter, state: State, plan: StepPlan, noise: Tensor | None, chain: Proposal
) -> Proposal:
    """The tree of each slot that has a node budget, as deep as its block; the chain, a tree of one path, of others.

    A node's score is the chance of its path to be the target's choice (`Draws.scores`).

    Args:
        chain: a proposal whose shape is wanted.
    """
    assert plan.nodes is not None and plan.trees is not None
    cached, beam = state.length - 1, drafter.beam
    front, found = Front.root(cached, beam), Candidates()
    ranks = torch.arange(beam, device=cached.device)
    hidden = cached  # nothing is above depth 1
    for depth in range(1, max(plan.widths)):
        level = level_of(plan, depth, beam, drafter.row_tile)
        slot, at = level.rows.slot, level.rows.places(beam)
        before = front.score.flatten()[at]
        if depth == 1:
            hidden, logits = drafter.begin_drafts(state, plan, level)
        else:
            hidden, logits = _deepen(drafter, state, plan, level, front, hidden)
        scores = drafter.draws(state, plan, level, noise).scores(logits)
        columns, likely = likeliest(scores, beam)
        total = before[:, None] + likely
        drafter.non_finite += (
            likely[:, 0].isnan() & (before > -torch.inf) & (depth < state.effective[slot])
        ).sum()
        live = (depth < state.effective[slot])[:, None] & ((plan.budgets[slot] > 0)[:, None] | (ranks == 0))
        total = torch.where(live & (total > -torch.inf), total, -torch.inf)
        front = add_children(found, front, at, drafter.vocabulary.ids(columns), total, depth, cached)
    return tree_of(state, plan, found, chain)


def _deepen(
    drafter: Eagle3Drafter, state: State, plan: StepPlan, level: Level, front: Front, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """`Eagle3Drafter.deepen` for the front's nodes."""
    at = level.rows.places(drafter.beam)
    above = level.first + front.row.flatten()[at]
    exists = front.score.flatten()[at] > -torch.inf
    extent = state.length - 1 + (level.depth - 1) * drafter.beam
    path = front.path.flatten(0, 1)[at]
    return drafter.deepen(state, plan, level, front.token.flatten()[at], hidden[above], exists, extent, path)
