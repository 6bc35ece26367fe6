"""A drafter's twin learns what it is shown, and says what undoing that would cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockpilot import LLM, SamplingParams
from blockpilot.adapt import learner as module
from blockpilot.adapt.learner import Learner
from blockpilot.training.draft_data import read_answer
from tests.adapt.opening import GREEDY, opened, weights
from tests.implementations import default_dtype


def finish(work):
    """The outcome of an update or a trial, run to its end."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


@pytest.fixture
def served(learning):
    """An engine, its outputs, the pieces that it gathered meanwhile, and a learner for them."""
    llm = LLM(learning.pair[0], drafter=learning.pair[1], max_length=96, max_requests=3, adapt=True)
    adapting = llm.adapter
    llm.drafter.history.open = True
    adapting._advance = adapting.feedback.take
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, width=4)
    trees = [replace(params, tree=12 if i % 3 == 0 else None) for i in range(12)]
    outputs = llm.generate(learning.prompts(12), trees)
    twin = Learner(llm.drafter, llm.target, 64, torch.tensor([0.5, 2.0, 3.0]), 0)
    return llm, outputs, list(adapting.feedback.pieces), twin


def test_pieces_are_what_the_target_says(served, learning):
    """Ids and features are those of the target reading the answer again; every answered id is in one piece."""
    llm, outputs, pieces, _ = served
    alone = LLM(learning.pair[0], max_length=96, max_requests=1).target
    alone.use_features(llm.drafter.feature_layers)
    read = []
    for o in outputs:
        ids = [*o.prompt_token_ids, *o.token_ids]
        with torch.inference_mode():
            read.append((ids, read_answer(alone, o.prompt_token_ids, o.token_ids)[0].bfloat16()))
    covered = 0
    for piece in pieces:
        size, covered = len(piece.ids), covered + len(piece.ids) - piece.start
        assert size <= 24 and 1 <= piece.start < size
        found = [
            torch.equal(features[i : i + size - 1], piece.features)
            for ids, features in read
            for i in range(len(ids) - size + 1)
            if ids[i : i + size] == piece.ids
        ]
        assert any(found)
    assert len(pieces) > 24 and 0.9 * 12 * 30 < covered <= 12 * 30


@pytest.mark.parametrize("arm", ["head", "full"])
def test_it_learns_what_it_is_shown(served, arm, monkeypatch):
    _, _, pieces, twin = served
    monkeypatch.setattr(module, "RATES", {"head": 0.02, "full": 0.02})
    monkeypatch.setattr(module, "STEPS", 80)
    before = {n: p.detach().clone() for n, p in twin.model.named_parameters()}
    finish(twin.update(arm, pieces, 4))
    moved = {n for n, p in twin.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == ({"lm_head"} if arm == "head" else set(before))
    shown = pieces[: -(len(pieces) // module.HELD_OUT)]
    after = {n: p.detach().clone() for n, p in twin.model.named_parameters()}
    assert finish(twin.trial(shown, 4)).gain < -0.05
    assert all(torch.equal(p, after[n]) for n, p in twin.model.named_parameters())
    twin.undo()
    assert all(torch.equal(p, before[n]) for n, p in twin.model.named_parameters())
    assert set(twin.tensors("head")) == {"lm_head.weight"}


def test_the_same_seed_does_the_same(served):
    llm, _, pieces, _ = served
    made = []
    for seed in (1, 1, 2):
        twin = Learner(llm.drafter, llm.target, 64, torch.ones(3), seed)
        made.append((finish(twin.update("full", pieces, 4)), twin.tensors("full")))
    assert made[0][0] == made[1][0]
    assert all(torch.equal(made[0][1][n], made[1][1][n]) for n in made[0][1])
    assert not all(torch.equal(made[0][1][n], made[2][1][n]) for n in made[0][1])


def test_adam_is_adam():
    """Beside torch's, a parameter without a gradient among those that have one."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(5, 4, generator=generator), torch.randn(3, generator=generator), torch.ones(2)]
    ours, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    adam, other = module.Adam(ours, 0.01), torch.optim.Adam(theirs, lr=0.01, betas=(0.9, 0.95))
    for _ in range(6):
        for p, q in zip(ours[:2], theirs[:2], strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        adam.step()
        other.step()
    for p, q, t in zip(ours, theirs, start, strict=True):
        torch.testing.assert_close(p, q)
        assert torch.equal(p, t) == (p is ours[2])


@pytest.mark.parametrize("kind", ["eagle3", "specblock"])
def test_a_default_dtype_of_float64_changes_no_update(learning, kind):
    learning.use(kind)
    made = []
    for dtype in (torch.float32, torch.float64):
        with default_dtype(dtype):
            llm = opened(learning)
            learning.force(llm, "head", "full")
            llm.generate(learning.prompts(12), replace(GREEDY, width=4))
            assert llm.adapter.failed is None and llm.adapter.counts["kept"] > 1
            made.append(weights(llm))
    assert all(map(torch.equal, *made))
