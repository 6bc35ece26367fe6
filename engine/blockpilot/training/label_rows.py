"""From the outputs of one prompt at every width to its row of a label file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from blockpilot.output import Output
from blockpilot.training.label_store import encode_input
from blockpilot.training.recorder import Capture

_LOGPROB_TOLERANCE = 1e-3


def usable(row: dict[str, Any]) -> bool:
    """Whether a row has a τ at every width and an input."""
    return row["input"] is not None and row["finish_reason"] != "error" and None not in row["tau"]


def text_hash(text: str) -> str:
    """Short hash that tells prompts apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def halves(step_tokens: Sequence[int]) -> list[list[int]]:
    """[[committed, steps] of the first half, of the second]: a step belongs to the half in which it starts.

    The first half holds the steps that start before half of the tokens are committed.
    """
    total, done, parts = sum(step_tokens), 0, [[0, 0], [0, 0]]
    for tokens in step_tokens:
        part = parts[2 * done >= total]
        part[0] += tokens
        part[1] += 1
        done += tokens
    return parts


def label_rows(
    chunk: Sequence[dict[str, str]],
    outputs: Sequence[Sequence[Output]],
    capture: Capture,
    window: tuple[int, ...],
    shard: str | None,
) -> list[dict[str, Any]]:
    """Rows in the order of the prompts.

    Args:
        chunk: prompts. outputs: by width, then by prompt.
        capture: what the policy saw in the first width's run.
        shard: file of the captured logits, if they were kept.
    """
    places = _places(capture, outputs[0])
    rows = []
    for i, prompt in enumerate(chunk):
        of_prompt, place = [o[i] for o in outputs], places[i]
        stats = [o.stats for o in of_prompt]
        rows.append({
            "id": prompt["id"],
            "family": prompt["family"],
            "dataset": prompt.get("dataset"),
            "prompt_hash": text_hash(prompt["prompt"]),
            "prompt_tokens": len(of_prompt[0].prompt_token_ids),
            "window": list(window),
            "tau": [s.tau for s in stats],
            "steps": [s.steps for s in stats],
            "committed": [s.committed for s in stats],
            "halves": [halves(s.step_tokens) for s in stats],
            "kept": [s.kept for s in stats],
            "offered": [s.offered for s in stats],
            "tokens": len(of_prompt[0].token_ids),
            "finish_reason": "error" if any(o.error for o in of_prompt) else of_prompt[0].finish_reason,
            "input": None if place is None else encode_input(capture.inputs[place]),
            "logits": None if place is None or shard is None else {"file": shard, "row": place},
        })  # fmt: skip
    return rows


def _places(capture: Capture, outputs: Sequence[Output]) -> list[int | None]:
    """The captured row of every prompt: in submission order, without requests that ended at prefill."""
    shown = [i for i, o in enumerate(outputs) if o.stats.steps > 0]
    if len(capture.inputs) == len(outputs):
        shown = list(range(len(outputs)))
    if len(capture.inputs) != len(shown):
        raise RuntimeError(
            f"the policy was asked {len(capture.inputs)} times, expected {len(shown)} requests with a step"
        )
    places: list[int | None] = [None] * len(outputs)
    for row, i in enumerate(shown):
        logprobs = outputs[i].logprobs
        if logprobs:
            seen = float(torch.log_softmax(capture.logits[row].double(), -1)[logprobs[0].token_id])
            if abs(seen - logprobs[0].logprob) > _LOGPROB_TOLERANCE:
                raise RuntimeError(
                    f"captured row {row} is not of request {i}: its first token has {seen}, {logprobs[0]}"
                )
        places[i] = row
    return places
