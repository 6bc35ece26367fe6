"""Drafters that learn from what they serve, if that pays (arXiv 2605.07243, its cost-aware bandit)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from blockpilot.drafters.pairs import PairDrafter
from blockpilot.graphs import DEPTH
from blockpilot.memory import require_fits

if TYPE_CHECKING:
    from blockpilot.adapt.adapter import Adapter
    from blockpilot.drafters import Drafter
    from blockpilot.targets import Target


@dataclass(frozen=True)
class Adapt:
    """How to adapt a drafter.

    Attributes:
        state: file that `LLM` goes on from if it is there, and that `LLM.close` writes; None keeps nothing.
        seed: of what an update looks at.

    Raises:
        ValueError: a seed out of range.
    """

    state: str | Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ValueError(f"Adapt.seed: expected 0 to 2**63 - 1, got {self.seed!r}")


def resolve_adapter(
    asked: bool | Adapt, drafter: Drafter | None, target: Target, slots: int
) -> Adapter | None:
    """What adapts `drafter` as asked; None for False.

    Raises:
        ValueError: a drafter that cannot adapt, memory that is not there, or a damaged or foreign state.
    """
    if asked is False:
        return None
    options = Adapt() if asked is True else asked
    if not isinstance(options, Adapt):
        raise ValueError(f"adapt: expected True, False or an Adapt, got {asked!r}")
    from blockpilot.adapt.adapter import Adapter
    from blockpilot.adapt.feedback import PIECES, SPAN, History
    from blockpilot.adapt.learner import MODELS, check
    from blockpilot.adapt.state import restore

    if not isinstance(drafter, PairDrafter) or drafter.kind not in MODELS:
        raise ValueError(
            f"adapt: expected a drafter of kind {' or '.join(MODELS)}, which can learn, without +lookup, got "
            f"{drafter.kind if drafter else None}; leave adapt out"
        )
    check(drafter)
    # On CUDA the device is at most a launch ahead of the host.
    ahead = max(drafter.window) * (DEPTH if target.device.type == "cuda" else 1)
    size, weights = drafter.config.feature_size, _weights(drafter.config)
    need = History.bytes_needed(slots, size, ahead) + 2 * PIECES * 2 * SPAN * size
    need += 4 * 5 * weights  # as they are, as they were, their gradient and two moments
    require_fits({"adaptation": need}, target.device)
    with torch.inference_mode():
        drafter.history = History(slots, size, ahead, target.device)
        drafter.own()
    state = None if options.state is None else Path(options.state)
    adapter = Adapter(drafter, target, state, options.seed)
    if state is not None and state.exists():
        restore(adapter, state)
    return adapter


def _weights(config: Any) -> int:
    return sum(s[0] * s[-1] for s in config.expected_tensors().values() if len(s) == 2)
