"""Decoding beside other programs: the same target file, drafter and prompt ids, one answer at a time.

Every prompt goes through every arm in turn and the arms take turns at going first, so that a machine that slows
down slows all of them. Speed is tokens after the first per second after the first; the time to the first
token stands beside it. Only this package's arms must agree with each other; what another program's
arithmetic makes of the same weights is reported.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

import peer_llama
import peer_ours
import peer_plot
import peer_torch
from blockpilot import SamplingParams
from blockpilot.cli.console import note, progress
from blockpilot.cli.prompts import Prompt, load_prompts
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.targets.hub import find_smollm2
from blockpilot.text import load_tokenizer
from peer_report import Row, add_ceilings, build_report, print_report
from peer_types import PROBE_CONTEXT, Arm, Decode, Request, Run, Setup, Unavailable

FP32, BF16 = torch.float32, torch.bfloat16
PACKAGES = ("llama-cpp-python", "dflash", "accelerate")
WARMUP_TOKENS, MARGIN = 8, 16
PROBE_POSITIONS = PROBE_CONTEXT + 64


def _llama(name: str, threads: int | None, quantised: str | None = None) -> Arm:
    opened = partial(peer_llama.open_llama, threads=threads, quantised=quantised)
    probe = partial(peer_llama.probe_llama, threads=threads, quantised=quantised)
    return Arm(name, "llama.cpp", opened, probe=probe)


ARMS = (
    *peer_ours.arms(),
    *peer_ours.arms("int8-", weights="stored-int8"),
    Arm("transformers-fp32-loop", "transformers", partial(peer_torch.open_loop, dtype=FP32)),
    Arm("transformers-fp32-generate", "transformers", partial(peer_torch.open_generate, dtype=FP32)),
    Arm("transformers-bf16-loop", "transformers", partial(peer_torch.open_loop, dtype=BF16)),
    Arm("transformers-bf16-generate", "transformers", partial(peer_torch.open_generate, dtype=BF16)),
    _llama("llama.cpp-1", 1),
    _llama("llama.cpp-all", None),
    _llama("llama.cpp-Q4_0-1", 1, "Q4_0"),  # repacked at load for the machine's instructions
    _llama("llama.cpp-Q4_0-all", None, "Q4_0"),
    Arm("dflash-fp32-4", "dflash", partial(peer_torch.open_dflash, dtype=FP32, width=4)),
    Arm("dflash-fp32-8", "dflash", partial(peer_torch.open_dflash, dtype=FP32, width=8)),
    Arm("dflash-bf16-8", "dflash", partial(peer_torch.open_dflash, dtype=BF16, width=8)),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; their names are those of `run`'s arguments."""
    names = ", ".join(dict.fromkeys(arm.family for arm in ARMS))
    parser.add_argument("--prompts", type=Path, metavar="FILE", action="append", help="JSONL; repeatable")
    parser.add_argument("--limit", type=positive, metavar="N", help="prompts of each dataset")
    parser.add_argument("--max-new-tokens", type=positive, metavar="N", help="per answer (128; quick: 32)")
    parser.add_argument("--threads", type=positive, metavar="N", help="of every arm (torch's default)")
    parser.add_argument(
        "--temperature", type=float, metavar="T", action="append", help="repeatable (0 and 1; quick: 0)"
    )
    parser.add_argument("--arms", type=lambda text: text.split(","), help=f"names or {names}, as in ours,a,b")


