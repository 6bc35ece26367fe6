"""`blockpilot label` and `blockpilot train-policy`: what reaches the library, and what comes back."""

from __future__ import annotations

import json

import pytest

from blockpilot.cli import label, train_policy
from blockpilot.training.labels import LabelSummary


@pytest.fixture
def labelling(monkeypatch):
    """Replaces the library's labelling; collects its arguments and opens an engine as it would."""
    seen: dict = {}

    def label_prompts(llm_factory, prompts, **options):
        seen.update(options, prompts=prompts)
        with llm_factory("the recording policy"):
            pass
        return LabelSummary(len(prompts), 5, 2, 3, 1, options["output"])

    monkeypatch.setattr("blockpilot.training.labels.label_prompts", label_prompts)
    return seen


def test_label(cli_json, fake_llm, labelling, tmp_path):
    output = tmp_path / "labels.jsonl"
    report = cli_json(
        "label", "-o", output, "--window", "3,1,2", "--count", "6", "--seed", "4", "--batch", "2"
    )
    assert set(report) == set(label.JSON_KEYS)
    assert report == {
        "prompts": 6,
        "labelled": 5,
        "skipped": 2,
        "identical": 3,
        "unusable": 1,
        "path": str(output),
    }
    assert labelling["window"] == (1, 2, 3)
    assert labelling["seed"] == 4
    assert len(labelling["prompts"]) == 6
    (opened,) = fake_llm.opened
    assert (opened["policy"], opened["drafter"], opened["max_requests"]) == (
        "the recording policy",
        "bundled+lookup",
        2,
    )


def test_label_reads_prompts(cli, fake_llm, labelling, tmp_path):
    file = tmp_path / "prompts.jsonl"
    row = {"id": "a", "family": "f", "prompt": "p"}
    file.write_text(json.dumps(row) + "\n")
    result = cli("label", "-o", tmp_path / "labels", "--window", "1,2", "--prompts", file)
    assert result.exit_code == 0, result.output
    assert labelling["prompts"] == [row]
    assert "5 of 1 prompts labelled" in result.stdout


def test_label_needs_a_drafter(refused, fake_llm, tmp_path):
    assert "expected a drafter" in refused(
        "label", "-o", tmp_path / "x", "--window", "1,2", "--drafter", "none"
    )


@pytest.mark.parametrize("window", ["0", "a", "1,,2", ""])
def test_label_refuses_a_bad_window(refused, fake_llm, tmp_path, window):
    assert "--window" in refused("label", "-o", tmp_path / "x", "--window", window)


class Report:
    fixed_width = None

    def to_dict(self) -> dict:
        return {"gain": 1.5}


@pytest.fixture
def training(monkeypatch):
    """Replaces the library's training; collects its arguments."""
    report = Report()
    seen: dict = {"report": report}

    def fake(labels, output, **options):
        seen.update(options, labels=labels, output=output)
        return report

    monkeypatch.setattr("blockpilot.training.policy_training.train_policy", fake)
    monkeypatch.setattr("blockpilot.training.report.render", lambda report: print("rendered"))
    return seen


def test_train_policy(cli_json, training, tmp_path):
    report = tmp_path / "report.json"
    out = cli_json(
        *("train-policy", "a.jsonl", "b.jsonl", "-o", "policy.safetensors", "--kind", "full", "--seed", "3"),
        *("--objective", "throughput", "--cost", "cost.json", "--window", "2,1", "--split", "family"),
    )
    assert set(out) == set(train_policy.JSON_KEYS)
    assert out == {
        "policy": "policy.safetensors",
        "predictor": "policy.safetensors",
        "report": {"gain": 1.5},
        "ablation": None,
    }
    assert [p.name for p in training["labels"]] == ["a.jsonl", "b.jsonl"]
    assert training["window"] == (1, 2)
    assert training["objective"] == "throughput"
    assert training["cost"].name == "cost.json"
    settings = training["settings"]
    assert (settings.kind, settings.seed, settings.split) == ("full", 3, "family")
    assert not report.exists()


def test_train_policy_writes_what_is_asked_for(cli, training, monkeypatch, tmp_path):
    written = []
    monkeypatch.setattr("blockpilot.training.report.write_json", lambda report, path: written.append(path))
    monkeypatch.setattr("blockpilot.training.report.plot", lambda report, path: False)
    result = cli(
        "train-policy",
        "a.jsonl",
        "-o",
        "p.safetensors",
        "--report",
        tmp_path / "r.json",
        "--plot",
        "plot.png",
    )
    assert result.exit_code == 0, result.output
    assert "rendered" in result.stdout and "policy written to p.safetensors" in result.stdout
    assert written == [tmp_path / "r.json"]
    assert "matplotlib is not installed" in result.stderr


def test_train_policy_names_both_files_of_an_unsupported_predictor(cli, cli_json, training):
    training["report"].fixed_width = 6
    command = ("train-policy", "a.jsonl", "-o", "some/p.safetensors")
    assert cli_json(*command)["predictor"] == "some/p.predictor.safetensors"
    assert "fixed width 6; the predictor is in some/p.predictor.safetensors" in cli(*command).stdout


def test_train_policy_passes_the_rest_on(cli_json, training, fake_llm):
    options = ("--loss", "expected_gain", "--seeds", "4", "--depth", "3", "--threads", "1")
    sets = ("--evaluation", "e.jsonl", "--evaluation", "f.jsonl")
    cli_json("train-policy", "a.jsonl", "-o", "p", *options, *sets)
    settings = training["settings"]
    assert (settings.loss, settings.seeds, settings.depth) == ("expected_gain", 4, 3)
    assert [p.name for p in training["evaluation"]] == ["e.jsonl", "f.jsonl"]
    assert training["time_calls"] is True and training["window"] is None


def test_train_policy_ablates(cli, cli_json, refused, monkeypatch, tmp_path):
    seen: dict = {}
    result = {"train_accuracy": 0.8, "accuracy": 0.1, "gain": {"mean": 0.1, "low": -0.1, "high": 0.3}}
    result |= {name: {"mean": 1.5} for name in ("predictor", "best_fixed", "oracle")}
    cell = {"factor": "k", "value": 2, "window": [2, 4], "skipped": None, "result": result}
    found = {"cells": [cell, {**cell, "value": 1, "skipped": "too few", "result": None}]}

    def fake(labels, output, **options):
        seen.update(options, output=output)
        options["progress"](1, "k = 2")
        return found

    monkeypatch.setattr("blockpilot.training.ablation.ablate", fake)
    command = ("train-policy", "a.jsonl", "--ablate", "a.json", "--epochs", "7")
    out = cli_json(*command)
    assert set(out) == set(train_policy.JSON_KEYS) and out["ablation"] == found and out["policy"] is None
    assert (seen["settings"].kind, seen["settings"].epochs, seen["settings"].patience) == ("full", 7, 7)
    text = cli(*command).stdout
    assert "80%/10%" in text and "+0.1 (-0.1 to 0.3)" in text and "k = 1 skipped: too few" in text
    assert "expected --output or --ablate" in refused("train-policy", "a.jsonl")


def test_train_policy_lists_the_kinds(refused):
    line = refused("train-policy", "a.jsonl", "-o", "p", "--kind", "huge")
    assert "compact" in line and "full" in line


def test_train_policy_names_a_missing_file(refused, tmp_path):
    assert "absent.jsonl" in refused(
        "train-policy", tmp_path / "absent.jsonl", "-o", tmp_path / "p.safetensors"
    )
