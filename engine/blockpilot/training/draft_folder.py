"""What a training run of a drafter is asked to do, and what its folder remembers of that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blockpilot.drafters.folder import FILES
from blockpilot.drafters.specblock_config import BLOCKS as DRAFTED
from blockpilot.policies.atomic import replacing
from blockpilot.targets.checkpoint import Checkpoint
from blockpilot.training.draft_kinds import KINDS
from blockpilot.training.draft_training import Recipe

FORMAT = 1
PARTS = ("shift", "valid-prefix")  # of SpecBlock, that a drafter or its training can do without
SHORTEST = 8  # answers below this teach nothing about blocks
_BINDING = (
    "kind",
    "weights",
    "layers",
    "block_size",
    "feature_layers",
    "start",
    "mask_token_id",
    "draft_vocabulary",
    "without",
)  # of every resumption
# Of runs that began when there was no such option.
_BEFORE: dict[str, Any] = {"draft_vocabulary": 0, "kind": "dflash", "without": []}


@dataclass(frozen=True)
class DraftOptions:
    """What to train and on what.

    Attributes:
        answers: folder of make-data. kind: a key of `draft_kinds.KINDS`. target, weights, device: as in `LLM`.
        layers, block_size: of the drafter. feature_layers: target layers it reads, None for the default.
        start: target layers its own begin as, () for random ones. mask_token_id: None picks one.
        draft_vocabulary: ids it drafts, the most frequent of the training answers; 0 for all.
        validation: greedy answers of the validation families that τ is measured on. widths: to measure at.
        every: seconds between validations. without: parts of SpecBlock to leave out, of `PARTS`.

    Raises:
        ValueError: a number out of range.
    """

    answers: Path
    kind: str = "dflash"
    target: str | Path | Checkpoint = "smollm2"
    weights: str = "auto"
    device: str = "cpu"
    layers: int = 2
    block_size: int = 8
    feature_layers: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    draft_vocabulary: int = 8192
    validation: int = 48
    widths: tuple[int, ...] = (4, 8)
    every: float = 240.0
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {sorted(KINDS)}, got {self.kind!r}")
        if self.kind == "eagle3" and self.layers != 1:
            raise ValueError(f"layers: expected 1 of an EAGLE-3 drafter, got {self.layers}")
        for name, least in (("layers", 1), ("block_size", 2), ("draft_vocabulary", 0), ("validation", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if not self.widths or min(self.widths) < 2:
            raise ValueError(f"widths: expected widths of at least 2, got {list(self.widths)}")
        if not self.every > 0:
            raise ValueError(f"every: expected seconds above 0, got {self.every}")
        known = PARTS if self.kind == "specblock" else ()
        if other := [x for x in self.without if x not in known]:
            raise ValueError(f"without: expected parts of {known} of kind {self.kind!r}, got {other}")
        most = DRAFTED * (self.block_size - 1) + 1
        if self.kind == "specblock" and max(self.widths) > most:
            raise ValueError(
                f"widths: expected at most {most}, {DRAFTED} blocks of {self.block_size - 1} ids, got "
                f"{list(self.widths)}"
            )

    def starting_layers(self, count: int) -> tuple[int, ...]:
        """Target layers, of `count`, that the drafter's begin as; () for random ones.

        Raises:
            ValueError: layers the target lacks, or another number of them than the drafter has.
        """
        start = self.start
        if start is None:
            # The first and the last carry most of what a shallow stack needs; with a head of its own, a drafter goes on
            # from a late layer's output.
            first = 0 if self.kind == "dflash" else count - self.layers
            start = (first, *range(count - self.layers + 1, count))
            if self.layers > count:
                raise ValueError(
                    f"layers: expected at most the target's {count} to start from, got {self.layers}; "
                    "start from random ones"
                )
        if start and (len(start) != self.layers or min(start) < 0 or max(start) >= count):
            raise ValueError(
                f"start: expected {self.layers} target layers of 0 to {count - 1}, one for each of the "
                f"drafter's, got {list(start)}"
            )
        return start

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe that the kind cannot follow.

        Raises:
            ValueError: random widths of SpecBlock blocks, which are trained whole.
        """
        if self.kind == "specblock" and recipe.widths != (self.block_size, self.block_size):
            raise ValueError(
                f"train widths: expected {self.block_size} alone of SpecBlock blocks, which are trained whole, got "
                f"{recipe.widths}; leave them out"
            )


