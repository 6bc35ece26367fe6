"""What a launch is sized by, and that the step it records needs no host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockpilot import SamplingParams
from blockpilot.graphs import DEPTH, Graphs, Launch, horizon, key_bucket, slot_bucket
from blockpilot.recorders import Uncaptured
from blockpilot.request import Handle
from tests.engine.test_static import ConstantDrafter, engine
from tests.no_host_sync import NoHostSync


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_recorded_step_needs_no_host(device):
    """Ring and cursor included; on meta there is no data at all."""
    target, state, plan = engine(device)
    plan = replace(plan, logprobs=None)
    known = Graphs(state, target, ConstantDrafter(), Uncaptured())
    with torch.inference_mode():
        known._step(plan)  # lays out the plan's tensors
        pointers = state.pointers()
        with NoHostSync():
            known._step(plan)
    assert state.pointers() == pointers
    if device == "cpu":
        assert int(known._ring.cursor) == 2 and sorted(known._reports(known._ring.rows[1].tolist())) == [
            0,
            1,
            2,
        ]


def handle_of(prompt: int, budget: int | None, width: int, said: int) -> Handle:
    class Silent:
        def detokenizer(self):
            return None

    handle = Handle([3] * prompt, SamplingParams(max_new_tokens=budget), Silent(), None)
    handle.token_ids = [4] * said
    handle.stats.width = width
    return handle


def test_horizon_counts_what_is_certain():
    one = handle_of(10, 20, 4, 1)
    assert horizon({0: one}, None, 96) == (5, 30)  # ⌈19 / 4⌉ steps, all of the budget in reach
    assert horizon({0: one}, Launch({0: one}, 3, lambda: ([], 0.0)), 96)[0] == 2
    assert horizon({0: one}, Launch({0: one}, 5, lambda: ([], 0.0)), 96)[0] == 0
    other = Launch({0: handle_of(1, 1, 1, 0)}, 5, lambda: ([], 0.0))
    assert horizon({0: one}, other, 96)[0] == 5  # that of a request that was there before
    free = handle_of(10, None, 2, 1)
    assert horizon({0: one, 1: free}, None, 4096) == (DEPTH, 11 + 2 * DEPTH)
    assert horizon({0: one, 1: free}, None, 24)[0] == 7  # the slot's capacity is a limit too


def test_buckets():
    assert [slot_bucket(h, 12) for h in range(12)] == [1, 2, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12]
    assert [key_bucket(n, 3000) for n in (1, 512, 513, 1025, 2049)] == [512, 512, 1024, 2048, 3008]
    assert key_bucket(3, 100) == 128
