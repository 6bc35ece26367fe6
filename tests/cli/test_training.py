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
        "bundled",
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
    def to_dict(self) -> dict:
        return {"gain": 1.5}


@pytest.fixture
def training(monkeypatch):
    """Replaces the library's training; collects its arguments."""
    seen: dict = {}

    def fake(labels, output, **options):
        seen.update(options, labels=labels, output=output)
        return Report()

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
    assert out == {"policy": "policy.safetensors", "report": {"gain": 1.5}}
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


def test_train_policy_lists_the_kinds(refused):
    line = refused("train-policy", "a.jsonl", "-o", "p", "--kind", "huge")
    assert "compact" in line and "full" in line


def test_train_policy_names_a_missing_file(refused, tmp_path):
    assert "absent.jsonl" in refused(
        "train-policy", tmp_path / "absent.jsonl", "-o", tmp_path / "p.safetensors"
    )
