"""`blockpilot analyze`: folders of tables and label files, for people and machines."""

from __future__ import annotations

import pytest

from blockpilot.cli import analyze
from blockpilot.training.acceptance import read_acceptance
from blockpilot.training.analysis import analyse
from tests.training.acceptance_data import write_set
from tests.training.fakes import planted, write_labels


@pytest.fixture
def folder(tmp_path):
    write_set(tmp_path / "tables" / "a")
    write_set(tmp_path / "tables" / "b", chosen=False)
    return tmp_path / "tables"


def test_json_holds_what_the_library_finds(cli_json, folder):
    report = cli_json("analyze", folder, "--block-size", "8", "--simulations", "20", "--seed", "3")
    assert set(report) == set(analyze.JSON_KEYS)
    tables = read_acceptance(folder, 8)
    assert report["sets"] == [analyse(t, simulations=20, seed=3).to_dict() for t in tables] != []
    assert report["families"] == []
    assert report["chosen"] == {"prompts": 4, "equal_oracle": 3}


def test_tables_for_people(cli, folder):
    result = cli("analyze", folder, "--block-size", "8", "--window", "9,8")
    assert result.exit_code == 0, result.output
    assert "4.250" in result.stdout and "8…9" in result.stdout
    assert "75.0 %" in result.stdout and "as good as the oracle: 3 of 4" in result.stdout


def test_label_files_show_their_families(cli, cli_json, tmp_path):
    labels = write_labels(tmp_path / "mine.jsonl", *planted(12))
    report = cli_json("analyze", labels, "--simulations", "5")
    assert [s["name"] for s in report["sets"]] == ["mine"]
    assert [f["name"] for f in report["families"]] == [f"f{i}" for i in range(6)]
    assert [f["prompts"] for f in report["families"]] == [2] * 6
    assert report["chosen"] is None
    result = cli("analyze", labels, "--simulations", "5")
    assert "f5" in result.stdout and "chosen" not in result.stdout


def test_mistakes_are_refused(refused, folder, tmp_path):
    assert "absent.jsonl" in refused("analyze", tmp_path / "absent.jsonl")
    assert "--window" in refused("analyze", folder, "--window", "x")
    assert "among the measured" in refused("analyze", folder, "--block-size", "8", "--window", "5")
