"""Timing a step through the real engine on a tiny pair: what is measured, never how long it takes."""

from __future__ import annotations

import pytest
import torch

from blockpilot import LLM, SamplingParams
from blockpilot.errors import NonFiniteLogitsError
from blockpilot.training import step_timing
from blockpilot.training.step_timing import Grid, calibrate
from tests.engine.inside import change_logits
from tests.engine.pair import write_tokenizer
from tests.tiny import save_drafter, save_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(target, drafter of block size 4) folders."""
    folder = tmp_path_factory.mktemp("pair")
    target = save_target(folder / "target", vocab=48, eos_token_id=1)
    write_tokenizer(target)
    return target, save_drafter(folder / "drafter", target, block_size=4)


@pytest.fixture(scope="module")
def llm(pair):
    with LLM(str(pair[0]), drafter=str(pair[1]), max_requests=3, max_length=64) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain_llm(pair):
    with LLM(str(pair[0]), max_requests=1, max_length=64) as opened:
        yield opened


def run(llm, **axes):
    return calibrate(llm, Grid.resolve(llm, **axes), hardware={"cpu": "x"}, versions={"torch": None})


def test_every_cell_is_measured_once_in_order(llm):
    found = run(llm, requests=(3, 1), contexts=(20, 5), widths=(4, 2), repeats=2)
    cells = [(r.requests, r.context, r.width, r.sum_width, r.steps) for r in found.rows]
    assert cells == [(r, c, w, r * w, 2) for r in (1, 3) for c in (5, 20) for w in (1, 2, 4)]
    assert found.pair.target == llm.target.fingerprint and found.pair.drafter == llm.drafter.fingerprint
    assert (found.dtype, found.device, found.hardware) == ("float32", "cpu", {"cpu": "x"})
    assert found.threads == torch.get_num_threads()
    found.check_pair(llm.target.fingerprint, llm.drafter.fingerprint)


def test_a_target_alone_is_measured_plain(plain_llm):
    found = run(plain_llm, requests=(1,), contexts=(5,), repeats=1)
    assert found.pair.drafter == "none" and found.widths == (1,)


def test_defaults_are_what_fits(llm, plain_llm):
    with pytest.raises(ValueError, match=r"contexts: expected at most 58 tokens .* got \(128, 512, 1024\)"):
        Grid.resolve(llm)
    grid = Grid.resolve(llm, requests=(1,), contexts=(58,))
    assert grid.widths == (1, 2, 3, 4) and grid.steps == 4 * 16
    assert Grid.resolve(plain_llm, requests=(1,), contexts=(61,)).widths == (1,)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"widths": (1, 9)}, r"widths: expected widths among .*, got \[9\]"),
        ({"widths": (0, 2)}, r"widths: expected ints >= 1, got \[0\]"),
        ({"contexts": (8, 59)}, r"expected at most 58 tokens .* got \(8, 59\)"),
        ({"contexts": (0,)}, "contexts: expected ints >= 1"),
        ({"contexts": ()}, "contexts: expected at most"),
        ({"requests": (1, 4)}, "requests: expected at most max_requests 3"),
        ({"requests": ()}, "requests: expected ints >= 1, got none"),
        ({"repeats": 0}, "repeats: expected ints >= 1"),
    ],
)
def test_cells_that_cannot_be_measured_are_refused(llm, axes, message):
    with pytest.raises(ValueError, match=message):
        Grid.resolve(llm, **{"requests": (1,), "contexts": (8,), **axes})


def test_a_rewound_step_is_the_first_step_of_a_fresh_request(llm, monkeypatch):
    """Up to the longest context there is room for, so that a step that drifted would end the request."""
    seen: dict[tuple[tuple[int, ...], int], list[list[int]]] = {}
    timed_step = step_timing._timed_step

    def watched(scheduler, handles, width, tree):
        sample = timed_step(scheduler, handles, width, tree)
        for handle in handles:
            seen.setdefault((tuple(handle.prompt), width), []).append(list(handle.token_ids))
        return sample

    monkeypatch.setattr(step_timing, "_timed_step", watched)
    run(llm, requests=(3,), contexts=(6, 25, 58), repeats=3)
    steps = (step_timing.WARMUP + 3) * (step_timing.SETTLE + 1)
    assert len(seen) == 3 * 3 * 4 and all(len(each) == steps for each in seen.values())
    for (prompt, width), each in seen.items():
        fresh = llm.submit(prompt, SamplingParams(max_new_tokens=None, ignore_eos=True, width=width))
        llm.step()
        assert each == [fresh.token_ids] * steps
        llm.cancel(fresh)
    accepted = {len(each[0]) - 2 for each in seen.values()}
    assert len(accepted) > 1  # a pair that never agrees would show nothing


def test_trees_are_measured_with_exactly_these_nodes(llm, monkeypatch):
    """At every budget, and chains beside them as ever."""
    found, drafted = {}, []
    propose = llm.drafter.propose

    def watched(state, plan, noise):
        proposal = propose(state, plan, noise)
        drafted.append(0 if plan.trees is None else int(proposal.nodes[0]))
        return proposal

    monkeypatch.setattr(llm.drafter, "propose", watched)
    found = run(llm, requests=(1,), contexts=(7,), widths=(3,), repeats=1, trees={3: 9, 2: 2})
    nodes = [1, 2, 3, 4, 6, 8, 9]
    shapes = [(2, 1), (2, 2), *((3, n) for n in nodes)]
    assert [(t.width, t.nodes, t.sum_width) for t in found.trees] == [(w, n, n) for w, n in shapes]
    assert [r.width for r in found.rows] == [1, 3] and {r.nodes for r in found.rows} == {0}
    assert set(drafted) == {0, *nodes}
    assert Grid.resolve(llm, requests=(1,), contexts=(7,), trees={3: 9}).steps == (4 + 7) * 16
    for trees in ({9: 9}, {3: 2}, {3: 17}, {1: 4}):
        with pytest.raises(ValueError, match=r"trees: expected widths among .* at most 16 nodes"):
            Grid.resolve(llm, requests=(1,), contexts=(7,), trees=trees)


def test_the_same_prompts_every_time(llm, monkeypatch):
    prompts = []
    prefill = step_timing._prefill

    def watched(*arguments):
        handles = prefill(*arguments)
        prompts.append([h.prompt for h in handles])
        return handles

    monkeypatch.setattr(step_timing, "_prefill", watched)
    for _ in range(2):
        run(llm, requests=(2,), contexts=(9,), widths=(1,), repeats=1)
    assert prompts[0] == prompts[1] and prompts[0][0] != prompts[0][1]
    assert [len(p) for p in prompts[0]] == [9, 9]


def test_progress_adds_up_and_says_what_is_measured(llm):
    told = []
    grid = Grid.resolve(llm, requests=(1,), contexts=(5, 9), widths=(2,), repeats=2)
    calibrate(llm, grid, hardware={}, versions={}, progress=lambda n, doing: told.append((n, doing)))
    assert sum(n for n, _ in told) == grid.steps == 12
    assert told[0] == (0, "1 x 5 tokens: prefill") and told[-1] == (2, "1 x 9 tokens")


def test_the_engine_serves_as_before(llm):
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    before = llm.generate([[5, 6, 7]], params)[0].token_ids
    run(llm, requests=(1, 3), contexts=(11,), repeats=1)
    assert llm.generate([[5, 6, 7]], params)[0].token_ids == before


def test_logits_that_are_not_finite_end_it(pair):
    with LLM(str(pair[0]), max_requests=1, max_length=64) as broken:
        change_logits(broken, lambda logits: torch.full_like(logits, float("nan")))
        with pytest.raises(NonFiniteLogitsError):
            run(broken, requests=(1,), contexts=(5,), repeats=1)
