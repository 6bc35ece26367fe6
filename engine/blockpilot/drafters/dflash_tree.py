"""Trees out of one DFlash pass: the likeliest paths through its positions (DDTree, arXiv 2604.12989)."""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot.drafters import Proposal
from blockpilot.drafters.draft_vocabulary import DraftVocabulary
from blockpilot.drafters.draws import likeliest
from blockpilot.drafters.head_rows import HeadRows
from blockpilot.plan import StepPlan
from blockpilot.state import State
from blockpilot_kernels.draft_tree import draft_tree


def tree_proposal(
    state: State,
    plan: StepPlan,
    head: HeadRows,
    scores: Tensor,
    chain: Proposal,
    vocabulary: DraftVocabulary,
) -> tuple[Proposal, Tensor]:
    """The best tree of each slot that has a node budget, the chain, as it is, of the others; and which rows are finite.

    Args:
        head: where the rows of `scores` [M, V'] belong. chain: what a plan without trees would propose.
    """
    assert plan.trees is not None
    slots = len(chain.tokens)
    most, depths = max(plan.trees), max(plan.widths) - 1
    ids, likely = likeliest(scores, min(most - 1, scores.shape[1]))
    shape = (slots * depths, ids.shape[1])
    at = head.slot * depths + head.column - 1
    table = torch.full(shape, -torch.inf, dtype=likely.dtype, device=scores.device).index_copy_(0, at, likely)
    tokens = torch.zeros(shape, dtype=torch.long, device=scores.device).index_copy_(
        0, at, vocabulary.ids(ids)
    )

    budget = torch.where(state.done, 0, plan.budgets)
    cost = None if plan.node_cost is None else plan.node_cost[:most]
    candidate, parent, depth, count = draft_tree(
        table.view(slots, depths, -1), (state.effective - 1).clamp(min=0), budget, most, cost
    )
    cell = (depth - 1).clamp(min=0) * ids.shape[1] + candidate
    drafted = tokens.view(slots, -1).gather(1, cell)
    tree, short = (plan.budgets > 0)[:, None], most - 1
    made = [x.clone() for x in (chain.tokens, chain.parent, chain.depth)]
    for whole, part in zip(made, (drafted, parent, depth), strict=True):
        whole[:, :short] = torch.where(tree, part, whole[:, :short])
    nodes = torch.where(tree[:, 0], count, state.effective)
    return Proposal(made[0], made[1], made[2], nodes), ~likely[:, 0].isnan()
