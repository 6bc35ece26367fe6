"""SpecBlock's tree: a chain with siblings where its rank head sees the target's token among them (2605.07243)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockpilot.drafters import Proposal
from blockpilot.drafters.candidates import Candidates, tree_of
from blockpilot.drafters.draws import Draws, likeliest
from blockpilot.drafters.specblock_rank import MOST
from blockpilot.drafters.specblock_rows import BlockRows, second_rows
from blockpilot.plan import StepPlan
from blockpilot.state import State
from blockpilot_kernels.draft_tree import largest

if TYPE_CHECKING:
    from blockpilot.drafters.specblock import Guesses, SpecBlockDrafter

BEAM = 10  # blocks of the second pass


def grow(
    drafter: SpecBlockDrafter, state: State, plan: StepPlan, noise: Tensor | None, chain: Proposal
) -> Proposal:
    """The tree of each slot that has a node budget, as deep as its block; of others the chain.

    The second block goes on from the likeliest siblings and from the chain's end. From inside the chain, where the
    published tree goes on too, it would only repeat what the chain says next.
    """
    made, guesses = drafter.first_block(state, plan)
    k = made.slots
    shape = (len(state.length), 1, k)
    exists = made.slot + 1 < state.effective[made.rows.slot]
    draws = drafter.draws(state, plan, made, made.slot + 1, noise)
    token, likely, wide = _say(drafter, plan, made, exists, guesses, draws, made.rows.places(k), shape)
    wide[:, :, 0] = torch.where(plan.budgets > 0, MOST, 0)[:, None]
    depth = torch.arange(1, k + 1, device=token.device).expand(shape)
    nothing = torch.zeros(shape[:2], dtype=torch.float32, device=token.device)
    found = Candidates()
    score = _add(found, state, token, likely, wide, depth, nothing, nothing.long() - 1)
    if max(plan.widths) > 2:
        _second_block(drafter, state, plan, noise, guesses[0], found, score)
    return tree_of(state, plan, found, chain)


def _say(
    drafter: SpecBlockDrafter,
    plan: StepPlan,
    made: BlockRows,
    exists: Tensor,
    guesses: Guesses,
    draws: Draws,
    at: Tensor,
    shape: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """What rows, those `at` [N] of the tables, say: ids and log-probabilities [S, F, K, r], and how many children each
    should have [S, F, K]."""
    _, normed, logits = guesses
    columns, likely = likeliest(draws.scores(logits), min(MOST, logits.shape[1]))
    wide = torch.where(plan.budgets[made.rows.slot] > 0, drafter.rank.branches(normed, logits), 0)
    r, cells = columns.shape[1], shape[0] * shape[1] * shape[2]
    drafter.non_finite += (likely[:, 0].isnan() & exists).sum()
    likely = torch.where(likely > -torch.inf, likely, -torch.inf)
    table = likely.new_full((cells, r), -torch.inf).index_copy_(0, at, likely)
    token = columns.new_zeros(cells, r).index_copy_(0, at, drafter.vocabulary.ids(columns))
    widths = wide.new_zeros(cells).index_copy_(0, at, wide)
    return token.view(*shape, r), table.view(*shape, r), widths.view(shape)


def _add(
    found: Candidates,
    state: State,
    token: Tensor,
    likely: Tensor,
    wide: Tensor,
    depth: Tensor,
    begun: Tensor,
    above: Tensor,
) -> Tensor:
    """Blocks' greedy chains and the siblings of their ids, until a slot has none → their scores [S, F, K, r].

    Args:
        depth: [S, F, K]. begun: [S, F] score of the node that a block goes on from. above: [S, F] its number.
    """
    slots, blocks, k, r = token.shape
    opened = wide * (wide > 0).long().cumprod(-1)
    rank = torch.arange(r, device=token.device)
    chain = begun[..., None] + likely[..., 0].cumsum(-1)
    prefix = torch.cat([begun[..., None], chain[..., :-1]], -1)
    live = ((rank == 0) | (rank < opened[..., None])) & (depth < state.effective[:, None, None])[..., None]
    score = torch.where(live, prefix[..., None] + likely, -torch.inf)
    score[..., 0] = torch.where(live[..., 0], chain, -torch.inf)
    number = found.count + torch.arange(blocks * k * r, device=token.device).view(blocks, k, r)
    before = number[:, :-1, 0].expand(slots, -1, -1)
    parent = torch.cat([above[..., None], before], -1)[..., None].expand_as(token)
    found.add(
        score.flatten(1), token.flatten(1), parent.flatten(1), depth[..., None].expand_as(token).flatten(1)
    )
    return score


def _second_block(
    drafter: SpecBlockDrafter,
    state: State,
    plan: StepPlan,
    noise: Tensor | None,
    hidden: Tensor,
    found: Candidates,
    score: Tensor,
) -> None:
    """One pass over the blocks that go on from the first, and what they add.

    Args:
        hidden: [M, H] of the first blocks' rows. score: [S, 1, K, r] of what they said.
    """
    slots, _, k, r = score.shape
    cached, device = state.length - 1, score.device
    ends = torch.arange(r, device=device) > 0
    ends = ends.expand(k, r).clone()
    ends[k - 1, 0] = True
    begun = torch.where(ends, score[:, 0], -torch.inf).flatten(1)
    beam = min(BEAM, begun.shape[1])
    start = largest(begun, beam)
    begun, said = begun.gather(1, start), found.token[0].gather(1, start)
    from_slot = start // r

    after = second_rows(plan, k, 2, beam)
    rows, block, slot = after.rows, after.rows.column // k, after.slot
    at = rows.slot * beam + block
    ahead, score_at = from_slot.flatten()[at], begun.flatten()[at]
    exists = (score_at > -torch.inf) & (ahead + 2 < state.effective[rows.slot])
    above, end = after.first + ahead, cached[rows.slot] * k
    anchor = end - k + ahead
    own = (end + block * k)[:, None] + torch.arange(k, device=device)
    path = torch.cat([anchor[:, None], own], 1)
    extent, number = (cached + beam) * k, cached[rows.slot] + ahead
    where = (anchor + 1, number, exists, extent, drafter.bound(plan))
    second = drafter.run(rows, said.flatten()[at], hidden[above], *where, rows.every, path)
    draws = drafter.draws(state, plan, after, ahead + slot + 2, noise)
    shape = (slots, beam, k)
    token, likely, wide = _say(drafter, plan, after, exists, second, draws, at * k + slot, shape)
    depth = from_slot[..., None] + 2 + torch.arange(k, device=device)
    _add(found, state, token, likely, wide, depth, begun, start)
