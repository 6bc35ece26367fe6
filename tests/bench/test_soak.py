"""`bench/run.py soak`: a tiny pair through the real load, and memory that grows."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

import run as bench_run
import soak
from tests.engine.pair import ScriptedDrafter, tiny_llm

SHORT = ["soak", "--minutes", "0.2", "--limit-mb", "500"]


@pytest.fixture
def tiny(monkeypatch):
    """A tiny engine, and a clock on which every step takes a tenth of a second."""
    ticks = itertools.count()
    monkeypatch.setattr(soak, "open_engine", lambda: tiny_llm(max_requests=3))
    monkeypatch.setattr(soak, "time", SimpleNamespace(perf_counter=lambda: next(ticks) / 10))


def test_report(tiny, tmp_path, capsys):
    file = tmp_path / "report.json"
    assert bench_run.main([*SHORT, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["ok"] is True and report["same_answers"] is True
    assert report["requests"] == sum(report["finish_reasons"].values()) == sum(report["widths"].values()) > 8
    assert {"stop", "length", "cancelled"} <= set(report["finish_reasons"])
    assert report["tokens"] > report["requests"]
    assert [round(at) for at, _ in report["mb"]] == [*range(12), 12]
    assert all(mb > 1 for _, mb in report["mb"])
    shown = capsys.readouterr().out
    assert "growth after settling" in shown and shown.rstrip().endswith("the same: yes")


def test_growth_after_settling_is_what_counts(tiny, monkeypatch, capsys):
    """A rise before minute 1 is none; one behind it is."""

    def play(before, after):
        levels = [(t, before if t < 60 else 900.0 if t < 300 else after) for t in range(0, 600, 10)]
        monkeypatch.setattr(soak, "watch", lambda load, duration: [load.step(), levels][1])
        return bench_run.main(["soak", "--limit-mb", "32"])

    assert play(100.0, 930.0) == 0 and "growth after settling: 30.0 MB" in capsys.readouterr().out
    assert play(100.0, 933.0) == 1 and "growth after settling: 33.0 MB" in capsys.readouterr().out
    assert play(2000.0, 800.0) == 0 and "growth after settling: -100.0 MB" in capsys.readouterr().out


def test_settled_samples():
    samples = [(0.0, 5.0), (1.0, 6.0), (2.5, 7.0)]
    assert soak.settled_samples(samples, 1.0) == [6.0, 7.0]
    assert soak.settled_samples(samples, 9.0) == [7.0]


def test_failures_and_other_answers_are_told(tiny, monkeypatch, capsys):
    real = soak.Load._count

    def changed(load, handle):
        handle.output = replace(handle.output, finish_reason="error")
        real(load, handle)

    monkeypatch.setattr(soak.Load, "_count", changed)
    assert bench_run.main(SHORT) == 1
    assert capsys.readouterr().out.rstrip().endswith("the same: yes")

    def different(load, handle):
        real(load, handle)
        load.probes |= {(len(load.probes),)}

    monkeypatch.setattr(soak.Load, "_count", different)
    assert bench_run.main(SHORT) == 1
    assert capsys.readouterr().out.rstrip().endswith("the same: NO")


class Guesser(ScriptedDrafter):
    """Proposes the same token again and again."""

    def _draft(self, state, slot, width):
        return [3] * (width - 1)


def test_widths_of_a_drafter():
    """Every width of the drafter's window is asked for, and served."""
    load = soak.Load(tiny_llm(Guesser(), max_requests=3), random.Random(1))
    asked = {load._params().width for _ in range(200)}
    assert asked == {None, *Guesser.window}
    for _ in range(60):
        load.step()
    load.finish()
    assert len(load.widths) > 3 and not load.reasons["error"] and len(load.probes) == 1


def test_options(capsys):
    for wrong in (["--minutes", "0"], ["--limit-mb", "nan"], ["--minutes", "x"]):
        with pytest.raises(SystemExit):
            bench_run.main(["soak", *wrong])
