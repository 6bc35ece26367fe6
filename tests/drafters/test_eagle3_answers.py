"""What EAGLE-3's chains and trees commit is plain decoding's, bit for bit, whoever is beside them."""

from __future__ import annotations

import pytest
import torch

from blockpilot.drafters import load_drafter
from blockpilot.drafters.eagle3 import Eagle3Drafter
from blockpilot.drafters.eagle3_cpp import CppEagle3Drafter
from blockpilot.targets.checkpoint import load_checkpoint
from tests.drafters.conftest import FAMILIES
from tests.drafters.eagle3_rounds import DTYPES, REQUESTS, TREES, run
from tests.drafters.rounds import Rounds, in_blocks, load_pair, remembered, spoil
from tests.eagle3 import IDS
from tests.implementations import build, require


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_commits_what_plain_decoding_does(load, eagle3_for, family, dtype, trees):
    """Chains, trees and plain; and what is remembered is what a fresh drafter would know."""
    folders = eagle3_for(family)
    requests = [(p, {**a, **t} if trees else a) for (p, a), t in zip(REQUESTS, TREES, strict=True)]
    plain = run(
        load(*folders, slots=5, dtype=dtype), [(p, {**a, "width": 1, "tree": 0}) for p, a in REQUESTS], 40
    )
    rounds = run(load(*folders, slots=5, dtype=dtype), requests, 40)
    fresh = Rounds(*load(*folders, dtype=dtype))
    deeper = 0
    for slot in range(5):
        assert rounds.tokens(slot) == plain.tokens(slot)
        deeper += sum(c > 1 for c in rounds.counts[slot])
        if rounds.widths[slot] > 1:
            so_far = rounds.tokens(slot)[:-1]
            known = len(so_far) - rounds.counts[slot][-1]  # the last pairs still wait
            with torch.inference_mode():
                fresh.drafter.begin(0, fresh.target.prefill(0, so_far)[1], so_far)
            seen, expected = (remembered(r.drafter, s, known) for r, s in ((rounds, slot), (fresh, 0)))
            assert torch.equal(seen, expected)
    assert deeper > 5


@pytest.mark.parametrize("temperature", [0.0, 3.0])
@pytest.mark.parametrize("tree", [0, 16])
def test_every_accepted_count_at_every_width(load, eagle3_for, temperature, tree):
    rounds = Rounds(*load(*eagle3_for("qwen3")), widest=16)
    for width in range(2, 7):
        seen: set[int] = set()
        for seed in range(12):
            asked = {"budget": 48, "temperature": temperature, "seed": seed}
            prompt = [5 + seed, 6, 3 + width]
            rounds.start(0, prompt, width=1, **asked)
            rounds.finish()
            plain = rounds.tokens(0)
            rounds.start(0, prompt, width=width, tree=tree and max(width, tree), **asked)
            rounds.finish()
            assert rounds.tokens(0) == plain
            seen |= set(rounds.counts[0])
            if seen == set(range(1, width + 1)):
                break
        assert seen == set(range(1, width + 1)), width


@pytest.mark.parametrize("trees", [False, True])
def test_drafts_do_not_depend_on_neighbours(load, eagle3_for, trees):
    """Each slot's blocks are those of the same request alone; beside trees a block shows the taken path alone."""
    folders = eagle3_for("llama")
    requests = [(p, {**a, **t} if trees else a) for (p, a), t in zip(REQUESTS, TREES, strict=True)]
    rounds = run(load(*folders, slots=5), requests, 30)
    alone = Rounds(*load(*folders), widest=16)
    for slot, (prompt, asked) in enumerate(requests):
        alone.start(0, prompt, budget=30, **asked)
        alone.finish()
        assert alone.counts[0] == rounds.counts[slot]
        assert trees or alone.blocks[0] == rounds.blocks[slot]


def test_no_stop_id_is_drafted_before_it_is_allowed(load, eagle3_for):
    rounds = Rounds(*load(*eagle3_for("llama")), widest=16)
    for tree in (0, 12):
        banned = free = 0
        for free_from in range(6, 16):
            asked = {"width": 6, "budget": 20, "stops": [3, 4], "free_from": free_from, "tree": tree}
            rounds.start(0, [5, 6, 7], **asked)
            rounds.finish()
            if tree:
                continue  # a block shows the path that was taken alone
            position = 4
            for block, count in zip(rounds.blocks[0], rounds.counts[0], strict=True):
                drafted = dict(enumerate(block[1:], position))
                assert not {3, 4} & {t for p, t in drafted.items() if p < free_from}
                banned += free_from - 1 in drafted
                free += drafted.get(free_from) in (3, 4)
                position += count
        assert tree or (banned and free)


def test_more_nodes_are_accepted_no_less(load, eagle3_for):
    steps = {}
    for tree in (0, 16):
        rounds = Rounds(*load(*eagle3_for("llama"), slots=4), widest=16)
        for slot in range(4):
            rounds.start(slot, [5 + slot, 9], width=6, budget=60, tree=tree, temperature=0.8, seed=slot)
        rounds.finish()
        steps[tree] = sum(len(c) for c in rounds.counts.values())
    assert steps[16] < steps[0]


def test_the_end_of_the_context(load, eagle3_for):
    """Branches of a tree lie beyond the last position; answers are the start of a longer engine's."""
    folders = eagle3_for("llama")
    roomy, tight = (Rounds(*load(*folders, capacity=c), widest=16) for c in (128, 64))
    for tree in (0, 16):
        for length in (56, 61, 63):
            for rounds in (roomy, tight):
                rounds.start(0, [5 + i % 20 for i in range(length)], width=8, budget=60, tree=tree)
                rounds.finish()
            assert len(tight.tokens(0)) == 64
            assert tight.tokens(0) == roomy.tokens(0)[:64]


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
