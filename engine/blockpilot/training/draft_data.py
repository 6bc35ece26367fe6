"""Answers as a drafter trains on them: ids, the target's features and its likeliest ids at every position."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from blockpilot.policies.atomic import replacing
from blockpilot.rows import Rows, kv_bound, make_rows
from blockpilot.training.replay import RecordingTarget

if TYPE_CHECKING:
    from blockpilot.targets import Target

TEACHERS = 16  # likeliest ids kept at each position of an answer
# Of P prompt ids and A answered ones: features [P + A − 1, n·H], likeliest ids [A, K] int32, their
# log-probabilities [A, K] float16.
Heard: TypeAlias = tuple[Tensor, Tensor, Tensor]


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

    def layers(self, shard: str) -> list[int]:
        """Feature layers of the shard's file, whatever its origin; none without a file."""
        try:
            with safe_open(self.path(shard), "pt") as file:
                found: list[int] = json.loads((file.metadata() or {}).get("layers", "[]"))
        except (OSError, SafetensorError, ValueError):
            return []
        return found

    def write(
        self,
        shard: str,
        digest: str,
        target: Target,
        rows: Sequence[Mapping[str, Any]],
        advance: Callable[[int], None],
    ) -> None:
        """Let `target`, whose `feature_layers` are set, read every answer of a shard."""
        heard = []
        for row in rows:
            heard.append(read_answer(target, row["prompt_ids"], row["output_ids"]))
            advance(1)
        self.save(shard, digest, heard)

    def save(self, shard: str, digest: str, heard: Sequence[Heard]) -> None:
        """Write what was heard of every answer of a shard, in order; nothing for a shard without answers."""
        if not heard:
            return
        parts = [(features.bfloat16(), ids, logp) for features, ids, logp in heard]
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


def feature_cache(folder: Path, target: str, layers: Sequence[int]) -> FeatureCache:
    """The cache beside answers or in a run's folder, for target layers (0 = the first) of that fingerprint."""
    return FeatureCache(folder / "features", {"target": target, "layers": list(layers)})


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


class Listener(RecordingTarget):
    """A target that answers, and keeps what is heard of every answer besides its ids."""

    verify_commit = None  # what is heard are logits, which that call does not hand out

    def __init__(self, target: Target, room: int) -> None:
        super().__init__(target, room)
        self._said: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}

    def prefill(self, slot: int, prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
        logits, features = super().prefill(slot, prompt)
        ids, logp = likeliest(logits.view(1, -1))
        self._said[id(self.answers[-1])] = {len(prompt): (ids[0], logp[0])}
        return logits, features

    def verify(
        self, rows: Rows, tokens: Tensor, position: Tensor, exists: Tensor, extent: Tensor, bound: int
    ) -> tuple[Tensor, Tensor]:
        logits, features = super().verify(rows, tokens, position, exists, extent, bound)
        ids, logp = likeliest(logits)
        for answer, span, first in self._spans(rows, position):
            said = self._said[id(answer)]
            for i in range(span.start, span.stop):
                said[first + i - span.start + 1] = (ids[i], logp[i])
        return logits, features

    def heard(self, number: int, count: int) -> Heard:
        """Of the answer whose prefill was the `number`-th and which has `count` ids."""
        answer = self.answers[number]
        start, said = len(answer.prompt), self._said[id(answer)]
        top = [said[at] for at in range(start, start + count)]
        ids, logp = (torch.stack(column) for column in zip(*top, strict=True))
        return answer.features[: start + count - 1].cpu(), ids.cpu(), logp.cpu()


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[N, V] → the K likeliest ids [N, K] int32 and their log-probabilities float16."""
    top = torch.log_softmax(logits.float(), -1).topk(min(TEACHERS, logits.shape[-1]))
    return top.indices.int(), top.values.half()


def read_answer(target: Target, prompt: Sequence[int], output: Sequence[int]) -> Heard:
    """What is heard while the target reads an answer; uses its slot 0."""
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
    top = [likeliest(s) for s in says]
    ids, logp = (torch.cat(column).cpu() for column in zip(*top, strict=True))
    return torch.cat(parts).cpu(), ids, logp
