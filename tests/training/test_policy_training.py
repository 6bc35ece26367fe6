"""Training: learns a planted rule, its shuffled control does not, and nothing held out leaks in."""

from __future__ import annotations

import json

import pytest
import torch

from blockpilot.policies import Pair, load_policy
from blockpilot.policies.policy_file import read_policy
from blockpilot.training.label_store import read_labels
from blockpilot.training.labels import label_prompts
from blockpilot.training.policy_training import TrainSettings, predictor_file
from blockpilot.training.prompts import split_rows
from tests.training.calibrations import calibration, modelled
from tests.training.fakes import (
    HIDDEN,
    VOCAB,
    WINDOW,
    FakeLLM,
    embedding,
    logits_of,
    planted,
    prompts,
    write_labels,
)
from tests.training.policy_runs import COUNT, read_predictor, train, weights


def test_a_planted_rule_is_learnt_and_shuffled_labels_are_not(trained):
    section = trained[0].acceptance
    assert section.accuracy > 0.85
    assert section.control_accuracy < 0.45
    for other in ("best_fixed", "drafter_block", "random", "shuffled_control"):
        assert section.gains[f"predictor - {other}"].low > 0.1
    assert section.gains["predictor - best_fixed"].mean > 0.8 * section.gains["oracle - best_fixed"].mean
    assert 0 <= section.regret < 0.1
    assert trained[0].conclusion.startswith("The predictor beats the best fixed width")


def test_labels_without_a_rule_are_not_claimed_to_be_learnt(tmp_path):
    labels = write_labels(tmp_path / "labels.jsonl", *planted(COUNT, rule=False))
    report = train(labels, tmp_path / "policy.safetensors")
    assert report.acceptance.accuracy < 0.45
    assert not report.conclusion.startswith("The predictor beats")


def test_the_file_holds_what_the_report_says_and_steers_the_pair(trained):
    report, path = trained
    file = read_policy(path)
    assert file.report == json.loads(json.dumps(report.to_dict()))
    assert file.pair == Pair("fake-target", "fake-drafter") and file.objective == "acceptance"
    assert file.training["seed"] == 0 and file.training["hidden"] == 32 and file.training["kind"] == "compact"
    assert 1 <= file.training["best_epoch"] <= 40 and file.training["labels"]["block_size"] == 4
    policy = load_policy(path, "fake-target", "fake-drafter", range(1, 9))
    table = torch.eye(VOCAB)[:, :HIDDEN]
    policy.bind(table)
    assert set(policy.choose(torch.randn(20, VOCAB)).tolist()) <= set(WINDOW)


def test_the_same_seed_gives_the_same_file_and_another_does_not(labels, trained, tmp_path):
    train(labels, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == trained[1].read_bytes()
    train(labels, tmp_path / "other.safetensors", seed=1)
    assert not torch.equal(
        weights(tmp_path / "other.safetensors")["head.weight"], weights(trained[1])["head.weight"]
    )


def test_training_leaves_the_global_stream_and_threads_alone(labels, tmp_path):
    before = torch.get_num_threads()  # 1 or 2
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    train(labels, tmp_path / "policy.safetensors", epochs=1, threads=2)
    assert torch.equal(torch.rand(3), wanted) and torch.get_num_threads() == before


def test_held_out_labels_cannot_reach_the_network(labels, trained, tmp_path):
    """Turning every held-out τ upside down changes the report and not one weight."""
    inputs, tau = planted(COUNT)
    _, held = split_rows([f"f{i % 6}" for i in range(COUNT)], 0.25, 0, "random")
    assert len(held) == trained[0].held_out == 100
    tau[held] = 3 - tau[held]
    turned = write_labels(tmp_path / "labels.jsonl", inputs, tau)
    report = train(turned, tmp_path / "policy.safetensors")
    old, new = weights(trained[1]), weights(tmp_path / "policy.safetensors")
    assert all(torch.equal(old[k], new[k]) for k in old)
    assert report.acceptance.best_fixed_width == trained[0].acceptance.best_fixed_width
    assert report.acceptance.accuracy < 0.2


def test_whole_families_can_be_held_out(labels, tmp_path):
    report = train(labels, tmp_path / "policy.safetensors", split="family", epochs=2)
    assert report.split == "family"
    assert 132 <= report.held_out <= 134 and report.train + report.held_out == COUNT  # 2 of 6 families


def test_throughput_labels_follow_the_cost(labels, tmp_path):
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps({"2": 0.01, "3": 0.1, "4": 0.1, "5": 0.1, "9": 1}))
    path = tmp_path / "policy.safetensors"
    report = train(labels, path, "throughput", cost, epochs=15)
    assert report.throughput is not None and report.throughput.best_widths == {2: 100, 3: 0, 4: 0, 5: 0}
    assert report.throughput.best_fixed_width == 2 and report.throughput.accuracy == 1
    assert report.acceptance.picks == {2: 100, 3: 0, 4: 0, 5: 0} and report.acceptance.accuracy < 0.5
    assert "tokens per second" in report.conclusion and "does not beat" in report.conclusion
    assert read_policy(path).cost == {2: 0.01, 3: 0.1, 4: 0.1, 5: 0.1}


