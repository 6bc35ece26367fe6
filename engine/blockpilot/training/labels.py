"""Labels: what each width is worth for a prompt, from one decoded answer and its replays (arXiv 2606.31315).

The runs of a prompt differ in width only, so they must give the same ids. Without replays every width is decoded
in full, and every labelled prompt is a check of exactness.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockpilot.errors import BlockPilotError
from blockpilot.output import Output
from blockpilot.params import SamplingParams
from blockpilot.policies.contract import BlockPolicy, check_trees, check_window
from blockpilot.progress import progress_bar
from blockpilot.training.label_rows import label_rows, text_hash, usable
from blockpilot.training.label_store import LabelStore
from blockpilot.training.recorder import Capture, Recorder
from blockpilot.training.replay import Answer, RecordingTarget, ReplayTarget, standing_in

if TYPE_CHECKING:
    from blockpilot.llm import LLM


class ExactnessError(BlockPilotError, AssertionError):
    """Two widths gave different token ids for the same prompt."""


@dataclass(frozen=True)
class LabelSummary:
    """What a labelling run did.

    Attributes:
        prompts: prompts asked for.
        labelled: rows the file now holds for them.
        skipped: rows it held before this run.
        identical: prompts of this run whose ids were the same at every width (all that did not fail).
        unusable: rows without a label: the answer ended at its first token, or failed.
        path: the label file.
    """

    prompts: int
    labelled: int
    skipped: int
    identical: int
    unusable: int
    path: Path


@dataclass(frozen=True)
class _Run:
    """Constants of a labelling run."""

    window: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    seed: int
    raw_logits: bool
    replay: bool
    trees: Mapping[int, int]


def label_prompts(
    llm_factory: Callable[[BlockPolicy], LLM],
    prompts: Sequence[dict[str, str]],
    *,
    window: Sequence[int],
    max_new_tokens: int = 128,
    output: str | Path,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 16,
    raw_logits: bool = False,
    replay: bool = True,
    trees: Mapping[int, int] | None = None,
    progress: bool = True,
) -> LabelSummary:
    """Labels prompts into a JSONL file (`label_store`); an existing file of the same settings is continued.

    Args:
        llm_factory: makes the LLM around the recording policy it is given; the LLM is closed at the end.
        prompts: {"id", "family", "prompt"} each, ids unique.
        window: widths to compare. The first runs through the policy, the others through
            `SamplingParams.width`.
        max_new_tokens: tokens per answer, at least 2.
        output: label file.
        temperature, seed: sampling; a prompt's own seed depends on `seed` and its id, not on its place.
        batch: prompts per `generate` call; rows are written after each.
        replay: decode at the first width only and replay the answer at the others, which gives the same labels for
            a fraction of the work; False decodes at every width and so checks that they agree.
        trees: nodes of the trees that widths stand for, as in `BlockPolicy`; they are always decoded.
        raw_logits: also keep the last-position logits, 4·V bytes a prompt, for full predictors.
        progress: bar with the time left, on stderr.

    Raises:
        ExactnessError: two widths disagree on a prompt's ids.
        ValueError: bad arguments, or `output` belongs to other settings or prompts.
    """
    if max_new_tokens < 2 or batch < 1:
        raise ValueError(f"expected max_new_tokens >= 2 and batch >= 1, got {max_new_tokens} and {batch}")
    widths = check_window(tuple(window))
    grown = check_trees(trees or {}, widths)
    if widths[0] in grown:
        raise ValueError(
            f"trees: expected a chain or plain decoding at the first width, {widths[0]}, which answers are recorded at"
        )
    run = _Run(widths, max_new_tokens, temperature, seed, raw_logits, replay, grown)
    hashes = _hashes(prompts)
    recorder = Recorder(run.window)
    llm = llm_factory(recorder)
    try:
        with LabelStore(output, _settings(llm, recorder, run)) as store:
            todo = _unfinished(prompts, hashes, store)
            with progress_bar("labelling", len(todo) * len(run.window), show=progress) as show:
                advance = _counter(show)
                chunks = (todo[start : start + batch] for start in range(0, len(todo), batch))
                identical = sum(_label(llm, recorder, store, chunk, run, advance) for chunk in chunks)
            rows = [r for r in store.rows if r["id"] in hashes]
    finally:
        llm.close()
    unusable = sum(not usable(r) for r in rows)
    return LabelSummary(len(prompts), len(rows), len(prompts) - len(todo), identical, unusable, store.path)


def _label(
    llm: LLM,
    recorder: Recorder,
    store: LabelStore,
    chunk: Sequence[dict[str, str]],
    run: _Run,
    advance: Callable[[int], None],
) -> int:
    """Decodes a batch at every width and appends its rows; returns how many had the same ids throughout."""
    outputs, capture = _decode(llm, recorder, chunk, run, advance)
    identical = _check_identical(chunk, outputs, run.window)
    shard = store.save_logits(capture.logits) if run.raw_logits and len(capture.logits) else None
    store.append(label_rows(chunk, outputs, capture, run.window, shard))
    return identical


def _hashes(prompts: Sequence[dict[str, str]]) -> dict[str, str]:
    hashes = {p["id"]: text_hash(p["prompt"]) for p in prompts}
    if len(hashes) != len(prompts) or not prompts:
        raise ValueError(
            f"prompts: expected at least one and unique ids, got {len(prompts)} with {len(hashes)} ids"
        )
    return hashes


def _settings(llm: LLM, recorder: Recorder, run: _Run) -> dict[str, Any]:
    if llm.drafter is None:
        raise ValueError(
            "llm_factory: expected an LLM with a drafter, got one without: widths differ only with one"
        )
    outside = [w for w in run.window if w != 1 and w not in llm.drafter.window]
    if outside:
        raise ValueError(f"window: the drafter drafts {list(llm.drafter.window)}, got {outside}")
    vocabulary, size = recorder.embedding.shape
    largest = llm.drafter.largest_tree if run.trees else 0
    if max(run.trees.values(), default=0) > largest:
        raise ValueError(f"trees: the drafter makes trees of at most {largest} nodes, got {dict(run.trees)}")
    settings = {
        "pair": {"target": llm.target.fingerprint, "drafter": llm.drafter.fingerprint},
        "block_size": llm.drafter.block_size,
        "dtype": str(llm.target.dtype).removeprefix("torch."),
        "weights": llm.weights,
        "window": list(run.window),
        "max_new_tokens": run.max_new_tokens,
        "temperature": run.temperature,
        "seed": run.seed,
        "raw_logits": run.raw_logits,
        "input_kind": "mean_likely_embedding",
        "input_size": size,
        "vocabulary": vocabulary,
    }
    return {**settings, "trees": {str(w): n for w, n in run.trees.items()}} if run.trees else settings


def _unfinished(
    prompts: Sequence[dict[str, str]], hashes: dict[str, str], store: LabelStore
) -> list[dict[str, str]]:
    done = {r["id"]: r["prompt_hash"] for r in store.rows}
    changed = [i for i, h in hashes.items() if done.get(i, h) != h]
    if changed:
        raise ValueError(
            f"{store.path}: holds labels of other prompts under ids {changed[:5]}; use another output"
        )
    return [p for p in prompts if p["id"] not in done]


def _decode(
    llm: LLM, recorder: Recorder, chunk: Sequence[dict[str, str]], run: _Run, advance: Callable[[int], None]
) -> tuple[list[list[Output]], Capture]:
    """Outputs by width, then by prompt, and what the policy saw."""
    texts = [p["prompt"] for p in chunk]
    outputs: list[list[Output]] = []
    answers: list[Answer] = []
    capture = None
    for width in run.window:
        first = capture is None
        params = [
            SamplingParams(
                max_new_tokens=run.max_new_tokens,
                temperature=run.temperature,
                seed=_seed(run.seed, p["id"]),
                logprobs=0 if first and not run.replay else None,
                width=None if first else width,
                tree=run.trees.get(width),
            )
            for p in chunk
        ]
        if first:
            recorder.start()
        if not run.replay or width in run.trees:
            outputs.append(llm.generate(texts, params))
        elif first:
            outputs.append(_record(llm, texts, params, answers))
        else:
            outputs.append(_replay(llm, texts, params, answers, outputs[0]))
        if first:
            capture = recorder.stop()
        advance(len(chunk))
    assert capture is not None  # a window has at least one width
    return outputs, capture


def _record(llm: LLM, texts: list[str], params: list[SamplingParams], answers: list[Answer]) -> list[Output]:
    """Decodes, and fills `answers` for the replays."""
    recording = RecordingTarget(llm.target, params[0].max_new_tokens or 0)
    with standing_in(llm, recording):
        outputs = llm.generate(texts, params)
    for answer, output in zip(recording.answers, outputs, strict=True):
        answer.finish(output.token_ids)
    answers += recording.answers
    return outputs


def _replay(
    llm: LLM, texts: list[str], params: list[SamplingParams], answers: list[Answer], first: list[Output]
) -> list[Output]:
    """Replays the answers that did not fail; one that did fails at every width alike."""
    whole = [i for i, output in enumerate(first) if output.error is None]
    with standing_in(llm, ReplayTarget(llm.target, [answers[i] for i in whole])):
        replayed = llm.generate([texts[i] for i in whole], [params[i] for i in whole])
    outputs = list(first)
    for i, output in zip(whole, replayed, strict=True):
        outputs[i] = output
    return outputs


def _seed(seed: int, prompt_id: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()[:7], "big")


def _check_identical(
    chunk: Sequence[dict[str, str]], outputs: list[list[Output]], window: tuple[int, ...]
) -> int:
    """Number of prompts with the same ids at every width: all but those that failed."""
    whole = [i for i in range(len(chunk)) if all(o[i].error is None for o in outputs)]
    for i in whole:
        wanted = outputs[0][i].token_ids
        for width, of_width in zip(window[1:], outputs[1:], strict=True):
            got = of_width[i].token_ids
            if got != wanted:
                pairs = zip(wanted, got, strict=False)
                at = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(got)))
                raise ExactnessError(
                    f"prompt {chunk[i]['id']}: widths {window[0]} and {width} give different ids from token "
                    f"{at} on ({wanted[at : at + 3]}, {got[at : at + 3]}); the engine is not exact"
                )
    return len(whole)


def _counter(show: Callable[[float], None]) -> Callable[[int], None]:
    """Adds up what is finished and shows the sum."""
    finished = 0

    def advance(n: int) -> None:
        nonlocal finished
        finished += n
        show(finished)

    return advance
