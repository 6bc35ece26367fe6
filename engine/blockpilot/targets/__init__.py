"""Targets: the models whose output is reproduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from blockpilot.rows import Rows
    from blockpilot.targets.config import ModelConfig


class Target(Protocol):
    """What the step asks of a target; each implementation owns the layout of its KV cache.

    Attributes:
        dtype: KV cache and rounding of matmul inputs. capacity: positions per slot.
        row_tile: packed rows come in multiples of it. forwards: passes so far.
        embedding: the table [V, H] that a drafter borrows and a policy reads a distribution through.
        cache: static keys and values; `cache.dump` is the slot that absent rows have.
    """

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    capacity: int
    fingerprint: str
    row_tile: int
    forwards: int
    feature_layers: tuple[int, ...]
    embedding: Any
    cache: Any

    @property
    def verify_commit(self) -> Callable[..., tuple[Tensor, list[int]]] | None:
        """`begin_block`, `verify`, the choices, their commit and its report in one call, (state, plan, noise) and for
        a plan with trees their proposal → features, report (see `packed_decoder.verify_commit`); None: the step takes
        them one by one."""

    def use_features(self, layers: Sequence[int]) -> None:
        """Choose the hidden states handed to the drafter (HF convention), or ValueError."""

    def prefill(self, slot: int, prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Fill a slot → last-position logits [V], features [len(prompt), n·H]."""

    def verify(
        self,
        rows: Rows,
        tokens: Tensor,
        position: Tensor,
        exists: Tensor,
        extent: Tensor,
        bound: int,
        path: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A block or tree per slot → logits [N, V], features [N, n·H]; rows that do not exist hold anything.

        `path` [N, D] int64 says for trees where in the cache a row finds the anchor and its further ancestors, by
        depth, and puts its own key; it sees these and what lies before the anchor.
        """

    def compact(self, begin: Tensor, source: Tensor, count: Tensor) -> None:
        """Copy keys and values of places begin + source of every slot to begin + 0 … count − 1.

        begin, count: [R] int64. source: [R, W] int64, rising, so that nothing moves up.
        """
