"""The picture of the peer benchmark: speed by arm, one panel per temperature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blockpilot.policies.atomic import replacing

COLOURS = {"ours": "tab:blue", "transformers": "tab:orange", "dflash": "tab:green", "llama.cpp": "tab:red"}


def draw(report: dict[str, Any], path: Path) -> bool:
    """Median tokens/s of every arm, bars to the least and greatest prompt. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    results = report["results"]
    tallest = max(len(result["overall"]) for result in results.values())
    figure = Figure(figsize=(6 * len(results), 1.2 + 0.3 * tallest), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for panel, (temperature, result) in zip(panels, results.items(), strict=True):
        speeds = {arm: found["tokens_per_s"] for arm, found in result["overall"].items()}
        _bars(panel, {arm: speed for arm, speed in speeds.items() if speed}, report["families"])
        panel.set(title=f"T={temperature}", xlabel="tokens/s: median, min, max of prompts")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return True


def _bars(panel: Any, speeds: dict[str, dict[str, float]], families: dict[str, str]) -> None:
    medians = [speed["median"] for speed in speeds.values()]
    low = [speed["median"] - speed["min"] for speed in speeds.values()]
    high = [speed["max"] - speed["median"] for speed in speeds.values()]
    others = [family for family in dict.fromkeys(families.values()) if family not in COLOURS]
    palette = {**COLOURS, **{family: f"C{i}" for i, family in enumerate(others)}}
    colours = [palette[families[arm]] for arm in speeds]
    panel.barh(list(speeds), medians, xerr=[low, high], color=colours, capsize=2)
    panel.invert_yaxis()
