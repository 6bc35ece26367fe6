"""An engine that starts from a saved state goes on as the one that saved it."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from blockpilot import LLM
from blockpilot.adapt import Adapt, state
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


def parts(path) -> tuple[dict, dict]:
    """What is known, and the tensors."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["state"]), load_file(path)


def write(path, known, tensors, seal="") -> None:
    """A state under the seal that it should have, or another one."""
    text = json.dumps(known)
    save_file(tensors, path, metadata={"state": text, "seal": seal or state._seal(text, tensors)})


def fields(found, at=()):
    """Places of everything in nested objects and lists."""
    for key, value in found.items() if isinstance(found, dict) else enumerate(found):
        yield (*at, key)
        if isinstance(value, (dict, list)):
            yield from fields(value, (*at, key))


def altered(known, at, change):
    """A copy in which `change(container, key)` was done at one place."""
    made = deepcopy(known)
    change(reduce(lambda inside, key: inside[key], at[:-1], made), at[-1])
    return made


@pytest.fixture
def saved(learning, tmp_path):
    """A state in which all was used."""
    path = tmp_path / "adapt.safetensors"
    llm = opened(learning, Adapt(path))
    learning.force(llm, "head", "full")
    llm.generate(learning.prompts(20), replace(GREEDY, width=4))
    llm.close()
    assert llm.adapter.counts["kept"] > 1
    return path


@pytest.fixture
def fresh(learning):
    """An adapter that knows nothing yet."""
    return opened(learning).adapter


def refuse(adapter, path) -> None:
    before = adapter.bandit, adapter.pulse, adapter.learner, adapter.seconds
    with pytest.raises(ValueError, match=r"expected what adapting saved, found .*; delete the file") as error:
        state.restore(adapter, path)
    assert str(error.value).startswith(f"{path}: ")
    assert (adapter.bandit, adapter.pulse, adapter.learner, adapter.seconds) == before


WRONG = [None, "text", True, [], {}, [1, 2], {"a": 1}, math.nan, math.inf, 1e40, 10**400]


def test_every_field_that_is_wrong_or_missing_is_refused(saved, fresh):
    known, tensors = parts(saved)
    free = [("counts", name) for name in known["counts"]]  # those that did not happen are not there
    for at in fields(known):
        value = reduce(lambda inside, key: inside[key], at, known)
        for wrong in WRONG:
            text = isinstance(value, str) and isinstance(wrong, str) and at != ("changed",)
            unmade = (
                wrong is None and at[-1] == "seconds" and at[0] == "bandit"
            )  # of an update that was never made
            none = at == ("counts",) and wrong in ({}, {"a": 1})
            if text or unmade or none or type(wrong) is type(value) is bool:
                continue
            write(saved, altered(known, at, lambda inside, key, w=wrong: inside.__setitem__(key, w)), tensors)
            refuse(fresh, saved)
        if at not in free:
            write(saved, altered(known, at, lambda inside, key: inside.pop(key)), tensors)
            refuse(fresh, saved)
    for wrong in ("", "{", "[]", "null", "3"):
        save_file(tensors, saved, metadata={"state": wrong, "seal": state._seal(wrong, tensors)})
        refuse(fresh, saved)
    for singular in (np.zeros((5, 5)), -np.eye(5)):
        at = ("bandit", "arms", "head", "precision")
        write(
            saved,
            altered(known, at, lambda inside, key, w=singular: inside.__setitem__(key, w.tolist())),
            tensors,
        )
        refuse(fresh, saved)
    write(saved, known, tensors)
    state.restore(fresh, saved)


def test_every_tensor_that_is_wrong_or_missing_is_refused(saved, fresh):
    known, tensors = parts(saved)
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        wrong = [flat[:0], flat[:1], tensor[None].contiguous(), torch.cat([flat, flat]), tensor.double()]
        wrong += [tensor * math.nan] if tensor.is_floating_point() else []
        for other in wrong:
            write(saved, known, tensors | {name: other})
            refuse(fresh, saved)
        write(saved, known, {n: t for n, t in tensors.items() if n != name} | {"more": tensor})
        refuse(fresh, saved)
        write(saved, known, {n: t for n, t in tensors.items() if n != name})
        refuse(fresh, saved)
    write(saved, known, tensors | {"generator": torch.full_like(tensors["generator"], 255)})
    refuse(fresh, saved)
    for few in ({}, {"format": tensors["format"]}):
        write(saved, known, few)
        refuse(fresh, saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(b"nothing"), "expected what adapting saved"),
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "expected what adapting saved"),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b"pulse", b"pulsf")),
            "expected what adapting",
        ),
        (lambda path: write(path, *parts(path), seal="0" * 64), "contents that its seal is not of"),
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
