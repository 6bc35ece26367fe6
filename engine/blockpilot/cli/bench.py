"""`blockpilot bench`: a pair on prompt files, plain beside the policy or fixed widths.

With `--json` stdout holds one object with the keys of `JSON_KEYS`; `--output` writes it to a file too. The
figures at the top and under `datasets` are those of the first item of `--widths`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockpilot.cli import measure
from blockpilot.cli.bench_report import build_report, print_report
from blockpilot.cli.bench_store import Store, fingerprint, sidecar_of
from blockpilot.cli.console import emit_json, fail, note, progress, write_report
from blockpilot.cli.machine import hardware, versions
from blockpilot.cli.options import (
    BUNDLED_TARGET,
    DeviceOption,
    DrafterOption,
    DTypeOption,
    Engine,
    JsonOption,
    MaxLengthOption,
    MaxNewTokensOption,
    PolicyOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    WeightsOption,
    sampling_params,
)
from blockpilot.cli.prompts import Prompt, load_prompts

if TYPE_CHECKING:
    from blockpilot.llm import LLM
    from blockpilot.params import SamplingParams

JSON_KEYS = {
    "identical": "every answer of every arm equals plain decoding",
    "prompts": "how many",
    "tau": "tokens committed by steps / steps",
    "width": "block width of each prompt, in file order",
    "plain_tokens_per_s": "tokens committed by steps per second, plain",
    "spec_tokens_per_s": "the same, speculative, policy included",
    "speedup": "their ratio, null unless identical",
    "acceptance_by_offset": "kept / offered drafted tokens at offset 1, 2, ...",
    "ttft": "mean seconds to first token, plain and spec",
    "seconds": "seconds by phase, plain and spec",
    "errors": "requests that failed",
    "datasets": "the figures above for each dataset",
    "arms": "overall and datasets for each item of --widths",
    "differences": "arm, id and token index of every difference",
    "settings": "what was asked for",
    "fingerprint": "hash of the settings",
    "versions": "software",
    "hardware": "machine",
}
PromptsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts", "-p", help='JSONL of {"id", "dataset", "prompt"}; repeatable; default: bundled.'
    ),
]
WidthsOption = Annotated[
    str | None,
    typer.Option(
        "--widths",
        help="What stands beside plain decoding: widths, trees and policy, as in 4,6/12,policy; "
        "6/12 drafts trees of 12 nodes from blocks of width 6; default: policy, where none is in use the "
        "drafter's own block size.",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Write the JSON here; finished prompts are kept beside it."),
]


def run(
    prompts: PromptsOption = None,
    target: TargetOption = BUNDLED_TARGET,
    drafter: DrafterOption = None,
    policy: PolicyOption = None,
    widths: WidthsOption = None,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 if any answer differs from plain.")] = False,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests decoded together.")] = 1,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Prompts of each dataset.")] = None,
    max_new_tokens: MaxNewTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Every prompt derives its own from this.")] = 0,
    dtype: DTypeOption = "float32",
    weights: WeightsOption = "auto",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    max_length: MaxLengthOption = None,
    output: OutputOption = None,
    json: JsonOption = False,
) -> None:
    """Measure a pair on prompt files: plain decoding beside the policy or fixed widths, answers compared."""
    engine = Engine.resolve(
        target,
        drafter,
        policy,
        dtype=dtype,
        weights=weights,
        device=device,
        threads=threads,
        max_length=max_length,
    )
    params = sampling_params(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    arms = arms_of(engine, widths)
    report = compare(engine, load_prompts(prompts or (), limit), params, arms, batch, output)
    emit_json(report) if json else print_report(report)
    if report["errors"]:
        fail(f"{report['errors']} requests failed")
    if report["errors"] or (check and not report["identical"]):
        raise typer.Exit(1)


def compare(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    arms: Sequence[measure.Arm],
    batch: int = 1,
    output: Path | None = None,
) -> dict[str, Any]:
    """Measure every prompt plain and under every arm; the report, written to `output` if given."""
    with engine.open(max_requests=batch) as llm:
        settings = _settings(engine, llm, arms, params, batch)
        store = Store(sidecar_of(output) if output else None, settings)
        _measure(llm, store, prompts, params, arms, batch)
        if broken := int(getattr(llm.drafter, "non_finite", 0)):
            note(f"{broken} drafts had logits that are not finite; try another dtype")
    report = build_report(prompts, store.records, arms)
    report |= {"settings": settings, "fingerprint": fingerprint(settings), "versions": versions()}
    report["hardware"] = hardware(engine.threads)
    if output is not None:
        write_report(output, report)
    return report


def arms_of(engine: Engine, widths: str | None) -> list[measure.Arm]:
    """What `--widths` asks of this engine; a row is called policy only where one is in use."""
    if engine.policy is not None:
        return parse_widths(measure.POLICY.name if widths is None else widths)
    if widths is None:
        return [measure.Arm("no drafter" if engine.drafter is None else "block size", None)]
    arms = parse_widths(widths)
    if measure.POLICY in arms:
        raise ValueError(
            f"--widths: expected widths and trees, as no policy is in use, got {widths!r}; name one with --policy"
        )
    return arms


def parse_widths(text: str) -> list[measure.Arm]:
    """`4,6/12,policy` → arms, in this order."""
    arms = []
    for item in (part.strip() for part in text.split(",")):
        if item == "policy":
            arms.append(measure.POLICY)
        else:
            arms.append(_fixed_arm(item))
    if len(set(arms)) != len(arms):
        raise ValueError(f"--widths: expected every item once, got {text!r}")
    return arms


def _fixed_arm(item: str) -> measure.Arm:
    """A width, or a width and a tree's nodes."""
    width, slash, tree = item.partition("/")
    sizes = [int(n) if n.isdecimal() else 0 for n in ((width, tree) if slash else (width,))]
    if sizes != sorted(sizes) or sizes[0] < 1:
        raise ValueError(
            f"--widths: expected widths >= 1, trees of no fewer nodes and policy, as in 4,6/12,policy, got {item!r}"
        )
    name = f"width {sizes[0]}"
    return measure.Arm(f"{name} tree {sizes[1]}", *sizes) if slash else measure.Arm(name, sizes[0])


