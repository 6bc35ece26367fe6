"""`bench/device_check.py` in a dry run: its sections on a CPU, so that no minute on a GPU goes to a typo."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import torch

import device_check
import device_sections
import roofline
from device_setup import Setup, Skip
from tests.implementations import require

NEEDS_CPP = ("smollm2",)  # the reference would take minutes over 135 million weights


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def section(name: str, tmp_path) -> dict:
    into = tmp_path / "section.json"
    code = device_check.run_section(name, into, True, 300.0)
    found = json.loads(into.read_text())
    assert code == 0, found.get("traceback")
    return found


@pytest.mark.parametrize("name", [*device_check.SECTIONS, *device_check.HIDDEN])
def test_a_section(name, tmp_path):
    if name in NEEDS_CPP:
        require("cpp")
    found = section(name, tmp_path)
    assert found["status"] in ("ok", "skipped")
    results = found["results"]
    if name == "tests":
        assert results["counts"]["collected"] > 50
    if name == "errors":
        assert len(results["relative_error"]) == 10
    if name == "exact":
        assert results.pop("loop") == {"same": True}
        assert all(r["launches"] and all(r["same"].values()) for r in results.values()) and len(results) == 2
    if name == "kernels":
        assert all(row["captured"] and row["ms"] > 0 and row["bytes"] > 0 for row in results["kernels"])


def test_steps_are_read_by_the_roofline(tmp_path):
    """As a results file of a GPU that it knows, compared with what it projects."""
    entries = section("Llama-3.1-8B", tmp_path)["results"]["entries"]
    assert [e["width"] for e in entries] == [1, 8, 10, 16, 18]
    path = tmp_path / "nvidia-h200.json"
    report = {
        "gpu": "NVIDIA H200",
        "hardware": {"cuda": ["NVIDIA H200"]},
        "sections": {"x": {"entries": entries}},
    }
    path.write_text(json.dumps(report))
    compared = roofline.run(True, measured=[path])["measured"]
    assert [(row["model"], row["gpu"], row["width"]) for row in compared] == [
        ("Llama-3.1-8B", "H200", e["width"]) for e in entries
    ]


def test_bytes_are_those_of_the_roofline_at_full_size():
    from roofline_models import find_model
    from roofline_terms import WEIGHTS, Load, step_terms

    moved = sum(t.bytes for t in step_terms(find_model("Qwen3-8B"), WEIGHTS["bf16"], Load(1, 1024, 1)))
    assert 15.0e9 < moved < 15.6e9


def test_the_command(tmp_path):
    """Processes, files and table, with two sections."""
    command = [sys.executable, device_check.__file__, "--dry-run", "--only", "probe,small_step,errors"]
    ended = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "dry-run.json").read_text())
    assert {name: s["status"] for name, s in report["sections"].items()} == {"probe": "ok", "errors": "ok"}
    assert report["gpu"] == "cpu" and report["versions"]["torch"] and report["label"].startswith("dry run")
    assert "copy " in ended.stdout and [p.name for p in tmp_path.iterdir()] == ["dry-run.json"]


def test_a_section_that_breaks_keeps_what_it_had(tmp_path, monkeypatch):
    def broken(setup, put):
        put("first", 1)
        raise ZeroDivisionError("in the second")

    monkeypatch.setattr(device_sections, "probe", broken)
    into = tmp_path / "section.json"
    assert device_check.run_section("probe", into, True, 9.0) == 1
    found = json.loads(into.read_text())
    assert found["status"] == "failed" and found["results"] == {"first": 1}
    assert found["reason"] == "ZeroDivisionError: in the second" and "in broken" in found["traceback"]


def test_what_is_not_here_is_skipped_with_its_reason(tmp_path, monkeypatch):
    def absent(setup, put):
        raise Skip("no such tool")

    monkeypatch.setattr(device_sections, "sanitizer", absent)
    found = section("sanitizer", tmp_path)
    assert (found["status"], found["reason"]) == ("skipped", "no such tool")


def test_sections_end_in_time_and_the_next_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(device_check, "SECTIONS", {"probe": 0.2, "errors": 60})
    assert device_check.main(["--dry-run", "--output", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "dry-run.json").read_text())
    assert [s["status"] for s in report["sections"].values()] == ["timed out", "ok"]
    assert "stopped after" in report["sections"]["probe"]["reason"]
    assert "timed out" in capsys.readouterr().out


def test_no_section_starts_after_the_limit(tmp_path):
    assert device_check.main(["--dry-run", "--limit", "1", "--output", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "dry-run.json").read_text())
    assert {s["status"] for s in report["sections"].values()} == {"no time"}
    assert list(report["sections"]) == list(device_check.SECTIONS)


def test_a_stopped_command_takes_its_children_along(tmp_path):
    mark = tmp_path / "mark"
    command = ["sh", "-c", f"(sleep 2; touch {mark}) & wait"]
    assert device_check.bounded(command, 0.5, tmp_path / "log") is None
    time.sleep(2.5)
    assert not mark.exists()


def test_without_a_gpu_it_says_so(tmp_path):
    into = tmp_path / "section.json"
    assert device_check.run_section("probe", into, False, 9.0) == 1
    assert "--dry-run" in json.loads(into.read_text())["reason"]
    with pytest.raises(RuntimeError, match="expected a CUDA device"):
        Setup.of(False, 9.0)
