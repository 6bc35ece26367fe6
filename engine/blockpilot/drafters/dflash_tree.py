"""Trees out of one DFlash pass: the likeliest paths through its positions (DDTree, arXiv 2604.12989)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.drafters import Proposal
from blockpilot.drafters.draft_vocabulary import DraftVocabulary
from blockpilot.drafters.head_rows import HeadRows
from blockpilot.plan import StepPlan
from blockpilot.state import State
from blockpilot_kernels.draft_tree import draft_tree, largest

LARGEST_TREE = 16  # nodes: rows of a request that the memory estimates allow for


@dataclass(frozen=True)
class Draws:
    """How M rows of draft logits over V' ids become tokens.

    Attributes:
        noise: [M, V'] of the position each row guesses, or None. temperature: [M], 0 is greedy. banned: [M, S]
            columns that cannot be, −1 pads, or None.
    """

    noise: Tensor | None
    temperature: Tensor
    banned: Tensor | None

    def scores(self, logits: Tensor) -> Tensor:
        """[M, V'] logits as the target's choice sees them: at its temperature, its noise added, bans taken out.

        If the target's differ from them by independent Gumbel errors, then exp(log_softmax) of these is the chance
        of each id to be its choice, greedy or drawn: the noise is no longer random here, so it counts as part of
        what is known.
        """
        if self.noise is not None:
            sampled = (self.temperature > 0)[:, None]
            cooled = logits / torch.where(sampled, self.temperature[:, None], 1.0)
            logits = torch.where(sampled, cooled + self.noise, logits)
        if self.banned is None:
            return logits
        last = logits.shape[1]
        out = torch.where(self.banned < 0, last, self.banned)
        return torch.nn.functional.pad(logits, (0, 1)).scatter(1, out, -torch.inf)[:, :last]


def tree_proposal(
    state: State,
    plan: StepPlan,
    head: HeadRows,
    scores: Tensor,
    chain: Proposal,
    vocabulary: DraftVocabulary,
) -> Proposal:
    """The best tree of each slot that has a node budget; the chain, as it is, of the others.

    Args:
        head: where the rows of `scores` [M, V'] belong. chain: what a plan without trees would propose.
    """
    assert plan.trees is not None
    slots = len(chain.tokens)
    most, depths = max(plan.trees), max(plan.widths) - 1
    ids, likely = likeliest(scores, min(most - 1, scores.shape[1]))
    shape = (slots * depths, ids.shape[1])
    at = head.slot * depths + head.column - 1
    table = torch.full(shape, -torch.inf, device=scores.device).index_copy_(0, at, likely)
    tokens = torch.zeros(shape, dtype=torch.long, device=scores.device).index_copy_(
        0, at, vocabulary.ids(ids)
    )

    budget = torch.where(state.done, 0, plan.budgets)
    candidate, parent, depth, count = draft_tree(
        table.view(slots, depths, -1), (state.effective - 1).clamp(min=0), budget, most
    )
    cell = (depth - 1).clamp(min=0) * ids.shape[1] + candidate
    drafted = tokens.view(slots, -1).gather(1, cell)
    tree, short = (plan.budgets > 0)[:, None], most - 1
    made = [x.clone() for x in (chain.tokens, chain.parent, chain.depth)]
    for whole, part in zip(made, (drafted, parent, depth), strict=True):
        whole[:, :short] = torch.where(tree, part, whole[:, :short])
    nodes = torch.where(tree[:, 0], count, state.effective)
    return Proposal(made[0], made[1], made[2], nodes)


def likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """scores [M, V'] → columns [M, count] and log_softmax there, falling; the lower column first among equals."""
    found = largest(scores, count)
    return found, scores.gather(1, found) - scores.logsumexp(-1, keepdim=True)
