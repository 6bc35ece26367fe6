"""Answers as a drafter trains on them: ids, the target's features and its likeliest ids at every position."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from blockpilot.policies.atomic import replacing
from blockpilot.rows import kv_bound, make_rows

if TYPE_CHECKING:
    from blockpilot.targets import Target

TEACHERS = 16  # likeliest ids kept at each position of an answer


@dataclass(frozen=True)
class Answer:
    """One answer, read from the cache when asked for.

    Attributes:
        ids: prompt and answer. start: index of the first answered id.
        features: [len(ids) − 1, n·H] bfloat16; teacher_ids, teacher_p: [len(ids) − start, K] for the choice of
            ids[start], ids[start + 1], ….
    """

    ids: list[int]
    start: int
    features: Tensor
    teacher_ids: Tensor
    teacher_p: Tensor


class FeatureCache:
    """What the target says while it reads answers, a safetensors file per shard of answers.

    Tensors: features [Σ (length − 1), n·H] bfloat16, top_ids [Σ answered, K] int32, top_logp [Σ answered, K]
    float16. Metadata names target, feature layers and shard, and a file of another origin is made anew.
    """

    def __init__(self, folder: Path, origin: Mapping[str, Any]) -> None:
        self.folder, self.origin = folder, {k: json.dumps(v) for k, v in origin.items()}

    def path(self, shard: str) -> Path:
        """The cache file of a shard of answers."""
        return self.folder / Path(shard).with_suffix(".safetensors").name

    def has(self, shard: str, digest: str) -> bool:
        """Whether the shard's file is there and of this origin."""
        try:
            with safe_open(self.path(shard), "pt") as file:
                return bool(file.metadata() == self._metadata(digest))
        except (OSError, SafetensorError):
            return False

    def write(
        self,
        shard: str,
        digest: str,
        target: Target,
        rows: Sequence[Mapping[str, Any]],
        advance: Callable[[int], None],
    ) -> None:
        """Let `target`, whose `feature_layers` are set, read every answer of a shard."""
        parts = []
        for row in rows:
            features, ids, logp = read_answer(target, row["prompt_ids"], row["output_ids"])
            parts.append((features.bfloat16(), ids, logp))
            advance(1)
        names = ("features", "top_ids", "top_logp")
        tensors = {
            name: torch.cat(column) for name, column in zip(names, zip(*parts, strict=True), strict=True)
        }
        with replacing(self.path(shard)) as temporary:
            save_file(tensors, temporary, metadata=self._metadata(digest))

    def answers(self, shard: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[Callable[[], Answer]]:
        """A reader for every answer of a shard."""
        path, at, answered = self.path(shard), 0, 0
        for row in rows:
            length, count = len(row["prompt_ids"]) + len(row["output_ids"]) - 1, len(row["output_ids"])
            yield _Reader(path, list(row["prompt_ids"]), list(row["output_ids"]), at, answered)
            at, answered = at + length, answered + count

    def _metadata(self, digest: str) -> dict[str, str]:
        return {**self.origin, "shard": digest}


@dataclass(frozen=True)
class _Reader:
    path: Path
    prompt: list[int]
    output: list[int]
    at: int
    answered: int

    def __call__(self) -> Answer:
        length, count = len(self.prompt) + len(self.output) - 1, len(self.output)
        with safe_open(self.path, "pt") as file:
            features = file.get_slice("features")[self.at : self.at + length]
            ids = file.get_slice("top_ids")[self.answered : self.answered + count]
            logp = file.get_slice("top_logp")[self.answered : self.answered + count]
        teacher = logp.float().exp()
        return Answer(self.prompt + self.output, len(self.prompt), features, ids.long(), teacher)


def read_answer(
    target: Target, prompt: Sequence[int], output: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Teacher-forced: features [P + A − 1, n·H], top ids [A, K] int32, their log-probabilities float16.

    Uses slot 0 of the target.
    """
    logits, features = target.prefill(0, prompt)
    parts, says = [features], [logits.view(1, -1)]
    fed, width = list(output[:-1]), 64
    for begin in range(0, len(fed), width):
        part = fed[begin : begin + width]
        rows = make_rows((0,), (len(part),), 1, target.device, target.row_tile)
        first = len(prompt) + begin
        tokens = torch.zeros(rows.padded, dtype=torch.long, device=target.device)
        tokens[: rows.total] = torch.tensor(part, device=target.device)
        exists = rows.slot != 1
        end = first + len(part)
        extent = torch.full((2,), end, device=target.device)
        said, seen = target.verify(rows, tokens, rows.column + first, exists, extent, kv_bound(end))
        parts.append(seen[: rows.total])
        says.append(said[: rows.total])
    top = [torch.log_softmax(s.float(), -1).topk(min(TEACHERS, s.shape[-1])) for s in says]
    ids, logp = torch.cat([t.indices for t in top]), torch.cat([t.values for t in top])
    return torch.cat(parts).cpu(), ids.int().cpu(), logp.half().cpu()
