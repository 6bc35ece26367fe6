"""`bench/run.py adapt`: every arm answers alike, updates when it says, and what it reports adds up."""

from __future__ import annotations

import argparse
import json

import pytest

import adapt
import run as bench_run
from tests.adapt.conftest import learning, learning_pairs

__all__ = ["learning", "learning_pairs"]


@pytest.fixture
def asked(learning, monkeypatch):
    """Options for the tiny pair, and prompts that it can read."""
    monkeypatch.setattr(
        adapt, "_prompts", lambda families, count, seed: learning.prompts(count, len(families))
    )
    target, drafter = (str(p) for p in learning.pair)
    return ["adapt", "--target", target, "--drafter", drafter, "--prompts", "16", "--requests", "2"]


def test_report(asked, tmp_path, capsys):
    file = tmp_path / "report.json"
    assert bench_run.main([*asked, "--max-new-tokens", "40", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["ok"] and report["identical"]
    assert list(report["segments"]) == ["before", "after"] and set(report["adapters"]) == {
        "head",
        "full",
        "bandit",
    }
    for arm in ("head", "full"):
        found = report["adapters"][arm]
        assert found["kept"] + found["dropped"] == found["arms"][arm]["updates"] > 1 and not found["skipped"]
    parts = [*report["segments"].values(), report["whole"]]
    for part in parts:
        arms, best = part["arms"], part["arms"][part["oracle"]]
        assert part["oracle"] != "bandit"
        assert best["regret"] == [0.0, 0.0, 0.0] == arms["never"]["seconds_over_never"]
        assert best["seconds"] == min(a["seconds"] for n, a in arms.items() if n != "bandit")
        for a in arms.values():
            assert a["regret"][0] == pytest.approx(a["seconds"] - best["seconds"], abs=1e-4)
            assert a["adapting_seconds"] < a["seconds"] and len(a["tau_by_part"]) == 8
        assert arms["never"]["adapting_seconds"] == 0.0 < arms["head"]["adapting_seconds"]
    first, second, whole = ([p["arms"][n]["seconds"] for n in ("never", "head")] for p in parts)
    assert whole == pytest.approx([a + b for a, b in zip(first, second, strict=True)])
    shown = capsys.readouterr().out
    assert "the whole stream" in shown and shown.rstrip().endswith("the same: yes")


def test_answers_that_differ_are_told(asked, monkeypatch):
    answer = adapt.Run.answer

    def changed(self, prompts, params):
        answer(self, prompts, params)
        if self.llm.adapter:
            self.ids[-1] = [*self.ids[-1][:-1], 0, 0]

    monkeypatch.setattr(adapt.Run, "answer", changed)
    assert bench_run.main([*asked, "--max-new-tokens", "4", "--arms", "never,bandit"]) == 1


def test_options():
    parser = argparse.ArgumentParser()
    adapt.add_options(parser)
    found = parser.parse_args(["--drafter", "d", "--before", "story,letter", "--arms", "never,full"])
    assert (found.before, found.arms) == (("story", "letter"), ("never", "full"))
    for wrong in (["--after", "poems"], ["--arms", "often"], ["--prompts", "0"]):
        with pytest.raises(SystemExit):
            parser.parse_args(["--drafter", "d", *wrong])
    prompts = adapt._prompts(("story", "letter"), 5, 0)
    assert len(set(prompts)) == 5 and adapt._prompts(("story", "letter"), 5, 1) != prompts
    assert [adapt._turn("abc", i) for i in (0, 4)] == [["a", "b", "c"], ["b", "c", "a"]]
