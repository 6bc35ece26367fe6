"""Label files as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockpilot.policies.contract import Pair, check_window
from blockpilot.policies.predictor import policy_input
from blockpilot.training.label_rows import usable
from blockpilot.training.label_store import decode_input, read_labels, read_logits


@dataclass(frozen=True)
class Examples:
    """Labelled prompts.

    Attributes:
        ids, families: one per prompt.
        inputs: [N, D] float32, what the predictor reads.
        tau: [N, C] float64, tokens per step at each width.
        window: the C widths.
    """

    ids: tuple[str, ...]
    families: tuple[str, ...]
    inputs: Tensor
    tau: Tensor
    window: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, rows: Sequence[int]) -> Examples:
        """The prompts at the given rows."""
        index = torch.tensor(rows, dtype=torch.long)
        ids, families = (tuple(x[i] for i in rows) for x in (self.ids, self.families))
        return replace(self, ids=ids, families=families, inputs=self.inputs[index], tau=self.tau[index])


@dataclass(frozen=True)
class LabelSet:
    """Examples with where they come from: pair, drafter block size, settings of the run, rows left out."""

    examples: Examples
    pair: Pair
    block_size: int
    settings: dict[str, Any]
    unusable: int


def load_examples(
    files: Sequence[str | Path], input_kind: str = "mean_embedding", window: Sequence[int] | None = None
) -> LabelSet:
    """Reads label files made with the same settings.

    Args:
        files: label files; an id may occur once over all of them.
        input_kind: "mean_embedding" is in the label file; the others are computed from its raw logits.
        window: widths to keep, a subset of the labelled ones; None keeps all.
    """
    settings, rows = _read_all([Path(f) for f in files])
    widths = check_window(tuple(settings["window"] if window is None else window))
    missing = [w for w in widths if w not in settings["window"]]
    if missing:
        raise ValueError(f"window: expected widths among the labelled {settings['window']}, got {missing}")
    kept = [(path, row) for path, row in rows if usable(row)]
    if len(kept) < 8:
        raise ValueError(f"labels: expected at least 8 usable prompts, got {len(kept)} of {len(rows)}")
    columns = [settings["window"].index(w) for w in widths]
    examples = Examples(
        ids=tuple(row["id"] for _, row in kept),
        families=tuple(row["family"] for _, row in kept),
        inputs=torch.stack([_input(path, row, settings, input_kind) for path, row in kept]),
        tau=torch.tensor([[row["tau"][c] for c in columns] for _, row in kept], dtype=torch.float64),
        window=widths,
    )
    return LabelSet(
        examples, Pair(**settings["pair"]), settings["block_size"], settings, len(rows) - len(kept)
    )


def _read_all(files: Sequence[Path]) -> tuple[dict[str, Any], list[tuple[Path, dict[str, Any]]]]:
    if not files:
        raise ValueError("labels: expected at least one label file, got none")
    settings: dict[str, Any] | None = None
    rows: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in files:
        found, own = read_labels(path)
        if settings is not None and found != settings:
            differing = sorted(k for k in {*found, *settings} if found.get(k) != settings.get(k))
            raise ValueError(
                f"{path}: expected the settings of {files[0]}, found other {', '.join(differing)}"
            )
        settings = found
        for row in own:
            if row["id"] in rows:
                raise ValueError(f"{path}: prompt {row['id']!r} is already in {rows[row['id']][0]}")
            rows[row["id"]] = (path, row)
    assert settings is not None  # files is not empty
    return settings, list(rows.values())


def _input(path: Path, row: dict[str, Any], settings: dict[str, Any], input_kind: str) -> Tensor:
    if input_kind != "mean_embedding":
        return policy_input(read_logits(path, row, settings["vocabulary"])[None], input_kind)[0]
    try:
        return decode_input(row["input"], settings["input_size"])
    except ValueError as error:
        raise ValueError(f"{path}: prompt {row['id']!r}: {error}") from error


def worth(tau: Tensor, window: tuple[int, ...], cost: Mapping[int, float] | None) -> Tensor:
    """What a width is worth, [N, C] float64: τ, or with a cost table tokens per second, τ / cost(width)."""
    if cost is None:
        return tau
    return tau / torch.tensor([cost[w] for w in window], dtype=torch.float64)


def best(values: Tensor) -> Tensor:
    """Column of the highest value, [N] int64; the lowest width wins a tie."""
    columns = torch.arange(values.shape[1])
    top = values == values.amax(-1, keepdim=True)
    return torch.where(top, columns, values.shape[1]).amin(-1)


def equally_best(values: Tensor) -> Tensor:
    """Training label of each row, [N, C] float32: one, shared equally by the widths that reach the maximum.

    Wide blocks often tie, since a draft that is never accepted changes nothing; naming one of the tied widths
    would teach the others to be wrong.
    """
    top = (values == values.amax(-1, keepdim=True)).float()
    return top / top.sum(-1, keepdim=True)
