"""Seeded draws that stay the same across Python versions and processes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def article(noun: str) -> str:
    """The noun with "a" or "an" before it."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


class Draw:
    """Choices made from `random.Random.random()` alone, whose sequence Python guarantees for a seed."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)  # a str seed is hashed with SHA-512, not with PYTHONHASHSEED

    def number(self, low: int, high: int) -> int:
        """A whole number in [low, high]."""
        return low + int(self._random.random() * (high - low + 1))

    def pick(self, items: Sequence[T]) -> T:
        """One item."""
        return items[self.number(0, len(items) - 1)]

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different positions of `items`, in drawn order."""
        pool = list(items)
        return [pool.pop(self.number(0, len(pool) - 1)) for _ in range(count)]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """All items in drawn order."""
        return self.some(items, len(items))
