"""`blockpilot make-data`: prompts with the target's own answers, for training drafters.

With `--json` stdout holds one object with the keys of `JSON_KEYS`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from blockpilot.cli.console import emit_json, say
from blockpilot.cli.options import (
    BUNDLED_TARGET,
    DeviceOption,
    DTypeOption,
    Engine,
    JsonOption,
    MaxNewTokensOption,
    TargetOption,
    ThreadsOption,
    WeightsOption,
    parse_layers,
)

JSON_KEYS = {
    "prompts": "how many were asked for, in whole shards",
    "skipped": "how many of them in earlier runs",
    "answered": "rows in the folder",
    "validation": "rows of the families held out",
    "tokens": "tokens of all answers",
    "dropped": "prompts by the reason why they are no rows",
    "families": "rows by family",
    "path": "the folder",
}
Source = Literal["mixed", "own", "target"]
SourceOption = Annotated[
    Source | None,
    typer.Option(
        "--source",
        help="own: made by code; target: openings that the target continues; mixed: 1 to 6. Default: mixed.",
    ),
]
FamiliesOption = Annotated[
    str | None,
    typer.Option(
        "--validation-families", help="Families held out, as in a,b; none; default: up to three drawn."
    ),
]
AgainstOption = Annotated[
    list[Path] | None,
    typer.Option("--against", help="Evaluation JSONL (repeatable): what shares 13 words with it is dropped."),
]
FeaturesOption = Annotated[
    str | None,
    typer.Option(
        "--features",
        help="Keep these target layers' states for train-draft: default, or 1,8,14 (0 is the first).",
    ),
]


def run(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder; one of the same options is continued.")
    ],
    source: SourceOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help='JSONL of {"id", "family", "prompt"} in place of a source.'),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--count", min=1, help="Prompts, rounded up to whole shards; default: the file's, or 960."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the prompts and of sampling.")] = 0,
    target: TargetOption = BUNDLED_TARGET,
    max_new_tokens: MaxNewTokensOption = 144,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", min=8, help="Longest prompt, with the chat template's tokens.")
    ] = 288,
    sampled: Annotated[
        float,
        typer.Option("--sampled", help="Share answered at a temperature of 0.7 to 1; the rest greedily."),
    ] = 0.2,
    against: AgainstOption = None,
    validation_families: FamiliesOption = None,
    shard_prompts: Annotated[int, typer.Option("--shard-prompts", min=1, help="Prompts of a shard.")] = 96,
    features: FeaturesOption = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests decoded at once.")] = 32,
    dtype: DTypeOption = "float32",
    weights: WeightsOption = "auto",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Make prompts, have the target answer them, and keep both for training drafters. Resumable."""
    from blockpilot.training.draft_model import default_features
    from blockpilot.training.make_data import make_data
    from blockpilot.training.prompt_sources import DataOptions

    options = DataOptions(
        source=source or ("mixed" if prompts is None else "file"),
        prompts=prompts,
        seed=seed,
        max_new_tokens=max_new_tokens,
        prompt_tokens=prompt_tokens,
        sampled=sampled,
        against=tuple(against or ()),
        validation_families=_families(validation_families),
        shard_prompts=shard_prompts,
        features=None if features in (None, "default") else parse_layers("--features", features or ""),
    )
    engine = Engine.resolve(
        target,
        "none",
        "none",
        dtype=dtype,
        weights=weights,
        device=device,
        threads=threads,
        max_length=prompt_tokens + max_new_tokens,
    )
    with engine.open(max_requests=batch) as llm:
        if features == "default":
            options = replace(options, features=default_features(llm.target.config))
        summary = make_data(llm, output, options, count=count)
    report = asdict(summary) | {"path": str(summary.path)}
    emit_json(report) if json else _print(report)


def _families(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return () if text == "none" else tuple(name.strip() for name in text.split(","))


def _print(report: dict[str, Any]) -> None:
    say(f"{report['answered']} of {report['prompts']} prompts answered in {report['path']}")
    say(
        f"tokens: {report['tokens']}; held out: {report['validation']}; earlier runs: {report['skipped']} prompts"
    )
    dropped = ", ".join(f"{reason} {n}" for reason, n in report["dropped"].items() if n)
    say(f"dropped: {dropped or 'none'}")
