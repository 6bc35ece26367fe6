"""The rows of SpecBlock's two passes, laid out on the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from blockpilot.drafters.levels import Members
from blockpilot.plan import StepPlan
from blockpilot.rows import Rows, make_rows


@dataclass(frozen=True)
class BlockRows:
    """Packed rows of blocks of `slots` slots, those of one request after another.

    Attributes:
        first: [N] the request's first row in the pass before; of a first block, among those of its waiting pairs.
        anchor, last: [N] target rows that choose a request's first draft and its last.
    """

    rows: Rows
    slots: int
    first: Tensor
    anchor: Tensor
    last: Tensor

    @property
    def slot(self) -> Tensor:
        """[N] slot of each row in its block."""
        return self.rows.column % self.slots

    def source(self, depth: Tensor) -> Tensor:
        """[N] target row that chooses what a row guesses, at `depth` [N] behind the anchor."""
        return torch.minimum(self.anchor + depth - 1, self.last)


def pair_rows(plan: StepPlan, slots: int) -> Rows:
    """`slots` rows of every pair that may wait."""
    requests, widths, _ = plan.drafting
    return make_rows(requests, tuple(w * slots for w in widths), plan.dump, plan.device)


def first_rows(plan: StepPlan, slots: int) -> BlockRows:
    """One block of each request that drafts."""
    begins = pair_rows(plan, slots).starts
    return _laid_out(plan.drafting, (1,) * len(begins), begins, slots, plan.dump, plan.device)


def second_rows(plan: StepPlan, slots: int, width: int, beam: int) -> BlockRows:
    """A second block of each request wider than `width`, `beam` of them where it drafts a tree."""
    before = first_rows(plan, slots).rows
    begins = dict(zip(before.slots, before.starts, strict=True))
    trees = dict(zip(plan.slots, plan.trees or (0,) * len(plan.slots), strict=True))
    kept = [x for x in zip(*plan.drafting, strict=True) if x[1] > width]
    members = tuple(x[0] for x in kept), tuple(x[1] for x in kept), tuple(x[2] for x in kept)
    counts = tuple(beam if trees[r] else 1 for r in members[0])
    above = tuple(begins[r] for r in members[0])
    return _laid_out(members, counts, above, slots, plan.dump, plan.device)


@lru_cache(maxsize=1024)
def _laid_out(
    members: Members,
    counts: tuple[int, ...],
    begins: tuple[int, ...],
    slots: int,
    dump: int,
    device: torch.device,
) -> BlockRows:
    requests, widths, starts = members
    rows = make_rows(requests, tuple(n * slots for n in counts), dump, device)
    columns: list[list[int]] = [[], [], []]
    for width, start, begin, n in zip(widths, starts, begins, counts, strict=True):
        for column, value in zip(columns, (begin, start, start + width - 2), strict=True):
            column += [value] * (n * slots)
    pad = [0] * (rows.padded - rows.total)
    first, anchor, last = (torch.tensor(x + pad, device=device) for x in columns)
    return BlockRows(rows, slots, first, anchor, last)
