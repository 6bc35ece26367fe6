"""The rows of SpecBlock's two passes, laid out on the host and kept with the plan's rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

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


Made = TypeVar("Made")


def _kept(plan: StepPlan, name: str, slots: int, beam: int, make: Callable[[], Made]) -> Made:
    """What `make` made for an equal plan before; as long-lived as the rows of the plan, which a captured step reads."""
    kept, key = plan.draft_rows.kept, (name, plan.drafting, plan.trees, plan.slots, slots, beam)
    if key not in kept:
        kept[key] = make()
    found: Made = kept[key]
    return found


def pair_rows(plan: StepPlan, slots: int) -> Rows:
    """`slots` rows of every pair that may wait."""
    requests, widths, _ = plan.drafting
    counts = tuple(w * slots for w in widths)
    return _kept(
        plan, "pairs", slots, 0, lambda: make_rows(requests, counts, plan.dump, plan.device, plan.tile)
    )


def first_rows(plan: StepPlan, slots: int) -> BlockRows:
    """One block of each request that drafts."""
    begins = pair_rows(plan, slots).starts
    given = (plan.drafting, (1,) * len(begins), begins, slots, plan)
    return _kept(plan, "first", slots, 0, lambda: _laid_out(*given))


def second_rows(plan: StepPlan, slots: int, width: int, beam: int) -> BlockRows:
    """A second block of each request wider than `width`, `beam` of them where it drafts a tree."""
    return _kept(plan, f"second {width}", slots, beam, lambda: _second(plan, slots, width, beam))


def _second(plan: StepPlan, slots: int, width: int, beam: int) -> BlockRows:
    before = first_rows(plan, slots).rows
    begins = dict(zip(before.slots, before.starts, strict=True))
    trees = dict(zip(plan.slots, plan.trees or (0,) * len(plan.slots), strict=True))
    kept = [x for x in zip(*plan.drafting, strict=True) if x[1] > width]
    members = tuple(x[0] for x in kept), tuple(x[1] for x in kept), tuple(x[2] for x in kept)
    counts = tuple(beam if trees[r] else 1 for r in members[0])
    above = tuple(begins[r] for r in members[0])
    return _laid_out(members, counts, above, slots, plan)


def _laid_out(
    members: Members,
    counts: tuple[int, ...],
    begins: tuple[int, ...],
    slots: int,
    plan: StepPlan,
) -> BlockRows:
    requests, widths, starts = members
    rows = make_rows(requests, tuple(n * slots for n in counts), plan.dump, plan.device, plan.tile)
    columns: list[list[int]] = [[], [], []]
    for width, start, begin, n in zip(widths, starts, begins, counts, strict=True):
        for column, value in zip(columns, (begin, start, start + width - 2), strict=True):
            column += [value] * (n * slots)
    pad = [0] * (rows.padded - rows.total)
    first, anchor, last = (torch.tensor(x + pad, device=plan.device) for x in columns)
    return BlockRows(rows, slots, first, anchor, last)
