"""`blockpilot analyze`: what the best width of each prompt is worth, and how much of it is noise.

With `--json` stdout holds one object with the keys of `JSON_KEYS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockpilot.cli.console import ERR, emit_json, number, say, table
from blockpilot.cli.options import JsonOption, parse_window

if TYPE_CHECKING:
    from blockpilot.training.analysis import Analysis, Spread

JSON_KEYS = {
    "path": "what was read",
    "sets": "for each set tau_by_width, at_block, window, best fixed width, oracle and its gains as shares, noise "
    "(the same gains where widths differ by noise alone), locality of the best widths, and chosen widths if any",
    "families": "the same for each family of a label file",
    "chosen": "prompts with a chosen width, and how many are as good as the oracle; null: none",
}
PathArgument = Annotated[
    Path, typer.Argument(help="A label file, or a folder of tables {prompt: tau} named by width, as 16.json.")
]
BlockOption = Annotated[
    int | None,
    typer.Option("--block-size", min=1, help="The drafter's, for tables; default 16. Label files record it."),
]
WindowOption = Annotated[
    str | None,
    typer.Option(
        "--window", help="Widths to choose from; default: B-2 to B+2 of tables, all of a label file."
    ),
]


def run(
    path: PathArgument,
    block_size: BlockOption = None,
    window: WindowOption = None,
    simulations: Annotated[int, typer.Option("--simulations", min=1, help="Tables of pure noise.")] = 2000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the noise.")] = 0,
    json: JsonOption = False,
) -> None:
    """Mean tau of fixed widths, the oracle, a noise control and the locality of best widths."""
    from blockpilot.training.acceptance import read_acceptance
    from blockpilot.training.analysis import analyse

    widths = None if window is None else parse_window("--window", window)
    tables = read_acceptance(path, block_size)
    groups = {t.name: dict.fromkeys(t.groups) for t in tables}
    families = [t.group(name) for t in tables for name in groups[t.name] if len(groups[t.name]) > 1]
    with ERR.status(f"{simulations} simulations a set"):
        found, parts = (
            [analyse(t, widths, simulations=simulations, seed=seed) for t in some]
            for some in (tables, families)
        )
    if json:
        emit_json({
            "path": str(path),
            "sets": [a.to_dict() for a in found],
            "families": [a.to_dict() for a in parts],
            "chosen": _chosen(found),
        })  # fmt: skip
    else:
        _print(found, parts)


def _chosen(found: Sequence[Analysis]) -> dict[str, int] | None:
    known = [a.chosen for a in found if a.chosen is not None]
    if not known:
        return None
    return {"prompts": sum(c.prompts for c in known), "equal_oracle": sum(c.equal_oracle for c in known)}


def _print(found: Sequence[Analysis], parts: Sequence[Analysis]) -> None:
    widths = sorted({w for a in found for w in a.tau_by_width})
    means = [[a.name, *(number(a.tau_by_width.get(w), 3) for w in widths)] for a in found]
    table("mean τ by width", means, left=("set",), right=[str(w) for w in widths])
    everything = [*found, *parts]
    table(
        f"choosing among widths, drafter block B = {found[0].block_size}",
        [_row(a) for a in everything],
        left=("set", "window"),
        right=("prompts", "τ at B", "best fixed", "oracle", "over B", "noise", "over best", "noise"),
    )
    table(
        "best width of all measured ones",
        [_place(a) for a in everything],
        left=("set",),
        right=("beats B", "not B, lowest on a tie", "within B±3", "tied"),
    )
    if (chosen := _chosen(found)) is not None:
        say(f"chosen widths as good as the oracle: {chosen['equal_oracle']} of {chosen['prompts']}")
    say("noise: the oracle's gain where widths differ by noise alone, mean and 95 % range of simulations")


def _row(a: Analysis) -> list[str]:
    return [
        a.name,
        f"{a.window[0]}…{a.window[-1]}",
        str(a.prompts),
        number(a.at_block, 3),
        f"{number(a.best_fixed, 3)} ({a.best_fixed_width})",
        number(a.oracle, 3),
        percent(a.gain_over_block, sign=True),
        noise(a.noise and a.noise.over_block),
        percent(a.gain_over_best_fixed, sign=True),
        noise(a.noise and a.noise.over_best_fixed),
    ]


def _place(a: Analysis) -> list[str]:
    place = a.locality
    return [a.name, *(percent(s) for s in (place.differs, place.differs_lowest, place.within, place.tied))]


def percent(share: float | None, sign: bool = False) -> str:
    """A share for a table; a dash where there is none."""
    return "-" if share is None else f"{100 * share:{'+' if sign else ''}.1f} %"


def noise(spread: Spread | Any) -> str:
    """The noise control's mean and range for a table."""
    if spread is None:
        return "-"
    return f"{percent(spread.mean, sign=True)} ({100 * spread.low:.1f} to {100 * spread.high:.1f})"
