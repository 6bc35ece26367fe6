"""EAGLE-3 on the C++ decoder: one call drafts what a pass a depth does, beside any target; and what is refused."""

from __future__ import annotations

import pytest
import torch

from blockpilot.drafters import load_drafter
from blockpilot.drafters.eagle3 import Eagle3Drafter
from blockpilot.drafters.eagle3_cpp import CppEagle3Drafter
from blockpilot.targets.checkpoint import load_checkpoint
from tests.drafters.pair_rounds import DTYPES, REQUESTS, TREES, run
from tests.drafters.rounds import Rounds, in_blocks, load_pair, spoil
from tests.eagle3 import IDS
from tests.implementations import build, require


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


@pytest.mark.parametrize("weights", ["stored", "stored-int8", "stored-int16"])
def test_beside_a_target_in_blocks(eagle3_for, weights):
    require("cpp")
    folders = eagle3_for("llama")
    target = build("cpp", in_blocks(load_checkpoint(folders[0])), 5, 128, weights=weights)
    drafter = load_drafter(folders[1], target, 5)
    target.use_features(drafter.feature_layers)
    plain = run((target, drafter), [(p, {**a, "width": 1}) for p, a in REQUESTS], 30)
    for trees in (False, True):
        requests = [(p, {**a, **t} if trees else a) for (p, a), t in zip(REQUESTS, TREES, strict=True)]
        rounds = run((target, drafter), requests, 30)
        assert [rounds.tokens(i) for i in range(5)] == [plain.tokens(i) for i in range(5)]
        assert sum(len(c) for c in rounds.counts.values()) < sum(len(c) for c in plain.counts.values())


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
