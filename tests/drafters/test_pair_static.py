"""A round of EAGLE-3 or SpecBlock reads no device value on the host, moves no buffer, and reads nothing unwritten."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockpilot import LLM, SamplingParams
from blockpilot.plan import StepPlan
from blockpilot.state import State
from blockpilot.step import StepClock, run_step
from blockpilot_kernels.dispatch import forced
from tests.drafters.rounds import Rounds, load_pair, spoil
from tests.eagle3 import save_eagle3_drafter
from tests.engine.pair import VOCAB, write_tokenizer
from tests.implementations import require
from tests.no_host_sync import NoHostSync
from tests.specblock import save_specblock_drafter
from tests.tiny import save_target


def one_step(folders, device: str, implementation: str, trees: tuple[int, ...] | None) -> State:
    target, drafter = load_pair(*folders, slots=3, capacity=64, device=device, implementation=implementation)
    state = State.allocate(3, 64, 16, 4, device)
    state.done[:3] = False
    for name, value in {"limit": 60, "length": 7, "count": 3, "temperature": 0.7, "free_from": 9}.items():
        getattr(state, name).fill_(value)
    wants = {"sampled": True, "bans": True, "tile": target.row_tile, "trees": trees}
    plan = StepPlan((0, 1, 2), (6, 1, 3), 3, 64, torch.device(device), **wants)
    state.width[:3] = torch.tensor(plan.widths, device=device)
    with torch.inference_mode():
        begun = state.length.clone(), state.count.clone()
        run_step(state, plan, target, drafter, StepClock())  # lays rows out on the host, between steps
        for name, value in (("length", begun[0]), ("count", begun[1])):
            getattr(state, name).copy_(value)
        with NoHostSync():
            run_step(state, plan, target, drafter, StepClock())
    return state


@pytest.mark.parametrize("trees", [None, (16, 0, 0), (0, 0, 9)])
@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_a_round_reads_nothing_on_the_host(pair_for, backend, implementation, trees):
    require(backend)
    with forced(backend):
        state = one_step(pair_for("llama"), "cpu", implementation, trees)
    assert (state.count[:3] >= 1).all()


@pytest.mark.parametrize("trees", [None, (16, 0, 7)])
def test_a_round_runs_on_meta(pair_for, trees):
    """No data at all: any branch on a value would raise."""
    assert one_step(pair_for("llama", None), "meta", "torch", trees).count.is_meta


def test_pointers_never_change_and_nothing_unwritten_is_read(load, pair_for):
    """NaN in every key, value and feature that no request has written changes no draft."""
    drafts = []
    for poison in (False, True):
        rounds = Rounds(*load(*pair_for("llama"), slots=2), widest=16)
        drafter, cache = rounds.drafter, rounds.drafter.cache
        buffers = (cache.k, cache.v, drafter._tokens, drafter._pending)
        before = [t.data_ptr() for t in buffers]
        if poison:
            with torch.inference_mode():
                drafter._pending.fill_(float("nan"))
                drafter._tokens.fill_(7)
                for slot in range(3):
                    spoil(cache, slot, 0)
        rounds.start(0, [5, 6, 9, 9], width=4, budget=20)
        rounds.start(1, [7], width=3, budget=20, temperature=1.0, tree=12)
        rounds.finish()
        assert [t.data_ptr() for t in buffers] == before
        drafts.append((rounds.blocks, rounds.counts))
        assert int(drafter.non_finite) == 0
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize(
    ("kind", "save"), [("eagle3", save_eagle3_drafter), ("specblock", save_specblock_drafter)]
)
def test_the_library_serves_it(implementation, tmp_path, kind, save):
    """`LLM.generate` over chains, trees, modes and stops in one batch: every answer is plain decoding's."""
    target = save_target(tmp_path / "target", vocab=VOCAB)
    write_tokenizer(target)
    folder = save(tmp_path / "drafter", target, range(0, VOCAB, 1))
    prompts = [[5 + i, *range(7, 7 + 5 * i)] for i in range(9)]
    plain = [
        SamplingParams(
            max_new_tokens=12 + 3 * i,
            temperature=(0.0, 2.0, 0.9)[i % 3],
            top_k=(0, 0, 12)[i % 3],
            seed=i,
            ignore_eos=i % 2 == 0,
            logprobs=1 if i == 4 else None,
        )
        for i in range(9)
    ]
    shapes = [{"width": 2 + i % 6, "tree": 8 + i if i % 3 == 1 else None} for i in range(9)]
    with forced("cpp" if implementation == "cpp" else "reference"):
        llm = LLM(target, drafter=folder, max_requests=4, max_length=128)
        assert llm.drafter.kind == kind
        expected = llm.generate(prompts, [replace(p, width=1) for p in plain])
        outputs = llm.generate(prompts, [replace(p, **s) for p, s in zip(plain, shapes, strict=True)])
    for output, alone in zip(outputs, expected, strict=True):
        assert output.token_ids == alone.token_ids
        assert output.logprobs == alone.logprobs
        assert output.finish_reason == alone.finish_reason
    assert sum(o.stats.steps for o in outputs) < sum(o.stats.steps for o in expected)
