"""What the peer benchmark found: medians and spread by arm and dataset, differences, tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from blockpilot.cli.console import fail, number, say, table
from blockpilot.cli.prompts import Prompt
from peer_types import Arm, Run

PLAIN = "plain"


@dataclass(frozen=True)
class Row:
    """The answers of every arm to one prompt at one temperature, by the arm's name."""

    prompt: Prompt
    temperature: float
    runs: dict[str, Run]


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median, least and greatest of what is there; None of nothing."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    return {"median": statistics.median(there), "min": min(there), "max": max(there)}


def first_difference(a: Run, b: Run) -> int | None:
    """Index of the first token that differs, the shorter length if one ends early; None: the same answer."""
    for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)):
        if x != y:
            return i
    failed = a.error is not None or b.error is not None
    same = len(a.token_ids) == len(b.token_ids) and not failed
    return None if same else min(len(a.token_ids), len(b.token_ids))


def compared(arm: Arm, temperature: float) -> bool:
    """Whether this arm's answers are compared: another random generator draws other tokens."""
    return arm.exact or temperature == 0


def figures(rows: Sequence[Row], arm: Arm) -> dict[str, Any]:
    """Figures of an arm over rows of one temperature.

    Returns:
        `tokens_per_s` (decoding alone), `first_token_s` and `ratio` (speed against `plain` on the same prompt),
        each as median, min and max over the prompts; `pooled_tokens_per_s`: all tokens / all seconds; `tau`;
        `phase_s`: seconds per step; `identical` to the reference, None where that is not compared, and
        `first_differences`: the token index of every answer that differs.
    """
    runs = [row.runs[arm.name] for row in rows]
    seconds, decoded = sum(run.decoding for run in runs), sum(run.decoded for run in runs)
    steps = sum(run.steps or 0 for run in runs)
    found = [first_difference(row.runs[arm.reference], row.runs[arm.name]) for row in rows]
    differences = [index for index in found if index is not None]
    checked = bool(rows) and compared(arm, rows[0].temperature)
    return {
        "prompts": len(runs),
        "tokens": sum(len(run.token_ids) for run in runs),
        "tokens_per_s": spread(run.tokens_per_s for run in runs),
        "pooled_tokens_per_s": decoded / seconds if decoded and seconds > 0 else None,
        "ratio": spread(_ratio(row.runs[arm.name], row.runs[PLAIN]) for row in rows),
        "first_token_s": spread(run.first_token for run in runs),
        "tau": decoded / steps if steps else None,
        "phase_s": _phases(runs, steps or decoded),
        "identical": not differences if checked else None,
        "first_differences": differences if checked else None,
        "errors": sum(run.error is not None for run in runs),
    }


def _ratio(run: Run, plain: Run) -> float | None:
    ours, base = run.tokens_per_s, plain.tokens_per_s
    return ours / base if ours and base else None


def _phases(runs: Sequence[Run], steps: int) -> dict[str, float]:
    names = dict.fromkeys(name for run in runs for name in run.phases if name != "prefill")
    if not steps:
        return {}
    return {name: sum(run.phases.get(name, 0.0) for run in runs) / steps for name in names}


def build_report(rows: Sequence[Row], arms: Sequence[Arm]) -> dict[str, Any]:
    """Figures by temperature, overall and by dataset; the best arm of each family; every difference.

    Returns:
        `ok`: every arm that must equal its reference does, without a failed request.
    """
    temperatures = dict.fromkeys(row.temperature for row in rows)
    results = {f"{t:g}": _results([r for r in rows if r.temperature == t], arms) for t in temperatures}
    exact = [result["overall"][arm.name] for result in results.values() for arm in arms if arm.exact]
    return {
        "ok": bool(exact) and all(found["identical"] and not found["errors"] for found in exact),
        "results": results,
        "best": {t: _best(result["overall"], arms) for t, result in results.items()},
        "differences": [found for row in rows for found in _differences(row, arms)],
        "errors": [
            {"arm": name, "id": row.prompt.id, "temperature": row.temperature, "error": run.error}
            for row in rows
            for name, run in row.runs.items()
            if run.error is not None
        ],
        "runs": [_raw(row) for row in rows],
    }


def add_ceilings(results: dict[str, Any], probes: dict[str, dict[str, Any]]) -> None:
    """Beside each speculative arm with parts timed alone: τ / their sum, which no loop of them can pass.

    `ceiling` tokens/s, `of_ceiling`: the pooled speed as a share of it.
    """
    for result in results.values():
        for arm, found in result["overall"].items():
            alone = probes.get(arm, {}).get("alone_seconds")
            speed, tau = found["pooled_tokens_per_s"], found["tau"]
            if alone and tau and speed:
                found["ceiling"] = tau / sum(alone.values())
                found["of_ceiling"] = speed / found["ceiling"]


