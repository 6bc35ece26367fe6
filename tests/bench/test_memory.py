"""`bench/run.py memory`: what its report says of starts, without starting any."""

from __future__ import annotations

import json

import pytest

import memory
import run as bench_run

MB = 10**6


@pytest.fixture
def starts(monkeypatch):
    """Processes that print what real ones do; peaks of first and second starts alternate."""
    state = {"peaks": [460 * MB, 430 * MB], "texts": ["a"], "folders": [], "started": 0}

    def python(script, *arguments, **environment):
        if script == memory.TORCH:
            return f"{230 * MB}\n"
        assert arguments == (str(memory.MAX_LENGTH), str(memory.TOKENS))
        n, state["started"] = state["started"], state["started"] + 1
        state["folders"].append(environment["BLOCKPILOT_CACHE"])
        return json.dumps(
            {
                "peak": state["peaks"][n % 2],
                "weights": 110 * MB,
                "kv": 25 * MB,
                "load_s": 2.0,
                "first_token": memory.time.time() + 3.0,
                "text": state["texts"][n % len(state["texts"])],
            }
        )

    monkeypatch.setattr(memory, "python", python)
    return state


def test_report(starts, tmp_path, capsys):
    file = tmp_path / "report.json"
    assert bench_run.main(["memory", "--repeats", "2", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["torch_mb"] == 230 and report["limit_mb"] == 100
    assert {name: start["rest_mb"] for name, start in report["starts"].items()} == {"first": 95, "second": 65}
    assert report["starts"]["first"]["first_token_s"] == pytest.approx(3.0, abs=0.5)
    folders = starts["folders"]
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert (report["ok"], report["within_limit"], report["same_answers"]) == (True, True, True)
    assert capsys.readouterr().out.endswith("within the limit: yes\nanswers the same: yes\n")


@pytest.mark.parametrize(
    ("change", "within", "same"),
    [({"peaks": [466 * MB, 430 * MB]}, "NO", "yes"), ({"texts": ["a", "b"]}, "yes", "NO")],
)
def test_too_much_memory_or_another_answer_fails(starts, change, within, same, tmp_path, capsys):
    starts.update(change)
    file = tmp_path / "report.json"
    assert bench_run.main(["memory", "--quick", "--json", str(file)]) == 1
    assert capsys.readouterr().out.endswith(f"within the limit: {within}\nanswers the same: {same}\n")
    report = json.loads(file.read_text())
    found = (report["ok"], report["within_limit"], report["same_answers"])
    assert found == (False, within == "yes", same == "yes")


def test_a_start_that_fails_is_told(capsys, monkeypatch):
    monkeypatch.setattr(memory, "TORCH", "raise SystemExit(3)")
    assert bench_run.main(["memory", "--quick"]) == 2
    assert "exit code 3" in capsys.readouterr().err
    assert bench_run.main(["memory", "--repeats", "-1"]) == 2
