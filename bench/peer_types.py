"""What every arm of the peer benchmark is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROBE_CONTEXT = 128  # tokens before what is timed alone


class Unavailable(Exception):
    """An arm cannot run here; the message says why."""


@dataclass(frozen=True)
class Setup:
    """What all arms share. `max_length`: positions of prompt and answer. `eos`: ids that end an answer."""

    gguf: Path
    eos: tuple[int, ...]
    threads: int
    max_length: int


@dataclass(frozen=True)
class Request:
    """One prompt, as token ids so that every arm sees the same ones. `temperature` 0 is greedy."""

    ids: tuple[int, ...]
    seed: int
    temperature: float
    max_new_tokens: int


@dataclass(frozen=True)
class Run:
    """One answer.

    Attributes:
        token_ids: the answer; an end id is kept.
        first_token: seconds to the first token. decoding: seconds from there to the last.
        steps: forward passes of a speculative arm after prefill; None elsewhere.
        phases: seconds by phase, where the arm tells them.
        width, tree: of the block and of its tree, 0 for a chain, where the arm tells them.
        error: why there is no answer.
    """

    token_ids: tuple[int, ...]
    first_token: float | None = None
    decoding: float = 0.0
    steps: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    width: int = 1
    tree: int = 0
    error: str | None = None

    @property
    def decoded(self) -> int:
        """Tokens made in `decoding`: prefill delivers the first."""
        return max(len(self.token_ids) - 1, 0)

    @property
    def tokens_per_s(self) -> float | None:
        """Speed without prefill; None if nothing was left to decode."""
        return self.decoded / self.decoding if self.decoded and self.decoding > 0 else None


Decode = Callable[[Request], Run]


@dataclass(frozen=True)
class Arm:
    """One way to decode.

    Attributes:
        name: without spaces and commas, for `--arms`. family: `--arms` takes it for all of its arms.
        open: loads the model, once for arms that share it. May raise `Unavailable`.
        reference: the arm whose answers this one's are compared with.
        exact: any difference is a failure, sampled or not. Other arms are compared where they are greedy.
        probe: further figures, measured once.
    """

    name: str
    family: str
    open: Callable[[Setup], Decode]
    reference: str = "plain"
    exact: bool = False
    probe: Callable[[Setup], dict[str, Any]] | None = None
