"""Sections made from label files: τ by width, best widths, accepted lengths, acceptance by offset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from blockpilot.training.analysis import REACH, Analysis, analyse
from blockpilot.training.evaluation import Bootstrap
from blockpilot.training.page import drawing
from blockpilot.training.page.inputs import Bench, Labels
from blockpilot.training.page.parts import Part, Picture, Table, figure, percent

RESAMPLES = 2000
PAPER = "66 % (GSM8K) to 94 % (Alpaca)"


def tau_part(labels: Sequence[Labels]) -> Part:
    """Mean τ by width of every file and family, and what an oracle over widths could add."""
    found = [analyse(x.table) for x in labels]
    means = {x.file: _intervals(x) for x in labels}
    families = [_family_means(x) for x in labels]
    faint = [f for group in families for f in group.values()] if len(labels) == 1 else []
    named = {f"{x.file}, {len(x.rows)} prompts": means[x.file] for x in labels}
    picture = drawing.lines_by_width(named, faint, found[0].block_size)
    tables = [
        _choosing(labels, found),
        *(_by_family(x, f, means[x.file]) for x, f in zip(labels, families, strict=True)),
    ]
    return Part(
        "tau",
        "τ by width",
        [
            "τ is tokens committed by steps / steps, the mean of the prompts; bars are 95 % bootstrap intervals over "
            "prompts. The oracle knows each prompt's best width afterwards. The noise control is what an oracle gains "
            "where prompts and widths only add up and the rest is noise of the same size: a gain at or below it is no "
            "evidence that widths matter to prompts. Where prompts gain from width at different rates it is too high."
        ],
        [Picture("tau-by-width", "Mean τ by block width", picture)],
        tables,
        {x.file: a.to_dict() for x, a in zip(labels, found, strict=True)},
    )


def _intervals(labels: Labels) -> dict[int, drawing.Interval]:
    tau = torch.from_numpy(labels.table.tau)
    bootstrap = Bootstrap(len(tau), RESAMPLES, 0)
    found = [bootstrap.interval(tau[:, i]) for i in range(tau.shape[1])]
    return {w: (v.mean, v.low, v.high) for w, v in zip(labels.table.widths, found, strict=True)}


def _family_means(labels: Labels) -> dict[str, dict[int, float]]:
    """By family, the highest mean τ first; empty when there is only one."""
    names = dict.fromkeys(labels.table.groups)
    means = {name: labels.table.group(name).tau.mean(0).tolist() for name in names if len(names) > 1}
    ranked = sorted(means, key=lambda name: -max(means[name]))
    return {name: dict(zip(labels.table.widths, means[name], strict=True)) for name in ranked}


def _by_family(
    labels: Labels, families: dict[str, dict[int, float]], means: dict[int, drawing.Interval]
) -> Table:
    sizes = {name: labels.table.groups.count(name) for name in families}
    rows = [[name, str(sizes[name]), *map(figure, taus.values())] for name, taus in families.items()]
    ends = [("all", 0, str(len(labels.rows))), ("95 % from", 1, ""), ("95 % to", 2, "")]
    all_rows = [[name, size, *(figure(v[i]) for v in means.values())] for name, i, size in ends]
    caption = f"Mean τ, {labels.file}; columns are block widths"
    return Table(caption, ["family", "prompts", *map(str, means)], [*all_rows, *rows])


def _choosing(labels: Sequence[Labels], found: Sequence[Analysis]) -> Table:
    rows = []
    for x, a in zip(labels, found, strict=True):
        noise = "–" if a.noise is None else percent(a.noise.over_best_fixed.mean, sign=True)
        fixed = f"{figure(a.best_fixed)} (width {a.best_fixed_width})"
        rows.append([
            x.file, figure(a.at_block), fixed, figure(a.oracle), percent(a.gain_over_best_fixed, sign=True), noise,
        ])  # fmt: skip
    header = ["set", "τ at B", "best fixed", "oracle", "oracle over best fixed", "noise control"]
    return Table("Choosing a width", header, rows)


def locality_part(labels: Sequence[Labels]) -> Part:
    """Where each prompt's best width lies, beside the paper's claims."""
    found = {x.file: analyse(x.table, simulations=1).locality for x in labels}
    rows = [
        [file, *(percent(s) for s in (p.differs, p.differs_lowest, p.within, p.tied))]
        for file, p in found.items()
    ]
    pictures = []
    for i, (x, place) in enumerate(zip(labels, found.values(), strict=True)):
        n = len(x.rows)
        series = {
            "best, the lowest width on a tie": {w: c / n for w, c in place.best.items()},
            "reaches the best τ": {w: c / n for w, c in place.reaching.items()},
        }
        name = "best-widths" if i == 0 else f"best-widths-{i + 1}"
        picture = drawing.best_widths(series, x.table.block_size, REACH)
        pictures.append(Picture(name, f"Best widths of the prompts, {x.file}", picture))
    return Part(
        "locality",
        "Best widths and their locality",
        [
            f"BlockPilot (arXiv 2606.31315) says that the best width differs from the drafter's block size B for "
            f"{PAPER} of prompts, and that nearly all lie within B±{REACH}. Many prompts reach their best τ at several "
            "widths, since drafts that are never accepted change nothing; so a prompt counts as differing only where "
            "some width beats B, and beside it where the lowest of the tied widths is counted. Only labelled widths "
            "can be best."
        ],
        pictures,
        [
            Table(
                "Share of prompts",
                ["set", "a width beats B", "lowest best ≠ B", f"a best width in B±{REACH}", "tied"],
                [*rows, ["paper's claim", PAPER, "", "nearly all", ""]],
            )
        ],
        {file: vars(place) for file, place in found.items()},
    )


def accepted_part(labels: Sequence[Labels]) -> Part:
    """How many drafted tokens a step keeps, by width."""
    pictures, tables, numbers = [], [], {}
    for i, x in enumerate(labels):
        shares = {w: lengths(x, w) for w in x.table.widths}
        shown = {str(w): shares[w] for w in drawing.spread_out(x.table.widths)}
        name = "accepted-lengths" if i == 0 else f"accepted-lengths-{i + 1}"
        pictures.append(Picture(name, f"Steps by accepted length, {x.file}", drawing.accepted_lengths(shown)))
        longest = range(max(x.table.widths))
        rows = [
            [f"width {w}", *(percent(s[k]) if k in s else "" for k in longest)] for w, s in shares.items()
        ]
        tables.append(Table(f"Share of steps by accepted length, {x.file}", ["", *map(str, longest)], rows))
        numbers[x.file] = shares
    text = "Drafted tokens that a step keeps; the target's own token comes on top. Steps of all prompts together."
    return Part("accepted", "Accepted lengths", [text], pictures, tables, numbers)


def lengths(labels: Labels, width: int) -> dict[int, float]:
    """Share of steps that keep 0 … width − 1 drafted tokens."""
    column = labels.table.widths.index(width)
    steps = sum(row["steps"][column] for row in labels.rows)
    at_least = [steps, *_totals(labels, column, "kept"), 0]
    return {k: (at_least[k] - at_least[k + 1]) / steps for k in range(width)}


def acceptance(labels: Labels, width: int) -> list[float | None]:
    """Kept / offered drafts at offset 1 … width − 1; None where nothing was offered."""
    column = labels.table.widths.index(width)
    pairs = zip(_totals(labels, column, "kept"), _totals(labels, column, "offered"), strict=True)
    return [kept / offered if offered else None for kept, offered in pairs]


def _totals(labels: Labels, column: int, name: str) -> list[int]:
    return [sum(at) for at in zip(*(row[name][column] for row in labels.rows), strict=True)]


def offset_part(labels: Sequence[Labels], bench: Sequence[Bench]) -> Part | None:
    """Acceptance by offset of every labelled width and every arm of a bench result."""
    tables, drawn, numbers = [], {}, {}
    for x in labels:
        rates = {f"width {w}": acceptance(x, w) for w in x.table.widths if w > 1}
        numbers[x.file] = _known(rates)
        for name in list(numbers[x.file])[-1:]:  # the widest: where others are offered too they hardly differ
            drawn[f"{x.file}, {name}"] = rates[name]
    for result in bench:
        arms: dict[str, Any] = result.report["arms"]
        found = {name: arm["overall"]["acceptance_by_offset"] for name, arm in arms.items()}
        numbers[result.file] = _known(found)
        drawn |= {f"{result.file}, {name}": rates for name, rates in numbers[result.file].items()}
    tables = [_offsets(file, rates) for file, rates in numbers.items() if rates]
    if not drawn:
        return None
    names = drawing.spread_out(list(drawn))
    return Part(
        "offsets",
        "Acceptance by offset",
        [
            "Kept / offered drafts at each place of the block. A draft is kept only if all before it are. The picture "
            "shows the widest width of label files and the arms of bench results, six lines at most."
        ],
        [
            Picture(
                "acceptance-by-offset",
                "Acceptance by offset",
                drawing.by_offset({n: drawn[n] for n in names}),
            )
        ],
        tables,
        dict(numbers),
    )


def _known(rates: dict[str, list[float | None]]) -> dict[str, list[float | None]]:
    return {name: rate for name, rate in rates.items() if any(r is not None for r in rate)}


def _offsets(file: str, rates: dict[str, list[float | None]]) -> Table:
    longest = max(map(len, rates.values()))
    rows = [[name, *map(percent, rate), *[""] * (longest - len(rate))] for name, rate in rates.items()]
    return Table(
        f"Kept / offered, {file}; columns are offsets", ["", *(str(k) for k in range(1, longest + 1))], rows
    )
