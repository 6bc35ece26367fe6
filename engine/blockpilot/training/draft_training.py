"""Training a drafter on the target's own answers (arXiv 2602.06036, 2503.01840; recipes of SpecForge).

Warm-up, a constant rate, and a linear decay over the last part: a run that stopped in the constant part can be
continued to any length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockpilot.errors import TrainingDivergedError
from blockpilot.training.draft_batches import Order, Reader, make_blocks, random_anchors
from blockpilot.training.draft_data import Answer
from blockpilot.training.draft_loss import (
    ABSENT,
    DraftIds,
    Labels,
    Vocabulary,
    draft_loss,
    position_weights,
)
from blockpilot.training.draft_state import load_state, save_state
from blockpilot.training.draft_validation import validate

if TYPE_CHECKING:
    from blockpilot.training.draft_kinds import Model


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        blocks: in all. batch: answers of a step; anchors: blocks of each.
        widths: (low, high): a step's width is drawn from low … high. gamma: of the position weights.
        rate: peak learning rate; warm_up: blocks; decay: last share of the run over which the rate falls to 0.
        vocabulary: ids of a step's softmax. distil: weight of the target's probabilities.
        seed: of order, anchors, widths and sampled ids.

    Raises:
        ValueError: a number out of range.
    """

    blocks: int
    batch: int = 8
    anchors: int = 32
    widths: tuple[int, int] = (8, 8)
    gamma: float = 4.0
    rate: float = 1e-3
    warm_up: int = 10_000
    decay: float = 0.3
    weight_decay: float = 0.01
    vocabulary: int = 8192
    distil: float = 0.5
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("blocks", "batch", "anchors"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("gamma", "rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected a number above 0, got {getattr(self, name)}")
        if not 2 <= self.widths[0] <= self.widths[1]:
            raise ValueError(f"widths: expected 2 <= low <= high, got {self.widths}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: expected 0 to {2**32 - 1}, got {self.seed}")
        if not 0 <= self.distil <= 1:
            raise ValueError(f"distil: expected a share between 0 and 1, got {self.distil}")

    def rate_at(self, done: int) -> float:
        """Learning rate after `done` blocks."""
        rising = (done + self.batch * self.anchors) / max(1, self.warm_up)
        falling = (self.blocks - done) / max(1.0, self.decay * self.blocks)
        return self.rate * max(0.0, min(1.0, rising, falling))


class DraftTrainer:
    """Model, optimiser and place in the data; `step` goes on, `save` and `load` take all of it along.

    Args:
        model: the drafter. readers: training answers. lengths: their ids, prompt included.
        embedding, head: [V, H] of the target, where the model is. counts: [V] ids in the training answers.
        own_ids: [V'] sorted, of a head of the drafter's own; None: it borrows the target's.
        dtype: of the matrix products; sums, norms and weights stay float32.
    """

    def __init__(
        self,
        model: Model,
        recipe: Recipe,
        readers: Sequence[Reader],
        lengths: Sequence[int],
        embedding: Tensor,
        head: Tensor,
        counts: Tensor,
        dtype: torch.dtype = torch.float32,
        own_ids: Tensor | None = None,
    ) -> None:
        self.model, self.recipe, self.readers, self.lengths = model, recipe, readers, lengths
        self.embedding, self.head, self._dtype = embedding, head, dtype
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.95), fused=True)
        self.vocabulary: Vocabulary | DraftIds = Vocabulary(counts, recipe.vocabulary)
        if own_ids is not None:
            self.vocabulary = DraftIds(own_ids, len(counts))
        self.order = Order(recipe.seed, recipe.batch, len(readers))
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.blocks = self.steps = self.tokens = 0
        self.seconds = 0.0

    @property
    def finished(self) -> bool:
        """Whether every block of the recipe was seen."""
        return self.blocks >= self.recipe.blocks

    def step(self) -> dict[str, Any]:
        """One update; returns loss, column and rightness of every guess, rate.

        Raises:
            TrainingDivergedError: the loss or its gradient is not finite; the weights are left as they were.
        """
        begun, r = time.process_time(), self.recipe
        for group in self.optimiser.param_groups:
            group["lr"] = r.rate_at(self.blocks)
        low, high = r.widths
        width = low + int(torch.randint(high - low + 1, (), generator=self.generator))
        loss, right, column = self._loss(width)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), r.clip)
        if not (loss.isfinite() and norm.isfinite()):
            raise TrainingDivergedError(
                f"training diverged at step {self.steps}: the loss is {float(loss.detach())} and its gradient's "
                f"size {float(norm)}; lower the learning rate"
            )
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.steps += 1
        self.blocks += r.batch * r.anchors
        self.tokens += len(right)
        self.seconds += time.process_time() - begun
        return {
            "loss": float(loss.detach()),
            "column": column,
            "right": right,
            "rate": r.rate_at(self.blocks),
        }

    def _answers(self) -> tuple[list[Answer], list[Tensor]]:
        """Those of the next step, and anchors in each."""
        answers = [self.readers[i]() for i in self.order.next(self.lengths)]
        return answers, [random_anchors(a, self.recipe.anchors, self.generator) for a in answers]

    def _loss(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the next step; rightness and column of every guess that has a label."""
        r, (answers, anchors) = self.recipe, self._answers()
        weights = position_weights(width - 1, r.gamma)
        blocks, labels = make_blocks(answers, anchors, width, self.model.mask_token_id, weights)
        labels = self.vocabulary.keep(labels)
        known = (labels.ids != ABSENT).nonzero()[:, 0]
        kept = Labels(*(t[known] for t in vars(labels).values()))
        chosen = self.vocabulary.choose(kept, self.generator)
        device = self.embedding.device
        there = Labels(*(t.to(device) for t in vars(kept).values()))
        ids, extra = (t.to(device) for t in chosen)
        with torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32):
            hidden = self.model.guesses(blocks.to(device), self.embedding).flatten(0, 2)[known.to(device)]
            rows = self.model.head_rows(self.head, ids)
            loss, right = draft_loss(hidden, rows, there, ids, extra, r.distil)
        return loss, right.cpu(), known % (width - 1)

    def validate(
        self, readers: Sequence[Reader], widths: Sequence[int], vocabulary: Tensor | None = None
    ) -> dict[str, Any]:
        """A log line: τ by width, share of right guesses by column; `vocabulary`: the ids drafted, None for all."""
        self.model.eval()
        ids = self.vocabulary.seen
        taus, accuracy = validate(self.model, readers, self.embedding, self.head, ids, widths, vocabulary)
        self.model.train()
        return self.line("validation") | {"tau": {str(k): v for k, v in taus.items()}, "accuracy": accuracy}

    def line(self, kind: str) -> dict[str, Any]:
        """What every log line begins with."""
        place = {"step": self.steps, "blocks": self.blocks, "tokens": self.tokens}
        return {"kind": kind, **place, "cpu_seconds": self.seconds, "epoch": self.order.epoch}

    def save(self, path: Path) -> None:
        """Everything that a run needs to go on as if it had not stopped, in one safetensors file."""
        save_state(self, path)

    def load(self, path: Path) -> None:
        """Go on from a `save` of the same recipe, except for `blocks`, `decay` and `rate`.

        Raises:
            ValueError: a damaged file, or one of another recipe or another drafter; nothing has changed then.
        """
        load_state(self, path)
