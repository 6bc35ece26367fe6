"""The picture of the roofline benchmark: projected step time by width, one panel per model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blockpilot.policies.atomic import replacing


def draw(report: dict[str, Any], path: Path) -> bool:
    """A line for every GPU, context and number of requests. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    names = list(dict.fromkeys(entry["model"] for entry in report["entries"]))
    figure = Figure(figsize=(4.5 * len(names), 4), layout="constrained")
    for panel, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for entry in report["entries"]:
            if entry["model"] == name:
                label = f"{entry['gpu']}, {entry['requests']} x {entry['context']}"
                lines.setdefault(label, []).append((entry["width"], entry["step_ms"]))
        for label, points in lines.items():
            panel.plot(*zip(*points, strict=True), marker="o", label=label)
        panel.set(title=f"{name}, {report['label']}", xlabel="width", ylabel="ms of a step")
        panel.set_ylim(0, 1.1 * max(ms for points in lines.values() for _, ms in points))
        panel.legend(fontsize="x-small", loc="lower right")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return True
