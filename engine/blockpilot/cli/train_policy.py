"""`blockpilot train-policy`: fit a block-width policy to labels and report it on held-out prompts.

With `--json` stdout holds one object with the keys of `JSON_KEYS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from blockpilot.cli.console import ERR, emit_json, note, progress, say, table
from blockpilot.cli.options import Engine, JsonOption, ThreadsOption, parse_window

if TYPE_CHECKING:
    from blockpilot.training.held_out import HeldOutReport

JSON_KEYS = {
    "policy": "the default policy file: the predictor, or the best fixed width where the report supports no predictor",
    "predictor": "the predictor's file",
    "report": "held-out figures, as written by --report",
    "ablation": "what --ablate wrote, or null",
}
LabelsArgument = Annotated[list[Path], typer.Argument(help="Label files of one pair.")]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Policy file to write; required unless --ablate is given."),
]
KindOption = Annotated[Literal["compact", "full"], typer.Option("--kind", help="Size of the predictor.")]
InputKindOption = Annotated[
    str | None,
    typer.Option("--input-kind", help="raw, probabilities, normalised, top_k or mean_likely_embedding."),
]
ObjectiveOption = Annotated[
    Literal["acceptance", "throughput"], typer.Option("--objective", help="What the best width maximises.")
]
LossOption = Annotated[
    Literal["cross_entropy", "expected_gain"], typer.Option("--loss", help="What training minimises.")
]
CostOption = Annotated[
    Path | None,
    typer.Option(
        "--cost", help='A calibration file, or JSON of {"width": seconds per step}; for throughput.'
    ),
]
WindowOption = Annotated[
    str | None,
    typer.Option(
        "--window", help="Widths to choose from; default: all labelled, and for throughput plain decoding, 1."
    ),
]
EvaluationOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--evaluation", help="Label file of evaluation sets, for the report alone; may be repeated."
    ),
]
SplitOption = Annotated[
    Literal["random", "family"], typer.Option("--split", help="Hold out prompts at random or whole families.")
]
HeldOutOption = Annotated[float, typer.Option("--held-out", help="Share of the prompts held out.")]
EpochsOption = Annotated[int, typer.Option("--epochs", min=1, help="At most.")]
RateOption = Annotated[float | None, typer.Option("--learning-rate", help="Default: the kind's.")]
HiddenOption = Annotated[int | None, typer.Option("--hidden", min=1, help="Default: the kind's.")]
DepthOption = Annotated[int, typer.Option("--depth", min=1, max=4, help="Hidden layers.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the split, the weights and the batches.")]
SeedsOption = Annotated[
    int, typer.Option("--seeds", min=1, help="Networks to train on the same split; the first is saved.")
]
TimedOption = Annotated[
    str | None,
    typer.Option(
        "--target", "-t", help="Time a predictor call on this target; default: on a float table of its size."
    ),
]
ReportOption = Annotated[Path | None, typer.Option("--report", help="Write the held-out report as JSON.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Write the held-out report as PNG.")]
AblateOption = Annotated[
    Path | None,
    typer.Option(
        "--ablate", help="Train the paper's ablations and write them as JSON; an existing file is continued."
    ),
]


def run(
    labels: LabelsArgument,
    output: OutputOption = None,
    kind: KindOption = "compact",
    input_kind: InputKindOption = None,
    objective: ObjectiveOption = "acceptance",
    loss: LossOption = "cross_entropy",
    cost: CostOption = None,
    window: WindowOption = None,
    evaluation: EvaluationOption = None,
    split: SplitOption = "random",
    held_out: HeldOutOption = 0.25,
    epochs: EpochsOption = 100,
    learning_rate: RateOption = None,
    hidden: HiddenOption = None,
    depth: DepthOption = 2,
    seed: SeedOption = 0,
    seeds: SeedsOption = 1,
    threads: ThreadsOption = None,
    target: TimedOption = None,
    report: ReportOption = None,
    plot: PlotOption = None,
    ablate: AblateOption = None,
    json: JsonOption = False,
) -> None:
    """Fit a policy to labels; report it held out beside fixed widths, the oracle and shuffled labels.

    Where the predictor does not beat the best fixed width, the policy file holds that width, and the predictor
    is written beside it.
    """
    if output is None and ablate is None:
        raise ValueError("train-policy: expected --output or --ablate, got neither")
    shared = {
        "epochs": epochs,
        "learning_rate": learning_rate,
        "loss": loss,
        "held_out": held_out,
        "split": split,
        "seed": seed,
        "threads": threads,
    }
    network = {"kind": kind, "input_kind": input_kind, "hidden": hidden, "depth": depth, "seeds": seeds}
    widths = None if window is None else parse_window("--window", window)
    goal = {"objective": objective, "cost": cost}
    answer: dict[str, Any] = dict.fromkeys(JSON_KEYS)
    if output is not None:
        options = {**goal, "window": widths, "evaluation": evaluation or []}
        found = _train(labels, output, {**network, **shared}, target, **options)
        answer |= _tell(found, output, report, plot, json)
    if ablate is not None:
        answer["ablation"] = _ablate(labels, ablate, shared, json, **goal)
    if json:
        emit_json(answer)


def _train(
    labels: list[Path], output: Path, settings: dict[str, Any], target: str | None, **options: Any
) -> HeldOutReport:
    from blockpilot.training.policy_training import TrainSettings, train_policy

    chosen = TrainSettings(**settings)
    with ERR.status(f"training a {settings['kind']} policy on {len(labels)} label files") as status:
        options["progress"] = status.update
        if target is None:
            return train_policy(labels, output, settings=chosen, time_calls=True, **options)
        with Engine.resolve(target, "none", "none", threads=settings["threads"]).open() as llm:
            return train_policy(labels, output, settings=chosen, time_calls=llm.target.embedding, **options)


def _tell(
    found: HeldOutReport, output: Path, report: Path | None, plot: Path | None, json: bool
) -> dict[str, Any]:
    import blockpilot.training.report as reporting
    from blockpilot.training.policy_training import predictor_file

    if report is not None:
        reporting.write_json(found, report)
    if plot is not None and not reporting.plot(found, plot):
        note("no plot: matplotlib is not installed")
    predictor = output if found.fixed_width is None else predictor_file(output)
    if not json:
        reporting.render(found)
        say(f"policy written to {output}")
        if predictor != output:
            say(f"it is the fixed width {found.fixed_width}; the predictor is in {predictor}")
    return {"policy": str(output), "predictor": str(predictor), "report": found.to_dict()}


def _ablate(
    labels: list[Path], output: Path, settings: dict[str, Any], json: bool, **goal: Any
) -> dict[str, Any]:
    from blockpilot.training import ablation
    from blockpilot.training.fitting import TrainSettings

    chosen = TrainSettings(kind="full", patience=settings["epochs"], **settings)
    total = sum(len(values) for values in ablation.GRID.values())
    with progress("ablations", total=total) as advance:
        found = ablation.ablate(labels, output, settings=chosen, progress=advance, **goal)
    if not json:
        left, right = ablation.HEADINGS[:2], ablation.HEADINGS[2:]
        title = "ablations: share of best widths chosen, training/held out; the rest held out"
        table(title, ablation.rows(found), left=left, right=right)
        for line in ablation.skipped(found):
            say(line)
        say(f"ablations written to {output}")
    return found
