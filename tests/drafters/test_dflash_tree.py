"""Trees of a DFlash pass: what ranks their candidates, and that what is committed stays plain decoding's."""

from __future__ import annotations

import pytest
import torch

from blockpilot.drafters.draws import Draws, likeliest
from tests.drafters.conftest import FAMILIES
from tests.drafters.pair_rounds import CUT
from tests.drafters.rounds import Rounds, remembered

DTYPES = [torch.float32, torch.bfloat16]


def test_the_likeliest_and_their_log_probabilities():
    scores = torch.randn(7, 40, generator=torch.Generator().manual_seed(0)) * 3
    columns, logq = likeliest(scores, 6)
    assert torch.equal(columns, scores.topk(6).indices)
    torch.testing.assert_close(logq, scores.log_softmax(-1).gather(1, columns))


def test_no_candidate_is_likelier_than_certain():
    """However its sum is rounded, a log-probability is at most 0, or a child would overtake its parent."""
    scores = torch.randn(2000, 33, generator=torch.Generator().manual_seed(1)) * 1e-3 - 20
    scores[:, 7] = torch.linspace(-5, 5, 2000)
    scores[:, 8:] -= 3
    _, logq = likeliest(scores, 2)
    assert (logq <= 0).all() and (logq[:, 0] > -1e-4).all()


def test_scores_are_what_the_targets_choice_sees():
    gen = torch.Generator().manual_seed(1)
    logits, noise = torch.randn(2, 3, 9, generator=gen)
    heat = torch.tensor([0.0, 0.5, 2.0])
    assert torch.equal(Draws(None, heat, None).scores(logits), logits)
    found = Draws(noise, heat, torch.tensor([[-1, -1], [4, -1], [0, 8]])).scores(logits)
    assert torch.equal(found[0], logits[0])
    expected = logits / heat[:, None] + noise
    expected[1, 4], expected[2, [0, 8]] = -torch.inf, -torch.inf
    assert torch.equal(found[1:], expected[1:])


REQUESTS = [
    ([5, *range(6, 20)], {"width": 4, "tree": 4, "temperature": 0.0}),
    ([8, 9], {"width": 6, "tree": 16, "temperature": 1.0, "seed": 5}),
    ([7], {"width": 5, "tree": 0, "temperature": 0.7, "seed": 2}),
    ([6, 7, 9], {"width": 2, "tree": 9, "temperature": 0.9, "seed": 3, "stops": (3,), "free_from": 12}),
    ([4] * 9, {"width": 1, "tree": 0, "temperature": 0.0}),
]


def run(pair, budget: int, drafting: bool, cost: tuple[float, ...] | None = None) -> Rounds:
    """All requests in one batch; plain, or as they draft."""
    rounds = Rounds(*pair, widest=16)
    rounds.cost = cost
    for slot, (prompt, asked) in enumerate(REQUESTS):
        plain = {} if drafting else {"width": 1, "tree": 0}
        rounds.start(slot, prompt, budget=budget, **{**asked, **plain})
    while not rounds.state.done.all():
        rounds.step()
    return rounds


@pytest.mark.parametrize("cost", [None, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_trees_commit_what_plain_decoding_does(load, drafter_for, family, dtype, cost):
    """Trees, a chain and plain in one batch; and what is remembered is what a fresh drafter would know."""
    folders = drafter_for(family)
    plain = run(load(*folders, slots=5, dtype=dtype), 40, False)
    rounds = run(load(*folders, slots=5, dtype=dtype), 40, True, cost)
    fresh = Rounds(*load(*folders, dtype=dtype))
    deeper = 0
    for slot in range(5):
        assert rounds.tokens(slot) == plain.tokens(slot)
        deeper += sum(c > 1 for c in rounds.counts[slot])
        if rounds.widths[slot] > 1:
            so_far = rounds.tokens(slot)[:-1]
            with torch.inference_mode():
                fresh.drafter.begin(0, fresh.target.prefill(0, so_far)[1], so_far)
            seen, expected = (remembered(r.drafter, s, len(so_far)) for r, s in ((rounds, slot), (fresh, 0)))
            assert torch.equal(seen, expected)
    assert deeper > 10


def test_a_tree_holds_the_chain_first(load, drafter_for):
    """Greedy: as many nodes as columns may go elsewhere, but the likeliest first token is always there."""
    rounds = Rounds(*load(*drafter_for("llama"), slots=2), widest=16)
    rounds.start(0, [5, 6, 7], width=6, budget=20)
    rounds.start(1, [5, 6, 7], width=6, budget=20, tree=16)
    rounds.step()
    with torch.inference_mode():
        proposal = rounds.drafter.propose(rounds.state, rounds.plan([0, 1]), None)
    count = int(proposal.nodes[1]) - 1
    tokens, parent, depth = (
        t[1, :count].tolist() for t in (proposal.tokens, proposal.parent, proposal.depth)
    )
    assert count == 15 and proposal.nodes[0] == 6
    assert (parent[0], depth[0]) == (-1, 1)
    assert max(depth) <= 5
    for node, above in enumerate(parent):
        assert above < node and depth[node] == (1 if above < 0 else depth[above] + 1)
    children = list(zip(parent, tokens, strict=True))
    assert len(set(children)) == count


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_more_nodes_are_accepted_no_less(load, drafter_for, temperature):
    """At equal positions a larger tree holds every path of a smaller one; over many steps it commits more."""
    steps = {}
    for tree in (0, 16):
        rounds = Rounds(*load(*drafter_for("llama"), slots=4), widest=16)
        for slot in range(4):
            asked = {"width": 6, "budget": 60, "tree": tree, "temperature": temperature, "seed": slot}
            rounds.start(slot, [5 + slot, 9], **asked)
        rounds.finish()
        steps[tree] = sum(len(c) for c in rounds.counts.values())
    assert steps[16] < steps[0]


def test_a_tree_is_cut_and_a_chain_is_not(load, drafter_for):
    """What is cut is the end of the whole tree, and nothing is where every node is free."""
    rounds = Rounds(*load(*drafter_for("llama"), slots=2), widest=16)
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
