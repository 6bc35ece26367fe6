"""`blockpilot calibrate`: what a step costs on this machine, by width, context and number of requests.

With `--json` stdout holds what the file holds, one object with the keys of `JSON_KEYS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockpilot.cli.console import emit_json, number, progress, say, table
from blockpilot.cli.machine import hardware, versions
from blockpilot.cli.options import (
    BUNDLED_TARGET,
    DeviceOption,
    DrafterOption,
    DTypeOption,
    Engine,
    JsonOption,
    MaxLengthOption,
    TargetOption,
    ThreadsOption,
    WeightsOption,
    parse_trees,
    parse_window,
)

if TYPE_CHECKING:
    from blockpilot.training.calibration import Calibration

JSON_KEYS = {
    "calibration": "format of the file, 1",
    "pair": "fingerprints of target and drafter",
    "dtype": "arithmetic",
    "weights": "format of the weights",
    "device": "where it ran",
    "backend": "kernel backend, auto unless forced",
    "threads": "CPU threads",
    "hardware": "machine",
    "versions": "software",
    "trees": "the same with nodes, of every number of nodes that --trees measures",
    "rows": "requests, context, width, sum_width, steps and ms (median, p10, p90 of every phase) of each cell",
    "fit": "c0 by requests, c1 per row of sum_width, residual and plain cost in ms at each context",
}
WidthsOption = Annotated[
    str | None,
    typer.Option("--widths", help="As in 2,4,8; default: up to the drafter's block size. 1 is always there."),
]
TreesOption = Annotated[
    str | None,
    typer.Option("--trees", help="As in 6/16: trees from blocks of width 6, cut to 1 ... 16 nodes."),
]
ContextsOption = Annotated[
    str | None,
    typer.Option("--contexts", help="Cached tokens of a request; default: those of 128,512,1024 that fit."),
]


def run(
    target: TargetOption = BUNDLED_TARGET,
    drafter: DrafterOption = None,
    widths: WidthsOption = None,
    trees: TreesOption = None,
    contexts: ContextsOption = None,
    requests: Annotated[str, typer.Option("--requests", help="Requests decoded together.")] = "1,4",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Steps measured of each cell.")] = 15,
    dtype: DTypeOption = "float32",
    weights: WeightsOption = "auto",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    max_length: MaxLengthOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the JSON goes.")] = Path(
        "calibration.json"
    ),
    json: JsonOption = False,
) -> None:
    """Measure what a step costs on this machine and write it to a file. Best on an otherwise idle machine."""
    engine = Engine.resolve(
        target,
        drafter,
        "none",
        dtype=dtype,
        weights=weights,
        device=device,
        threads=threads,
        max_length=max_length,
    )
    if output.is_dir():
        raise ValueError(f"--output: expected a file, got the folder {output}")
    axes: dict[str, Any] = {"requests": parse_window("--requests", requests, "counts"), "repeats": repeats}
    if contexts is not None:
        axes["contexts"] = parse_window("--contexts", contexts, "tokens")
    if widths is not None:
        axes["widths"] = parse_window("--widths", widths)
    if trees is not None:
        axes["trees"] = parse_trees("--trees", trees)
    found = _measure(engine, axes)
    found.save(output)
    if json:
        emit_json(found.to_dict())
    else:
        _print(found)
        say(f"calibration written to {output}")


def _measure(engine: Engine, axes: dict[str, Any]) -> Calibration:
    from blockpilot.training.step_timing import Grid, calibrate

    with engine.open(max_requests=max(axes["requests"])) as llm:
        grid = Grid.resolve(llm, **axes)
        machine = {"hardware": hardware(engine.threads), "versions": versions()}
        with progress("steps", total=grid.steps, ticking=False) as advance:
            return calibrate(llm, grid, progress=advance, **machine)


def _print(found: Calibration) -> None:
    cells = [(r, c) for r in found.requests for c in found.contexts]
    _print_costs(found, cells)
    if not found.trees:
        return
    trees = {(t.width, t.nodes, t.requests, t.context): t.total for t in found.trees}
    shapes = dict.fromkeys((t.width, t.nodes) for t in found.trees)
    grown = [[f"{w}/{n}", *(number(trees[w, n, r, c]) for r, c in cells)] for w, n in shapes]
    heads = ("width/nodes", *(f"{r} x {c}" for r, c in cells))
    table("ms of a step with trees, requests x context", grown, left=(), right=heads)


def _print_costs(found: Calibration, cells: list[tuple[int, int]]) -> None:
    plain = {cell: found.cost(1, cell[1], cell[0]) for cell in cells}
    rows = []
    for width in found.widths:
        costs = [(found.cost(width, c, r), plain[r, c]) for r, c in cells]
        rows.append([str(width), *(f"{number(ms)} ({number(ms / base)}x)" for ms, base in costs)])
    table(
        f"ms of a step and its ratio to plain, requests x context, {found.hardware['cpu']}",
        rows,
        left=(),
        right=("width", *(f"{r} x {c}" for r, c in cells)),
    )
    fits = [
        [str(f.context), *(number(f.c0[r]) for r in found.requests), number(f.c1, 3), number(f.residual)]
        for f in found.fits()
    ]
    if fits:
        names = [f"c0({r})" for r in found.requests]
        title = "ms = c0 + c1 x sum of widths"
        table(title, fits, left=(), right=("context", *names, "c1", "residual"))
