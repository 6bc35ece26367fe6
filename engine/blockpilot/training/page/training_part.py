"""The section made from a drafter's training log."""

from __future__ import annotations

from typing import Any

from blockpilot.training.page import drawing
from blockpilot.training.page.parts import Part, Picture, Table, count, figure, percent
from blockpilot.training.page.training_log import Extrapolation, TrainingLog, extrapolate

AXES = {"blocks": "blocks seen", "tokens": "tokens seen", "cpu_hours": "CPU hours"}
AHEAD = (2, 4, 10)
_STEPS = 20


def training_part(log: TrainingLog) -> Part:
    """Curves of τ and loss, the newest validation, and a guess of what more training brings."""
    fits = _fits(log)
    pictures = []
    if panels := _panels(log):
        guesses = {AXES[axis]: _line(fit) for axis, fit in fits.items()}
        curves = drawing.curves(panels, guesses)
        pictures.append(Picture("training-tau", "τ on validation prompts during training", curves))
    if len(log.train) > 1:
        losses = [(r["blocks"], r["loss"]) for r in log.train]
        pictures.append(Picture("training-loss", "Training loss", drawing.losses(losses)))
    text = ["τ is measured on validation prompts as training goes on; the x axes are logarithmic."]
    text.append(_about(log, fits))
    if log.others:
        text.append(f"{log.others} lines of the log are of other kinds and are not shown.")
    numbers = {"widths": log.widths, "fits": {axis: vars(fit) for axis, fit in fits.items()}}
    return Part("training", "Training of the drafter", text, pictures, _tables(log, fits), numbers)


def _fits(log: TrainingLog) -> dict[str, Extrapolation]:
    """By axis, for the widest width."""
    if not log.widths:
        return {}
    width = log.widths[-1]
    found = {axis: extrapolate(log.curve(width, axis), width) for axis in AXES}
    return {axis: fit for axis, fit in found.items() if fit is not None}


def _about(log: TrainingLog, fits: dict[str, Extrapolation]) -> str:
    if not fits:
        return "Too few validations to extrapolate from."
    fit = next(iter(fits.values()))
    return (
        f"Dashed lines are an extrapolation, not a measurement: τ at width {log.widths[-1]} as a straight line in "
        f"ln x, by least squares of the last {fit.points} validations, continued to {AHEAD[-1]} times as much. A "
        "straight line does not flatten as such curves do in the end: read it as an upper guess."
    )


def _panels(log: TrainingLog) -> dict[str, Any]:
    """By axis and width, the points that logarithmic axes can show."""
    shown = drawing.spread_out(log.widths)
    panels: dict[str, Any] = {}
    for axis, label in AXES.items():
        found = {w: log.curve(w, axis) for w in shown}
        if any(found.values()):
            panels[label] = {w: points for w, points in found.items() if points}
    return panels


def _line(fit: Extrapolation) -> list[tuple[float, float]]:
    end = fit.last * AHEAD[-1]
    xs = [fit.first * (end / fit.first) ** (i / _STEPS) for i in range(_STEPS + 1)]
    return [(x, fit.at(x)) for x in xs]


def _tables(log: TrainingLog, fits: dict[str, Extrapolation]) -> list[Table]:
    tables = []
    if log.validation:
        last = log.validation[-1]
        seen = [str(last["step"]), count(last["blocks"]), figure(last["cpu_seconds"] / 3600, 2)]
        row = [*seen, *(figure(last["tau"].get(w)) for w in log.widths)]
        header = ["step", "blocks", "CPU hours", *(f"τ at width {w}" for w in log.widths)]
        tables.append(Table("Newest validation", header, [row]))
        offsets = [str(k) for k in range(1, len(last["accuracy"]) + 1)]
        values = ["accuracy", *map(percent, last["accuracy"])]
        tables.append(Table("Accuracy by offset at the newest validation", ["offset", *offsets], [values]))
    rows = []
    for axis, fit in fits.items():
        ahead = [f"{figure(fit.at(n * fit.last))} (at {count(n * fit.last)})" for n in AHEAD]
        rows.append([AXES[axis], *ahead, figure(fit.residual, 4)])
    if rows:
        header = ["against", *(f"{n} times as much" for n in AHEAD), "error of the fit"]
        tables.append(Table(f"Extrapolated τ at width {log.widths[-1]}, not measured", header, rows))
    return tables
