"""The learning curve of a drafter as a picture."""

from __future__ import annotations

import json
from pathlib import Path

from blockpilot.policies.atomic import replacing


def plot_curve(log: Path, path: Path) -> bool:
    """τ by width and loss against blocks, as PNG. False when matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    lines = [json.loads(x) for x in log.read_text(encoding="utf-8").splitlines()]
    found = [x for x in lines if x["kind"] == "validation"]
    losses = [x for x in lines if x["kind"] == "train"]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for width in found[-1]["tau"] if found else ():
        points = [(x["blocks"], x["tau"][width]) for x in found if width in x["tau"]]
        axes.plot(*zip(*points, strict=True), marker=".", label=f"τ, width {width}")
    axes.set_xlabel("blocks seen")
    axes.set_ylabel("held-out τ")
    axes.legend(loc="upper left", frameon=False)
    right = axes.twinx()
    right.plot([x["blocks"] for x in losses], [x["loss"] for x in losses], color="0.6", linewidth=1)
    right.set_ylabel("training loss", color="0.4")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return True