def positive(text: str) -> int:
    """A whole number of at least one, of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text!r}")
    return int(text)


def choose_arms(wanted: Sequence[str] | None, arms: Sequence[Arm]) -> list[Arm]:
    """The arms of these names and families with what they are compared with, in the order of the table.

    Raises:
        ValueError: no arm and no family of that name.
    """
    if wanted is None:
        return list(arms)
    known = {name for arm in arms for name in (arm.name, arm.family)}
    if unknown := [name for name in wanted if name not in known]:
        every = ", ".join(arm.name for arm in arms)
        raise ValueError(f"--arms: expected families or any of {every}, got {unknown[0]!r}")
    chosen = [arm for arm in arms if {arm.name, arm.family} & set(wanted)]
    names = {arm.name for arm in chosen} | {arm.reference for arm in chosen} | {"plain"}
    return [arm for arm in arms if arm.name in names]


def run(
    quick: bool,
    *,
    prompts: Sequence[Path] | None = None,
    limit: int | None = None,
    max_new_tokens: int | None = None,
    threads: int | None = None,
    temperature: Sequence[float] | None = None,
    arms: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Measure; the report of `peer_report.build_report` with what was measured, skipped and probed.

    `load_before` is the machine's one-minute load average before the first arm opens: with other work on the
    cores, the figures are that work's too.
    """
    chosen = choose_arms(arms, ARMS)
    for value in temperature or ():
        SamplingParams(temperature=value)  # refuses what no arm can serve before hours are spent
    texts = load_prompts(prompts or (), limit or (1 if quick else None))
    budget = max_new_tokens or (32 if quick else 128)
    temperatures = list(dict.fromkeys(temperature or ([0.0] if quick else [0.0, 1.0])))
    setup, requests = prepare(texts, temperatures, budget, threads or torch.get_num_threads())
    load = psutil.getloadavg()[0]
    decoders, skipped = open_arms(chosen, setup)
    measured = [arm for arm in chosen if arm.name in decoders]
    probes = {arm.name: arm.probe(setup) for arm in measured if arm.probe}
    report = build_report(measure(requests, decoders), measured)
    add_ceilings(report["results"], probes)
    settings = {"prompts": len(texts), "max_new_tokens": budget, "temperatures": temperatures}
    return {
        **report,
        "settings": {**settings, "threads": setup.threads, "target": setup.gguf.name},
        "load_before": load,
        "families": {arm.name: arm.family for arm in measured},
        "skipped": skipped,
        "probes": probes,
        "peers": {package: _version(package) for package in PACKAGES},
    }


def prepare(
    prompts: Sequence[Prompt], temperatures: Sequence[float], budget: int, threads: int
) -> tuple[Setup, list[tuple[Prompt, list[Request]]]]:
    """What the arms share, and each prompt's requests, one per temperature."""
    torch.set_num_threads(threads)
    checkpoint = load_checkpoint(find_smollm2())
    tokenizer = load_tokenizer(checkpoint)
    eos = tuple(sorted({*checkpoint.config.eos_token_ids, *tokenizer.eos_token_ids}))
    ids = [tuple(tokenizer.encode_prompt(prompt.prompt)) for prompt in prompts]
    requests = [
        (prompt, [Request(tokens, prompt.seed(0), t, budget) for t in temperatures])
        for prompt, tokens in zip(prompts, ids, strict=True)
    ]
    length = max(max(map(len, ids)) + max(budget, WARMUP_TOKENS) + MARGIN, PROBE_POSITIONS)
    return Setup(find_smollm2(), eos, threads, length), requests


def open_arms(arms: Sequence[Arm], setup: Setup) -> tuple[dict[str, Decode], dict[str, str]]:
    """The arms that run here by name, and why the others do not, said at once."""
    decoders: dict[str, Decode] = {}
    skipped: dict[str, str] = {}
    for arm in arms:
        try:
            decoders[arm.name] = arm.open(setup)
        except Unavailable as reason:
            skipped[arm.name] = str(reason)
            note(f"skipped {arm.name}: {reason}")
    return decoders, skipped


def measure(
    requests: Sequence[tuple[Prompt, Sequence[Request]]], decoders: Mapping[str, Decode]
) -> list[Row]:
    """Every request through every arm; the next prompt starts with the next arm."""
    order = list(decoders)
    first = requests[0][1][0]
    warmup = Request(first.ids, first.seed, first.temperature, WARMUP_TOKENS)
    rows = []
    with progress("answers", total=(len(requests) * len(requests[0][1]) + 1) * len(order)) as advance:
        for name in order:
            attempt(decoders[name], warmup)
            advance()
        for prompt, asked in requests:
            for request in asked:
                runs = {}
                for name in order:
                    runs[name] = attempt(decoders[name], request)
                    advance()
                rows.append(Row(prompt, request.temperature, runs))
            order = order[1:] + order[:1]
    return rows


def attempt(decode: Decode, request: Request) -> Run:
    """The answer, or a run that says why there is none: one arm's failure must not cost the others' hours."""
    try:
        return decode(request)
    except Exception as error:
        return Run((), error=f"{type(error).__name__}: {error}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def show(report: dict[str, Any]) -> None:
    """The tables."""
    print_report(report)


def plot(report: dict[str, Any], path: Path) -> None:
    """A picture of the speeds; one line if it cannot be drawn."""
    if not peer_plot.draw(report, path):
        note("no plot: matplotlib is not installed (the extra `plot`)")
