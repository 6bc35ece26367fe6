"""Launches of captured steps give what single steps give, whatever is in flight; on CPU with a recorder that replays
by calling the step again, where nothing may be read on the host."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from blockpilot import LLM, SamplingParams, graphs
from blockpilot.graphs import Graphs
from blockpilot.recorders import say_once
from blockpilot_kernels.dispatch import forced
from tests.eagle3 import save_eagle3_drafter
from tests.engine.inside import change_logits
from tests.engine.pair import VOCAB, prompts, write_tokenizer
from tests.engine.replaying import Replaying
from tests.specblock import save_specblock_drafter
from tests.tiny import save_drafter, save_target

GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)
MODES = (
    GREEDY,
    replace(GREEDY, temperature=1.5, seed=3),
    replace(GREEDY, temperature=3.0, top_k=9, top_p=0.95, seed=5),
    replace(GREEDY, temperature=1.5, seed=7, stop_token_ids=(9, 12), min_new_tokens=6),
)
WIDTHS = (4, 1, 8, 3, 2, 6)


@pytest.fixture(autouse=True)
def reference() -> Iterator[None]:
    say_once.cache_clear()
    with forced("reference"):
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = save_target(folder / "target", vocab=VOCAB, eos_token_id=1)
    write_tokenizer(target)
    return target, save_drafter(folder / "drafter", target, block_size=4)


KINDS = ("dflash", "dflash+lookup", "lookup", "eagle3", "specblock")


def of_kind(pair, kind: str, folder):
    """The same target with another drafter."""
    target, drafter = pair
    saves = {"eagle3": save_eagle3_drafter, "specblock": save_specblock_drafter}
    if kind in saves:
        return target, saves[kind](folder / kind, target, list(range(0, VOCAB, 2)))
    return target, {"dflash+lookup": f"{drafter}+lookup", "lookup": "lookup"}.get(kind, drafter)


def replaying(pair, recorder: Replaying, slots: int = 3, **options) -> LLM:
    llm = LLM(pair[0], drafter=pair[1], max_requests=slots, max_length=96)
    s = llm._scheduler
    s.graphs = Graphs(s.state, s.target, s.drafter, recorder, **options)
    return llm


def eager(pair, slots: int = 3) -> LLM:
    return LLM(pair[0], drafter=pair[1], max_requests=slots, max_length=96)


def mixed(count: int) -> list[SamplingParams]:
    """Modes, widths and budgets that end in the middle of a launch."""
    budgets = [(40, 1, 2, 17, 33)[i % 5] for i in range(count)]
    return [
        replace(mode, width=WIDTHS[i % 6], max_new_tokens=n, min_new_tokens=min(n, mode.min_new_tokens))
        for i, n in enumerate(budgets)
        for mode in [MODES[i % 4]]
    ]


def counted(output) -> tuple:
    s = output.stats
    return output.token_ids, output.text, output.finish_reason, s.step_tokens, s.offered, s.kept, s.steps


@pytest.mark.parametrize("options", [{}, {"latency": 0.0}, {"latency": 3.5e-4}])
def test_answers_and_counters_are_those_of_single_steps(pair, options):
    asked = prompts(9, seed=2)
    recorder = Replaying()
    llm = replaying(pair, recorder, **options)
    outputs = llm.generate(asked, mixed(9))
    assert [counted(o) for o in outputs] == [counted(o) for o in eager(pair).generate(asked, mixed(9))]
    assert any(o.stats.committed > o.stats.steps for o in outputs)
    most = {0.0: 1, 3.5e-4: 3}.get(options.get("latency"))
    assert max(recorder.launches) == most if most else max(recorder.launches) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_every_drafter_can_be_replayed(pair, kind, tmp_path):
    """Nothing that a request's answers or counters depend on may lie on the host."""
    asked, other = prompts(6, seed=2), of_kind(pair, kind, tmp_path)
    outputs = replaying(other, Replaying()).generate(asked, mixed(6))
    assert [counted(o) for o in outputs] == [counted(o) for o in eager(other).generate(asked, mixed(6))]


