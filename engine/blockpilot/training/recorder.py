"""A policy that answers a fixed width and keeps what a predictor would have read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.policies.contract import Table, check_window
from blockpilot.policies.predictor import policy_input


@dataclass(frozen=True)
class Capture:
    """What `choose` saw, a row per request in call order: inputs [N, H], logits [N, V], float32, CPU."""

    inputs: Tensor
    logits: Tensor


class Recorder:
    """A `BlockPolicy` for labelling: the predictor's input is captured where inference computes it.

    Args:
        window: the widths the labels compare; `choose` answers the first.
    """

    def __init__(self, window: tuple[int, ...]) -> None:
        self.window = check_window(window)
        self._embedding: Tensor | Table | None = None
        self._rows: list[tuple[Tensor, Tensor]] | None = None

    def bind(self, embedding: Tensor | Table) -> None:
        """Keeps a reference to the target's embedding [V, H]."""
        self._embedding = embedding

    @property
    def embedding(self) -> Tensor | Table:
        """The bound embedding; RuntimeError before `bind`."""
        if self._embedding is None:
            raise RuntimeError("the recording policy was never bound: pass it on as LLM(policy=...)")
        return self._embedding

    def choose(self, last_logits: Tensor) -> Tensor:
        """[R, V] → the window's first width for every row."""
        if self._rows is not None:
            inputs = policy_input(last_logits, "mean_likely_embedding", self.embedding)
            self._rows.append((inputs.cpu(), last_logits.float().cpu().clone()))
        return last_logits.new_full((last_logits.shape[0],), self.window[0]).long()

    def start(self) -> None:
        """Begins a recording."""
        self._rows = []

    def stop(self) -> Capture:
        """Ends it and returns its rows in the order in which requests were shown to the policy."""
        rows, self._rows = self._rows or [], None
        vocabulary, size = self.embedding.shape
        inputs = torch.cat([r[0] for r in rows]) if rows else torch.zeros(0, size, dtype=torch.float32)
        logits = torch.cat([r[1] for r in rows]) if rows else torch.zeros(0, vocabulary, dtype=torch.float32)
        return Capture(inputs, logits)
