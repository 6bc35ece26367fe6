"""A training run of a drafter in a folder: data, features, steps, validation, resumption, and the finished drafter.

The folder holds settings.json, log.jsonl (a line per log entry), state.safetensors, features/ (what the target
says, made once), curve.png and drafter/, which `LLM(drafter=…)` loads.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockpilot.drafters.dflash_checkpoint import save_dflash
from blockpilot.drafters.dflash_config import DFlashConfig
from blockpilot.loading import build_target, resolve_checkpoint, resolve_device, resolve_weights
from blockpilot.policies.atomic import replacing
from blockpilot.targets.checkpoint import EMBEDDING, HEAD, Checkpoint
from blockpilot.text import load_tokenizer
from blockpilot.training.answers import read_shards
from blockpilot.training.draft_batches import Reader
from blockpilot.training.draft_data import FeatureCache, feature_cache
from blockpilot.training.draft_model import DraftModel, drafter_config, start_from_target
from blockpilot.training.draft_training import DraftTrainer, Recipe

SHORTEST = 8  # answers below this teach nothing about blocks
SAMPLE = 48  # answers that the features' sizes are taken from
_BINDING = (
    "weights",
    "layers",
    "block_size",
    "feature_layers",
    "start",
    "mask_token_id",
)  # of every resumption
Bar = Callable[[str, int], Callable[[int], None]]


@dataclass(frozen=True)
class DraftOptions:
    """What to train and on what.

    Attributes:
        answers: folder of make-data. target, weights, device: as in `LLM`.
        layers, block_size: of the drafter. feature_layers: target layers it reads, None for the default.
        start: target layers its own begin as, () for random ones. mask_token_id: None picks one.
        validation: greedy answers of the validation families that τ is measured on. widths: to measure at.
        every: seconds between validations.
    """

    answers: Path
    target: str | Path | Checkpoint = "smollm2"
    weights: str = "auto"
    device: str = "cpu"
    layers: int = 2
    block_size: int = 8
    feature_layers: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    validation: int = 48
    widths: tuple[int, ...] = (4, 8)
    every: float = 240.0


@dataclass
class _Data:
    train: list[Reader]
    lengths: list[int]
    validation: list[Reader]
    counts: Tensor


class DraftRun:
    """A run in `folder`, new or continued.

    Raises:
        ValueError: a folder of another run, or answers of another target.
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
        self.config = self._config(shards)
        self._settle(recipe)
        data = self._data(shards, bar)
        tensors, device = self.checkpoint.tensors, resolve_device(options.device)
        embedding = tensors[EMBEDDING].float().to(device)
        head = tensors[HEAD].float().to(device) if HEAD in tensors else embedding
        rows = (data.train, data.lengths, embedding, head, data.counts)
        self.trainer = DraftTrainer(self._model(data).to(device), recipe, *rows, _dtype(device))
        self._validation = data.validation
        if self._state.exists():
            self.trainer.load(self._state)
            self._cut_log()

    @property
    def _state(self) -> Path:
        return self.folder / "state.safetensors"

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
        window = _Window(self.config.block_size + 2)
        with _Stop() as stop:
            while not trainer.finished and (seconds is None or time.monotonic() - begun < seconds):
                before = trainer.blocks
                window.add(trainer.step())
                advance(trainer.blocks - before)
                if stop.asked:
                    self.save()
                    raise KeyboardInterrupt
                if time.monotonic() - last > self.options.every:
                    self._log(trainer.line("train") | window.take())
                    self.validate()
                    self.save()
                    last = time.monotonic()
        if window.steps:
            self._log(trainer.line("train") | window.take())
        result = self.validate()
        self.save()
        return result

    def validate(self) -> dict[str, Any]:
        """Measure τ on the validation answers and log it."""
        line = self.trainer.validate(self._validation, self.options.widths)
        self._log(line)
        return line

    def save(self) -> None:
        """Write the state and the drafter as it is."""
        self.trainer.save(self._state)
        tensors = {k: v.bfloat16() for k, v in self.trainer.model.tensors().items()}
        save_dflash(self.folder / "drafter", self.config.source, tensors)

    def _log(self, line: dict[str, Any]) -> None:
        with self.log_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _cut_log(self) -> None:
        """Drop lines that were logged after the state was saved."""
        lines = self.log_path.read_text(encoding="utf-8").splitlines() if self.log_path.exists() else []
        kept = [x for x in lines if x.endswith("}") and json.loads(x)["step"] <= self.trainer.steps]
        with replacing(self.log_path) as temporary:
            temporary.write_text("".join(f"{x}\n" for x in kept), encoding="utf-8")

    def _config(self, shards: Sequence[Any]) -> DFlashConfig:
        o, target = self.options, self.checkpoint.config
        settings = self.folder / "settings.json"
        mask = o.mask_token_id
        if mask is None and settings.exists():
            mask = json.loads(settings.read_text(encoding="utf-8"))["mask_token_id"]
        if mask is None:
            used = {i for _, _, rows in shards for r in rows for i in (*r["prompt_ids"], *r["output_ids"])}
            mask = load_tokenizer(self.checkpoint).unused_control(used)
        source = drafter_config(target, o.layers, o.block_size, mask, o.feature_layers)
        return DFlashConfig.from_json(source)

    def _settle(self, recipe: Recipe) -> None:
        """Write the settings of a new folder, or compare those of an old one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = {k: getattr(self.options, k) for k in _BINDING}
        settings = {
            "training": 1,
            "target": self.checkpoint.fingerprint,
            "mask_token_id": self.config.mask_token_id,
            "options": kept,
            "recipe": asdict(recipe),
        }
        settings = json.loads(json.dumps(settings))
        path = self.folder / "settings.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            differing = [k for k in kept if found["options"].get(k) != settings["options"][k]]
            if found["target"] != settings["target"] or differing:
                raise ValueError(
                    f"{self.folder}: the run there has other options ({', '.join(differing) or 'target'}); "
                    "use another folder"
                )
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def _data(self, shards: Sequence[Any], bar: Bar) -> _Data:
        o = self.options
        layers, mark = self.config.target_layer_ids, self.checkpoint.fingerprint
        own, given = (feature_cache(folder, mark, layers) for folder in (self.folder, o.answers))
        sources = {name: given if given.has(name, digest) else own for name, digest, _ in shards}
        self._read(own, [s for s in shards if sources[s[0]] is own], bar)
        data = _Data([], [], [], torch.zeros(self.checkpoint.config.vocab_size))
        for name, _, rows in shards:
            for row, reader in zip(rows, sources[name].answers(name, rows), strict=True):
                if len(row["output_ids"]) < SHORTEST:
                    continue
                if row["split"] == "validation":
                    if row["temperature"] == 0 and len(data.validation) < o.validation:
                        data.validation.append(reader)
                    continue
                data.train.append(reader)
                data.lengths.append(len(row["prompt_ids"]) + len(row["output_ids"]))
                ids = torch.tensor(row["output_ids"])
                data.counts.index_add_(0, ids, torch.ones(len(ids)))
        return data

    def _read(self, cache: FeatureCache, shards: Sequence[Any], bar: Bar) -> None:
        """Let the target read the shards whose features are not there yet."""
        missing = [s for s in shards if not cache.has(s[0], s[1])]
        if not missing:
            return
        rows = [r for _, _, shard in missing for r in shard]
        longest = max(len(r["prompt_ids"]) + len(r["output_ids"]) for r in rows)
        device = resolve_device(self.options.device)
        weights = resolve_weights(self.options.weights, self.checkpoint, device)
        target = build_target(self.checkpoint, 1, longest, torch.float32, device, weights)
        target.use_features([i + 1 for i in self.config.target_layer_ids])
        advance = bar("reading answers", len(rows))
        for name, digest, part in missing:
            cache.write(name, digest, target, part, advance)

    def _model(self, data: _Data) -> DraftModel:
        o, c = self.options, self.checkpoint.config
        some = data.train[:: max(1, len(data.train) // SAMPLE)]
        count = len(self.config.target_layer_ids)
        sample = torch.cat([reader().features.float() for reader in some]).unflatten(1, (count, -1))
        scale = sample.pow(2).mean((0, 2)).rsqrt()
        torch.manual_seed(0)
        model = DraftModel(self.config, max(data.lengths), scale)
        start = o.start
        if start is None:  # the first and the last layers carry most of what a shallow stack needs
            start = (0, *range(c.num_layers - o.layers + 1, c.num_layers))
        if start:
            start_from_target(model, self.checkpoint.tensors, start, sample[:, -1])
        return model


def _dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the processor multiplies it fast."""
    fast = device.type == "cuda" or getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return torch.bfloat16 if fast else torch.float32


class _Stop:
    """Takes SIGINT and SIGTERM as a wish to stop at the end of a step, which could not be repeated in part."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True


class _Window:
    """Sums over the steps since the last log line."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._clear()

    def _clear(self) -> None:
        self.steps, self._loss, self._rate = 0, 0.0, 0.0
        self._right, self._seen = torch.zeros(self._columns), torch.zeros(self._columns)

    def add(self, step: dict[str, Any]) -> None:
        self.steps, self._loss, self._rate = self.steps + 1, self._loss + step["loss"], step["rate"]
        self._right.index_add_(0, step["column"], step["right"].float())
        self._seen.index_add_(0, step["column"], torch.ones(len(step["column"])))

    def take(self) -> dict[str, Any]:
        """Mean loss, share of right guesses by column, rate."""
        share = [r / s for r, s in zip(self._right.tolist(), self._seen.tolist(), strict=True) if s > 0]
        line = {"loss": self._loss / self.steps, "accuracy": share, "lr": self._rate}
        self._clear()
        return line
