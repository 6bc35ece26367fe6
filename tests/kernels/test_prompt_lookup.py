"""Prompt lookup against a search by hand, on every backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockpilot_kernels.prompt_lookup import prompt_lookup, reference
from tests.kernels.backends import Backend
from tests.no_host_sync import NoHostSync


def by_hand(ids: list[int], drafts: list[int], shortest: int, longest: int) -> list[int]:
    best, at = 0, -1
    for place in range(len(ids) - 1):
        match = 0
        while match < min(longest, place + 1) and ids[place - match] == ids[-1 - match]:
            match += 1
        if match >= max(best, shortest):
            best, at = match, place
    if at < 0:
        return drafts
    known = list(ids)
    while len(known) <= at + len(drafts):
        known.append(known[len(known) - (len(ids) - 1 - at)])
    return known[at + 1 : at + 1 + len(drafts)]


def case(seed: int, slots: int, columns: int, width: int, ids: int) -> tuple[Tensor, Tensor, Tensor]:
    """Few different ids, so that matches of every length occur; what is beyond a slot's length would match too."""
    gen = torch.Generator().manual_seed(seed)
    known = torch.randint(0, ids, (slots, columns), generator=gen)
    length = torch.randint(0, columns + 1, (slots,), generator=gen)
    return known, length, torch.randint(100, 200, (slots, width), generator=gen)


@pytest.mark.parametrize("columns", [1, 7, 40])
@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 4), (3, 3), (3, 8), (9, 9)])
def test_as_found_by_hand(backend: Backend, columns, shortest, longest):
    copied = 0
    for seed in range(2 if backend.slow else 8):
        known, length, drafts = case(seed, 5, columns, 1 + seed % 6, 2 + seed % 3)
        found = prompt_lookup(*map(backend.put, (known, length, drafts)), shortest, longest).cpu()
        for r in range(5):
            ids = known[r, : length[r]].tolist()
            expected = by_hand(ids, drafts[r].tolist(), shortest, longest) if ids else drafts[r].tolist()
            assert found[r].tolist() == expected, (seed, r)
            copied += expected != drafts[r].tolist()
    assert copied or columns < 40 or shortest == 9


def test_a_repetition_goes_on_at_any_width(backend: Backend):
    known = torch.tensor([[5, 1, 2, 1, 2, 1, 2, 0, 0]])
    drafts = torch.zeros(1, 9, dtype=torch.long)
    found = prompt_lookup(*map(backend.put, (known, torch.tensor([7]), drafts)), 2, 8)
    assert found.tolist() == [[1, 2, 1, 2, 1, 2, 1, 2, 1]]


def test_places_in_several_parts_views_and_long_lengths(backend: Backend):
    """More places than a program takes at once; columns cut from a wider table, whose lengths go beyond them."""
    whole = torch.arange(2 * 3000).view(2, 3000)
    whole[:, 2000:2004] = whole[:, 100:104]
    whole[0, 1500:1503] = whole[0, 101:104]
    known, length = backend.put(whole)[:, :2004], backend.put(torch.tensor([2004, 3000]))
    drafts = backend.put(torch.full((2, 5), -1))
    found = prompt_lookup(known, length, drafts[:, ::2], 3, 4).cpu()
    assert found.tolist() == [[104, 105, 106], [3104, 3105, 3106]]
    assert prompt_lookup(known, length, drafts, 3, 3).cpu()[0].tolist() == [1503, 1504, 1505, 1506, 1507]
    assert prompt_lookup(known[:0], length[:0], drafts[:0], 1, 2).shape == (0, 5)
    assert prompt_lookup(known[:, :0], length, drafts, 1, 2).tolist() == drafts.tolist()
    assert prompt_lookup(known, length, drafts[:, :0], 1, 2).shape == (2, 0)


def test_nothing_is_read_on_the_host():
    given = case(0, 4, 30, 5, 3)
    with NoHostSync():
        reference.prompt_lookup(*given, 2, 6)
    assert reference.prompt_lookup(*(t.to("meta") for t in given), 2, 6).shape == (4, 5)


def test_what_is_refused(backend: Backend):
    known, length, drafts = map(backend.put, case(0, 3, 9, 2, 3))
    for bad in (
        (known[0], length, drafts, 1, 2),
        (known.int(), length, drafts, 1, 2),
        (known, length[:2], drafts, 1, 2),
        (known, length, drafts[:2], 1, 2),
        (known, length, drafts, 0, 2),
        (known, length, drafts, 3, 2),
    ):
        with pytest.raises(ValueError, match="expected"):
            prompt_lookup(*bad)