def _settings(
    engine: Engine, llm: LLM, arms: Sequence[measure.Arm], params: SamplingParams, batch: int
) -> dict[str, Any]:
    """Everything a record depends on but the prompt itself."""
    machine, software = hardware(engine.threads), versions()
    return {
        **engine.to_dict(),
        "weights": llm.weights,
        "pair": llm.fingerprint,
        "widths": [arm.name for arm in arms],
        "batch": batch,
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "backend": os.environ.get("BLOCKPILOT_BACKEND", "auto"),
        "software": [software["blockpilot"], software["torch"]],
        "machine": [machine["cpu"], machine["cpu_capability"], machine["threads"], *machine["cuda"]],
    }


def _measure(
    llm: LLM,
    store: Store,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    arms: Sequence[measure.Arm],
    batch: int,
) -> None:
    """Decode what the store lacks, in groups; the arms take turns at going first."""
    missing = [prompt for prompt in prompts if prompt.key not in store.records]
    finished = len(prompts) - len(missing)
    if finished:
        note(f"{finished} prompts are already measured")
    if not missing:
        return
    llm.warmup()
    order = [measure.PLAIN, *arms]
    with progress("prompts", total=len(prompts), completed=finished) as advance:
        for group in _groups(missing, batch):
            results = {arm.name: measure.decode(llm, group, params, arm) for arm in order}
            for i, prompt in enumerate(group):
                store.add(prompt, {name: records[i] for name, records in results.items()})
            order = order[1:] + order[:1]
            advance(len(group))


def _groups(prompts: Sequence[Prompt], batch: int) -> Iterator[list[Prompt]]:
    """Up to `batch` prompts of one dataset at a time: a group's time is shared by its prompts."""
    for name in dict.fromkeys(prompt.dataset for prompt in prompts):
        chosen = [prompt for prompt in prompts if prompt.dataset == name]
        for start in range(0, len(chosen), batch):
            yield chosen[start : start + batch]
