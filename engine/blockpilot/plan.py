"""What the host knows before a step: which slots run, how wide, and which optional work they need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from blockpilot.rows import Rows, make_rows
from blockpilot_kernels.tiled_linear import TILE


@dataclass(frozen=True)
class StepPlan:
    """One graph family: everything about a step that is not a device value.

    Attributes:
        slots: active slots. widths: their admitted widths.
        dump: index of the dump slot. bound: multiple of 64, at least every slot's keys after the step.
        sampled: some slot samples. filtered: some slot filters. bans: some slot may not stop yet.
        logprobs: number of top log-probabilities wanted, or None.
        tile: the target's `row_tile`: packed rows are padded to a multiple of it.
        trees: node budgets, at least the width; 0 of a slot that drafts a chain. None: all do.
        cost: of a step whose trees have 1, 2, … nodes; they are cut as `worthwhile` says. None: never.
    """

    slots: tuple[int, ...]
    widths: tuple[int, ...]
    dump: int
    bound: int
    device: torch.device
    sampled: bool = False
    filtered: bool = False
    bans: bool = False
    logprobs: int | None = None
    tile: int = TILE
    trees: tuple[int, ...] | None = None
    cost: tuple[float, ...] | None = None

    @cached_property
    def nodes(self) -> tuple[int, ...] | None:
        """Rows that each slot verifies where some slot drafts a tree."""
        return self.trees and tuple(t or w for t, w in zip(self.trees, self.widths, strict=True))

    @cached_property
    def budgets(self) -> Tensor:
        """[R] int64 node budget of each slot that drafts a tree, 0 of every other."""
        budgets = [0] * (self.dump + 1)
        for slot, tree in zip(self.slots, self.trees or (0,) * len(self.slots), strict=True):
            budgets[slot] = tree
        return torch.tensor(budgets, device=self.device)

    @cached_property
    def chains(self) -> bool:
        """Whether some slot drafts a chain."""
        trees = self.trees or (0,) * len(self.slots)
        return any(w > 1 and not t for w, t in zip(self.widths, trees, strict=True))

    @cached_property
    def node_cost(self) -> Tensor | None:
        """[max(nodes)] float32 of `cost`, infinite beyond what it tells; None where no tree is cut."""
        if self.nodes is None or self.cost is None:
            return None
        most = max(self.nodes)
        known = self.cost[:most]
        padded = (*known, *(math.inf,) * (most - len(known)))
        return torch.tensor(padded, dtype=torch.float32, device=self.device)

    @cached_property
    def rows(self) -> Rows:
        """Every block column or node of every active slot."""
        return make_rows(self.slots, self.nodes or self.widths, self.dump, self.device, self.tile)

    @cached_property
    def noisy(self) -> Tensor | None:
        """Packed rows whose noise is read, as a node takes that of its depth's row; None: all of them."""
        if self.nodes is None:
            return None
        parts = zip(self.rows.starts, self.nodes, self.widths, strict=True)
        read = [row for start, nodes, width in parts for row in range(start, start + min(nodes, width))]
        read += range(self.rows.total, self.rows.padded)
        return torch.tensor(read, device=self.device)

    @cached_property
    def greedy(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[N] temperature, top_k, top_p and min_p of rows that neither sample nor filter."""
        zero = torch.zeros(self.rows.padded, dtype=torch.float32, device=self.device)
        return zero, zero.long(), zero + 1, zero

    @property
    def drafts(self) -> bool:
        """Whether any slot drafts at all; otherwise no drafter runs."""
        return max(self.widths) > 1

    @cached_property
    def drafting(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Slots wider than 1, their widths, and the packed target row of each one's column 0."""
        wide = [x for x in zip(self.slots, self.widths, self.rows.starts, strict=True) if x[1] > 1]
        return tuple(x[0] for x in wide), tuple(x[1] for x in wide), tuple(x[2] for x in wide)

    @cached_property
    def draft_rows(self) -> Rows:
        """The rows of slots wider than 1, for the drafter's own pass."""
        slots, widths, _ = self.drafting
        return make_rows(slots, widths, self.dump, self.device, self.tile)

    @cached_property
    def all_draft(self) -> bool:
        """Whether `draft_source` is 0, 1, … of all rows: every slot drafts a chain, and nothing is padded."""
        return self.draft_rows.total == self.rows.total == self.rows.padded

    @cached_property
    def draft_source(self) -> Tensor:
        """[draft_rows.padded] target row of each draft row; padding points at row 0."""
        rows = self.rows
        index: list[int] = []
        for start, width in zip(rows.starts, self.widths, strict=True):
            index += range(start, start + width) if width > 1 else ()
        pad = self.draft_rows.padded - len(index)
        return torch.tensor(index + [0] * pad, device=self.device)


step_plan = lru_cache(maxsize=256)(StepPlan)
"""The same plan, with its tensors, for the same step."""
