"""`blockpilot train-policy`: fit a block-width policy to labels and report it on held-out prompts.

With `--json` stdout holds one object with the keys of `JSON_KEYS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from blockpilot.cli.console import emit_json, note, say
from blockpilot.cli.options import JsonOption, ThreadsOption, parse_window

JSON_KEYS = {"policy": "the policy file", "report": "held-out figures, as written by --report"}


Kind = Literal["compact", "full"]
Objective = Literal["acceptance", "throughput"]
Split = Literal["random", "family"]


def run(
    labels: Annotated[list[Path], typer.Argument(help="Label files of one pair.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Policy file to write.")],
    kind: Annotated[Kind, typer.Option("--kind", help="Size of the predictor.")] = "compact",
    input_kind: Annotated[
        str | None, typer.Option("--input-kind", help="Default: what the kind reads.")
    ] = None,
    objective: Annotated[Objective, typer.Option("--objective", help="What to maximise.")] = "acceptance",
    cost: Annotated[
        Path | None,
        typer.Option("--cost", help='JSON of seconds per step, {"width": seconds}; for throughput.'),
    ] = None,
    window: Annotated[
        str | None, typer.Option("--window", help="Widths to choose from; default: all.")
    ] = None,
    split: Annotated[Split, typer.Option("--split", help="Hold out at random or whole families.")] = "random",
    held_out: Annotated[float, typer.Option("--held-out", help="Share of the prompts held out.")] = 0.25,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="At most.")] = 100,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", help="Default: the kind's.")
    ] = None,
    hidden: Annotated[int | None, typer.Option("--hidden", min=1, help="Default: the kind's.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the split, the weights and the batches.")] = 0,
    threads: ThreadsOption = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write the held-out report as JSON.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write the held-out report as PNG.")] = None,
    json: JsonOption = False,
) -> None:
    """Fit a policy to labels; report it held out beside fixed widths, the oracle and shuffled labels."""
    import blockpilot.training.report as reporting
    from blockpilot.training.policy_training import TrainSettings, train_policy

    settings = TrainSettings(
        kind=kind,
        input_kind=input_kind,
        hidden=hidden,
        epochs=epochs,
        learning_rate=learning_rate,
        held_out=held_out,
        split=split,
        seed=seed,
        threads=threads,
    )
    note(f"training a {kind} policy on {len(labels)} label files")
    found: Any = train_policy(
        labels,
        output,
        settings=settings,
        objective=objective,
        cost=cost,
        window=None if window is None else parse_window("--window", window),
    )
    if report is not None:
        reporting.write_json(found, report)
    if plot is not None and not reporting.plot(found, plot):
        note("no plot: matplotlib is not installed")
    if json:
        emit_json({"policy": str(output), "report": found.to_dict()})
    else:
        reporting.render(found)
        say(f"policy written to {output}")
