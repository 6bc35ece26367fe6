"""What a step should take on a GPU, from the bytes it moves and what it computes; beside it what was measured.

Nothing runs: every figure is a projection from published shapes and peaks, and labelled so. A group of kernels takes
the longer of its bytes at `--efficiency` of the peak bandwidth and its arithmetic at the same share of the dense
bfloat16 peak, and `--launch-us` for every launch. The limit is the bytes alone at the whole bandwidth. `even τ` is the
τ above which a width beats plain decoding. A published τ belongs to the drafter's own width and another engine.

`--measured` takes what `blockpilot calibrate -o` and `bench/run.py throughput --json` write, and files that hold
such reports, or entries with `model`, `requests`, `context`, `width` and `step_ms`, at any depth.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from blockpilot.cli.console import number, say, table
from roofline_devices import DEVICES, find_device
from roofline_measured import compare, read_measured
from roofline_models import MODELS, find_model
from roofline_project import EFFICIENCY, LABEL, LAUNCH_US, Settings, parse_tau, policy, project
from roofline_terms import WEIGHTS, Load

QUICK = ("Qwen3-8B", "H200")
WIDTHS, CONTEXTS, REQUESTS, TAU = (1, 8, 16), (1024,), (1,), "gsm8k"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; their names are those of `run`'s arguments."""
    models, gpus = (", ".join(x.name for x in known) for known in (MODELS, DEVICES))
    parser.add_argument("--models", type=_names(find_model), metavar="NAME,…", help=f"of {models} (all)")
    parser.add_argument("--gpus", type=_names(find_device), metavar="NAME,…", help=f"of {gpus} (all)")
    parser.add_argument(
        "--widths", default=WIDTHS, type=_whole(1), metavar="N,…", help="1 is plain decoding (1,8,16)"
    )
    parser.add_argument(
        "--contexts", default=CONTEXTS, type=_whole(0), metavar="N,…", help="cached tokens (1024)"
    )
    parser.add_argument(
        "--requests", default=REQUESTS, type=_whole(1), metavar="N,…", help="decoded together (1)"
    )
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16", help="how they are stored (bf16)")
    parser.add_argument(
        "--tau", default=TAU, type=_tau, metavar="N", help="tokens a step, or a published workload (gsm8k)"
    )
    parser.add_argument(
        "--efficiency", default=EFFICIENCY, type=float, metavar="SHARE", help="of the peaks (0.8)"
    )
    parser.add_argument(
        "--launch-us", default=LAUNCH_US, type=float, metavar="N", help="microseconds of a launch (1)"
    )
    parser.add_argument(
        "--measured", type=Path, nargs="+", default=(), metavar="FILE", help="compare with these results"
    )


