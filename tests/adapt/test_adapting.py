"""`LLM(adapt=…)`: answers are plain decoding's bit for bit while weights move, decisions follow the numbers, and memory
is bounded."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from blockpilot import LLM
from blockpilot.adapt import Adapt, adapter, learner
from blockpilot.adapt.bandit import EXPLORATION, Choice
from blockpilot.adapt.learner import Outcome
from tests.adapt.opening import GREEDY, opened, same, weights
from tests.eagle3 import save_eagle3_drafter
from tests.tiny import save_drafter

MODES = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=1.5, seed=3),
    "filtered": replace(GREEDY, temperature=3.0, top_k=9, top_p=0.95, seed=5),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["eagle3", "specblock"])
def test_answers_are_plain_while_weights_move(learning, backend, kind, mode):
    """Chains, trees and plain requests in one batch; some of what is drafted is accepted behind every update."""
    learning.use(kind)
    prompts = learning.prompts(24)
    plain = [
        o.token_ids for o in opened(learning, adapt=False).generate(prompts, replace(MODES[mode], width=1))
    ]
    llm = opened(learning)
    learning.force(llm, "head", "full")
    before, moved = weights(llm), []
    install = llm.adapter.install

    def installing(arm: str) -> None:
        install(arm)
        moved.append(weights(llm))

    llm.adapter.install = installing
    params = [
        replace(MODES[mode], width=(4, 6, 1, 3)[i % 4], tree=12 if i % 4 == 1 else None) for i in range(24)
    ]
    outputs = llm.generate(prompts, params)
    assert [o.token_ids for o in outputs] == plain
    assert len(moved) > 2
    for old, new in zip([before, *moved], moved, strict=False):
        assert not same(old, new)
    assert sum(o.stats.committed - o.stats.steps for o in outputs[12:]) > 10


def test_without_it_nothing_is_kept_or_asked(learning, backend):
    llm = opened(learning, adapt=False)
    assert llm.drafter.history is None and llm.adapter is None
    asked = learning.prompts(6), replace(GREEDY, width=4)
    outputs = llm.generate(*asked)
    quiet = opened(learning)
    quiet.adapter.bandit.decide = lambda *_: None
    before = weights(quiet)
    others = quiet.generate(*asked)
    assert [o.token_ids for o in others] == [o.token_ids for o in outputs]
    assert [o.stats.step_tokens for o in others] == [o.stats.step_tokens for o in outputs]
    assert same(before, weights(quiet))
    assert not quiet.drafter.history.kept.any()
    assert quiet.adapter.report()["skipped"] > 3


def served(learning, monkeypatch, gain: float, step: float, work: float, count: int = 24) -> LLM:
    """Requests served where a step takes `step` seconds, half an update `work`, and every update gains `gain`."""
    now = 0.0

    def update(self, arm, pieces, width):
        nonlocal now
        now, self.before = now + work, {}
        yield
        now += work
        return Outcome(gain, 0.001)

    monkeypatch.setattr(learner.Learner, "update", update)
    llm = opened(learning, max_requests=1)
    adapting = llm.adapter
    adapting._clock = lambda: now
    around = adapting.around

    def timed(handles, run):
        def running():
            nonlocal now
            run()
            now += step

        around(handles, running)

    adapting.around = timed
    llm.generate(learning.prompts(count), replace(GREEDY, width=4))
    return llm


def test_an_update_that_pays_is_repeated(learning, monkeypatch):
    """0.02 s beside steps of 0.1 s, for a gain of 5 %; the first ones are exploration."""
    llm = served(learning, monkeypatch, 0.05, 0.1, 0.01, count=40)
    report = llm.adapter.report()
    updates = sum(arm["updates"] for arm in report["arms"].values())
    assert report["kept"] == updates > 5 and report["dropped"] == 0
    assert 0.02 <= report["explored"] <= EXPLORATION * llm.adapter.pulse.seconds + 0.02
    assert report["explored"] < 0.5 * report["seconds"]
    assert report["seconds"] == pytest.approx(0.02 * updates)


def test_an_update_that_does_not_pay_is_tried_within_the_budget(learning, monkeypatch):
    llm = served(learning, monkeypatch, 0.0, 0.1, 0.1, count=60)
    report, seconds = llm.adapter.report(), llm.adapter.pulse.seconds
    assert report["kept"] == 0 and report["dropped"] >= 1 and report["skipped"] > 20
    assert report["explored"] == pytest.approx(0.2 * report["dropped"]) == pytest.approx(report["seconds"])
    assert report["explored"] <= EXPLORATION * seconds + 0.2
    assert report["share"] == pytest.approx(report["seconds"] / (report["seconds"] + seconds))


def test_a_dear_update_is_not_tried_at_all(learning, monkeypatch):
    monkeypatch.setattr(adapter, "GUESS", 1e6)
    llm = served(learning, monkeypatch, 0.5, 0.1, 100.0)
    report = llm.adapter.report()
    assert report["kept"] == report["dropped"] == 0 and report["skipped"] > 10


def test_what_does_not_gain_is_not_installed(learning):
    llm = opened(learning)
    before = weights(llm)
    learning.force(llm, "full", keep=False)
    honest = learner.Learner.update

    def lost(*given):
        yield from honest(*given)
        return Outcome(-0.1, 0.01)

    learning._patch.setattr(learner.Learner, "update", lost)
    llm.generate(learning.prompts(24), replace(GREEDY, width=4))
    report = llm.adapter.report()
    assert report["dropped"] > 1 and report["kept"] == 0
    assert same(before, weights(llm))
    twin = llm.adapter.learner
    assert all(torch.equal(twin.model.get_parameter(n), t) for n, t in twin.before.items())


def test_harm_is_taken_back(learning):
    """An update that ruins the drafter passes for a gain; once τ is seen to have fallen, the old weights do better."""
    llm = opened(learning)
    before, adapting = weights(llm), llm.adapter
    honest = learner.Learner.update

    def ruined(self, *given):
        yield from honest(self, *given)
        with torch.no_grad():
            self.model.lm_head.zero_()
        return Outcome(0.2, 0.01)

    learning._patch.setattr(learner.Learner, "update", ruined)
    once = iter([Choice("head", explores=False)])
    adapting.bandit.decide = lambda *_: next(once, None)
    adapting._watch.fell = lambda look: adapting.counts["kept"] == 1 and adapting.counts["reverted"] == 0
    held = []
    install = adapting.install
    adapting.install = lambda arm: (install(arm), held.append(weights(llm)))
    llm.generate(learning.prompts(30, 1), replace(GREEDY, width=6))
    assert adapting.counts["reverted"] == 1 and adapting._watch._before is None
    assert len(held) == 2 and not same(before, held[0])
    assert same(before, weights(llm))
    assert adapting.bandit.explored > 0


def test_a_fall_that_is_not_the_updates_fault_changes_nothing(learning):
    llm = opened(learning)
    learning.force(llm, "head")
    llm.generate(learning.prompts(24), replace(GREEDY, width=4))
    adapting = llm.adapter
    assert adapting.counts["kept"]
    adapting.stop()
    held = weights(llm)
    adapting.bandit.decide = lambda *_: None
    adapting._watch.fell = lambda look: adapting.learner.before and not adapting.counts["trials"]
    honest = learner.Learner.trial

    def trial(self, *given):
        adapting.counts["trials"] += 1
        yield from honest(self, *given)
        return Outcome(-0.05, 0.01)

    learning._patch.setattr(learner.Learner, "trial", trial)
    llm.generate(learning.prompts(24, 1), replace(GREEDY, width=4))
    assert adapting.counts["trials"] == 1 and adapting.counts["reverted"] == 0
    assert same(held, weights(llm))


def test_features_that_are_not_finite_end_an_update(learning):
    llm = opened(learning)
    learning.force(llm, "full", keep=False)
    before = weights(llm)
    read = llm.drafter.history.read
    llm.drafter.history.read = lambda *given: read(*given) * float("nan")
    asked = learning.prompts(16), replace(GREEDY, width=4)
    outputs = llm.generate(*asked)
    assert llm.adapter.report()["dropped"] > 0 and llm.adapter.report()["kept"] == 0
    assert same(before, weights(llm))
    assert [o.token_ids for o in outputs] == [
        o.token_ids for o in opened(learning, adapt=False).generate(*asked)
    ]


def test_where_features_are_always_kept(learning):
    """As captured steps do: decisions and updates are the same."""
    found = []
    for always in (False, True):
        llm = opened(learning)
        history = llm.drafter.history
        history._open = history._always = always
        learning.force(llm, "head")
        llm.generate(learning.prompts(20), replace(GREEDY, width=4))
        llm.adapter.bandit.decide = lambda *_: None
        llm.generate(learning.prompts(6, 1), replace(GREEDY, width=4))
        assert llm.adapter.counts["kept"] > 1 and llm.adapter.counts["skipped"] > 1
        assert history.open == always
        found.append(llm.adapter.counts["kept"])
    assert found[1] >= found[0]


def test_memory_is_bounded(learning):
    llm = opened(learning)
    learning.force(llm, "head", "full")
    pieces = llm.adapter.feedback.pieces
    for seed in range(4):
        llm.generate(learning.prompts(30, seed), replace(GREEDY, width=4))
        assert len(pieces) <= pieces.maxlen == 32
        assert all(len(p.ids) <= 24 and len(p.features) == len(p.ids) - 1 for p in pieces)
        assert llm.drafter.history.kept.shape[1] < 64
        assert not llm.adapter.feedback._cut
    assert llm.adapter.feedback.rows > 32 * 24


def test_a_cancelled_request_is_let_go(learning):
    """Though pieces of it were made and nobody has its slot since."""
    llm = opened(learning)
    learning.force(llm, "head")
    llm.adapter._gather(True)
    handle = llm.submit([5, 6, 7], replace(GREEDY, width=4))
    while not llm.adapter.feedback.pieces:
        llm.step()
    assert not handle.finished
    llm.cancel(handle)
    gone = weakref.ref(handle)
    del handle
    gc.collect()
    assert gone() is None


def test_what_cannot_adapt_is_refused(learning, tmp_path):
    target = learning.pair[0]
    dflash = save_drafter(tmp_path / "dflash", target)
    biased = tmp_path / "biased"
    save_eagle3_drafter(biased, target, None, attention_bias=True)
    normed = save_eagle3_drafter(tmp_path / "normed", target, None, norm_before_residual=True)
    for drafter, message in (
        (None, "expected a drafter of kind eagle3.*got None"),
        (dflash, "kind eagle3.*got dflash"),
        ("lookup", "got lookup"),
        (f"{learning.pair[1]}+lookup", r"without \+lookup, got eagle3\+lookup"),
        (biased, "without midlayer.self_attn.q_proj.bias"),
        (normed, "without norm_before_residual"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(target, drafter=drafter, max_length=96, adapt=True)
    with pytest.raises(ValueError, match=r"expected True, False or an Adapt, got 1\.5"):
        opened(learning, 1.5)
    with pytest.raises(ValueError, match="seed: expected 0"):
        Adapt(seed=-1)


def test_a_drafter_with_an_embedding_of_its_own(learning, backend, tmp_path):
    folder = save_eagle3_drafter(
        tmp_path / "drafter", learning.pair[0], None, hidden_size=64, target_hidden_size=32
    )
    asked = learning.prompts(20), replace(GREEDY, width=4)
    llm = LLM(learning.pair[0], drafter=folder, max_length=96, max_requests=2, adapt=True)
    learning.force(llm, "full", "head")
    outputs = llm.generate(*asked)
    assert llm.adapter.report()["kept"] > 1
    assert [o.token_ids for o in outputs] == [
        o.token_ids for o in opened(learning, adapt=False).generate(*asked)
    ]
