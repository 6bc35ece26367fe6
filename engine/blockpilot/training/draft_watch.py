"""What a training run keeps an eye on besides its steps: a wish to stop, and sums for the log."""

from __future__ import annotations

import signal
import threading
from typing import Any

import torch


class Stop:
    """Takes SIGINT and SIGTERM as a wish to stop at the end of a step, which could not be repeated in part."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True


class Window:
    """Sums over the steps since the last log line."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._clear()

    def _clear(self) -> None:
        self.steps, self._loss, self._rate = 0, 0.0, 0.0
        self._right = torch.zeros(self._columns, dtype=torch.float32)
        self._seen = torch.zeros_like(self._right)

    def add(self, step: dict[str, Any]) -> None:
        self.steps, self._loss, self._rate = self.steps + 1, self._loss + step["loss"], step["rate"]
        self._right.index_add_(0, step["column"], step["right"].float())
        self._seen.index_add_(0, step["column"], torch.ones(len(step["column"]), dtype=torch.float32))

    def take(self) -> dict[str, Any]:
        """Mean loss, share of right guesses by column, rate."""
        share = [r / s for r, s in zip(self._right.tolist(), self._seen.tolist(), strict=True) if s > 0]
        line = {"loss": self._loss / self.steps, "accuracy": share, "lr": self._rate}
        self._clear()
        return line
