"""`blockpilot report`: from files on the command line to the page."""

from __future__ import annotations

import sys

import pytest

from blockpilot.cli import report
from tests.cli.fakes import write_prompts
from tests.training.page_files import write_calibration, write_labels, write_log, write_policy

pytest.importorskip("matplotlib")


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures that take no time to draw."""
    monkeypatch.setattr("blockpilot.training.page.drawing.draw", lambda *args, **options: b"a picture")


def test_json_names_the_files_and_holds_the_numbers(undrawn, cli_json, tmp_path):
    labels, calibration = write_labels(tmp_path / "l.jsonl"), write_calibration(tmp_path / "c.json")
    page = tmp_path / "out" / "page.html"
    found = cli_json("report", "--labels", labels, "--calibration", calibration, "-o", page)
    assert set(found) == set(report.JSON_KEYS)
    assert found["html"] == str(page)
    assert sorted(found["images"]) == sorted(str(p) for p in page.parent.glob("page-*.png"))
    assert list(found["sections"]) == ["tau", "locality", "accepted", "offsets", "speed", "cost"]
    assert found["sections"]["tau"]["numbers"]["l.jsonl"]["tau_by_width"] == {"2": 1.425, "4": 1.675}
    assert all(part["title"] for part in found["sections"].values())


def test_one_line_for_people_and_the_default_file(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log, policy = write_log(tmp_path / "log.jsonl"), write_policy(tmp_path / "p.json")
    result = cli("report", "--training-log", log, "--policy-report", policy)
    assert result.exit_code == 0, result.output
    assert result.stdout == "2 sections written to report.html, 4 pictures beside it\n"
    assert "Training of the drafter" in (tmp_path / "report.html").read_text()


def test_what_bench_writes_can_be_shown(undrawn, cli_json, fake_llm, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", {"alpha": 2, "beta": 1})
    result = tmp_path / "bench.json"
    measured = cli_json(
        "bench", "--prompts", prompts, "--max-new-tokens", "9", "--widths", "2,4", "-o", result
    )
    found = cli_json("report", "--bench", result, "-o", tmp_path / "r.html")
    numbers = found["sections"]["bench"]["numbers"]["bench.json"]
    assert numbers == {name: arm["overall"] for name, arm in measured["arms"].items()}


def test_mistakes_are_one_line_and_write_nothing(refused, tmp_path):
    page = tmp_path / "page.html"
    assert "expected at least one of labels" in refused("report", "-o", page)
    assert "absent" in refused("report", "--labels", tmp_path / "absent", "-o", page)
    log = write_log(tmp_path / "log.jsonl")
    assert "got the folder" in refused("report", "--training-log", log, "-o", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


def test_without_matplotlib_the_extra_is_named(refused, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = refused("report", "--training-log", write_log(tmp_path / "log.jsonl"), "-o", tmp_path / "r.html")
    assert "plot extra" in line
