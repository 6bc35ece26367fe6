"""`blockpilot label`: decode prompts at every width of a window and record what each width was worth.

With `--json` stdout holds one object with the keys of `JSON_KEYS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockpilot.cli.console import emit_json, say
from blockpilot.cli.options import (
    BUNDLED_TARGET,
    DeviceOption,
    DrafterOption,
    DTypeOption,
    Engine,
    JsonOption,
    MaxLengthOption,
    MaxNewTokensOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    WeightsOption,
    parse_trees,
    parse_window,
)

if TYPE_CHECKING:
    from blockpilot.llm import LLM
    from blockpilot.policies import BlockPolicy

JSON_KEYS = {
    "prompts": "how many were asked for",
    "labelled": "how many the file now holds",
    "skipped": "how many it held before",
    "identical": "prompts of this run with the same answer at every width",
    "unusable": "answers too short to label",
    "path": "the label file",
}
WindowOption = Annotated[str, typer.Option("--window", help="Widths to decode at, as in 1,2,3,4.")]
PromptsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts",
        "-p",
        help='JSONL of {"id", "dataset" or "family", "prompt"}; repeatable; default: generated.',
    ),
]
RawLogitsOption = Annotated[
    bool, typer.Option("--raw-logits", help="Keep whole logit rows, for policies that read them.")
]
TreesOption = Annotated[
    str | None,
    typer.Option(
        "--trees", help="As in 6/12: width 6 of the window stands for trees of 12 nodes, not for a chain."
    ),
]
ReplayOption = Annotated[
    bool,
    typer.Option(
        "--replay/--no-replay",
        help="Decode one width and replay the answer at the others, or decode at every width.",
    ),
]


def run(
    output: Annotated[Path, typer.Option("--output", "-o", help="Label file; an existing one is continued.")],
    window: WindowOption,
    prompts: PromptsOption = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Generated prompts.")] = 720,
    seed: Annotated[int, typer.Option("--seed", help="Of the generated prompts and of sampling.")] = 0,
    target: TargetOption = BUNDLED_TARGET,
    drafter: DrafterOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Prompts of a generate call.")] = 16,
    raw_logits: RawLogitsOption = False,
    replay: ReplayOption = True,
    trees: TreesOption = None,
    dtype: DTypeOption = "float32",
    weights: WeightsOption = "auto",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    max_length: MaxLengthOption = None,
    json: JsonOption = False,
) -> None:
    """Decode prompts at every width of a window and write labels for train-policy. Resumable."""
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
    if engine.drafter is None:
        raise ValueError("label: expected a drafter, got none; widths differ only with one")
    widths = parse_window("--window", window)
    summary = _label(
        engine,
        _prompts(prompts, count, seed),
        window=widths,
        max_new_tokens=max_new_tokens,
        output=output,
        temperature=temperature,
        seed=seed,
        batch=batch,
        raw_logits=raw_logits,
        replay=replay,
        trees=parse_trees("--trees", trees or ""),
    )
    report = {key: getattr(summary, key) for key in JSON_KEYS} | {"path": str(summary.path)}
    emit_json(report) if json else _print(report)


def _print(report: dict[str, Any]) -> None:
    say(f"{report['labelled']} of {report['prompts']} prompts labelled in {report['path']}")
    say(f"already there: {report['skipped']}; too short to label: {report['unusable']}")


def _prompts(files: list[Path] | None, count: int, seed: int) -> list[dict[str, Any]]:
    from blockpilot.training import prompts

    return prompts.read_prompts(*files) if files else prompts.generate_prompts(count, seed)


def _label(engine: Engine, prompts: list[dict[str, Any]], **options: Any) -> Any:
    from blockpilot.training.labels import label_prompts

    def factory(policy: BlockPolicy) -> LLM:
        return engine.open(max_requests=min(options["batch"], 16), policy=policy)

    return label_prompts(factory, prompts, **options, progress=True)
