"""`blockpilot train-draft`: train a drafter on answers from make-data.

With `--json` stdout holds one object with the keys of `JSON_KEYS`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from blockpilot.cli.console import emit_json, note, progress, say
from blockpilot.cli.options import (
    BUNDLED_TARGET,
    DeviceOption,
    JsonOption,
    TargetOption,
    ThreadsOption,
    WeightsOption,
    check_device,
    parse_layers,
    parse_window,
)

JSON_KEYS = {
    "drafter": "the drafter's folder, in the published format",
    "blocks": "blocks seen in all",
    "tokens": "labelled columns seen in all",
    "cpu_seconds": "processor time of all steps",
    "epoch": "passes over the answers",
    "tau": "width → mean τ over the validation answers",
    "accuracy": "share of right guesses by column at the widest",
    "finished": "whether every block of the recipe was seen",
    "log": "the log, JSON lines",
}
AnswersArgument = Annotated[Path, typer.Argument(help="Folder written by make-data.")]
OutputOption = Annotated[Path, typer.Option("--output", "-o", help="Folder of the run; continued if there.")]
BlocksOption = Annotated[int, typer.Option("--blocks", min=1, help="Blocks to train on, all runs together.")]
MinutesOption = Annotated[float | None, typer.Option("--minutes", help="Stop, resumable, after about these.")]
KindOption = Annotated[str, typer.Option("--kind", help="dflash, eagle3 or specblock.")]
LayersOption = Annotated[
    int | None, typer.Option("--layers", min=1, help="Layers of the drafter; default: 2, of EAGLE-3 its one.")
]
BlockSizeOption = Annotated[int, typer.Option("--block-size", min=2, help="B: training width.")]
FeaturesOption = Annotated[
    str | None, typer.Option("--feature-layers", help="Target layers it reads, as in 1,8,14; 0 is the first.")
]
StartOption = Annotated[
    str | None,
    typer.Option(
        "--start",
        help="Target layers its own begin as, or 'random'; default: the last; of DFlash the first, too.",
    ),
]
WidthsOption = Annotated[
    str | None,
    typer.Option("--train-widths", help="low,high: a step's width is drawn from these; default: B alone."),
]
DistilOption = Annotated[
    float, typer.Option("--distil", min=0, max=1, help="Weight of the target's probabilities in the loss.")
]
GammaOption = Annotated[
    float | None,
    typer.Option(
        "--gamma", help="Decay of the columns' weights; default: 4, of SpecBlock 4.48, 0.8 a column."
    ),
]
WithoutOption = Annotated[
    str | None, typer.Option("--without", help="Parts of SpecBlock to leave out: shift, valid-prefix.")
]
DraftVocabularyOption = Annotated[
    int,
    typer.Option(
        "--draft-vocabulary", min=0, help="Ids it drafts, the answers' most frequent; 0: all of them."
    ),
]


def run(
    answers: AnswersArgument,
    output: OutputOption,
    blocks: BlocksOption = 400_000,
    minutes: MinutesOption = None,
    target: TargetOption = BUNDLED_TARGET,
    kind: KindOption = "dflash",
    layers: LayersOption = None,
    block_size: BlockSizeOption = 8,
    feature_layers: FeaturesOption = None,
    start: StartOption = None,
    mask_token: Annotated[
        int | None, typer.Option("--mask-token", help="Default: an unused control token.")
    ] = None,
    train_widths: WidthsOption = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Answers of a step.")] = 8,
    anchors: Annotated[int, typer.Option("--anchors", min=1, help="Blocks of an answer and step.")] = 32,
    rate: Annotated[float, typer.Option("--learning-rate", help="At its highest.")] = 1e-3,
    gamma: GammaOption = None,
    distil: DistilOption = 0.5,
    draft_vocabulary: DraftVocabularyOption = 8192,
    vocabulary: Annotated[int, typer.Option("--vocabulary", min=2, help="Ids of a step's softmax.")] = 8192,
    seed: Annotated[int, typer.Option("--seed", help="Of weights, order and anchors.")] = 0,
    validation: Annotated[int, typer.Option("--validation", min=1, help="Answers τ is measured on.")] = 48,
    widths: Annotated[str, typer.Option("--widths", help="Widths τ is measured at.")] = "4,8",
    without: WithoutOption = None,
    every: Annotated[float, typer.Option("--every", help="Minutes between validations.")] = 4.0,
    weights: WeightsOption = "auto",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Train a drafter on the target's own answers. Stop and run again to go on."""
    check_device(device)
    if minutes is not None and not minutes >= 0:
        raise ValueError(f"--minutes: expected 0 or more, got {minutes}")
    options = {
        "answers": answers,
        "kind": kind,
        "target": target,
        "weights": weights,
        "device": device,
        "layers": (1 if kind == "eagle3" else 2) if layers is None else layers,
        "block_size": block_size,
        "feature_layers": None
        if feature_layers is None
        else parse_layers("--feature-layers", feature_layers),
        "start": () if start == "random" else None if start is None else parse_layers("--start", start),
        "mask_token_id": mask_token,
        "draft_vocabulary": draft_vocabulary,
        "validation": validation,
        "widths": parse_window("--widths", widths),
        "every": 60 * every,
        "without": () if without is None else tuple(without.split(",")),
    }
    recipe = {
        "blocks": blocks,
        "batch": batch,
        "anchors": anchors,
        "widths": _range(train_widths, block_size),
        "gamma": (4.48 if kind == "specblock" else 4.0) if gamma is None else gamma,
        "rate": rate,
        "vocabulary": vocabulary,
        "distil": distil,
        "seed": seed,
    }
    report = _train(output, options, recipe, minutes, threads)
    emit_json(report) if json else _print(report)


