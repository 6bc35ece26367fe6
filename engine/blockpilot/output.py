"""What a request returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PHASES = ("prefill", "policy", "draft", "verify", "accept", "commit", "host")


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a token and of the most likely ids, raw distribution (temperature 1)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Stats:
    """Counters of one request, all taken after the stop cut.

    Attributes:
        width: the block width chosen after prefill (1: plain decoding).
        steps: draft + verify rounds that were needed.
        committed: tokens those steps delivered; prefill's own token is not counted.
        offered, kept: steps that offered drafts and kept one at offset 1 … width−1 of a block.
        step_tokens: tokens each step delivered, in order; they add up to `committed`. Not in `to_dict`.
        tree: nodes of the tree that each step drafts; 0: a chain.
        time_to_first_token: seconds from submit to the first token.
        decode_seconds: seconds from the first token to the last.
        seconds: seconds by phase; a step's time is shared equally by the requests in it. `accept` is part of `verify`
            where the target chooses and commits in the same call, and a captured step is all of it.
    """

    width: int = 1
    steps: int = 0
    committed: int = 0
    offered: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    time_to_first_token: float | None = None
    decode_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    step_tokens: list[int] = field(default_factory=list)
    tree: int = 0

    @property
    def tau(self) -> float | None:
        """τ: tokens committed by steps / steps; None before the first step."""
        return self.committed / self.steps if self.steps else None

    @property
    def acceptance_by_offset(self) -> list[float | None]:
        """Kept / offered at offset 1 … width−1; None where nothing was offered."""
        return [k / o if o else None for k, o in zip(self.kept, self.offered, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, with the derived figures."""
        kept = {name: value for name, value in asdict(self).items() if name != "step_tokens"}
        return {**kept, "tau": self.tau, "acceptance_by_offset": self.acceptance_by_offset}


@dataclass(frozen=True)
class Output:
    """A finished request.

    Attributes:
        text: decoded answer, without the stop string or special tokens.
        token_ids: delivered ids; `len(token_ids)` is the usage. A stop id is included, a stop string's tokens
            are included up to the one that completed it.
        finish_reason: "stop", "length", "cancelled", "deadline" or "error".
        logprobs: one entry per delivered token, if asked for.
        seed: the seed used; the same seed reproduces the answer.
        error: why the request failed, if it did.
        exact: True when output is promised to equal plain decoding bit for bit.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    seed: int
    stats: Stats
    error: Exception | None = None
    exact: bool = True

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": len(self.prompt_token_ids),
            "finish_reason": self.finish_reason,
            "logprobs": None if self.logprobs is None else [asdict(x) for x in self.logprobs],
            "seed": self.seed,
            "stats": self.stats.to_dict(),
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
            "exact": self.exact,
        }
