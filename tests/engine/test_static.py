"""A step reads no device value on the host, allocates no state and ignores what was never written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockpilot import SamplingParams
from blockpilot.drafters import Proposal
from blockpilot.plan import StepPlan
from blockpilot.state import State
from blockpilot.step import StepClock, first_token, run_step
from blockpilot.targets import Target
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.targets.cpp_target import CppTarget
from blockpilot.targets.torch_target import TorchTarget
from blockpilot_kernels.dispatch import forced
from tests.engine.inside import caches, spoil_cache
from tests.engine.pair import (
    EOS,
    WIDEST,
    ScriptedDrafter,
    plain,
    prompts,
    script_answers,
    sized,
    tiny_config,
    tiny_folder,
    tiny_llm,
)
from tests.no_host_sync import NoHostSync

PARAMS = SamplingParams(max_new_tokens=sized(20, 6), ignore_eos=True, temperature=0.9, top_p=0.95, seed=11)


class ConstantDrafter:
    """Proposes token 5 everywhere, on any device."""

    block_size = WIDEST
    window = tuple(range(1, WIDEST + 1))
    feature_layers = (1,)
    kind = fingerprint = "constant"

    def attach(self, target, max_requests) -> None:
        pass

    def propose(self, state, plan, noise) -> Proposal:
        tokens = torch.full_like(state.block[:, 1:], 5)
        order = torch.arange(tokens.shape[1], device=tokens.device)
        return Proposal(tokens, (order - 1).expand_as(tokens), (order + 1).expand_as(tokens))

    def commit(self, state, plan, features) -> None:
        assert features.shape == (plan.rows.padded, tiny_config()["hidden_size"])


def engine(device: str, cpp: bool = False) -> tuple[Target, State, StepPlan]:
    checkpoint = load_checkpoint(tiny_folder())
    target: Target = TorchTarget(checkpoint, 3, 64, device=device)
    if cpp:
        target = CppTarget(checkpoint, 3, 64, torch.float32, "dense")
    target.use_features(ConstantDrafter.feature_layers)
    state = State.allocate(3, 64, WIDEST, 4, device)
    state.done[:3] = False
    state.limit.fill_(60)
    state.length.fill_(7)
    state.width.fill_(WIDEST)
    state.temperature.fill_(0.7)
    state.top_k.fill_(5)
    state.top_p.fill_(0.9)
    state.stop_ids[:, 0] = EOS
    state.free_from.fill_(9)
    widths, wants = (WIDEST, 1, 3), (True, True, True, 3)
    plan = StepPlan((0, 1, 2), widths, 3, 64, torch.device(device), *wants, target.row_tile)
    return target, state, plan


def step_once(device: str, cpp: bool = False) -> State:
    target, state, plan = engine(device, cpp)
    if isinstance(target, TorchTarget):
        plan.rows.tiles(target.shape.groups)
    with torch.inference_mode(), NoHostSync():
        run_step(state, plan, target, ConstantDrafter(), StepClock())
    return state


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_step_reads_nothing_on_the_host(backend):
    with forced(backend):
        state = step_once("cpu", backend == "cpp")
    assert (state.count[:3] >= 1).all()


def test_step_runs_on_meta():
    """No data at all: any branch on a value would raise."""
    assert step_once("meta").count.is_meta


def test_a_planted_host_read_is_caught():
    target, state, plan = engine("cpu")

    class Reading(ConstantDrafter):
        def propose(self, state, plan, noise):
            int(state.length.max())
            return super().propose(state, plan, noise)

    with torch.inference_mode(), pytest.raises(RuntimeError, match="host"), NoHostSync():
        run_step(state, plan, target, Reading(), StepClock())


def test_first_token_touches_one_slot_only():
    target, state, plan = engine("cpu")
    before = {k: v.clone() for k, v in vars(state).items()}
    one = replace(plan, slots=(1,), widths=(1,))
    with torch.inference_mode():
        first_token(state, one, torch.randn(target.config.vocab_size))
    assert state.length[1] == before["length"][1] + 1
    for name in ("tokens", "length", "done", "finish"):
        for slot in (0, 2):
            assert torch.equal(getattr(state, name)[slot], before[name][slot])


def test_pointers_never_change():
    drafter = ScriptedDrafter()
    asked = prompts(sized(6, 2))
    script_answers(drafter, [(p, PARAMS) for p in asked], "float32", 30)
    llm = tiny_llm(drafter, max_requests=2)
    state = llm._scheduler.state

    def pointers():
        return state.pointers(), [t.data_ptr() for t in caches(llm)]

    before = pointers()
    llm.generate(asked, [replace(PARAMS, width=1 + i % WIDEST) for i in range(len(asked))])
    assert before == pointers()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_in_everything_unwritten_changes_no_bit(dtype):
    drafter = ScriptedDrafter()
    asked = prompts(sized(5, 2), seed=3)
    script_answers(drafter, [(p, PARAMS) for p in asked], dtype, 30)
    llm = tiny_llm(drafter, dtype=dtype, max_requests=2)
    spoil_cache(llm)
    state = llm._scheduler.state
    state.block.fill_(3)
    state.choice.fill_(-7)
    state.finite.fill_(False)
    state.tokens.fill_(2)
    drafter.poison = 4
    for width in sized((1, 3, WIDEST), (3,)):
        outputs = llm.generate(asked, replace(PARAMS, width=width))
        assert [o.token_ids for o in outputs] == [plain(p, PARAMS, dtype).token_ids for p in asked]


def test_one_target_forward_per_step_for_eight_requests():
    drafter = ScriptedDrafter()
    asked = prompts(8, seed=2)
    script_answers(drafter, [(p, PARAMS) for p in asked], "float32", 30)
    llm = tiny_llm(drafter, max_requests=8)
    handles = [llm.submit(p, replace(PARAMS, width=1 + i % WIDEST)) for i, p in enumerate(asked)]
    llm.step()
    prefills = len(asked)
    assert llm.target.forwards == prefills + 1
    for n in range(2, 5):
        llm.step()
        assert llm.target.forwards == prefills + n
    while llm.step():
        pass
    assert all(h.finished for h in handles)
