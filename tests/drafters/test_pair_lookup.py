"""EAGLE-3 and SpecBlock behind prompt lookup: what a copied request skips, and that nothing else shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blockpilot.drafters import Proposal
from blockpilot.drafters.lookup import WithLookup
from tests.drafters.pair_rounds import DTYPES, REQUESTS, run
from tests.drafters.rounds import Rounds, load_pair, remembered, spoil
from tests.drafters.test_pair_answers import slots_of
from tests.implementations import require

UNWRITTEN = -7
SHARES = (0.0, 0.3, 0.5, 0.8, 1.0)  # of the slots that are copied, step by step


class Copying:
    """Copies what will be said, with an error here and there, into random slots; `skip` leaves them out of the pass."""

    def __init__(self, drafter: Any, answers: list[list[int]], skip: bool, seed: int) -> None:
        self.drafter, self.answers, self.skip = drafter, answers, skip
        self.gen = torch.Generator().manual_seed(seed)
        self.masks: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, state: Any, plan: Any, noise: Tensor | None) -> Proposal:
        copied = torch.rand(len(state.length), generator=self.gen) < SHARES[len(self.masks) % len(SHARES)]
        found = self._found(state)
        self.masks.append(copied)
        if not self.skip:
            own = self.drafter.propose(state, plan, noise)
        else:
            self.drafter._tokens.fill_(UNWRITTEN)
            own = self.drafter.propose_some(state, plan, noise, copied)
            drafting = torch.zeros_like(copied)
            drafting[list(plan.drafting[0])] = True
            column = torch.arange(1, state.widest)
            written = (column < state.effective[:, None]) & (drafting & ~copied)[:, None]
            assert torch.equal(own.tokens != UNWRITTEN, written)
        return Proposal(torch.where(copied[:, None], found, own.tokens), own.parent, own.depth)

    def _found(self, state: Any) -> Tensor:
        found = torch.zeros(len(state.length), state.widest - 1, dtype=torch.long)
        for slot, answer in enumerate(self.answers):
            ahead = answer[int(state.length[slot]) :][: state.widest - 1]
            found[slot, : len(ahead)] = torch.tensor(ahead, dtype=torch.long)
        wrong = torch.rand(found.shape, generator=self.gen) < 0.3
        return torch.where(wrong, (found + 1) % 32, found)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_later_drafts_are_as_if_nothing_were_left_out(pair_for, dtype, seed):
    """Over a whole batch, where keys and values that nobody wrote are NaN; and what is remembered is the same."""
    require("cpp")
    folders, results = pair_for("llama"), []
    plain = run(
        load_pair(*folders, slots=5, dtype=dtype, implementation="cpp"),
        [(p, {**a, "width": 1}) for p, a in REQUESTS],
        40,
    )
    answers = [plain.tokens(slot) for slot in range(5)]
    for skip in (False, True):
        target, drafter = load_pair(*folders, slots=5, dtype=dtype, implementation="cpp")
        for slot in range(5):
            spoil(drafter.cache, slot, 0)
        copying = Copying(drafter, answers, skip, seed)
        rounds = run((target, copying), REQUESTS, 40)
        known = [len(rounds.tokens(slot)) - 1 - rounds.counts[slot][-1] for slot in range(4)]
        kept = [remembered(drafter, slot, n * slots_of(drafter)) for slot, n in enumerate(known)]
        assert all(torch.isfinite(k).all() for k in kept) and int(drafter.non_finite) == 0
        results.append((rounds.blocks, rounds.counts, [k.tolist() for k in kept], len(copying.masks)))
        assert [rounds.tokens(slot) for slot in range(5)] == answers
    assert results[0] == results[1]
    assert len({c for counts in results[0][1].values() for c in counts}) > 3
    assert results[0][3] > len(SHARES)


def test_what_is_not_finite_counts_where_it_is_drafted(pair_for):
    require("cpp")
    target, drafter = load_pair(*pair_for("llama"), slots=2, implementation="cpp")
    rounds = Rounds(target, drafter, widest=16)
    for slot in range(2):
        rounds.start(slot, [5, 6, 7], width=4 + slot, budget=9)
        spoil(drafter.cache, slot, 0)
    counted = []
    for copied in ([True, True], [True, False], [False, True], [False, False]):
        before = int(drafter.non_finite)
        with torch.inference_mode():
            drafter.propose_some(rounds.state, rounds.plan([0, 1]), None, torch.tensor([*copied, False]))
        counted.append(int(drafter.non_finite) - before)
    assert counted == [0, 4, 3, 7]


def test_a_mask_of_another_shape_is_refused(pair_for):
    require("cpp")
    target, drafter = load_pair(*pair_for("llama"), slots=2, implementation="cpp")
    rounds = Rounds(target, drafter)
    rounds.start(0, [5, 6, 7], width=4, budget=9)
    for copied in (torch.zeros(2, dtype=torch.bool), torch.zeros(3)):
        with pytest.raises(ValueError, match="copied: expected"):
            drafter.propose_some(rounds.state, rounds.plan([0]), None, copied)


def test_lookup_leaves_out_what_it_copies(pair_for, monkeypatch):
    """Beside chains and, where nothing can be left out, trees."""
    require("cpp")
    folders = pair_for("llama")
    requests = [([5, 6, 7] * 5, {"width": 5}), ([8, 9], {"width": 6, "temperature": 1.0, "seed": 5})]
    plain = run(load_pair(*folders, slots=2), [(p, {**a, "width": 1}) for p, a in requests], 40)
    for trees in (0, 9):
        target, drafter = load_pair(*folders, slots=2, implementation="cpp")
        masks, real = [], drafter.propose_some
        monkeypatch.setattr(
            drafter, "propose_some", lambda *a, real=real, m=masks: m.append(a[3]) or real(*a)
        )
        asked = [(requests[0][0], requests[0][1]), (requests[1][0], {**requests[1][1], "tree": trees})]
        rounds = run((target, WithLookup(drafter)), asked, 40)
        assert [rounds.tokens(slot) for slot in range(2)] == [plain.tokens(slot) for slot in range(2)]
        assert any(m.any() and not m.all() for m in masks)
