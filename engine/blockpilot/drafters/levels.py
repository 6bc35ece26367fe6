"""The rows of one depth of an autoregressive drafter's block or tree, laid out on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.plan import StepPlan
from blockpilot.rows import Rows, make_rows


@dataclass(frozen=True)
class Level:
    """Rows that guess depth `depth`: of a chain one a slot, of a tree a beam, but one where it begins.

    Slots whose blocks are not that deep have none.

    Attributes:
        source: [N] target row that chooses what the row guesses.
        first: [N] the slot's first row one level higher; at depth 1, among `StepPlan.draft_rows`.
    """

    depth: int
    rows: Rows
    source: Tensor
    first: Tensor


def level_of(plan: StepPlan, depth: int, beam: int, tile: int) -> Level:
    """The level of a plan's drafting slots, with `beam` rows of each that drafts a tree; kept with the plan's rows."""
    slots = set(plan.drafting[0])
    trees = tuple(
        t for s, t in zip(plan.slots, plan.trees or (0,) * len(plan.slots), strict=True) if s in slots
    )
    beams = tuple(beam if t else 1 for t in trees)
    kept, key = plan.draft_rows.kept, ("level", plan.drafting, beams, depth, tile)
    if key not in kept:
        kept[key] = _level(plan.drafting, beams, depth, plan.dump, plan.device, tile)
    found: Level = kept[key]
    return found


Members = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _level(
    drafting: Members, beams: tuple[int, ...], depth: int, dump: int, device: torch.device, tile: int
) -> Level:
    slots, widths, starts = drafting
    here = [i for i, width in enumerate(widths) if width > depth]
    counts = tuple(_count(beams[i], depth) for i in here)
    rows = make_rows(tuple(slots[i] for i in here), counts, dump, device, tile)
    if depth == 1:
        above = dict(zip(range(len(slots)), make_rows(slots, widths, dump, device, tile).starts, strict=True))
    else:
        shallower = [i for i, width in enumerate(widths) if width >= depth]
        sizes = [_count(beams[i], depth - 1) for i in shallower]
        above = {i: sum(sizes[:n]) for n, i in enumerate(shallower)}
    pad = [0] * (rows.padded - rows.total)
    source = [starts[i] + depth - 1 for i, n in zip(here, counts, strict=True) for _ in range(n)]
    first = [above[i] for i, n in zip(here, counts, strict=True) for _ in range(n)]
    return Level(
        depth, rows, torch.tensor(source + pad, device=device), torch.tensor(first + pad, device=device)
    )


def _count(beam: int, depth: int) -> int:
    return 1 if depth == 1 else beam
