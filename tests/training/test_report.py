"""Text, JSON and picture of a report."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from blockpilot.training import report as reporting
from blockpilot.training.held_out import Seeds, SplitHalf
from blockpilot.training.policy_training import TrainSettings, train_policy
from tests.training.fakes import planted, write_labels


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    labels = write_labels(folder / "labels.jsonl", *planted(80))
    settings = TrainSettings(hidden=16, epochs=3, bootstrap=50)
    cost = {2: 0.01, 3: 0.011, 4: 0.012, 5: 0.013}
    return train_policy(
        labels, folder / "policy.safetensors", settings=settings, objective="throughput", cost=cost
    )


def test_text_shows_every_strategy_under_both_measures_and_the_conclusion(report):
    stream = io.StringIO()
    reporting.render(report, Console(file=stream, width=160))
    text = stream.getvalue()
    for name in report.acceptance.strategies:
        assert text.count(name) >= 2
    for figure in (
        report.acceptance.strategies["oracle"].mean,
        report.throughput.strategies["predictor"].mean,
    ):
        assert f"{figure:.4g}" in text
    assert "20 held-out prompts (random), 60 for training" in text
    assert text.startswith(report.headline) and report.conclusion in report.headline
    assert "warning: only 20 prompts are held out" in text


def test_text_shows_groups_halves_seeds_and_the_call(report):
    gain = report.acceptance.gains["oracle - best_fixed"]
    names = ("split_half_oracle - best_fixed", "predictor - best_fixed")
    half = SplitHalf(9, {"split_half_oracle": gain}, dict.fromkeys(names, gain))
    section = replace(
        report.throughput, split_half=half, evaluation={"gsm": report.throughput.by_family["f0"]}
    )
    seeds = Seeds((7, 8), (1.0, 2.0), (0.25, 0.5), (0.1, 0.1), 0.375, 0.125)
    stream = io.StringIO()
    shown = replace(report, throughput=section, seeds=seeds, predictor_us=123.4)
    reporting.render(shown, Console(file=stream, width=160))
    text = stream.getvalue()
    assert "first half of 9 answers" in text and "gsm" in text and "one predictor call: 123 µs" in text
    assert all(f"\n f{i} " in text for i in range(6))
    assert "over 2 seeds: +0.375, spread 0.125 (7: +0.25, 8: +0.5)" in text


def test_json_is_complete_and_strict(report, tmp_path):
    reporting.write_json(report, tmp_path / "report.json")
    read = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert read == json.loads(json.dumps(report.to_dict()))
    assert set(read["acceptance"]["strategies"]) == {
        "drafter_block", "best_fixed", "predictor", "shuffled_control", "random", "oracle",
    }  # fmt: skip
    assert set(read["tau_by_width"]) == {"2", "3", "4", "5"}
    for value in read["throughput"]["strategies"].values():
        assert value["low"] <= value["mean"] <= value["high"]


def test_picture_is_a_png(report, tmp_path):
    pytest.importorskip("matplotlib")
    assert reporting.plot(report, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_without_matplotlib_there_is_no_picture_and_no_error(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not reporting.plot(report, tmp_path / "report.png")
    assert list(tmp_path.iterdir()) == []