def test_a_calibration_is_a_cost_and_another_pair_s_is_refused(labels, tmp_path):
    pair, path = read_labels(labels)[0]["pair"], tmp_path / "calibration.json"
    calibration(pair=Pair(pair["target"], pair["drafter"]), widths=(1, 2, 4, 8)).save(path)
    train(labels, tmp_path / "policy.safetensors", cost=path, epochs=1)
    expected = {w: modelled(1, 100, w) / 1000 for w in (2, 3, 4, 5)}
    assert read_policy(tmp_path / "policy.safetensors").cost == pytest.approx(expected)
    calibration().save(path)
    with pytest.raises(ValueError, match="some-target"):
        train(labels, tmp_path / "policy.safetensors", cost=path, epochs=1)


def test_a_cost_alone_adds_figures_and_keeps_the_objective(labels, trained, tmp_path):
    report = train(labels, tmp_path / "policy.safetensors", cost={2: 0.01, 3: 0.1, 4: 0.1, 5: 0.1})
    assert report.objective == "acceptance" and report.acceptance == trained[0].acceptance
    assert report.throughput is not None and report.throughput.measure == "tokens_per_second"


def test_a_narrower_window_than_the_labelled_one(labels, tmp_path):
    report = train(labels, tmp_path / "policy.safetensors", window=(3, 5), epochs=20)
    assert report.window == (3, 5) and set(report.tau_by_width) == {3, 5}
    assert "drafter_block" not in report.acceptance.strategies
    assert read_predictor(tmp_path / "policy.safetensors").predictor.window == (3, 5)


def test_training_stops_when_validation_stops_improving(tmp_path):
    labels = write_labels(tmp_path / "labels.jsonl", *planted(80, rule=False))
    train(labels, tmp_path / "policy.safetensors", epochs=10_000, patience=3)
    assert read_policy(tmp_path / "policy.safetensors").training["best_epoch"] < 100


def test_the_papers_defaults_belong_to_full():
    full, compact = TrainSettings(kind="full").resolved(), TrainSettings().resolved()
    assert (full.hidden, full.learning_rate, full.epochs, full.dropout, full.input_kind) == (
        2048,
        1e-5,
        100,
        0.2,
        "raw",
    )
    assert (compact.hidden, compact.input_kind) == (256, "mean_likely_embedding")


@pytest.mark.parametrize("input_kind", ["raw", "probabilities", "normalised"])
def test_full_predictors_read_the_kept_logits(tmp_path, input_kind):
    labels = tmp_path / "labels.jsonl"
    label_prompts(
        FakeLLM,
        prompts(24),
        window=WINDOW,
        max_new_tokens=12,
        output=labels,
        raw_logits=True,
        replay=False,
        progress=False,
    )
    path = tmp_path / "policy.safetensors"
    report = train(labels, path, kind="full", input_kind=input_kind, epochs=3)
    architecture = read_predictor(path).predictor.architecture
    assert (architecture.kind, architecture.input_kind, architecture.input_size) == (
        "full",
        input_kind,
        VOCAB,
    )
    assert report.held_out == 6


def test_the_report_judges_what_the_engine_will_run(tmp_path):
    """Labels captured through the policy hook, then choose() on the same logits: the report's picks."""
    labels, items = tmp_path / "labels.jsonl", prompts(40)
    label_prompts(
        FakeLLM, items, window=WINDOW, max_new_tokens=12, output=labels, replay=False, progress=False
    )
    report = train(labels, tmp_path / "policy.safetensors", epochs=5)
    policy = load_policy(
        predictor_file(tmp_path / "policy.safetensors"), "fake-target", "fake-drafter", range(1, 9)
    )
    policy.bind(embedding())
    _, held = split_rows([p["family"] for p in items], 0.25, 0, "random")
    widths = policy.choose(torch.stack([logits_of(items[i]["prompt"]) for i in held])).tolist()
    assert {w: widths.count(w) for w in WINDOW} == report.acceptance.picks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "speed"}, "objective: expected one of"),
        ({"objective": "throughput"}, "expected seconds of a step by width"),
        ({"objective": "throughput", "cost": {2: 1.0}}, r"missing \[3, 4, 5\]"),
        ({"cost": {2: 1.0, 3: 1.0, 4: 1.0, 5: float("nan")}}, "finite positive seconds for width 5"),
        ({"cost": "no-such-file.json"}, "expected a JSON object of seconds by width"),
        ({"pair": Pair("fake-target", "another")}, "fake-drafter"),
        ({"window": (2, 6)}, r"got \[6\]"),
        ({"split": "topic"}, "'random' or 'family'"),
    ],
)
def test_bad_requests_are_refused_and_write_nothing(labels, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train(labels, tmp_path / "policy.safetensors", **options)
    assert not (tmp_path / "policy.safetensors").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"loss": "regret"},
        {"seeds": 0},
        {"kind": "tiny"},
        {"epochs": 0},
        {"held_out": 1.0},
        {"validation": 0},
        {"learning_rate": -1.0},
    ],
)
def test_bad_settings_are_refused(change):
    with pytest.raises(ValueError, match=f"TrainSettings.{next(iter(change))}"):
        TrainSettings(**change)


def test_a_diverging_run_is_an_error(tmp_path):
    inputs, tau = planted(40)
    labels = write_labels(tmp_path / "labels.jsonl", inputs / inputs.abs().max() * 3e38, tau)
    with pytest.raises(ArithmeticError, match="diverged"):
        train(labels, tmp_path / "policy.safetensors", epochs=2)
