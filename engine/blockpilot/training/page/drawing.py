"""Pictures as PNG bytes. Needs matplotlib, the `plot` extra."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

# Okabe and Ito's colours, which colour-blind readers can tell apart; yellow is too pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
_MOST_SERIES = 6

T = TypeVar("T")
Interval = tuple[float, float, float]  # mean, low, high


def check_matplotlib() -> None:
    """Refuse to go on without matplotlib."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ValueError(
            "pictures need matplotlib, which is not installed; "
            "install blockpilot with its plot extra, or matplotlib alone"
        ) from error


def draw(paint: Callable[..., None], panels: int = 1, height: float = 3.2) -> bytes:
    """PNG of `panels` axes side by side, which `paint` receives."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, height), layout="constrained")
        paint(*figure.subplots(1, panels, squeeze=False)[0])
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=140, metadata={"Software": None})
    return stream.getvalue()


def spread_out(items: Sequence[T], most: int = _MOST_SERIES) -> list[T]:
    """At most `most` of the items, the first and the last among them, evenly between."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def lines_by_width(
    named: Mapping[str, Mapping[int, Interval]], faint: Sequence[Mapping[int, float]], block: int
) -> bytes:
    """Means with intervals by width, thin grey lines behind them, width B marked."""

    def paint(axes: Any) -> None:
        for values in faint:
            axes.plot(list(values), list(values.values()), color="#bbbbbb", linewidth=0.8, zorder=1)
        for (name, series), colour in zip(named.items(), _cycle(len(named)), strict=True):
            means = [v[0] for v in series.values()]
            error = [[v[0] - v[1] for v in series.values()], [v[2] - v[0] for v in series.values()]]
            axes.errorbar(
                list(series), means, yerr=error, marker="o", capsize=3, color=colour, label=name, zorder=3
            )
        _mark_block(axes, block)
        axes.set(xlabel="block width", ylabel="τ, tokens per step")
        axes.set_xticks(sorted({w for s in named.values() for w in s}))
        if faint:
            axes.plot([], [], color="#bbbbbb", linewidth=0.8, label="one family")
        axes.legend()

    return draw(paint)


def best_widths(series: Mapping[str, Mapping[int, float]], block: int, reach: int) -> bytes:
    """Shares of prompts by width, bars side by side; B ± reach shaded."""

    def paint(axes: Any) -> None:
        widths = sorted({w for values in series.values() for w in values})
        near = [i for i, w in enumerate(widths) if abs(w - block) <= reach]
        if near:
            axes.axvspan(min(near) - 0.5, max(near) + 0.5, color="#f0f0e4", zorder=0, label=f"B±{reach}")
        _bars(axes, widths, series)
        labels = [f"{w}\n(B)" if w == block else str(w) for w in widths]
        axes.set_xticks(range(len(widths)), labels)
        axes.set(xlabel="block width", ylabel="% of prompts")
        axes.legend()

    return draw(paint)


def accepted_lengths(series: Mapping[str, Mapping[int, float]]) -> bytes:
    """Shares of steps by accepted length, bars side by side, one colour a width."""

    def paint(axes: Any) -> None:
        lengths = sorted({k for values in series.values() for k in values})
        _bars(axes, lengths, series)
        axes.set_xticks(range(len(lengths)), [str(k) for k in lengths])
        axes.set(xlabel="accepted drafted tokens of a step", ylabel="% of steps")
        axes.legend(title="width")

    return draw(paint)


def by_offset(series: Mapping[str, Sequence[float | None]]) -> bytes:
    """Acceptance in percent by offset, a line each."""

    def paint(axes: Any) -> None:
        for i, ((name, rates), colour) in enumerate(zip(series.items(), _cycle(len(series)), strict=True)):
            known = [(k, 100 * r) for k, r in enumerate(rates, 1) if r is not None]
            style = ("-", "--", ":")[i % 3]  # lines may lie on one another
            axes.plot(*zip(*known, strict=True), style, marker="o", markersize=4, color=colour, label=name)
        axes.set(xlabel="offset in the block", ylabel="% of offered drafts kept", ylim=(0, None))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()

    return draw(paint)


def speeds(series: Mapping[str, Mapping[int, float]], plain: Mapping[str, float]) -> bytes:
    """Tokens per second by width, and plain decoding as a dashed line of the same colour."""

    def paint(axes: Any) -> None:
        for (name, values), colour in zip(series.items(), _cycle(len(series)), strict=True):
            axes.plot(list(values), list(values.values()), marker="o", color=colour, label=name)
            axes.axhline(plain[name], color=colour, linestyle="--", label=f"{name}, plain")
        axes.set(xlabel="block width", ylabel="tokens per second", ylim=(0, None))
        axes.set_xticks(sorted({w for values in series.values() for w in values}))
        axes.legend(ncols=2)

    return draw(paint)


def strategies(values: Mapping[str, Interval], unit: str) -> bytes:
    """One row per way to choose a width: mean and interval."""

    def paint(axes: Any) -> None:
        names = [name.replace("_", " ") for name in values]
        means = [v[0] for v in values.values()]
        error = [[v[0] - v[1] for v in values.values()], [v[2] - v[0] for v in values.values()]]
        axes.errorbar(means, names, xerr=error, fmt="o", capsize=3, color=COLOURS[0])
        axes.invert_yaxis()
        axes.margins(y=0.12)
        axes.set(xlabel=unit)

    return draw(paint, height=0.9 + 0.3 * len(values))


def curves(
    panels: Mapping[str, Mapping[int, Any]], guesses: Mapping[str, Sequence[tuple[float, float]]]
) -> bytes:
    """τ against each axis, a line per width, guesses dashed; logarithmic in x."""

    def paint(*all_axes: Any) -> None:
        for axes, (label, by_width) in zip(all_axes, panels.items(), strict=True):
            for (width, points), colour in zip(by_width.items(), _cycle(len(by_width)), strict=True):
                axes.plot(
                    *zip(*points, strict=True), marker="o", markersize=3, color=colour, label=f"width {width}"
                )
            if guess := guesses.get(label):
                axes.plot(*zip(*guess, strict=True), "--", color=colour, label="extrapolation")
            axes.set(xlabel=label, xscale="log")
        all_axes[0].set_ylabel("τ on validation prompts")
        all_axes[0].legend()

    return draw(paint, len(panels))


def losses(train: Sequence[tuple[float, float]]) -> bytes:
    """Training loss against blocks."""

    def paint(axes: Any) -> None:
        axes.plot(*zip(*train, strict=True), color=COLOURS[0], linewidth=1)
        axes.set(xlabel="blocks seen", ylabel="training loss")

    return draw(paint, height=2.4)


def _bars(axes: Any, places: Sequence[int], series: Mapping[str, Mapping[int, float]]) -> None:
    thick = 0.8 / len(series)
    for i, ((name, values), colour) in enumerate(zip(series.items(), _cycle(len(series)), strict=True)):
        left = [p + (i - (len(series) - 1) / 2) * thick for p in range(len(places))]
        axes.bar(left, [100 * values.get(x, 0.0) for x in places], thick * 0.92, color=colour, label=name)
    axes.grid(axis="x", visible=False)


def _mark_block(axes: Any, block: int) -> None:
    axes.axvline(block, color="#888888", linestyle=":", linewidth=1, label=f"drafter block B = {block}")


def _cycle(n: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(n)]
