"""A training run of a drafter in a folder: data, features, steps, validation, resumption, and the finished drafter.

The folder holds settings.json, log.jsonl (a line per log entry), state.safetensors, features/ (what the target
says, made once), curve.png, draft_vocabulary.safetensors (the ids that are drafted, chosen once) and drafter/, which
`LLM(drafter=…)` loads.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockpilot.drafters.draft_vocabulary import DRAFT_VOCABULARY, most_frequent, read_ids, write_ids
from blockpilot.loading import build_target, resolve_checkpoint, resolve_device, resolve_weights
from blockpilot.policies.atomic import replacing
from blockpilot.targets.checkpoint import EMBEDDING, HEAD
from blockpilot.text import load_tokenizer
from blockpilot.training.answers import read_shards
from blockpilot.training.draft_batches import Reader
from blockpilot.training.draft_data import FeatureCache, feature_cache
from blockpilot.training.draft_folder import SHORTEST, DraftOptions, RunFolder, check_rows
from blockpilot.training.draft_kinds import KINDS, Kind, Model
from blockpilot.training.draft_training import Recipe
from blockpilot.training.draft_watch import Stop, Window

_log = logging.getLogger(__name__)
SAMPLE = 48  # answers that the features' sizes are taken from
Bar = Callable[[str, int], Callable[[int], None]]


@dataclass
class _Data:
    train: list[Reader]
    lengths: list[int]
    validation: list[Reader]
    longest: int = 0


class DraftRun:
    """A run in `folder`, new or continued.

    Raises:
        ValueError: a folder of another run, or answers of another target.

    Attributes:
        vocabulary: [V'] int64, the ids that are drafted; None: all.
    """

    def __init__(self, folder: Path, options: DraftOptions, recipe: Recipe, bar: Bar) -> None:
        self.folder, self.options = folder, options
        self.checkpoint = resolve_checkpoint(options.target)
        settings, shards = read_shards(options.answers)
        if settings["target"] != self.checkpoint.fingerprint:
            raise ValueError(
                f"{options.answers}: its answers are another target's (fingerprint {settings['target'][:12]}, "
                f"not {self.checkpoint.fingerprint[:12]}); train with the target that made them"
            )
        rows = [r for _, _, shard in shards for r in shard]
        check_rows(rows, recipe.batch, options.answers)
        options.check(recipe)
        self._start = options.starting_layers(self.checkpoint.config.num_layers)
        run, digests = RunFolder(folder), [digest for _, digest, _ in shards]
        counts = _count_ids(rows, self.checkpoint.config.vocab_size)
        self.vocabulary, mask = self._draft_ids(counts), self._mask(rows, run.found.get("mask_token_id"))
        self.kind: Kind = KINDS[options.kind](self.checkpoint.config, options, mask, self.vocabulary)
        mark = self.checkpoint.fingerprint
        run.check(options, mark, digests)
        if not run.found:
            run.write(options, recipe, mark, digests, mask)
        if self.vocabulary is not None and not self._ids_path.exists():
            write_ids(self._ids_path, self.vocabulary, len(counts))
        data = self._data(shards, bar)
        tensors, device = self.checkpoint.tensors, resolve_device(options.device)
        embedding = tensors[EMBEDDING].float().to(device)
        head = tensors[HEAD].float().to(device) if HEAD in tensors else embedding
        parts = (data.train, data.lengths, embedding, head, counts)
        model = self._model(data, recipe).to(device)
        self.trainer = self.kind.trainer(model, recipe, *parts, _dtype(device), self.kind.own_ids)
        self._validation = data.validation
        self._logged = 0
        if self._state.exists():
            self.trainer.load(self._state)
        run.write(options, recipe, mark, digests, mask)
        self._cut_log()

    @property
    def _state(self) -> Path:
        return self.folder / "state.safetensors"

    @property
    def _ids_path(self) -> Path:
        return self.folder / DRAFT_VOCABULARY

    @property
    def log_path(self) -> Path:
        """JSON lines: kind "train" or "validation"."""
        return self.folder / "log.jsonl"

    def train(self, advance: Callable[[int], None], seconds: float | None = None) -> dict[str, Any]:
        """Go on until the recipe's blocks, or for about `seconds`; returns the last validation.

        Raises:
            KeyboardInterrupt: after SIGINT or SIGTERM, once the step in work is done and the state saved.
        """
        trainer, begun, last = self.trainer, time.monotonic(), time.monotonic()
        window = Window(trainer.recipe.widths[1])
        with Stop() as stop:
            while not trainer.finished and (seconds is None or time.monotonic() - begun < seconds):
                before = trainer.blocks
                window.add(trainer.step())
                advance(trainer.blocks - before)
                if stop.asked:
                    self.save()
                    raise KeyboardInterrupt
                if time.monotonic() - last > self.options.every:
                    self._log(trainer.line("train") | window.take())
                    self.save()
                    self.validate()
                    last = time.monotonic()
        if window.steps:
            self._log(trainer.line("train") | window.take())
        self.save()
        return self.validate()

    def validate(self) -> dict[str, Any]:
        """Measure τ on the validation answers and log it."""
        ids = self.vocabulary if self.kind.own_ids is None else self.kind.own_ids
        line = self.trainer.validate(self._validation, self.options.widths, ids)
        self._log(line)
        return line

    def save(self) -> None:
        """Write the state and the drafter as it is."""
        self.trainer.save(self._state)
        tensors = {k: v.bfloat16() for k, v in self.trainer.model.tensors().items()}
        self.kind.save(self.folder / "drafter", tensors)

    def _log(self, line: dict[str, Any]) -> None:
        if self.log_path.stat().st_size != self._logged:
            raise ValueError(f"{self.folder}: another run writes here too; let one of them finish alone")
        with self.log_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._logged = self.log_path.stat().st_size

    def _cut_log(self) -> None:
        """Drop lines that were logged after the state was saved, and a torn one."""
        data = self.log_path.read_bytes() if self.log_path.exists() else b""
        lines = data[: data.rfind(b"\n") + 1].decode().splitlines()
        kept = [x for x in lines if json.loads(x)["step"] <= self.trainer.steps]
        with replacing(self.log_path) as temporary:
            temporary.write_text("".join(f"{x}\n" for x in kept), encoding="utf-8")
        self._logged = self.log_path.stat().st_size

    def _mask(self, rows: Sequence[Any], found: int | None) -> int:
        """The id that stands for a token to be guessed; `found`: the one that the run has already."""
        if self.options.mask_token_id is not None:
            return self.options.mask_token_id
        if found is not None:
            return found
        if self.options.kind != "dflash":
            return 0
        used = {i for r in rows for i in (*r["prompt_ids"], *r["output_ids"])}
        return load_tokenizer(self.checkpoint).unused_control(used)

    def _draft_ids(self, counts: Tensor) -> Tensor | None:
        """The ids that are drafted, None for all: those in the folder, whatever answers came since."""
        size = self.options.draft_vocabulary
        if not 0 < size < len(counts):
            return None
        if self._ids_path.exists():
            return read_ids(self._ids_path, len(counts))
        return most_frequent(counts, size, load_tokenizer(self.checkpoint).eos_token_ids)

    def _data(self, shards: Sequence[Any], bar: Bar) -> _Data:
        o = self.options
        layers, mark = self.kind.layers, self.checkpoint.fingerprint
        own, given = (feature_cache(folder, mark, layers) for folder in (self.folder, o.answers))
        sources = {name: given if given.has(name, digest) else own for name, digest, _ in shards}
        self._read(own, given, [s for s in shards if sources[s[0]] is own], bar)
        data = _Data([], [], [])
        for name, _, rows in shards:
            for row, reader in zip(rows, sources[name].answers(name, rows), strict=True):
                if len(row["output_ids"]) < SHORTEST:
                    continue
                length = len(row["prompt_ids"]) + len(row["output_ids"])
                data.longest = max(data.longest, length)
                if row["split"] == "validation":
                    if row["temperature"] == 0 and len(data.validation) < o.validation:
                        data.validation.append(reader)
                    continue
                data.train.append(reader)
                data.lengths.append(length)
        return data

    def _read(self, cache: FeatureCache, given: FeatureCache, shards: Sequence[Any], bar: Bar) -> None:
        """Let the target read the shards whose features are not there yet; say so if others are `given`."""
        missing = [s for s in shards if s[2] and not cache.has(s[0], s[1])]
        if not missing:
            return
        held = given.layers(missing[0][0])
        if held and held != list(self.kind.layers):
            _log.warning(
                "blockpilot: %s holds features of target layers %s, this drafter reads %s: the target reads all "
                "answers again; --feature-layers %s trains on what is there",
                self.options.answers,
                held,
                list(self.kind.layers),
                ",".join(map(str, held)),
            )
        rows = [r for _, _, shard in missing for r in shard]
        longest = max(len(r["prompt_ids"]) + len(r["output_ids"]) for r in rows)
        device = resolve_device(self.options.device)
        weights = resolve_weights(self.options.weights, self.checkpoint, device)
        target = build_target(self.checkpoint, 1, longest, torch.float32, device, weights)
        target.use_features([i + 1 for i in self.kind.layers])
        advance = bar("reading answers", len(rows))
        for name, digest, part in missing:
            cache.write(name, digest, target, part, advance)

    def _model(self, data: _Data, recipe: Recipe) -> Model:
        some = data.train[:: max(1, len(data.train) // SAMPLE)]
        count = len(self.kind.layers)
        sample = torch.cat([reader().features.float() for reader in some]).unflatten(1, (count, -1))
        scale = sample.pow(2).mean((0, 2)).rsqrt()
        torch.manual_seed(recipe.seed)
        widest = max(*self.options.widths, recipe.widths[1])
        model = self.kind.model(data.longest + widest, scale)
        if self._start:
            self.kind.start(model, self.checkpoint.tensors, self._start, sample[:, -1])
        return model


def _count_ids(rows: Sequence[Any], total: int) -> Tensor:
    """[V] how often the training answers hold each id."""
    counts = torch.zeros(total)
    for row in rows:
        if row["split"] != "validation" and len(row["output_ids"]) >= SHORTEST:
            ids = torch.tensor(row["output_ids"])
            counts.index_add_(0, ids, torch.ones(len(ids)))
    return counts


def _dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the processor multiplies it fast."""
    fast = device.type == "cuda" or getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return torch.bfloat16 if fast else torch.float32
