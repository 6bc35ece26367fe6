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
from blockpilot.training.prompts import split_rows


@dataclass(frozen=True)
class Examples:
    """Labelled prompts.

    Attributes:
        ids, families: one per prompt. hashes: of the prompts' texts, or empty.
        inputs: [N, D] float32, what the predictor reads.
        tau: [N, C] float64, tokens per step at each width.
        window: the C widths.
        datasets: the evaluation set of each prompt, or None; empty: none has one.
        halves: [N, 2, C] float64, tokens per step of the first and the second half of the answer, NaN where not
            labelled; None: no prompt has them.
    """

    ids: tuple[str, ...]
    families: tuple[str, ...]
    inputs: Tensor
    tau: Tensor
    window: tuple[int, ...]
    datasets: tuple[str | None, ...] = ()
    halves: Tensor | None = None
    hashes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, rows: Sequence[int]) -> Examples:
        """The prompts at the given rows."""
        index = torch.tensor(rows, dtype=torch.long)
        ids, families = (tuple(x[i] for i in rows) for x in (self.ids, self.families))
        return replace(
            self,
            ids=ids,
            families=families,
            inputs=self.inputs[index],
            tau=self.tau[index],
            datasets=tuple(self.datasets[i] for i in rows) if self.datasets else (),
            hashes=tuple(self.hashes[i] for i in rows) if self.hashes else (),
            halves=None if self.halves is None else self.halves[index],
        )

    def with_plain(self) -> Examples:
        """With width 1, plain decoding, among the candidates: every step delivers one token."""
        if 1 in self.window:
            return self
        tau = torch.cat([torch.ones(len(self), 1, dtype=torch.float64), self.tau], 1)
        halves = self.halves
        if halves is not None:
            halves = torch.cat([torch.ones(len(self), 2, 1, dtype=torch.float64), halves], 2)
        return replace(self, tau=tau, halves=halves, window=(1, *self.window))


@dataclass(frozen=True)
class LabelSet:
    """Examples with where they come from: pair, drafter block size, settings of the run, rows left out."""

    examples: Examples
    pair: Pair
    block_size: int
    settings: dict[str, Any]
    unusable: int


def load_examples(
    files: Sequence[str | Path],
    input_kind: str = "mean_likely_embedding",
    window: Sequence[int] | None = None,
    least: int = 8,
) -> LabelSet:
    """Reads label files made with the same settings.

    Args:
        files: label files; an id may occur once over all of them.
        input_kind: "mean_likely_embedding" is in the label file; the others are computed from its raw logits.
        window: widths to keep, of the labelled ones and 1, which is worth 1 token per step by definition; None
            keeps the labelled ones.
        least: usable prompts that must be there.
    """
    settings, rows = _read_all([Path(f) for f in files])
    widths = check_window(tuple(settings["window"] if window is None else window))
    missing = [w for w in widths if w not in settings["window"] and w != 1]
    if missing:
        raise ValueError(f"window: expected widths among the labelled {settings['window']}, got {missing}")
    kept = [(path, row) for path, row in rows if usable(row)]
    if len(kept) < least:
        raise ValueError(f"labels: expected at least {least} usable prompts, got {len(kept)} of {len(rows)}")
    columns = [settings["window"].index(w) if w in settings["window"] else None for w in widths]
    examples = Examples(
        ids=tuple(row["id"] for _, row in kept),
        families=tuple(row["family"] for _, row in kept),
        inputs=torch.stack([_input(path, row, settings, input_kind) for path, row in kept]),
        tau=torch.tensor(
            [[1.0 if c is None else row["tau"][c] for c in columns] for _, row in kept], dtype=torch.float64
        ),
        window=widths,
        datasets=tuple(row["dataset"] for _, row in kept),
        hashes=tuple(row["prompt_hash"] for _, row in kept),
        halves=_halves([row for _, row in kept], columns),
    )
    return LabelSet(
        examples, Pair(**settings["pair"]), settings["block_size"], settings, len(rows) - len(kept)
    )


def part(examples: Examples, share: float, seed: int, by: str = "random") -> tuple[Examples, Examples]:
    """(rest, share of the examples), seeded; what is taken lacks prompts whose text is among the rest.

    Raises:
        ValueError: nothing is left of either part.
    """
    rest, taken = split_rows(examples.families, share, seed, by)
    if examples.hashes:
        known = {examples.hashes[i] for i in rest}
        taken = [i for i in taken if examples.hashes[i] not in known]
        if not taken:
            raise ValueError("labels: every prompt that is to be held out occurs in the training part too")
    return examples.select(rest), examples.select(taken)


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


def _halves(rows: Sequence[dict[str, Any]], columns: Sequence[int | None]) -> Tensor | None:
    """[N, 2, C] tokens per step of either half; None when no row has them."""
    if all(row["halves"] is None for row in rows):
        return None

    def rate(row: dict[str, Any], half: int, column: int | None) -> float:
        if column is None:
            return 1.0
        committed, steps = (0, 0) if row["halves"] is None else row["halves"][column][half]
        return committed / steps if steps else float("nan")

    return torch.tensor(
        [[[rate(row, half, c) for c in columns] for half in (0, 1)] for row in rows], dtype=torch.float64
    )


def _input(path: Path, row: dict[str, Any], settings: dict[str, Any], input_kind: str) -> Tensor:
    if input_kind != "mean_likely_embedding":
        return policy_input(read_logits(path, row, settings["vocabulary"])[None], input_kind)[0]
    try:
        return decode_input(row["input"], settings["input_size"])
    except ValueError as error:
        raise ValueError(f"{path}: prompt {row['id']!r}: {error}") from error


def worth(tau: Tensor, window: tuple[int, ...], cost: Mapping[int, float] | None) -> Tensor:
    """What a width is worth, [..., C] float64: τ, or with a cost table tokens per second, τ / cost(width)."""
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
