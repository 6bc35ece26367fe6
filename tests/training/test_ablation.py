"""Ablations: which networks are trained on which widths, what is skipped, and runs that are continued."""

from __future__ import annotations

import json

import pytest

from blockpilot.training import ablation
from blockpilot.training.fitting import TrainSettings
from blockpilot.training.labels import label_prompts
from tests.training.fakes import FakeLLM, planted, prompts, write_labels

QUICK = TrainSettings(kind="full", epochs=2, bootstrap=20)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The grid with networks that train at once."""
    monkeypatch.setattr(ablation, "GRID", {**ablation.GRID, "hidden": (8, 16), "depth": (1, 2, 3)})
    monkeypatch.setattr(ablation, "PAPER", {"k": 2, "hidden": 16, "depth": 2})


@pytest.fixture
def labels(tmp_path):
    return write_labels(tmp_path / "labels.jsonl", *planted(40))  # widths 2, 3, 4, 5, block 4


def cells(found):
    return {(c["factor"], c["value"]): c for c in found["cells"]}


def test_one_thing_changes_at_a_time(labels, tmp_path):
    seen = []
    found = ablation.ablate(
        labels, tmp_path / "a.json", settings=QUICK, progress=lambda n, doing: seen.append(n)
    )
    assert json.loads((tmp_path / "a.json").read_text()) == found
    made = cells(found)
    assert [made["k", k]["window"] for k in (1, 2, 3)] == [[3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5]]
    assert made["k", 2]["result"] == made["hidden", 16]["result"] == made["depth", 2]["result"]
    assert made["hidden", 8]["result"]["parameters"] == 16 * 8 + 8 + 8 * 8 + 8 + 8 * 4 + 4
    assert made["depth", 3]["result"]["parameters"] == 16 * 16 + 16 + 2 * (16 * 16 + 16) + 16 * 4 + 4
    assert made["depth", 1]["result"]["parameters"] == 16 * 16 + 16 + 16 * 4 + 4
    result = made["k", 1]["result"]
    assert result["oracle"]["mean"] >= result["predictor"]["mean"]
    assert sum(seen) == len(found["cells"]) == 3 + 2 + 3 + 5
    assert len(ablation.rows(found)) == 3 + 2 + 3 + 1 and len(ablation.rows(found)[0]) == len(
        ablation.HEADINGS
    )


def test_inputs_that_need_raw_logits_are_skipped_without_them(labels, tmp_path):
    found = ablation.ablate(labels, tmp_path / "a.json", settings=QUICK)
    lines = ablation.skipped(found)
    assert lines == [
        f"input = {kind} skipped: labels hold no raw logits"
        for kind in ("raw", "probabilities", "normalised", "top_k")
    ]
    assert found["setup"]["settings"]["learning_rate"] == 1e-5


def test_with_raw_logits_every_input_is_trained(tmp_path):
    labels = tmp_path / "labels.jsonl"
    options = {"max_new_tokens": 12, "raw_logits": True, "replay": False, "progress": False}
    label_prompts(FakeLLM, prompts(24), window=(4, 7, 8), output=labels, **options)
    found = ablation.ablate(labels, tmp_path / "a.json", settings=QUICK)
    made = cells(found)
    assert ablation.skipped(found) == [
        "k = 1 skipped: labels hold 1 width within 1 of 4",
        "k = 2 skipped: labels hold 1 width within 2 of 4",
    ]
    assert made["hidden", 8]["input_kind"] == "raw" and made["hidden", 8]["window"] == [4, 7, 8]
    assert all(made["input", kind]["result"] for kind in ablation.GRID["input"])
    assert (
        made["input", "raw"]["result"]["parameters"]
        > made["input", "mean_likely_embedding"]["result"]["parameters"]
    )


def test_a_stopped_run_is_continued(labels, tmp_path, monkeypatch):
    whole = ablation.ablate(labels, tmp_path / "whole.json", settings=QUICK)
    real, asked = ablation._judge, []

    def judge(*args):
        asked.append(args[1].factor)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(ablation, "_judge", judge)
    with pytest.raises(KeyboardInterrupt):
        ablation.ablate(labels, tmp_path / "a.json", settings=QUICK)
    assert ablation.ablate(labels, tmp_path / "a.json", settings=QUICK) == whole
    different = 1 + 1 + 1 + 2  # k = 1, the paper's network, hidden 8, depth 1 and 3
    assert len(asked) == different + 1
    ablation.ablate(labels, tmp_path / "a.json", settings=QUICK)
    assert len(asked) == different + 1


def test_another_setup_or_file_is_not_overwritten(labels, tmp_path):
    path = tmp_path / "a.json"
    ablation.ablate(labels, path, settings=QUICK)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"another setup \(settings\)"):
        ablation.ablate(labels, path, settings=TrainSettings(kind="full", epochs=3, bootstrap=20))
    inputs, tau = planted(40)
    other = write_labels(tmp_path / "other.jsonl", inputs, tau + 1)
    with pytest.raises(ValueError, match="prompts_hash"):
        ablation.ablate(other, path, settings=QUICK)
    assert path.read_bytes() == before
    path.write_text("my notes")
    with pytest.raises(ValueError, match="expected an ablation to continue"):
        ablation.ablate(labels, path, settings=QUICK)
