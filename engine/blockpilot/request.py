"""The host's view of one request, from submit to the finished output."""

from __future__ import annotations

import itertools
import secrets
import time
from typing import TYPE_CHECKING

from blockpilot.errors import NonFiniteLogitsError
from blockpilot.output import Output, Stats, TokenLogprob
from blockpilot.params import SamplingParams
from blockpilot.stops import StopScanner

if TYPE_CHECKING:
    from blockpilot.text import Tokenizer

_ids = itertools.count()


class Handle:
    """A submitted request. Read-only for callers; `LLM.step` moves it forward.

    Attributes:
        text: everything that is safe to show so far. token_ids: delivered ids so far.
        finished: whether `output` is there. slot: the slot it occupies, or None.
    """

    def __init__(
        self, prompt: list[int], params: SamplingParams, tokenizer: Tokenizer, deadline: float | None
    ) -> None:
        self.id = next(_ids)
        self.prompt = prompt
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.submitted = time.perf_counter()
        self.expires = None if deadline is None else self.submitted + deadline
        self.slot: int | None = None
        self.token_ids: list[int] = []
        self.output: Output | None = None
        self.stats = Stats()
        self.exact = True
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._detokenizer = tokenizer.detokenizer()
        self._scanner = StopScanner(params.stop)
        self._text: list[str] = []
        self._first_token: float | None = None

    @property
    def finished(self) -> bool:
        return self.output is not None

    @property
    def text(self) -> str:
        return "".join(self._text)

    def choose_shape(self, width: int, tree: int) -> None:
        """Fix the block's width and its tree's nodes for the life of the request; at width 1 there is no tree."""
        self.stats.width = width
        self.stats.tree = tree if width > 1 else 0
        self.stats.offered = [0] * (width - 1)
        self.stats.kept = [0] * (width - 1)

    def advance(self, tokens: list[int], logprobs: list[TokenLogprob] | None, reason: str | None) -> int:
        """Deliver tokens in order until a stop string is complete; `reason` is the device's, for the last token.

        Returns:
            how many were delivered; the rest is overshoot and leaves no trace.
        """
        for i, token in enumerate(tokens):
            self.token_ids.append(token)
            if self._logprobs is not None and logprobs is not None:
                self._logprobs.append(logprobs[i])
            self._text.append(self._scanner.push(self._detokenizer.push([token])))
            if self._scanner.stopped:
                self._close("stop")
                return i + 1
        if self._first_token is None and tokens:
            self._mark_first()
        if reason is not None:
            error = NonFiniteLogitsError(self._failure()) if reason == "error" else None
            self._close(reason, error)
        return len(tokens)

    def count_step(self, effective: int, accepted: int, delivered: int) -> None:
        """Record one step: drafts offered, drafts kept and tokens delivered, all after the stop cut."""
        self.stats.steps += 1
        self.stats.committed += delivered
        self.stats.step_tokens.append(delivered)
        for j in range(1, effective):
            self.stats.offered[j - 1] += 1
            self.stats.kept[j - 1] += j <= min(accepted, delivered)

    def close(self, reason: str) -> None:
        """End early ("cancelled", "deadline"), keeping what was delivered."""
        if not self.finished:
            self._close(reason)

    def fail(self, error: BaseException) -> None:
        """End because of an exception; an interrupt counts as a cancellation."""
        if not self.finished:
            failed = isinstance(error, Exception)
            self._close("error" if failed else "cancelled", error if isinstance(error, Exception) else None)

    def _mark_first(self) -> None:
        self._first_token = time.perf_counter()
        self.stats.time_to_first_token = self._first_token - self.submitted

    def _failure(self) -> str:
        at = len(self.prompt) + len(self.token_ids)
        return f"the target's logits for position {at} are not finite (after {len(self.token_ids)} tokens)"

    def _close(self, reason: str, error: Exception | None = None) -> None:
        if self._first_token is None and self.token_ids:
            self._mark_first()
        if not self._scanner.stopped:
            self._text.append(self._scanner.push(self._detokenizer.finish()))
            if self._scanner.stopped and reason in ("stop", "length"):
                reason = "stop"
            self._text.append(self._scanner.finish())
        if self._first_token is not None:
            self.stats.decode_seconds = time.perf_counter() - self._first_token
        self.output = Output(
            text=self.text,
            token_ids=self.token_ids,
            prompt_token_ids=self.prompt,
            finish_reason=reason,
            logprobs=self._logprobs,
            seed=self.seed,
            stats=self.stats,
            error=error,
            exact=self.exact,
        )
