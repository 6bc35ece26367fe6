"""What the engine asks of a policy, and the simplest one. Importing this does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

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

    A width may stand for a tree as deep: an attribute `trees` maps it to the tree's nodes, the anchor included, and at
    all other widths chains are drafted. An attribute `node_cost` says what a step with trees of 1, 2, … nodes takes,
    in any unit: every tree of the engine is then cut where tokens for that cost are most (CaDDTree, arXiv 2606.01813),
    and has no more nodes than it names.
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
        target, drafter = (_short(f) for f in (self.target, self.drafter))
        return f"target {target} with drafter {drafter}"


def _short(fingerprint: str) -> str:
    """Enough of the hash to tell two apart, and all that is behind it."""
    hashed, plus, rest = fingerprint.partition("+")
    return hashed[:12] + plus + rest


class Fixed:
    """The same width for every request; width 1 is plain decoding.

    Args:
        width: block width, anchor included, at least 1.
        tree: nodes of the tree that is drafted in place of a chain, at least the width; 0: a chain.
        node_cost: as in `BlockPolicy`; None: trees keep all their nodes.

    Attributes:
        sampled: as in `Predictor`. trees: as in `BlockPolicy`.

    Raises:
        ValueError: sizes or costs that cannot be.
    """

    sampled: bool | None = None

    def __init__(self, width: int, tree: int = 0, node_cost: Sequence[float] | None = None) -> None:
        self.window = check_window((width,))
        self.width, self.tree = width, tree
        self.trees = check_trees({width: tree} if tree else {}, self.window)
        self.node_cost = None if node_cost is None else check_node_cost(node_cost)

    def bind(self, embedding: Tensor | Table) -> None:
        """Nothing to keep."""

    def choose(self, last_logits: Tensor) -> Tensor:
        """[R, V] → [R] int64, all equal to `width`."""
        return last_logits.new_full((last_logits.shape[0],), self.width).long()

    def __repr__(self) -> str:
        more = f", tree={self.tree}" if self.tree else ""
        return f"Fixed({self.width}{more}{', cut by cost' if self.node_cost else ''})"


def check_window(window: object) -> tuple[int, ...]:
    """The window as a tuple, or ValueError unless it is 1 to 64 ascending different ints ≥ 1."""
    widths = tuple(window) if isinstance(window, (tuple, list, range)) else (window,)
    whole = all(isinstance(w, int) and not isinstance(w, bool) and w >= 1 for w in widths)
    if not whole or not 1 <= len(widths) <= 64 or any(a >= b for a, b in pairwise(widths)):
        raise ValueError(f"window: expected 1 to 64 ascending widths, each an int >= 1, got {window!r}")
    return widths


def check_trees(trees: Mapping[int, int], window: Sequence[int]) -> dict[int, int]:
    """Nodes by width, or ValueError unless each width is in the window and above 1, and has at least so many nodes."""
    for width, nodes in trees.items():
        whole = isinstance(nodes, int) and not isinstance(nodes, bool)
        if width not in window or width < 2 or not whole or nodes < width:
            raise ValueError(
                f"trees: expected widths above 1 of {list(window)} with at least as many nodes, got "
                f"{nodes!r} at width {width!r}"
            )
    return dict(trees)


def check_node_cost(cost: Sequence[float]) -> tuple[float, ...]:
    """Costs by nodes from 1 on, or ValueError unless there is one and all are finite and above zero."""
    numbers = all(isinstance(c, (int, float)) and not isinstance(c, bool) for c in cost)
    if not cost or not numbers or not all(0 < c < math.inf for c in cost):
        raise ValueError(
            f"node_cost: expected finite costs above zero of 1, 2, ... nodes, got {list(cost)[:5]}"
        )
    return tuple(float(c) for c in cost)


def trees_of(labels: Mapping[str, Any], window: Sequence[int]) -> dict[int, int]:
    """Nodes by width of the trees that labels were made with, from their settings; those of the window's widths."""
    trees = {int(width): nodes for width, nodes in labels.get("trees", {}).items()}
    return check_trees({w: n for w, n in trees.items() if w in window}, window)
