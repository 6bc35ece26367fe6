"""What the benchmark of drafters found: shares of a step, the same steps on a GPU, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockpilot import LLM
from blockpilot.cli.console import number, table
from peer_report import Row, median_of, print_outcome, range_of, same
from roofline_devices import Device
from roofline_drafters import projected
from roofline_project import LABEL

OUTSIDE = ("prefill", "policy")  # phases that no step has
DRAFTING = ("draft", "commit")


def add_shares(results: dict[str, Any]) -> None:
    """`draft_share` of every arm's steps, overall and by dataset."""
    for result in results.values():
        for group in (result["overall"], *result["datasets"].values()):
            for found in group.values():
                phases = {name: s for name, s in found["phase_s"].items() if name not in OUTSIDE}
                whole = sum(phases.values())
                drafting = sum(phases.get(name, 0.0) for name in DRAFTING)
                found["draft_share"] = drafting / whole if whole else None


def project_rows(
    rows: Sequence[Row], engines: Mapping[str, LLM], context: int, device: Device
) -> dict[str, Any]:
    """`roofline_drafters.projected` of every arm by temperature, overall and by dataset."""

    def of(chosen: Sequence[Row]) -> dict[str, Any]:
        return {
            name: projected(
                [row.runs[name] for row in chosen], llm.target.config, llm.drafter, context, device
            )
            for name, llm in engines.items()
        }

    results = {}
    for temperature in dict.fromkeys(row.temperature for row in rows):
        here = [row for row in rows if row.temperature == temperature]
        names = dict.fromkeys(row.prompt.dataset for row in here)
        sets = {name: of([row for row in here if row.prompt.dataset == name]) for name in names}
        results[f"{temperature:g}"] = {"overall": of(here), "datasets": sets}
    return {"label": LABEL, "gpu": device.name, "context": context, "weights": "bf16", "results": results}


def print_drafters(report: dict[str, Any]) -> None:
    """Measured and projected tables by temperature; the last line says whether what must be identical is."""
    for temperature, result in report["results"].items():
        best = set(report["best"][temperature].values())
        overall = result["overall"]
        rows = [_row(report, name, found, name in best) for name, found in overall.items()]
        heads = ("CPU s", "τ", "draft %", "tokens/s", "min–max", "× plain", "same")
        table(
            f"T={temperature}, median over prompts; * best of its drafter; @ first other token",
            rows,
            ("arm",),
            heads,
        )
        timed = [[arm, *_drafting(found)] for arm, found in overall.items() if found["draft_ms"]]
        table(f"T={temperature}, median step's drafting", timed, ("arm",), ("draft ms", "÷ eagle3"))
        _by_set(f"T={temperature}, τ and tokens/s by dataset", result, "pooled_tokens_per_s", result)
        _print_projected(report["projected"], temperature, result)
    print_outcome(report)


def _row(report: dict[str, Any], name: str, found: dict[str, Any], best: bool) -> list[str]:
    trained = report["drafters"].get(report["families"][name], {}).get("cpu_seconds")
    return [
        f"{name} *" if best else name,
        number(trained, 0),
        number(found["tau"]),
        _percent(found["draft_share"]),
        number(median_of(found, "tokens_per_s"), 1),
        range_of(found, "tokens_per_s"),
        number(median_of(found, "ratio")),
        same(found),
    ]


def _drafting(found: dict[str, Any]) -> tuple[str, str]:
    return number(found["draft_ms"], 3), number(found["draft_ratio"])


def _print_projected(report: dict[str, Any], temperature: str, measured: dict[str, Any]) -> None:
    result = report["results"][temperature]
    rows = [
        [
            name,
            number(measured["overall"][name]["tau"]),
            number(found["step_ms"], 3),
            _percent(found["draft_share"]),
            number(found["tokens_per_s"], 0),
            number(found["ratio"]),
        ]
        for name, found in result["overall"].items()
    ]
    where = f"{report['label']} for {report['gpu']}, {report['weights']}, {report['context']} tokens before"
    table(f"T={temperature}, {where}", rows, ("arm",), ("τ", "step ms", "draft %", "tokens/s", "× plain"))
    _by_set(f"T={temperature}, {report['label']} by dataset", result, "tokens_per_s", measured)


def _by_set(title: str, result: dict[str, Any], key: str, measured: dict[str, Any]) -> None:
    """τ and a speed of every arm in every dataset, where there are several."""
    datasets = result["datasets"]
    if len(datasets) < 2:
        return
    rows = [
        [arm, *(_pair(measured["datasets"][d][arm]["tau"], datasets[d][arm][key]) for d in datasets)]
        for arm in result["overall"]
    ]
    table(title, rows, ("arm",), tuple(datasets))


def _pair(tau: float | None, speed: float | None) -> str:
    return f"{number(tau)} · {number(speed, 0)}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
