"""Every node that a tree could have, and the best of them that fit a budget."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockpilot.drafters import Proposal
from blockpilot.plan import StepPlan
from blockpilot.state import State
from blockpilot_kernels.draft_tree import largest, worthwhile


@dataclass
class Candidates:
    """Nodes of S slots, added in groups [S, C]; parents before their children.

    Attributes:
        score: Σ log q along the path, −inf of what is no node. token, depth. parent: number of another, −1 the anchor.
        count: nodes so far; the next ones are numbered from it.
    """

    score: list[Tensor] = field(default_factory=list)
    token: list[Tensor] = field(default_factory=list)
    parent: list[Tensor] = field(default_factory=list)
    depth: list[Tensor] = field(default_factory=list)
    count: int = 0

    def add(self, score: Tensor, token: Tensor, parent: Tensor, depth: Tensor) -> None:
        """A group, each [S, C]."""
        self.score.append(score)
        self.token.append(token)
        self.parent.append(parent)
        self.depth.append(depth)
        self.count += score.shape[1]

    def best(
        self, budget: Tensor, nodes: int, cut: Tensor, cost: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The likeliest, as many as `budget` [S] allows → tokens, parent, depth [S, nodes], and their count [S].

        With `cost` [nodes + 1], no more than are `worthwhile` where `cut` [S] says so. No child is likelier than its
        parent, and of equals the earlier comes first, so parents precede children.
        """
        score, token, parent, depth = (
            torch.cat(x, 1) for x in (self.score, self.token, self.parent, self.depth)
        )
        chosen = largest(score, min(nodes, self.count))
        order = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
        place = torch.full_like(token, -1).scatter(1, chosen, order)
        likely = score.gather(1, chosen)
        found = (likely > -torch.inf) & (order < budget[:, None])
        if cost is not None:
            kept = worthwhile(likely, found.sum(1) + 1, cost[: chosen.shape[1] + 1])
            found &= (order < kept[:, None] - 1) | ~cut[:, None]
        above = parent.gather(1, chosen)
        above = torch.where(above < 0, -1, place.gather(1, above.clamp(min=0)))
        made = (
            torch.where(found, x, empty)
            for x, empty in ((token.gather(1, chosen), 0), (above, -1), (depth.gather(1, chosen), 0))
        )
        tokens, parents, depths = (_wider(x, nodes) for x in made)
        return tokens, parents, depths, found.sum(1)


def tree_of(state: State, plan: StepPlan, found: Candidates, chain: Proposal) -> Proposal:
    """The best tree of each slot that has a node budget; of others all there is, a chain as wide as its block.

    Args:
        chain: a proposal whose shape is wanted.
    """
    assert plan.nodes is not None
    budget = torch.where(plan.budgets > 0, plan.budgets, state.effective)
    made = [x.clone() for x in (chain.tokens, chain.parent, chain.depth)]
    most = max(plan.nodes) - 1
    *parts, count = found.best(budget - 1, most, plan.budgets > 0, plan.node_cost)
    for whole, part in zip(made, parts, strict=True):
        whole[:, :most] = part
    return Proposal(made[0], made[1], made[2], torch.where(state.done, 0, count + 1))


def _wider(x: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, columns - x.shape[1]))