def test_launches_that_end_with_their_last_request(pair):
    """A stop id in the middle of a launch, which ends then; the one behind it has no step at all."""
    (prompt,) = prompts(1, seed=4)
    free = eager(pair).generate([prompt], MODES[1])[0].token_ids
    recorder = Replaying(looping=True)
    llm = replaying(pair, recorder)
    for at in range(6, 30, 4):
        params = replace(MODES[1], stop_token_ids=(free[at],), width=2)
        assert counted(llm.generate([prompt], params)[0]) == counted(
            eager(pair).generate([prompt], params)[0]
        )
    assert recorder.ended_early > 3


def test_one_family_serves_every_mixture_that_fits(pair):
    """Requests come and go beside one that lasts, in the last slot and as wide as any."""
    recorder = Replaying()
    llm = replaying(pair, recorder)
    each = [replace(GREEDY, width=w, max_new_tokens=n) for w, n in ((3, 9), (1, 5), (8, 70), (2, 3), (8, 12))]
    outputs = llm.generate(prompts(5), each)
    assert outputs[2].stats.steps > max(o.stats.steps for i, o in enumerate(outputs) if i != 2)
    assert recorder.records == 1
    llm.generate(prompts(5), each)
    assert recorder.records == 1


def test_families_are_bounded(pair, monkeypatch):
    monkeypatch.setattr(graphs, "FAMILIES", 2)
    recorder = Replaying()
    llm = replaying(pair, recorder, slots=1)
    for _ in range(2):
        for width in (2, 3, 4):
            llm.generate([[5, 6]], replace(GREEDY, width=width, max_new_tokens=20))
    known = llm._scheduler.graphs
    assert len(known._families) == 2 and set(known._seconds) <= set(known._families)
    assert recorder.records == 6


def test_overshoot_is_discarded_and_not_billed(pair):
    """A stop string that is complete in the middle of a launch, while the next one is under way."""
    (prompt,) = prompts(1, seed=4)
    params = replace(MODES[1], width=4)
    free = eager(pair).generate([prompt], params)[0]
    for at in range(2, 20, 5):
        stopping = replace(params, stop=(free.text[at : at + 2],))
        got = replaying(pair, Replaying()).generate([prompt, [7, 8]], [stopping, GREEDY])
        alone = eager(pair).generate([prompt, [7, 8]], [stopping, GREEDY])
        assert got[0].finish_reason == "stop" and len(got[0].token_ids) < len(free.token_ids)
        assert [counted(o) for o in got] == [counted(o) for o in alone]


def test_a_launch_that_nobody_waits_for_is_dropped(pair):
    """It was under way when a stop ended its last request: no later one sees it, and no statistic changes."""
    (prompt,) = prompts(1, seed=4)
    free = eager(pair).generate([prompt], MODES[1])[0].token_ids
    llm = replaying(pair, Replaying())
    params = replace(MODES[1], stop_token_ids=(free[9],))
    output = llm.generate([prompt], params)[0]
    seconds = dict(output.stats.seconds)
    assert llm._scheduler._under_way is None and output.finish_reason == "stop"
    llm._scheduler.graphs = None
    assert counted(llm.generate([prompt], params)[0]) == counted(output)
    assert output.stats.seconds == seconds and seconds["verify"] > 0


def test_a_cancelled_request_is_in_no_later_launch(pair):
    llm = replaying(pair, Replaying(seconds=graphs.LATENCY / 2))  # two steps a launch
    first, second = (llm.submit([5, i], replace(GREEDY, width=2, max_new_tokens=80)) for i in (6, 7))
    for _ in range(4):
        llm.step()
    state = llm._scheduler.state
    llm.cancel(first)
    llm.cancel(first)
    assert llm._scheduler.graphs._recorder.interrupts == 1  # what is under way may end sooner
    length, tokens = int(state.length[0]), list(first.token_ids)
    third = llm.submit([9], replace(GREEDY, width=4, max_new_tokens=5))
    llm.step()  # the third is in the first's place
    while not second.finished:
        llm.step()
    assert first.token_ids == tokens and len(tokens) + 2 < length
    assert second.token_ids == eager(pair).generate([[5, 7]], replace(second.params))[0].token_ids
    assert third.token_ids == eager(pair).generate([[9]], third.params)[0].token_ids