def _results(rows: Sequence[Row], arms: Sequence[Arm]) -> dict[str, Any]:
    names = dict.fromkeys(row.prompt.dataset for row in rows)
    groups = {name: [row for row in rows if row.prompt.dataset == name] for name in names}
    return {
        "overall": {arm.name: figures(rows, arm) for arm in arms},
        "datasets": {name: {arm.name: figures(g, arm) for arm in arms} for name, g in groups.items()},
    }


def _best(overall: dict[str, Any], arms: Sequence[Arm]) -> dict[str, str]:
    """The arm of each family with the greatest median speed."""
    best: dict[str, str] = {}
    for arm in arms:
        rival = best.get(arm.family)
        speed = median_of(overall[arm.name], "tokens_per_s")
        if speed is not None and (
            rival is None or speed > (median_of(overall[rival], "tokens_per_s") or 0.0)
        ):
            best[arm.family] = arm.name
    return best


def _differences(row: Row, arms: Sequence[Arm]) -> list[dict[str, Any]]:
    found = []
    for arm in arms:
        index = first_difference(row.runs[arm.reference], row.runs[arm.name])
        if index is not None and compared(arm, row.temperature):
            place = {"temperature": row.temperature, "id": row.prompt.id, "token": index}
            found.append({"arm": arm.name, "reference": arm.reference, "exact": arm.exact, **place})
    return found


def _raw(row: Row) -> dict[str, Any]:
    """What the figures were made from."""
    runs = {
        name: {
            "tokens": len(run.token_ids),
            "first_token": run.first_token,
            "decoding": run.decoding,
            "steps": run.steps,
        }
        for name, run in row.runs.items()
    }
    return {
        "id": row.prompt.id,
        "dataset": row.prompt.dataset,
        "temperature": row.temperature,
        "order": list(runs),
        "arms": runs,
    }


def median_of(found: dict[str, Any], key: str, scale: float = 1.0) -> float | None:
    """The median of a `spread`."""
    return found[key]["median"] * scale if found[key] else None


def range_of(found: dict[str, Any], key: str) -> str:
    """Least and greatest of a `spread`, for a table."""
    return f"{found[key]['min']:.1f}–{found[key]['max']:.1f}" if found[key] else "-"


def print_report(report: dict[str, Any]) -> None:
    """Tables for people; the last line says whether what must be identical is."""
    for temperature, result in report["results"].items():
        best = set(report["best"][temperature].values())
        rows = [_overall_row(name, found, name in best) for name, found in result["overall"].items()]
        figures = ("tokens/s", "min–max", "× plain", "first ms", "τ", "ceiling", "same")
        legend = "* best of its kind; @ first other token; ceiling: τ / parts timed alone"
        table(
            f"T={temperature}, median over prompts; {legend}",
            rows,
            ("arm",),
            figures,
        )
        if len(result["datasets"]) > 1:
            _print_datasets(temperature, result)
    for arm, probes in report["probes"].items():
        for name, found in probes.items():
            say(f"{arm} {name}: " + ", ".join(f"{key}: {value:.5f}" for key, value in found.items()))
    print_outcome(report)


def print_outcome(report: dict[str, Any]) -> None:
    """What was skipped, failed or differs; the last line says whether what must be identical is."""
    for arm, reason in report["skipped"].items():
        say(f"skipped {arm}: {reason}")
    for found in report["errors"]:
        fail(f"{found['arm']}: {found['id']} at T={found['temperature']:g}: {found['error']}")
    for found in report["differences"]:
        if found["exact"]:
            place = f"{found['id']}, token {found['token']}, T={found['temperature']:g}"
            fail(f"{found['arm']} differs from {found['reference']}: {place}")
    say("ours identical: yes", "bold green") if report["ok"] else say("ours identical: NO", "bold red")


def _overall_row(name: str, found: dict[str, Any], best: bool) -> list[str]:
    return [
        f"{name} *" if best else name,
        number(median_of(found, "tokens_per_s"), 1),
        range_of(found, "tokens_per_s"),
        number(median_of(found, "ratio")),
        number(median_of(found, "first_token_s", 1000), 0),
        number(found["tau"]),
        f"{found['ceiling']:.1f} {found['of_ceiling']:.0%}" if "ceiling" in found else "-",
        same(found),
    ]


def same(found: dict[str, Any]) -> str:
    """Whether the answers are the reference's; if not, how many differ and the first token that does."""
    if found["identical"] is None:
        return "-"
    differences = found["first_differences"]
    return f"{len(differences)}/{found['prompts']} no, @{min(differences)}" if differences else "yes"


def _print_datasets(temperature: str, result: dict[str, Any]) -> None:
    """Median speed by arm and dataset, with whether the answers are the reference's."""
    datasets = result["datasets"]
    rows = [[arm, *(_cell(found[arm]) for found in datasets.values())] for arm in result["overall"]]
    table(f"T={temperature}, tokens/s by dataset; ≠ other tokens", rows, ("arm",), tuple(datasets))


def _cell(found: dict[str, Any]) -> str:
    return number(median_of(found, "tokens_per_s"), 1) + (" ≠" if found["identical"] is False else "")