def _print(report: dict[str, Any]) -> None:
    taus = ", ".join(f"{tau:.3f} at width {width}" for width, tau in report["tau"].items())
    say(f"{report['blocks']} blocks in {report['cpu_seconds'] / 60:.1f} CPU-minutes; held-out τ {taus}")
    say(
        f"drafter: {report['drafter']}"
        + ("" if report["finished"] else " (not finished; run again to go on)")
    )


def _range(text: str | None, block_size: int) -> tuple[int, int]:
    if text is None:
        return block_size, block_size
    items = parse_layers("--train-widths", text)
    if len(items) != 2 or not 2 <= items[0] <= items[1]:
        raise ValueError(f"--train-widths: expected low,high with 2 <= low <= high, got {text!r}")
    return items[0], items[1]


def _train(
    output: Path, options: dict[str, Any], recipe: dict[str, Any], minutes: float | None, threads: int | None
) -> dict[str, Any]:
    import torch

    from blockpilot.training.draft_folder import DraftOptions
    from blockpilot.training.draft_run import DraftRun
    from blockpilot.training.draft_training import Recipe

    if threads is not None:
        torch.set_num_threads(threads)
    with _Bars() as bar:
        run = DraftRun(output, DraftOptions(**options), Recipe(**recipe), bar)
        left = max(0, recipe["blocks"] - run.trainer.blocks)
        line = run.train(bar("training", left), None if minutes is None else 60 * minutes)
    _draw(run.log_path, output / "curve.png")
    report = {key: line[key] for key in ("blocks", "tokens", "cpu_seconds", "epoch", "tau", "accuracy")}
    return report | {
        "drafter": str(output / "drafter"),
        "finished": run.trainer.finished,
        "log": str(run.log_path),
    }


def _draw(log: Path, path: Path) -> None:
    """The report's picture of τ during training."""
    from blockpilot.policies.atomic import replacing
    from blockpilot.training.page.drawing import check_matplotlib
    from blockpilot.training.page.training_log import read_training_log
    from blockpilot.training.page.training_part import training_part

    try:
        check_matplotlib()
    except ValueError as error:
        note(f"no {path.name}: {error}")
        return
    for picture in training_part(read_training_log(log)).pictures:
        if picture.name == "training-tau":  # not before the first step
            with replacing(path) as temporary:
                temporary.write_bytes(picture.png)


class _Bars:
    """Progress bars one after another."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __call__(self, what: str, total: int) -> Callable[[int], None]:
        self._stack.close()
        advance: Callable[[int], None] = self._stack.enter_context(progress(what, total))
        return advance