def test_after_a_cancellation_nothing_advances(pair):
    llm = replaying(pair, Replaying())
    first, second = (llm.submit([5, i], replace(GREEDY, width=2, max_new_tokens=80)) for i in (6, 7))
    for _ in range(2):
        llm.step()
    llm.cancel(first)
    length = int(llm._scheduler.state.length[0])
    llm.step()
    assert int(llm._scheduler.state.length[0]) == length
    assert not second.finished


def test_a_step_that_cannot_be_captured_runs_as_it_is(pair, caplog):
    asked, recorder = prompts(4), Replaying(broken=True)
    with caplog.at_level(logging.WARNING):
        outputs = replaying(pair, recorder).generate(asked, mixed(4))
    assert [counted(o) for o in outputs] == [counted(o) for o in eager(pair).generate(asked, mixed(4))]
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1 and lines[0].endswith("operation not permitted when stream is capturing")


def test_what_needs_single_steps_gets_them(pair, caplog):
    """Log-probabilities and trees, asked for while a launch is under way; one line for each."""
    asked = prompts(4)
    each = [
        GREEDY,
        replace(GREEDY, max_new_tokens=3),
        replace(GREEDY, logprobs=2, max_new_tokens=4),
        replace(GREEDY, tree=6, width=4, max_new_tokens=4),
    ]
    recorder = Replaying()
    with caplog.at_level(logging.WARNING):
        outputs = replaying(pair, recorder, slots=2).generate(asked, each)
    expected = eager(pair, slots=2).generate(asked, each)
    assert [(counted(o), o.logprobs) for o in outputs] == [(counted(o), o.logprobs) for o in expected]
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == len(set(lines)) == 2
    assert recorder.launches


def test_non_finite_logits_end_their_request_alone(pair):
    """In the middle of a launch, whose later steps leave no trace of it."""
    expected = eager(pair).generate([[5, 6], [7, 8]], GREEDY)
    llm = replaying(pair, Replaying())
    state = llm._scheduler.state

    def spoil(logits):
        if len(logits) == 1:
            return logits
        plan = max(llm._scheduler.graphs._families, default=None, key=lambda p: p.rows.padded)
        if plan is None or len(plan.rows.slot) != len(logits):
            return logits
        at = (plan.rows.slot == 0) & (state.length[plan.rows.slot] > 20)
        return torch.where(at[:, None], torch.nan, logits)

    change_logits(llm, spoil)
    bad, good = llm.generate([[5, 6], [7, 8]], GREEDY)
    assert bad.finish_reason == "error" and "not finite" in str(bad.error)
    assert bad.token_ids == expected[0].token_ids[: len(bad.token_ids)] and len(bad.token_ids) < 40
    assert counted(good) == counted(expected[1])


def test_a_failing_step_ends_its_requests_and_no_other(pair, monkeypatch):
    llm = replaying(pair, Replaying())
    handle = llm.submit([5, 6], GREEDY)
    for _ in range(2):
        llm.step()
    with monkeypatch.context() as patch:
        patch.setattr(llm.target, "verify", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.step()
    assert handle.finished and handle.output.finish_reason == "error"
    assert llm.generate([[7, 8]], GREEDY)[0].token_ids == eager(pair).generate([[7, 8]], GREEDY)[0].token_ids


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures real graphs: needs a CUDA device")
def test_captured_answers_are_those_of_single_steps(pair):
    asked = prompts(9, seed=2)
    with forced("triton"):
        llm = LLM(pair[0], drafter=pair[1], max_requests=3, max_length=96, device="cuda", dtype="bfloat16")
        captured = [counted(o) for o in llm.generate(asked, mixed(9))]
        assert llm._scheduler.graphs._families
        llm._scheduler.graphs = None
        assert captured == [counted(o) for o in llm.generate(asked, mixed(9))]
