"""Labels, training and the trained policy through the real engine on a tiny pair."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from blockpilot import LLM, SamplingParams
from blockpilot.policies.policy_file import read_policy
from blockpilot.training.label_store import read_labels
from blockpilot.training.labels import label_prompts
from blockpilot.training.policy_training import TrainSettings, predictor_file, train_policy
from blockpilot.training.step_timing import Grid, calibrate
from tests.engine.pair import write_tokenizer
from tests.tiny import save_drafter, save_target

WINDOW = (1, 2, 4)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(target, drafter, another drafter) folders."""
    folder = tmp_path_factory.mktemp("pair")
    target = save_target(folder / "target", vocab=48, eos_token_id=1)
    write_tokenizer(target)
    drafters = [save_drafter(folder / f"drafter{s}", target, block_size=4, seed=s) for s in (1, 2)]
    return target, *drafters


def engine(pair, policy, drafter=1) -> LLM:
    return LLM(str(pair[0]), drafter=str(pair[drafter]), policy=policy, max_requests=3, max_length=64)


def test_label_train_and_steer(pair, tmp_path):
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    texts = [letters[i : i + 1 + i % 4] for i in range(12)]
    prompts = [{"id": f"p{i}", "family": f"f{i % 3}", "prompt": t} for i, t in enumerate(texts)]
    labels, path = tmp_path / "labels.jsonl", tmp_path / "policy.safetensors"
    summary = label_prompts(
        lambda policy: engine(pair, policy),
        prompts,
        window=WINDOW,
        max_new_tokens=10,
        output=labels,
        batch=5,
        raw_logits=True,
        progress=False,
    )
    assert (summary.labelled, summary.identical) == (12, 12)
    settings, rows = read_labels(labels)
    assert settings["block_size"] == 4 and all(r["tau"][0] in (1.0, None) for r in rows)

    report = train_policy(labels, path, settings=TrainSettings(hidden=16, epochs=3, bootstrap=50))
    assert read_policy(path).policy.window == (report.fixed_width,)
    beside = predictor_file(path)
    with engine(pair, str(beside)) as llm:
        outputs = llm.generate(texts, SamplingParams(max_new_tokens=10))
        stepped = [i for i, o in enumerate(outputs) if o.stats.steps]
        assert llm.policy_calls == len(stepped) >= 8
        predictor = read_policy(beside).predictor
        predictor.bind(llm.target.embedding)
    shards = {s.name: load_file(s)["logits"] for s in labels.with_suffix(".logits").iterdir()}
    logits = torch.stack([shards[rows[i]["logits"]["file"]][rows[i]["logits"]["row"]] for i in stepped])
    assert [outputs[i].stats.width for i in stepped] == predictor.choose(logits).tolist()

    for file in (path, beside):
        with pytest.raises(ValueError, match="expected a policy made for"):
            engine(pair, str(file), drafter=2)


def test_widths_that_stand_for_trees(pair, tmp_path):
    """Labelled, weighed by what trees cost, saved, loaded and chosen request by request; the answers are plain ones."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    texts = [letters[i : i + 1 + i % 4] for i in range(14)]
    prompts = [{"id": f"p{i}", "family": f"f{i % 3}", "prompt": t} for i, t in enumerate(texts)]
    labels, path, costs = tmp_path / "labels.jsonl", tmp_path / "policy.safetensors", tmp_path / "costs.json"
    options = {"window": WINDOW, "max_new_tokens": 10, "output": labels, "progress": False}
    label_prompts(lambda policy: engine(pair, policy), prompts, trees={4: 7}, **options)
    with engine(pair, 1) as llm:
        grid = Grid.resolve(llm, requests=(1,), contexts=(8,), repeats=1, trees={4: 7})
        measured = calibrate(llm, grid, hardware={}, versions={})
        measured.save(costs)
        alone = llm.generate(texts, SamplingParams(max_new_tokens=10, width=4, tree=7))
        plain = llm.generate(texts, SamplingParams(max_new_tokens=10))
    settings, rows = read_labels(labels)
    assert settings["trees"] == {"4": 7}
    assert [row["tau"][2] for row in rows] == [o.stats.tau for o in alone]

    chosen = TrainSettings(hidden=16, epochs=3, bootstrap=50)
    report = train_policy(labels, path, settings=chosen, objective="throughput", cost=costs)
    seconds = read_policy(predictor_file(path)).cost
    assert seconds[4] == measured.node_cost(4, 7)[-1] / 1000
    assert seconds[2] == measured.cost(2, 8) / 1000
    with engine(pair, str(predictor_file(path))) as llm:
        assert llm.policy.trees == {4: 7}
        outputs = llm.generate(texts, SamplingParams(max_new_tokens=10))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert all(o.stats.tree == (7 if o.stats.width == 4 else 0) for o in outputs)
    with engine(pair, str(path)) as llm:
        assert llm.policy.trees == ({4: 7} if report.fixed_width == 4 else {})


@pytest.mark.parametrize(
    ("trees", "message"),
    [({1: 3}, "widths above 1"), ({2: 7}, "a chain or plain"), ({4: 99}, "at most 16 nodes")],
)
def test_trees_that_cannot_be_labelled(pair, tmp_path, trees, message):
    options = {"output": tmp_path / "l.jsonl", "progress": False, "trees": trees}
    with pytest.raises(ValueError, match=message):
        label_prompts(
            lambda policy: engine(pair, policy),
            [{"id": "a", "family": "f", "prompt": "A"}],
            window=(2, 4),
            **options,
        )
