"""EAGLE-3 on the C++ decoder: one call drafts what a pass a depth does, beside any target; and what is refused."""

from __future__ import annotations

import pytest
import torch

from blockpilot.drafters.eagle3 import Eagle3Drafter
from blockpilot.drafters.eagle3_cpp import CppEagle3Drafter
from tests.drafters.pair_rounds import DTYPES, REQUESTS, run
from tests.drafters.rounds import Rounds, load_pair, spoil
from tests.eagle3 import IDS
from tests.implementations import require


def test_what_is_refused(load, eagle3_for):
    target, drafter = load(*eagle3_for("llama", block_size=2))
    with pytest.raises(ValueError, match=r"features: expected \(3, 96\), got \(2, 96\)"):
        drafter.begin(0, torch.zeros(2, 96), [1, 2, 3])
    with pytest.raises(ValueError, match="expected room for 2 requests of 128 positions"):
        drafter.attach(target, 2)
    rounds = Rounds(target, drafter, widest=5)
    assert drafter.window == (1, 2, 3, 4)
    rounds.start(0, [5], width=5, budget=9)
    with pytest.raises(ValueError, match="at most 4"):
        rounds.step()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_call_drafts_what_a_pass_a_depth_does(eagle3_for, monkeypatch, dtype):
    """And PyTorch's ops draft the same in float32."""
    require("cpp")
    folders = eagle3_for("llama")
    results = []
    for implementation, chains in (("cpp", None), ("cpp", Eagle3Drafter._draft_chains), ("torch", None)):
        with monkeypatch.context() as patched:
            if chains:
                patched.setattr(CppEagle3Drafter, "_draft_chains", chains)
            rounds = run(
                load_pair(*folders, slots=5, dtype=dtype, implementation=implementation), REQUESTS, 30
            )
        results.append((rounds.blocks, rounds.counts, int(rounds.drafter.non_finite)))
    assert results[0] == results[1]
    assert dtype == torch.bfloat16 or results[0] == results[2]


def test_what_is_not_finite_drafts_the_first_id(load, eagle3_for):
    rounds = Rounds(*load(*eagle3_for("llama", [7, 9])))
    rounds.start(0, [5, 6, 7], width=4, budget=9)
    spoil(rounds.drafter.cache, 0, 0)
    rounds.step()
    assert rounds.blocks[0][0][1:] == [7, 7, 7]
    assert int(rounds.drafter.non_finite) == 3


def test_bad_operands_are_refused_by_the_op(eagle3_for):
    """Sizes that do not fit end in an error, not outside of their memory."""
    require("cpp")
    rounds = Rounds(*load_pair(*eagle3_for("llama"), implementation="cpp"))
    rounds.start(0, [5, 6, 7], width=4, budget=9)
    drafter, state = rounds.drafter, rounds.state
    for name, value, message in (
        ("_pending", drafter._pending[:, :3].contiguous(), "pending"),
        ("_pending", drafter._pending[..., :5].contiguous(), "pending"),
        ("_plan", drafter._plan[:-1], "plan"),
        ("_rules", (torch.tensor(IDS[::-1]), 1.0), "draft_ids"),
    ):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(drafter, name, value)
            with pytest.raises(ValueError, match=message):
                rounds.step()
    for count in (0, 4, 99):
        state.count[0] = count
        with pytest.raises(ValueError, match=r"count: expected 1 … 3"):
            rounds.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_what_it_holds(load, implementation, eagle3_for, dtype):
    """The estimate covers what is allocated, and not much more than a few times that."""
    folders = eagle3_for("llama", None, hidden_size=64, target_hidden_size=32)
    _, drafter = load(*folders, slots=3, capacity=128, dtype=dtype)
    held = drafter.cache.k.nbytes + drafter.cache.v.nbytes + drafter._pending.nbytes
    if implementation == "cpp":
        held += len(drafter._weights[0])
    else:
        layer = drafter.layer
        held += sum(
            x.bytes for x in (layer.qkv, layer.out, layer.gate_up, layer.down, drafter.fc, drafter._head)
        )
        held += drafter._embedding.nbytes
    estimate = drafter.memory_bytes(drafter.config, 3, 128, dtype)
    assert held <= estimate <= 4 * held
