"""Trees of drafts in a step: where their rows stand, which path the target takes, what moves afterwards.

Node n of a slot's tree stands at position anchor + depth, and its key and value at place anchor + n of the cache, so
branches lie between each other until the path that the target took is moved together. A chain beside trees is a
tree of one path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.drafters import Proposal
from blockpilot.plan import StepPlan
from blockpilot.rows import Rows
from blockpilot.state import State
from blockpilot.targets import Target


@dataclass(frozen=True)
class Tree:
    """The trees of one step: R slots of W columns, node 0 the anchor; N packed rows; D positions at most.

    Attributes:
        parent: [R, W] column of the parent, 0 for the anchor. depth: [R, W]. live: [R, W] bool.
        above: [R, W, D] column of a node's ancestor at each depth, itself the last; 0 beyond.
        anchor: [N] position of the row's anchor. exists: [N] bool. row_depth: [N].
        extent: [R] places that hold keys once the nodes are verified.
    """

    rows: Rows
    parent: Tensor
    depth: Tensor
    live: Tensor
    above: Tensor
    anchor: Tensor
    exists: Tensor
    row_depth: Tensor
    extent: Tensor

    @property
    def path(self) -> Tensor:
        """[N, D] places of each row's ancestors below the cached prefix, by depth, its own the last that counts."""
        at = self.rows.places(self.live.shape[1])
        return self.anchor[:, None] + self.above.flatten(0, 1)[at]

    def by_depth(self, noise: Tensor | None) -> Tensor | None:
        """Noise [N, V] of the rows of a chain of as many columns → that of each node's own position."""
        if noise is None:
            return None
        return noise.index_select(0, self.rows.every - self.rows.column + self.row_depth)

    def follow(self, state: State) -> Walk:
        """From the anchor to the child that equals the target's choice, as far as there is one.

        `state.block`, `choice` and `finite` become those of that path, a chain that ends before an id of −1; siblings
        hold different tokens, so there is one path at most.
        """
        same = state.block == state.choice.gather(1, self.parent)
        taken = same & state.finite.gather(1, self.parent) & self.live
        taken[:, 0] = True
        slots, columns, deepest = self.above.shape
        taken = taken.gather(1, self.above.flatten(1)).view(self.above.shape).all(-1) & self.live
        column = torch.arange(columns, device=taken.device).expand(slots, -1)
        walked = column.new_zeros(slots, deepest + 1)
        walked.scatter_(1, torch.where(taken, self.depth, deepest), column)
        reached = torch.where(taken, self.depth, 0).amax(1, keepdim=True)
        source = walked[:, column[0].clamp(max=deepest - 1)].where(column <= reached, 0)
        block = state.block.gather(1, source)
        state.block.copy_(torch.where(column <= reached, block, -1))
        state.choice.copy_(state.choice.gather(1, source))
        state.finite.copy_(state.finite.gather(1, source))
        return Walk(self, source)


@dataclass(frozen=True)
class Walk:
    """The path that was taken: [R, W] columns of its nodes by depth, 0 behind its end."""

    tree: Tree
    source: Tensor

    def gather(self, state: State, target: Target) -> Tensor:
        """Once they are committed, move their keys and values to the positions they are now those of.

        Returns:
            [N] for each packed row the row that now counts for it: a slot's first `state.count` ones are the path.
        """
        rows = self.tree.rows
        target.compact(state.length - state.count - 1, self.source, state.count)
        kept = rows.column < state.count[rows.slot]
        return rows.every - torch.where(kept, rows.column - self.source[rows.slot, rows.column], 0)


def plant(state: State, plan: StepPlan, proposal: Proposal) -> Tree:
    """The trees of a proposal, its tokens in `state.block`; `state.effective` becomes their deepest paths' width."""
    assert proposal.nodes is not None  # trees are asked only of drafters that make them
    rows, cached = plan.rows, state.length - 1
    nodes = torch.minimum(proposal.nodes, state.capacity - cached)
    nodes = torch.where(state.done, 0, nodes)
    column = torch.arange(state.widest, device=nodes.device)
    live = column < nodes[:, None]
    parent, depth = torch.zeros_like(state.block), torch.zeros_like(state.block)
    parent[:, 1:], depth[:, 1:] = proposal.parent + 1, proposal.depth
    parent, depth = torch.where(live, parent, 0), torch.where(live, depth, 0)
    state.effective.copy_(torch.where(state.done, 0, depth.amax(1) + 1))
    at = rows.places(state.widest)
    return Tree(
        rows=rows,
        parent=parent,
        depth=depth,
        live=live,
        above=ancestors(parent, depth, max(plan.widths)),
        anchor=cached[rows.slot],
        exists=live.flatten()[at],
        row_depth=depth.flatten()[at],
        extent=cached + nodes,
    )


def ancestors(parent: Tensor, depth: Tensor, deepest: int) -> Tensor:
    """parent, depth [R, W] → [R, W, deepest] the ancestor at each depth below `deepest`, 0 beyond a node's own."""
    found = depth.new_zeros(*depth.shape, deepest)
    at = torch.arange(depth.shape[1], device=depth.device).expand_as(depth)
    for up in range(deepest):
        found.scatter_(2, (depth - up).clamp(min=0)[..., None], at[..., None])
        at = parent.gather(1, at)
    return found
