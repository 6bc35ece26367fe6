"""Features are kept where a captured step can write them: nothing is read on the host, nothing moves."""

from __future__ import annotations

import pytest
import torch

from blockpilot.adapt.feedback import History
from blockpilot.step import StepClock, run_step
from tests.drafters.rounds import Rounds
from tests.no_host_sync import NoHostSync


@pytest.mark.parametrize("tree", [0, 12])
def test_a_step_keeps_what_it_commits(load, eagle3_for, implementation, tree):
    """Every committed position's features, of two slots that go on at different speeds; none while it is closed."""
    rounds = Rounds(*load(*eagle3_for("llama"), slots=2, capacity=96), widest=16)
    drafter, target = rounds.drafter, rounds.target
    history = drafter.history = History(2, drafter.config.feature_size, 6, target.device)
    history.kept.fill_(float("nan"))
    rounds.start(0, [5, 6, 7], width=4, budget=20)
    assert not history.whole
    history.open = True
    prompts = [[5, 6, 7], [9, *range(3, 12)]]
    for slot, prompt in enumerate(prompts):
        asked = {"temperature": 0.8, "seed": slot, "tree": tree if slot else 0}
        rounds.start(slot, prompt, width=4 + 2 * slot, budget=40, **asked)
    assert history.whole == {0, 1}
    place = history.kept.data_ptr()
    rounds.step()
    while not rounds.state.done.all():
        with torch.inference_mode():
            plan = rounds.plan([s for s in (0, 1) if not rounds.state.done[s]])
            if implementation == "torch" and not tree:
                with NoHostSync():
                    run_step(rounds.state, plan, target, drafter, StepClock())
            else:
                run_step(rounds.state, plan, target, drafter, StepClock())
    assert history.kept.data_ptr() == place
    for slot in (0, 1):
        tokens = rounds.tokens(slot)
        with torch.inference_mode():
            _, features = target.prefill(slot, tokens[:-1])
        kept = history.read(slot, 0, len(tokens) - 1)
        assert torch.equal(kept, features.bfloat16())
    held = history.kept.nan_to_num(7.0)
    history.open = False
    rounds.start(0, [5, 6, 7], width=4, budget=20)
    rounds.finish([0])
    assert torch.equal(history.kept.nan_to_num(7.0), held) and not history.whole
