"""The drafter contract: what the step asks of any drafter, chain or tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from pathlib import Path

    from blockpilot.plan import StepPlan
    from blockpilot.state import State
    from blockpilot.targets import Target


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens per slot, N = window − 1 columns; columns beyond a slot's width hold anything.

    Attributes:
        tokens: [R, N] int64 target ids. parent: [R, N] index of the parent column, −1 for the anchor.
        depth: [R, N] distance from the anchor, from 1. A chain has parent = j − 1, depth = j + 1. Parents come before
            their children, and children of one parent hold different tokens.
        nodes: [R] the anchor and the columns that count, for every slot of a plan with trees; None in any other.
    """

    tokens: Tensor
    parent: Tensor
    depth: Tensor
    nodes: Tensor | None = None

    @property
    def shape(self) -> tuple[Tensor, Tensor, Tensor]:
        """Parent, depth and nodes of trees."""
        assert self.nodes is not None  # a plan with trees has them
        return self.parent, self.depth, self.nodes


class Drafter(Protocol):
    """Guesses blocks. The target decides, so nothing here can change an output, only how fast it comes. On CUDA
    `propose` and `commit` are captured and replayed: all they know of a request lies in tensors of the device.

    Attributes:
        kind: short name. block_size: training width B. window: widths it can draft, sorted, 1 included.
        largest_tree: nodes of the largest tree it can draft, the anchor included; 0 if it drafts chains only.
        feature_layers: hidden states it wants from the target (HF convention).
        fingerprint: hash of its weights and config, and of the ids it drafts where these are not all.
    """

    kind: str
    block_size: int
    window: tuple[int, ...]
    largest_tree: int
    feature_layers: tuple[int, ...]
    fingerprint: str

    def attach(self, target: Target, max_requests: int) -> None:
        """Refuse, with a ValueError, a target or a number of slots this drafter was not built for."""

    def begin(self, slot: int, features: Tensor, tokens: Sequence[int]) -> None:
        """Start a request: features [len(tokens), n·H] of the whole prompt; `tokens` the prompt ids."""

    def propose(self, state: State, plan: StepPlan, noise: Tensor | None) -> Proposal:
        """Draft a block for every slot of `plan` wider than 1; noise [N, V] by target row, or None (greedy)."""

    def commit(self, state: State, plan: StepPlan, features: Tensor) -> None:
        """Take over features [N, n·H] of the verified rows; `state.count[r]` of them are committed."""


def load_drafter(
    source: str | Path, target: Target, max_requests: int, draft_temperature: float | None = None
) -> Drafter:
    """Load a drafter for `target`: "bundled", a folder in the format of DFlash, EAGLE-3 or SpecBlock, or a hub id, any
    of them followed by "+lookup" for `WithLookup`; or "lookup" for `PromptLookup`.

    Raises:
        ValueError: unknown format, corrupt files, or a drafter made for another target.
    """
    from blockpilot.drafters import eagle3_config, specblock_config
    from blockpilot.drafters.dflash import DFlashDrafter
    from blockpilot.drafters.dflash_config import ARCHITECTURE
    from blockpilot.drafters.dflash_cpp import CppDFlashDrafter
    from blockpilot.drafters.eagle3 import Eagle3Drafter
    from blockpilot.drafters.eagle3_cpp import CppEagle3Drafter
    from blockpilot.drafters.folder import CONFIG, find_drafter, read_config
    from blockpilot.drafters.lookup import SUFFIX, PromptLookup, WithLookup
    from blockpilot.drafters.specblock import SpecBlockDrafter
    from blockpilot.drafters.specblock_cpp import CppSpecBlockDrafter
    from blockpilot.targets.cpp_target import CppTarget

    asked, how = str(source), (target, max_requests, draft_temperature)
    if asked == PromptLookup.kind:
        return PromptLookup()
    if asked.endswith(SUFFIX) and asked != SUFFIX:
        return WithLookup(load_drafter(asked.removesuffix(SUFFIX), *how))
    packed = isinstance(target, CppTarget)
    folder = find_drafter(source)
    names = read_config(folder).get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if name in specblock_config.ARCHITECTURES:
        return (CppSpecBlockDrafter if packed else SpecBlockDrafter).load(folder, *how)
    if name in eagle3_config.ARCHITECTURES:
        return (CppEagle3Drafter if packed else Eagle3Drafter).load(folder, *how)
    if isinstance(name, str) and name.startswith("DFlash"):
        return (CppDFlashDrafter if packed else DFlashDrafter).load(folder, *how)
    known = (ARCHITECTURE, *eagle3_config.ARCHITECTURES, *specblock_config.ARCHITECTURES)
    raise ValueError(f"{folder / CONFIG}: expected architectures to be one of {known}, got {names!r}")
