"""What chains and trees of EAGLE-3 and SpecBlock commit is plain decoding's, bit for bit, whoever is beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockpilot.drafters import load_drafter
from blockpilot.targets.checkpoint import load_checkpoint
from tests.drafters.conftest import FAMILIES
from tests.drafters.pair_rounds import CUT, DTYPES, REQUESTS, TREES, run
from tests.drafters.rounds import Rounds, in_blocks, remembered
from tests.implementations import build, require


def slots_of(drafter: Any) -> int:
    """Places of a pair in the drafter's cache."""
    return getattr(drafter.config, "slots", 1)


@pytest.mark.parametrize("trees", [None, "whole", "cut"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_commits_what_plain_decoding_does(load, pair_for, family, dtype, trees):
    """Chains, trees and plain; and what is remembered is what a fresh drafter would know."""
    folders = pair_for(family)
    requests = [(p, {**a, **t} if trees else a) for (p, a), t in zip(REQUESTS, TREES, strict=True)]
    plain = run(
        load(*folders, slots=5, dtype=dtype), [(p, {**a, "width": 1, "tree": 0}) for p, a in REQUESTS], 40
    )
    rounds = run(load(*folders, slots=5, dtype=dtype), requests, 40, CUT if trees == "cut" else None)
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
            seen, expected = (
                remembered(r.drafter, s, known * slots_of(r.drafter)) for r, s in ((rounds, slot), (fresh, 0))
            )
            assert torch.equal(seen, expected)
    assert deeper > 5


@pytest.mark.parametrize("temperature", [0.0, 3.0])
@pytest.mark.parametrize("tree", [0, 16])
def test_every_accepted_count_at_every_width(load, pair_for, temperature, tree):
    rounds = Rounds(*load(*pair_for("qwen3")), widest=16)
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
def test_drafts_do_not_depend_on_neighbours(load, pair_for, trees):
    """Each slot's blocks are those of the same request alone; beside trees a block shows the taken path alone."""
    folders = pair_for("llama")
    requests = [(p, {**a, **t} if trees else a) for (p, a), t in zip(REQUESTS, TREES, strict=True)]
    rounds = run(load(*folders, slots=5), requests, 30)
    alone = Rounds(*load(*folders), widest=16)
    for slot, (prompt, asked) in enumerate(requests):
        alone.start(0, prompt, budget=30, **asked)
        alone.finish()
        assert alone.counts[0] == rounds.counts[slot]
        assert trees or alone.blocks[0] == rounds.blocks[slot]


def test_no_stop_id_is_drafted_before_it_is_allowed(load, pair_for):
    rounds = Rounds(*load(*pair_for("llama")), widest=16)
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


def test_more_nodes_are_accepted_no_less(load, pair_for):
    steps = {}
    for tree in (0, 16):
        rounds = Rounds(*load(*pair_for("llama"), slots=4), widest=16)
        for slot in range(4):
            rounds.start(slot, [5 + slot, 9], width=6, budget=60, tree=tree, temperature=0.8, seed=slot)
        rounds.finish()
        steps[tree] = sum(len(c) for c in rounds.counts.values())
    assert steps[16] < steps[0]


def test_the_end_of_the_context(load, pair_for):
    """Branches of a tree lie beyond the last position; answers are the start of a longer engine's."""
    folders = pair_for("llama")
    roomy, tight = (Rounds(*load(*folders, capacity=c), widest=16) for c in (128, 64))
    for tree in (0, 16):
        for length in (56, 61, 63):
            for rounds in (roomy, tight):
                rounds.start(0, [5 + i % 20 for i in range(length)], width=8, budget=60, tree=tree)
                rounds.finish()
            assert len(tight.tokens(0)) == 64
            assert tight.tokens(0) == roomy.tokens(0)[:64]


@pytest.mark.parametrize("weights", ["stored", "stored-int8", "stored-int16"])
def test_beside_a_target_in_blocks(pair_for, weights):
    require("cpp")
    folders = pair_for("llama")
    target = build("cpp", in_blocks(load_checkpoint(folders[0])), 5, 128, weights=weights)
    drafter = load_drafter(folders[1], target, 5)
    target.use_features(drafter.feature_layers)
    plain = run((target, drafter), [(p, {**a, "width": 1}) for p, a in REQUESTS], 30)
    for trees in (False, True):
        requests = [(p, {**a, **t} if trees else a) for (p, a), t in zip(REQUESTS, TREES, strict=True)]
        rounds = run((target, drafter), requests, 30)
        assert [rounds.tokens(i) for i in range(5)] == [plain.tokens(i) for i in range(5)]
        assert sum(len(c) for c in rounds.counts.values()) < sum(len(c) for c in plain.counts.values())


def test_a_tree_is_cut_and_a_chain_is_not(load, pair_for):
    """Nodes keep their order, and no more of them stay than pay."""
    rounds = Rounds(*load(*pair_for("llama"), slots=2), widest=16)
    rounds.start(0, [5, 6, 7], width=6, budget=20)
    rounds.start(1, [5, 6, 7], width=6, budget=20, tree=16)
    rounds.step()
    made = []
    for cost in (None, CUT, (1.0,) * 16, (1.0, 1.0)):
        rounds.cost = cost
        with torch.inference_mode():
            made.append(rounds.drafter.propose(rounds.state, rounds.plan([0, 1]), None))
    whole, cut, free, known = (int(p.nodes[1]) for p in made)
    assert 1 <= cut < whole == free and known <= 2
    assert {int(p.nodes[0]) for p in made} == {6}
    for name in ("tokens", "parent", "depth"):
        first, second = (getattr(p, name)[1, : cut - 1] for p in made[:2])
        assert torch.equal(first, second)
