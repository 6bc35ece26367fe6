"""`bench/run.py peers`: figures, comparison, turns, skipped arms and options, with arms that need no model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import peer_plot
import peer_report
import peers
import run as bench_run
from blockpilot.cli.prompts import Prompt
from peer_report import Row, build_report, figures, first_difference, spread
from peer_types import Arm, Request, Run, Setup, Unavailable

PROMPTS = [Prompt(f"{name}/{i}", name, f"{name} {i}") for name in ("alpha", "beta") for i in range(2)]
SETUP = Setup(Path("target.gguf"), (0,), 1, 64)


class Fake:
    """A model that answers 1, 2, 3, … at `step` seconds a token, or what `change` makes of that."""

    def __init__(self, step=0.5, change=lambda request, ids: ids):
        self.step, self.change = step, change

    def __call__(self, request: Request) -> Run:
        ids = self.change(request, list(range(1, request.max_new_tokens + 1)))
        return Run(tuple(ids), 0.25, self.step * (len(ids) - 1))


def arm(name, model, family="ours", exact=True, **more):
    return Arm(name, family, lambda setup: model, exact=exact, **more)


@pytest.fixture
def install(monkeypatch):
    """Put these arms in place of the real ones, and four prompts with made-up ids."""

    def prepare(prompts, temperatures, budget, threads):
        asked = [(p, [Request((i,), 7, t, budget) for t in temperatures]) for i, p in enumerate(PROMPTS)]
        return SETUP, asked

    def put(*arms):
        monkeypatch.setattr(peers, "ARMS", arms)
        monkeypatch.setattr(peers, "prepare", prepare)

    return put


def wrong_at(place, where=lambda request: True):
    return lambda request, ids: [*ids[:place], 99, *ids[place + 1 :]] if where(request) else ids


def test_spread_is_median_and_range_of_what_is_there():
    assert spread([3.0, None, 1.0, 8.0]) == {"median": 3.0, "min": 1.0, "max": 8.0}
    assert spread([4.0, 1.0]) == {"median": 2.5, "min": 1.0, "max": 4.0}
    assert spread([None]) is None


@pytest.mark.parametrize(
    ("a", "b", "index"),
    [
        ((1, 2), (1, 2), None),
        ((1, 2, 3), (1, 9, 3), 1),
        ((5,), (1,), 0),
        ((1, 2, 3), (1, 2), 2),
        ((), (1,), 0),
    ],
)
def test_first_difference(a, b, index):
    assert first_difference(Run(a), Run(b)) == first_difference(Run(b), Run(a)) == index


def test_a_failed_answer_is_never_the_same():
    assert first_difference(Run((), error="broken"), Run((), error="broken")) == 0
    assert first_difference(Run((1, 2)), Run((1, 2), error="late")) == 2


def test_speed_leaves_prefill_out():
    assert Run((1, 2, 3), first_token=9.0, decoding=4.0).tokens_per_s == 0.5
    assert Run((1,), first_token=9.0).tokens_per_s is None


def test_figures_of_an_arm():
    plain = [Run((1, 2, 3), 0.1, 2.0), Run((1, 2, 3, 4, 5), 0.3, 4.0), Run((7,), 0.2)]
    fast = [Run((1, 2, 3), 0.2, 0.5, 1), Run((1, 2, 3, 9, 5), 0.2, 2.0, 2), Run((7,), 0.2, 0.0, 0)]
    rows = [Row(PROMPTS[i], 0.0, {"plain": plain[i], "fast": fast[i]}) for i in range(3)]
    found = figures(rows, arm("fast", None))
    assert found["tokens_per_s"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert found["ratio"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert found["pooled_tokens_per_s"] == pytest.approx(6 / 2.5)
    assert found["first_token_s"]["median"] == 0.2
    assert (found["tau"], found["tokens"], found["prompts"]) == (2.0, 9, 3)
    assert (found["identical"], found["first_differences"]) == (False, [3])
    assert figures(rows, arm("plain", None))["tau"] is None


def test_phases_are_seconds_per_step():
    run = Run((1, 2, 3, 4, 5), 0.1, 1.0, 2, {"prefill": 9.0, "draft": 0.2, "verify": 0.8})
    found = figures([Row(PROMPTS[0], 0.0, {"plain": run})], arm("plain", None))
    assert found["phase_s"] == {"draft": pytest.approx(0.1), "verify": pytest.approx(0.4)}


def test_report_by_temperature_and_dataset(install, capsys):
    sampled = wrong_at(1, lambda request: request.temperature == 1)
    install(
        arm("plain", Fake()),
        arm("width-2", Fake(0.25)),
        arm("slow", Fake(1.0, wrong_at(3)), "other", False),
        arm("peer", Fake(0.4, sampled), "other", False),
    )
    report = peers.run(False, max_new_tokens=5)
    assert report["ok"] is True
    assert report["settings"]["temperatures"] == [0.0, 1.0]
    assert set(report["results"]) == {"0", "1"}
    assert set(report["results"]["0"]["datasets"]) == {"alpha", "beta"}
    assert report["results"]["0"]["datasets"]["beta"]["width-2"]["ratio"]["median"] == 2
    assert report["best"]["0"] == {"ours": "width-2", "other": "peer"}
    greedy, random = (report["results"][t]["overall"] for t in "01")
    assert (greedy["peer"]["identical"], random["peer"]["identical"]) == (True, None)
    assert (greedy["slow"]["identical"], greedy["slow"]["first_differences"]) == (False, [3] * 4)
    assert {(d["arm"], d["temperature"], d["token"]) for d in report["differences"]} == {("slow", 0.0, 3)}
    json.dumps(report, allow_nan=False)
    peers.show(report)
    assert "4/4 no, @3" in capsys.readouterr().out


@pytest.mark.parametrize("temperature", [0, 1])
def test_one_wrong_token_of_ours_is_not_ok(install, temperature):
    place = wrong_at(2, lambda request: request.ids == (1,) and request.temperature == temperature)
    install(arm("plain", Fake()), arm("policy", Fake(0.25, place)))
    report = peers.run(False, max_new_tokens=4)
    assert report["ok"] is False
    (found,) = report["differences"]
    assert (found["arm"], found["id"], found["token"], found["temperature"]) == (
        "policy",
        "alpha/1",
        2,
        temperature,
    )


def test_a_variant_is_compared_with_its_own_plain(install):
    other = wrong_at(0)
    install(
        arm("plain", Fake()),
        arm("int8-plain", Fake(0.3, other), reference="int8-plain"),
        arm("int8-policy", Fake(0.1, other), reference="int8-plain"),
    )
    assert peers.run(True)["ok"] is True
    names = [a.name for a in peers.choose_arms(["int8-policy"], peers.ARMS)]
    assert names == ["plain", "int8-plain", "int8-policy"]


def broken(request):
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(("name", "ok"), [("peer", True), ("policy", False)])
def test_a_failing_arm_does_not_stop_the_others(install, capsys, name, ok):
    install(arm("plain", Fake()), arm(name, broken, "other", exact=name == "policy"))
    report = peers.run(True)
    assert report["ok"] is ok
    assert [e["error"] for e in report["errors"]] == ["RuntimeError: out of memory"] * 4
    assert report["results"]["0"]["overall"][name]["tokens_per_s"] is None
    peers.show(report)
    assert "out of memory" in capsys.readouterr().err


def test_a_skipped_arm_is_named_with_its_reason(install, capsys):
    def absent(setup):
        raise Unavailable("pip install it")

    install(arm("plain", Fake()), Arm("gone", "other", absent, probe=absent))
    report = peers.run(True)
    assert (report["ok"], report["skipped"], report["probes"]) == (True, {"gone": "pip install it"}, {})
    assert set(report["results"]["0"]["overall"]) == {"plain"}
    peers.show(report)
    shown = capsys.readouterr()
    assert "skipped gone: pip install it" in shown.out and "skipped gone: pip install it" in shown.err


def test_without_llama_cpp_or_dflash_their_arms_are_skipped(monkeypatch):
    for package in ("llama_cpp", "dflash"):
        monkeypatch.setitem(sys.modules, package, None)
    chosen = [a for a in peers.ARMS if a.family in ("llama.cpp", "dflash")]
    decoders, skipped = peers.open_arms(chosen, SETUP)
    assert not decoders and set(skipped) == {a.name for a in chosen}
    assert "pip install llama-cpp-python" in skipped["llama.cpp-1"]
    assert "one thread" in skipped["llama.cpp-all"]
    assert "pip install --no-deps dflash" in skipped["dflash-fp32-8"]


def test_arms_take_turns_at_going_first():
    calls = []
    decoders = {n: lambda request, n=n: calls.append((n, request.ids)) or Run((1,)) for n in "abc"}
    requests = [(p, [Request((i,), 7, t, 4) for t in (0.0, 1.0)]) for i, p in enumerate(PROMPTS)]
    rows = peers.measure(requests, decoders)
    assert [(r.prompt.id, r.temperature) for r in rows] == [(p.id, t) for p in PROMPTS for t in (0.0, 1.0)]
    orders = ["".join(r.runs) for r in rows]
    assert orders == ["abc", "abc", "bca", "bca", "cab", "cab", "abc", "abc"]
    assert "".join(n for n, _ in calls) == "abc" + "".join(orders)  # a warm-up of each comes first


def test_a_ceiling_is_tau_over_parts_timed_alone():
    found = {"tau": 1.5, "pooled_tokens_per_s": 120.0}
    results = {"0": {"overall": {"width-2": found, "plain": {"tau": None, "pooled_tokens_per_s": 100.0}}}}
    peer_report.add_ceilings(results, {"width-2": {"alone_seconds": {"draft": 0.002, "verify": 0.008}}})
    assert found["ceiling"] == pytest.approx(150) and found["of_ceiling"] == pytest.approx(0.8)
    assert "ceiling" not in results["0"]["overall"]["plain"]


def test_arms_by_name_and_family():
    def names(*wanted):
        return [a.name for a in peers.choose_arms(wanted, peers.ARMS)]

    converted = ["llama.cpp-Q4_0-1", "llama.cpp-Q4_0-all"]
    assert names("llama.cpp") == ["plain", "llama.cpp-1", "llama.cpp-all", *converted]
    assert names("dflash-fp32-8", "width-4") == ["plain", "width-4", "dflash-fp32-8"]
    assert len({a.name for a in peers.ARMS}) == len(peers.ARMS) == len(peers.choose_arms(None, peers.ARMS))
    with pytest.raises(ValueError, match="got 'vllm'"):
        names("plain", "vllm")


def test_the_command_line_with_report_and_plot(install, tmp_path, capsys):
    install(arm("plain", Fake()), arm("width-2", Fake(0.25)), arm("peer", Fake(), "other", False))
    file = tmp_path / "report.json"
    options = ["--max-new-tokens", "3", "--temperature", "0.5", "--temperature", "0", "--threads", "2"]
    assert bench_run.main(["peers", "--json", str(file), *options, "--arms", "width-2,other"]) == 0
    report = json.loads(file.read_text())
    assert (report["benchmark"], report["ok"]) == ("peers", True)
    assert report["settings"]["temperatures"] == [0.5, 0.0]
    assert report["results"]["0.5"]["overall"]["plain"]["tokens"] == 12
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.rstrip().endswith("ours identical: yes")
    install(arm("plain", Fake()), arm("width-2", Fake(0.25, wrong_at(1))))
    assert bench_run.main(["peers", "--quick"]) == 1
    shown = capsys.readouterr()
    assert shown.out.rstrip().endswith("ours identical: NO")
    assert "width-2 differs from plain: alpha/0, token 1, T=0" in shown.err


def test_no_plot_without_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    peers.plot(build_report([], []), tmp_path / "plot.png")
    assert "no plot: matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "plot.png").exists()
    assert peer_plot.COLOURS.keys() == {a.family for a in peers.ARMS}


def test_options_belong_to_their_benchmark(install, capsys):
    install(arm("plain", Fake()))
    for wrong in (["decode", "--arms", "ours"], ["peers", "--limit", "0"], ["peers", "--json"]):
        with pytest.raises(SystemExit) as stop:
            bench_run.main(wrong)
        assert stop.value.code == 2
    assert bench_run.main(["peers", "--temperature", "-1"]) == 2
    assert bench_run.main(["unknown"]) == 2
    assert "temperature" in capsys.readouterr().err
    assert bench_run.main([]) == bench_run.main(["--list"]) == 0
    with pytest.raises(SystemExit):
        bench_run.main(["peers", "--help"])
    assert "--max-new-tokens" in capsys.readouterr().out
