"""`blockpilot train-policy`: fit a block-width policy to labels and report it on held-out prompts.

With `--json` stdout holds one object with the keys of `JSON_KEYS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from blockpilot.cli.console import ERR, emit_json, note, say
from blockpilot.cli.options import JsonOption, ThreadsOption, parse_window

if TYPE_CHECKING:
    from blockpilot.training.evaluation import HeldOutReport

JSON_KEYS = {"policy": "the policy file", "report": "held-out figures, as written by --report"}
LabelsArgument = Annotated[list[Path], typer.Argument(help="Label files of one pair.")]
OutputOption = Annotated[Path, typer.Option("--output", "-o", help="Policy file to write.")]
KindOption = Annotated[Literal["compact", "full"], typer.Option("--kind", help="Size of the predictor.")]
InputKindOption = Annotated[str | None, typer.Option("--input-kind", help="Default: what the kind reads.")]
ObjectiveOption = Annotated[
    Literal["acceptance", "throughput"], typer.Option("--objective", help="What the best width maximises.")
]
CostOption = Annotated[
    Path | None,
    typer.Option(
        "--cost", help='A calibration file, or JSON of {"width": seconds per step}; for throughput.'
    ),
]
WindowOption = Annotated[str | None, typer.Option("--window", help="Widths to choose from; default: all.")]
SplitOption = Annotated[
    Literal["random", "family"], typer.Option("--split", help="Hold out prompts at random or whole families.")
]
HeldOutOption = Annotated[float, typer.Option("--held-out", help="Share of the prompts held out.")]
EpochsOption = Annotated[int, typer.Option("--epochs", min=1, help="At most.")]
RateOption = Annotated[float | None, typer.Option("--learning-rate", help="Default: the kind's.")]
HiddenOption = Annotated[int | None, typer.Option("--hidden", min=1, help="Default: the kind's.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the split, the weights and the batches.")]
ReportOption = Annotated[Path | None, typer.Option("--report", help="Write the held-out report as JSON.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Write the held-out report as PNG.")]


def run(
    labels: LabelsArgument,
    output: OutputOption,
    kind: KindOption = "compact",
    input_kind: InputKindOption = None,
    objective: ObjectiveOption = "acceptance",
    cost: CostOption = None,
    window: WindowOption = None,
    split: SplitOption = "random",
    held_out: HeldOutOption = 0.25,
    epochs: EpochsOption = 100,
    learning_rate: RateOption = None,
    hidden: HiddenOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    report: ReportOption = None,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Fit a policy to labels; report it held out beside fixed widths, the oracle and shuffled labels."""
    widths = None if window is None else parse_window("--window", window)
    settings = {
        "kind": kind,
        "input_kind": input_kind,
        "hidden": hidden,
        "epochs": epochs,
        "learning_rate": learning_rate,
        "held_out": held_out,
        "split": split,
        "seed": seed,
        "threads": threads,
    }
    found = _train(labels, output, settings, objective=objective, cost=cost, window=widths)
    _tell(found, output, report, plot, json)


def _train(labels: list[Path], output: Path, settings: dict[str, Any], **options: Any) -> HeldOutReport:
    from blockpilot.training.policy_training import TrainSettings, train_policy

    with ERR.status(f"training a {settings['kind']} policy on {len(labels)} label files"):
        return train_policy(labels, output, settings=TrainSettings(**settings), **options)


def _tell(found: HeldOutReport, output: Path, report: Path | None, plot: Path | None, json: bool) -> None:
    import blockpilot.training.report as reporting

    if report is not None:
        reporting.write_json(found, report)
    if plot is not None and not reporting.plot(found, plot):
        note("no plot: matplotlib is not installed")
    if json:
        emit_json({"policy": str(output), "report": found.to_dict()})
    else:
        reporting.render(found)
        say(f"policy written to {output}")
