"""An engine that starts from a saved state goes on as the one that saved it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from blockpilot import LLM
from blockpilot.adapt import Adapt
from tests.adapt.opening import GREEDY, opened, same, weights
from tests.eagle3 import save_eagle3_drafter


@pytest.mark.parametrize("kind", ["eagle3", "specblock"])
def test_a_saved_state_goes_on_as_the_engine_that_saved_it(learning, backend, kind, tmp_path):
    learning.use(kind)
    path = tmp_path / "adapt.safetensors"
    llm = opened(learning, Adapt(path, seed=4))
    learning.force(llm, "head", "full")
    llm.generate(learning.prompts(30), replace(GREEDY, width=4))
    first = llm.adapter
    assert first.counts["kept"] > 2 and first.changed == "full"
    llm.close()
    llm.close()
    again = opened(learning, Adapt(path, seed=4))
    other = again.adapter
    assert same(weights(llm), weights(again))
    assert other.bandit.to_dict() == first.bandit.to_dict()
    assert other.pulse == first.pulse and other.counts == first.counts and other.changed == first.changed
    assert torch.equal(other.learner.generator.get_state(), first.learner.generator.get_state())
    llm = opened(learning, Adapt(path))
    for engine in (again, llm):
        learning.force(engine, "full")
        engine.generate(learning.prompts(30, 5), replace(GREEDY, width=4))
        assert engine.adapter.counts["kept"] > first.counts["kept"]
    assert same(weights(llm), weights(again))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_an_update_under_way_is_not_saved(learning, tmp_path):
    path = tmp_path / "adapt.safetensors"
    llm = opened(learning, Adapt(path))
    learning.force(llm, "full")
    before = weights(llm)
    adapting = llm.adapter
    handles = [llm.submit(p, replace(GREEDY, width=4)) for p in learning.prompts(30)]
    while llm.step() and not (adapting.learner and adapting.learner.before):
        pass
    assert not handles[-1].finished and adapting._work is not None
    moved = adapting.learner.model.get_parameter("lm_head").clone()
    llm.step()
    assert not torch.equal(moved, adapting.learner.model.get_parameter("lm_head"))
    llm.close()
    assert same(before, weights(opened(learning, Adapt(path))))


def spoil(path, change) -> None:
    """Another state under the same seal."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    known = json.loads(metadata["state"])
    change(known)
    save_file(tensors, path, metadata=metadata | {"state": json.dumps(known)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(b"nothing"), "expected what adapting saved"),
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "expected what adapting saved"),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b"pulse", b"pulsf")),
            "expected what adapting",
        ),
        (lambda path: spoil(path, lambda known: known["pulse"].update(width=None)), "expected what adapting"),
        (lambda path: (path.unlink(), path.mkdir()), "expected what adapting saved"),
    ],
)
def test_a_damaged_state_is_refused(learning, tmp_path, change, message):
    path = tmp_path / "adapt.safetensors"
    llm = opened(learning, Adapt(path))
    learning.force(llm, "head")
    llm.generate(learning.prompts(20), replace(GREEDY, width=4))
    llm.close()
    change(path)
    with pytest.raises(ValueError, match=message):
        opened(learning, Adapt(path))


def test_a_state_of_another_drafter_is_refused(learning, tmp_path):
    path = tmp_path / "adapt.safetensors"
    opened(learning, Adapt(path)).close()
    other = save_eagle3_drafter(tmp_path / "other", learning.pair[0], None)
    with pytest.raises(ValueError, match="expected the state of drafter"):
        LLM(learning.pair[0], drafter=other, max_length=96, adapt=Adapt(path))


def test_files_that_changed_since_end_adapting(learning, tmp_path, caplog):
    """Nothing is learned from other weights, and no request pays for it."""
    folder = save_eagle3_drafter(tmp_path / "drafter", learning.pair[0], None)
    llm = LLM(learning.pair[0], drafter=folder, max_length=96, max_requests=2, adapt=True)
    learning.force(llm, "head")
    save_eagle3_drafter(folder, learning.pair[0], None, seed=9)
    prompts, before = learning.prompts(20), weights(llm)
    answers = [o.token_ids for o in llm.generate(prompts, replace(GREEDY, width=4))]
    assert answers == [o.token_ids for o in llm.generate(prompts, replace(GREEDY, width=1))]
    assert "to hold the drafter that was loaded from it" in llm.adapter.report()["failed"]
    assert caplog.text.count("no longer adapts") == 1 and same(weights(llm), before)