class RunFolder:
    """A run's folder and its settings.json.

    Raises:
        ValueError: a folder of something else.

    Attributes:
        found: the settings there; empty in a new folder.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.found = path, dict[str, Any]()
        names = {p.name for p in path.iterdir()} if path.exists() else set()
        if "settings.json" in names:
            self.found = _read(self._settings)
        elif others := sorted(n for n in names if not n.endswith(".tmp")):
            raise ValueError(f"{path}: expected an empty folder or a run of train-draft, found {others[:5]}")
        drafter = path / "drafter"
        if drafter.exists() and (others := sorted({p.name for p in drafter.iterdir()} - FILES)):
            raise ValueError(
                f"{drafter}: expected nothing but {sorted(FILES)}, which a run replaces, found {others[:5]}; "
                "move them elsewhere"
            )

    @property
    def _settings(self) -> Path:
        return self.path / "settings.json"

    def check(self, options: DraftOptions, target: str, answers: Sequence[str]) -> None:
        """Compare what binds every continuation with what is found.

        Args:
            target: fingerprint. answers: digests of the shards of answers, in order; more may follow later.

        Raises:
            ValueError: another run's settings.
        """
        if not self.found:
            return
        options_found = _BEFORE | self.found["options"]
        differing = [k for k, v in _bound(options).items() if options_found.get(k) != v]
        if self.found["target"] != target or differing:
            raise ValueError(
                f"{self.path}: the run there has other options ({', '.join(differing) or 'target'}); "
                "use another folder"
            )
        before = self.found.get("answers", [])
        if list(answers[: len(before)]) != before:
            raise ValueError(
                f"{self.path}: the run there learns from other answers than {options.answers}; give the folder "
                "it began with, which may have grown, or use another folder for the run"
            )

    def write(
        self, options: DraftOptions, recipe: Recipe, target: str, answers: Sequence[str], mask: int
    ) -> None:
        """Write settings.json."""
        settings = {
            "training": FORMAT,
            "target": target,
            "mask_token_id": mask,
            "options": _bound(options),
            "recipe": asdict(recipe),
            "answers": list(answers),
        }
        with replacing(self._settings) as temporary:
            temporary.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def check_rows(rows: Sequence[Any], batch: int, answers: Path) -> None:
    """Refuse answers that leave nothing to train on or nothing to validate on.

    Raises:
        ValueError: which of them is missing.
    """
    long = [r for r in rows if len(r["output_ids"]) >= SHORTEST]
    train = sum(r["split"] == "train" for r in long)
    if train < batch:
        raise ValueError(
            f"{answers}: expected at least {batch} answers to train on, as many as a step takes, found {train} "
            f"of {SHORTEST} tokens or more; make more data, or lower the batch"
        )
    if not any(r["split"] == "validation" and r["temperature"] == 0 for r in long):
        raise ValueError(
            f"{answers}: expected greedy answers of {SHORTEST} tokens or more to prompts of a held-out family, "
            "which τ is measured on, found none; make the data with --validation-families"
        )


def _bound(options: DraftOptions) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(json.dumps({k: getattr(options, k) for k in _BINDING}))
    return kept


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected the settings of train-draft, found {error}") from error
    if (
        not isinstance(found, dict)
        or found.get("training") != FORMAT
        or not isinstance(found.get("options"), dict)
        or not {"target", "mask_token_id"} <= found.keys()
    ):
        raise ValueError(
            f"{path}: expected the settings of a train-draft run, found something else; use another folder"
        )
    return found
