"""One small file of each kind that a page is made from, all of the pair fake-target and fake-drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blockpilot.policies import Pair
from blockpilot.training.label_store import LabelStore
from tests.training.calibrations import calibration
from tests.training.fakes import label_row, planted

PAIR = {"target": "fake-target", "drafter": "fake-drafter"}
WINDOW = (2, 4)
BLOCK = 4
# By prompt: family, steps of 10 at width 2 and 4 that keep at least 1, and at width 4 at least 2 and 3 drafts.
ANSWERS = [("even", 5, (5, 2, 1)), ("odd", 2, (2, 0, 0)), ("even", 7, (6, 5, 4)), ("odd", 3, (1, 1, 0))]


def write_labels(path: Path, pair: dict[str, str] = PAIR, **over: Any) -> Path:
    settings = {
        "pair": pair,
        "block_size": BLOCK,
        "window": list(WINDOW),
        "temperature": 0.0,
        "dtype": "float32",
    }
    inputs, _ = planted(len(ANSWERS))
    with LabelStore(path, settings) as store:
        for i, (family, narrow, wide) in enumerate(ANSWERS):
            kept = [[narrow], list(wide)]
            committed = [10 + sum(k) for k in kept]
            row = {
                **label_row(i, inputs[i], [c / 10 for c in committed]),
                "family": family,
                "window": list(WINDOW),
                "steps": [10, 10],
                "committed": committed,
                "kept": kept,
                "offered": [[10], [10, 10, 8]],
                "prompt_tokens": 100 + 20 * i,
                "tokens": 40,
            }
            store.append([{**row, **over}])
    return path


def write_calibration(path: Path, pair: dict[str, str] = PAIR, **over: Any) -> Path:
    calibration(pair=Pair(**pair), **over).save(path)
    return path


LOG = [
    *(
        {
            "kind": "train", "step": s, "blocks": 64 * s, "tokens": 640 * s, "cpu_seconds": 36.0 * s,
            "loss": 5 - s / 100, "accuracy": [0.1, None], "lr": 1e-3,
        }
        for s in range(10, 110, 10)
    ),
    *(
        {
            "kind": "validation", "step": s, "blocks": 64 * s, "cpu_seconds": 36.0 * s,
            "tau": {"4": 1 + s / 100, "2": 1 + s / 200}, "accuracy": [0.4, 0.2, 0.1],
        }
        for s in (25, 50, 100)
    ),
]  # fmt: skip


def write_log(path: Path, lines: list[dict[str, Any]] = LOG) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def bench_result() -> dict[str, Any]:
    figures = {
        "identical": True, "prompts": 3, "tau": 1.5, "width": [4, 4, 2], "plain_tokens_per_s": 20.0,
        "spec_tokens_per_s": 31.0, "speedup": 1.55, "acceptance_by_offset": [0.4, 0.1, None],
    }  # fmt: skip
    slow = {**figures, "identical": False, "speedup": None, "tau": None, "spec_tokens_per_s": None}
    arms = {"policy": {"overall": figures, "datasets": {"a": figures, "b": slow}}}
    return {
        "arms": arms,
        "settings": {"pair": "fake-target+fake-drafter", "temperature": 0.0, "threads": 1},
        "hardware": {"cpu": "a processor", "cpu_capability": "AVX2", "threads": 1, "cuda": []},
        "versions": {"python": "3.12", "blockpilot": "0.1.0", "triton": None},
    }


def write_bench(path: Path, report: dict[str, Any] | None = None) -> Path:
    path.write_text(json.dumps(report or bench_result()))
    return path


def policy_report() -> dict[str, Any]:
    def interval(mean: float) -> dict[str, float]:
        return {"mean": mean, "low": mean - 0.25, "high": mean + 0.125}

    section = {
        "measure": "tau",
        "strategies": {"best_fixed": interval(1.5), "predictor": interval(1.625), "oracle": interval(1.75)},
        "gains": {"predictor - best_fixed": interval(0.125), "predictor - oracle": interval(-0.125)},
        "best_fixed_width": 4,
        "picks": {"2": 1, "4": 6},
        "best_widths": {"2": 3, "4": 4},
        "accuracy": 0.5,
        "control_accuracy": 0.25,
        "block_size_best": 0.75,
        "block_size_label": 0.25,
        "regret": 0.125,
    }
    group = {k: section[k] for k in ("strategies", "gains", "picks", "regret")} | {"prompts": 5}
    halves = {"best_fixed": interval(1.5), "predictor": interval(1.5), "split_half_oracle": interval(1.4375)}
    section |= {
        "by_family": {"letter": group},
        "by_dataset": {},
        "evaluation": {"gsm8k": group},
        "split_half": {"prompts": 6, "strategies": halves, "gains": {}},
    }
    return {
        "objective": "throughput",
        "window": [2, 4],
        "block_size": 4,
        "train": 21,
        "held_out": 7,
        "split": "family",
        "acceptance": section,
        "throughput": {**section, "measure": "tokens_per_second"},
        "tau_by_width": {"2": interval(1.25), "4": interval(1.5)},
        "conclusion": "The predictor is 1 < 2 & so on.",
        "loss": "cross_entropy",
        "seeds": {
            "seeds": [0, 1],
            "predictor": [1.5, 1.625],
            "gain": [0.0, 0.125],
            "accuracy": [0.5, 0.25],
            "mean": 0.0625,
            "spread": 0.0883883,
        },
        "saved": {"kind": "fixed", "width": 4},
        "warnings": ["Few prompts."],
        "predictor_us": 12.5,
    }


def write_policy(path: Path, report: dict[str, Any] | None = None) -> Path:
    path.write_text(json.dumps(report or policy_report()))
    return path