def _names(find: Callable[[str], Any]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        try:
            return list(dict.fromkeys(find(part.strip()).name for part in text.split(",")))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _whole(least: int) -> Callable[[str], list[int]]:
    def parse(text: str) -> list[int]:
        parts = text.split(",")
        if wrong := [p for p in parts if not p.isdecimal() or int(p) < least]:
            raise argparse.ArgumentTypeError(f"expected whole numbers >= {least}, got {wrong[0]!r}")
        return sorted({int(part) for part in parts})

    return parse


def _tau(text: str) -> float | str:
    try:
        return parse_tau(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(
    quick: bool,
    *,
    models: Sequence[str] | None = None,
    gpus: Sequence[str] | None = None,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] = CONTEXTS,
    requests: Sequence[int] = REQUESTS,
    weights: str = "bf16",
    tau: float | str = TAU,
    efficiency: float = EFFICIENCY,
    launch_us: float = LAUNCH_US,
    measured: Sequence[Path] = (),
) -> dict[str, Any]:
    """`entries`, `policy` and `measured`; `ok`: nothing measured on a GPU is faster than its bandwidth allows."""
    settings = Settings(efficiency, launch_us)
    targets = [find_model(n) for n in models or (QUICK[:1] if quick else [m.name for m in MODELS])]
    devices = [find_device(n) for n in gpus or (QUICK[1:] if quick else [d.name for d in DEVICES])]
    found = read_measured(measured, models)
    most = max(m.widest for m in targets)
    if min(widths) > most:
        raise ValueError(f"--widths: expected one of at most {most}, twice a drafter's block, got {widths}")
    loads = [Load(r, c, w) for r in requests for c in contexts for w in widths]
    pairs = [(model, device) for model in targets for device in devices]
    too_wide = {m.name: [w for w in widths if w > m.widest] for m in targets}
    compared = [compare(step, settings) for step in found]
    return {
        "ok": all(row["measured_ms"] >= row["limit_ms"] for row in compared if row["published_peaks"]),
        "label": LABEL,
        "settings": {"weights": weights, "efficiency": efficiency, "launch_us": launch_us, "tau": tau},
        "entries": [
            project(m, d, WEIGHTS[weights], load, settings, tau)
            for m, d in pairs
            for load in loads
            if load.width <= m.widest
        ],
        "too_wide": {name: left_out for name, left_out in too_wide.items() if left_out},
        "policy": [policy(m, d, settings) for m, d in pairs],
        "measured": compared,
    }


def show(report: dict[str, Any]) -> None:
    """Two tables for every number of requests and context, the policy's, and one of what was measured."""
    s, entries = report["settings"], report["entries"]
    say(f"{LABEL}: {s['weights']} weights, {s['efficiency']:g} of the peaks, {s['launch_us']:g} us a launch")
    for requests, context in dict.fromkeys((e["requests"], e["context"]) for e in entries):
        here = [e for e in entries if (e["requests"], e["context"]) == (requests, context)]
        _show_entries(here, f"{LABEL}: requests {requests}, context {context}")
    if any("published" in (entry["tau_source"] or "") for entry in entries):
        say(f"τ: published by z-lab for {s['tau']}, greedy, on a B200 with its own engine; not measured here")
    for name, widths in report["too_wide"].items():
        say(f"{name}: left out, beyond twice its drafter's block: width {', '.join(map(str, widths))}")
    _show_policy(report["policy"])
    if report["measured"]:
        _show_measured(report["measured"])
        if any(row["published_peaks"] for row in report["measured"]):
            say("nothing on a GPU faster than its bandwidth: " + ("yes" if report["ok"] else "NO"))
        if not all(row["published_peaks"] for row in report["measured"]):
            say("a CPU has the bandwidth of a throughput report: its load and threads are part of the ratio")


def _show_entries(entries: list[dict[str, Any]], title: str) -> None:
    costs, gains = [], []
    for entry in entries:
        name = [entry["model"], entry["gpu"], str(entry["width"])]
        times = [number(entry[f"{part}_ms"], 3) for part in ("step", "draft", "verify", "commit", "limit")]
        costs.append([*name, *times, entry["bound"] if entry["fits"] else "no room"])
        share = number(100 * entry["draft_share"], 1)
        taus = number(entry["even_tau"]), number(entry["tau"])
        speed = number(entry["tokens_per_s"], 0), number(entry["speedup"])
        gains.append([*name, share, *taus, *speed])
    heads = ("model", "GPU"), ("width", "step", "draft", "verify", "commit", "limit", "bound by")
    table(f"{title}, ms", costs, left=heads[0], right=heads[1])
    more = ("width", "draft %", "even τ", "τ", "tokens/s", "x plain")
    table(f"{title}, speed", gains, left=heads[0], right=more)


def _show_policy(found: list[dict[str, Any]]) -> None:
    gpus = list(dict.fromkeys(row["gpu"] for row in found))
    times = {(row["model"], row["gpu"]): number(row["policy_ms"], 3) for row in found}
    rows = [
        [name, *(times[name, gpu] for gpu in gpus)] for name in dict.fromkeys(row["model"] for row in found)
    ]
    say("the published predictor runs once a request, in no step above")
    table(f"{LABEL}: predictor, ms", rows, left=("model",), right=gpus)


def _show_measured(rows: list[dict[str, Any]]) -> None:
    shown = [
        [
            f"{row['model']}, {row['gpu']}",
            *(str(row[key]) for key in ("requests", "context", "width", "what")),
        ]
        + [number(row[key], digits) for key, digits in (("measured_ms", 3), ("step_ms", 3), ("ratio", 2))]
        for row in rows
    ]
    heads = ("R", "context", "width", "of a", "measured", LABEL, "ratio")
    table("measured / projected, ms", shown, left=("on",), right=heads)


def plot(report: dict[str, Any], path: Path) -> bool:
    """Step time by width, a panel a model. False without matplotlib."""
    from roofline_plot import draw

    return draw(report, path)
