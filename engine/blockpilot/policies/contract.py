"""What the engine asks of a policy, and the simplest one. Importing this does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@runtime_checkable
class Table(Protocol):
    """A target's embedding that is not kept as floats."""

    shape: tuple[int, int]
    ndim: int
    device: torch.device

    def weighted_mean(self, p: Tensor) -> Tensor:
        """p [R, V] float32 → p @ E, [R, H] float32, each row by itself."""
        ...


@runtime_checkable
class BlockPolicy(Protocol):
    """Chooses a request's block width once, after its prefill and before its first step.

    One that is for some requests only says so by an attribute `sampled`: True for those that sample, False for greedy
    ones. The engine decodes the others plain; without the attribute, or with None, it asks about all.
    """

    @property
    def window(self) -> tuple[int, ...]:
        """The widths it may choose, ascending."""
        ...

    def bind(self, embedding: Tensor | Table) -> None:
        """Receives the target's embedding table [V, H] before the first `choose`; it must not be changed."""
        ...

    def choose(self, last_logits: Tensor) -> Tensor:
        """Widths [R] int64 for the raw last-position logits [R, V] (before temperature, filters and bans)."""
        ...


@dataclass(frozen=True)
class Pair:
    """Fingerprints of the target and the drafter a policy was made for."""

    target: str
    drafter: str

    def __post_init__(self) -> None:
        for name in ("target", "drafter"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"Pair.{name}: expected a non-empty fingerprint, got {value!r}")

    def __str__(self) -> str:
        return f"target {self.target} with drafter {self.drafter}"


class Fixed:
    """The same width for every request; width 1 is plain decoding.

    Args:
        width: block width, anchor included, at least 1.

    Attributes:
        sampled: as in `Predictor`.
    """

    sampled: bool | None = None

    def __init__(self, width: int) -> None:
        self.window = check_window((width,))
        self.width = width

    def bind(self, embedding: Tensor | Table) -> None:
        """Nothing to keep."""

    def choose(self, last_logits: Tensor) -> Tensor:
        """[R, V] → [R] int64, all equal to `width`."""
        return last_logits.new_full((last_logits.shape[0],), self.width).long()

    def __repr__(self) -> str:
        return f"Fixed({self.width})"


def check_window(window: object) -> tuple[int, ...]:
    """The window as a tuple, or ValueError unless it is 1 to 64 ascending different ints ≥ 1."""
    widths = tuple(window) if isinstance(window, (tuple, list, range)) else (window,)
    whole = all(isinstance(w, int) and not isinstance(w, bool) and w >= 1 for w in widths)
    if not whole or not 1 <= len(widths) <= 64 or any(a >= b for a, b in pairwise(widths)):
        raise ValueError(f"window: expected 1 to 64 ascending widths, each an int >= 1, got {window!r}")
    return widths
