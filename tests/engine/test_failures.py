"""When something breaks in the middle, the request it belongs to ends by name and nothing else changes."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from blockpilot import LLM, QueueFullError, SamplingParams
from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.targets.torch_target import TorchTarget
from tests.engine.inside import change_logits
from tests.engine.pair import WIDEST, ScriptedDrafter, plain, prompts, script_answers, tiny_llm
from tests.tiny import save_drafter, save_target

PARAMS = SamplingParams(max_new_tokens=10, ignore_eos=True)


class Once:
    """Raises at its first call, then does what it replaces."""

    def __init__(self, inner, error: BaseException) -> None:
        self.inner, self.error = inner, error

    def __call__(self, *args, **kwargs):
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self.inner(*args, **kwargs)


def scripted_llm(asked, **options) -> LLM:
    drafter = ScriptedDrafter()
    script_answers(drafter, [(p, PARAMS) for p in asked], "float32", 30)
    return tiny_llm(drafter, **options)


@pytest.mark.parametrize("place", ["prefill", "begin", "choose"])
def test_a_start_that_fails_ends_that_request_only(place):
    asked = prompts(3, seed=31)
    llm = scripted_llm(asked, max_requests=1)
    owner = {"prefill": llm.target, "begin": llm.drafter, "choose": llm.policy}[place]
    setattr(owner, place, Once(getattr(owner, place), RuntimeError("broken on purpose")))
    first, *rest = llm.generate(asked, PARAMS)
    assert first.finish_reason == "error"
    assert "broken on purpose" in str(first.error)
    assert [o.token_ids for o in rest] == [plain(p, PARAMS).token_ids for p in asked[1:]]
    assert not llm._scheduler.active


@pytest.mark.parametrize("place", ["propose", "commit"])
def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(place):
    """After the device has committed, tokens of a broken step cannot be delivered: better no answer than a gap."""
    asked = prompts(3, seed=32)
    llm = scripted_llm(asked, max_requests=2)
    setattr(llm.drafter, place, Once(getattr(llm.drafter, place), RuntimeError("broken on purpose")))
    handles = [llm.submit(p, replace(PARAMS, width=3)) for p in asked]
    with pytest.raises(RuntimeError, match="on purpose"):
        while llm.step():
            pass
    while llm.step():
        pass
    assert [h.output.finish_reason for h in handles] == ["error", "error", "length"]
    assert handles[2].output.token_ids == plain(asked[2], PARAMS).token_ids
    for handle, prompt in zip(handles[:2], asked, strict=False):
        known = plain(prompt, PARAMS).token_ids
        assert handle.output.token_ids == known[: len(handle.output.token_ids)]


def test_an_interrupt_leaves_no_request_running():
    asked = prompts(2, seed=33)
    llm = scripted_llm(asked, max_requests=2)
    bystander = llm.submit(asked[1], PARAMS)
    pass_of_a_step = "verify" if llm.target.verify_commit is None else "verify_commit"
    setattr(llm.target, pass_of_a_step, Once(getattr(llm.target, pass_of_a_step), KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(asked[:1], replace(PARAMS, width=2))
    assert bystander.output.finish_reason == "cancelled"
    assert not llm._scheduler.busy
    assert llm.generate(asked, PARAMS)[0].token_ids == plain(asked[0], PARAMS).token_ids


def test_a_policy_outside_the_drafters_window_fails_its_request():
    llm = scripted_llm([[3, 4]], max_requests=1)
    llm.policy.choose = lambda logits: torch.tensor([WIDEST + 1])
    (output,) = llm.generate([[3, 4]], PARAMS)
    assert output.finish_reason == "error"
    assert f"chose width {WIDEST + 1}" in str(output.error)


def test_top_logprobs_of_equal_logits_do_not_depend_on_neighbours():
    llm = tiny_llm(max_requests=2)
    change_logits(llm, lambda logits: logits[:, :1].expand(-1, 48).contiguous())
    wanted = replace(PARAMS, logprobs=5)
    (alone,) = llm.generate([[3, 4]], wanted)
    beside, _ = llm.generate([[3, 4], [5, 6]], [wanted, replace(PARAMS, logprobs=20)])
    assert alone.logprobs == beside.logprobs
    assert [i for i, _ in alone.logprobs[0].top] == [0, 1, 2, 3, 4]


def test_a_dropped_stream_frees_its_slot_and_its_place_in_the_queue():
    llm = tiny_llm(max_requests=1, max_queue=1)
    for _ in llm.stream([3, 4], PARAMS):
        break
    waiting = llm.stream([5, 6], PARAMS)
    with pytest.raises(QueueFullError):
        llm.submit([7], PARAMS)
    del waiting
    gc.collect()
    handle = llm.submit([7], PARAMS)
    while llm.step():
        pass
    assert handle.output.token_ids == plain([7], PARAMS).token_ids


def test_a_stream_is_a_context_manager():
    llm = tiny_llm(max_requests=1)
    with llm.stream([3, 4], PARAMS) as stream:
        next(stream)
    assert stream.output.finish_reason == "cancelled"


def test_a_ready_drafter_of_other_sizes_or_for_another_target_is_refused(tmp_path):
    folder = save_target(tmp_path / "target", "llama")
    target, other = (TorchTarget(load_checkpoint(folder), 1, 64) for _ in range(2))
    built = DFlashDrafter.load(save_drafter(tmp_path / "drafter", folder), target, 1)
    built.attach(target, 1)
    with pytest.raises(ValueError, match="room for 3 requests"):
        built.attach(target, 3)
    with pytest.raises(ValueError, match="another target"):
        built.attach(other, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 2**63},
        {"min_new_tokens": 2**63, "max_new_tokens": None},
        {"temperature": 1e300},
        {"temperature": 10**400},
        {"temperature": "hot"},
        {"top_p": "x"},
        {"min_p": None},
        {"stop": 5},
        {"stop": None},
        {"stop_token_ids": 5},
        {"seed": 1.5},
    ],
)
def test_parameters_no_tensor_can_hold(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(PARAMS, **change)


@pytest.mark.parametrize("wrong", [None, 5, b"\x05\x06", {5, 6}, "\ud800"])
def test_prompts_of_other_types(wrong):
    with pytest.raises(ValueError, match="prompt"):
        tiny_llm(max_requests=1).submit(wrong, PARAMS)


def test_arguments_of_other_types():
    llm = tiny_llm(max_requests=1)
    for prompts_ in (None, iter([[3]]), "hello"):
        with pytest.raises(ValueError, match="list of prompts"):
            llm.generate(prompts_, PARAMS)
    for params in ({"temperature": 0}, 3):
        with pytest.raises(ValueError, match="SamplingParams"):
            llm.submit([3], params)
        with pytest.raises(ValueError, match="SamplingParams"):
            llm.generate([[3]], params)
    with pytest.raises(ValueError, match="deadline"):
        llm.submit([3], PARAMS, deadline="1")
    for target in (5, None):
        with pytest.raises(ValueError, match="target"):
            LLM(target)
    options = {"drafter": 5, "device": "nonsense", "dtype": ["x"], "draft_temperature": "x"}
    for name, value in options.items():
        with pytest.raises(ValueError, match=name):
            tiny_llm(**{name: value})
