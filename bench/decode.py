"""Decoding with the bundled pair: plain beside every fixed width and the policy, greedy, bundled prompts."""

from __future__ import annotations

import json
from typing import Any

from blockpilot import bundled
from blockpilot.cli import measure
from blockpilot.cli.bench import compare
from blockpilot.cli.bench_report import print_report
from blockpilot.cli.options import BUNDLED_TARGET, Engine, sampling_params
from blockpilot.cli.prompts import load_prompts


def run(quick: bool) -> dict[str, Any]:
    """The report of `blockpilot bench`, with `ok`: every answer equals plain decoding."""
    config = json.loads((bundled.drafter_path() / "config.json").read_text(encoding="utf-8"))
    widths = range(2, config["block_size"] + 1)
    arms = [measure.POLICY, *(measure.Arm(f"width {width}", width) for width in widths)]
    engine = Engine.resolve(BUNDLED_TARGET, None, None)
    params = sampling_params(max_new_tokens=32 if quick else 128, seed=0)
    report = compare(engine, load_prompts((), limit=1 if quick else None), params, arms)
    return {"ok": report["identical"] and not report["errors"], **report}


def show(report: dict[str, Any]) -> None:
    """The tables of `blockpilot bench`."""
    print_report(report)
