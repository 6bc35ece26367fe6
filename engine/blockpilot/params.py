"""What a caller may ask of one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e6
MAX_COUNT = 2**31
MAX_LOGPROBS = 20
MAX_STOP_IDS = 16


def _require(ok: bool, name: str, expected: str, got: object) -> None:
    if not ok:
        raise ValueError(f"SamplingParams.{name}: expected {expected}, got {got!r}")


def _is_int(value: object, low: int = -(2**63), high: int = 2**64) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < high


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _items(name: str, value: object, expected: str) -> tuple[Any, ...]:
    _require(isinstance(value, (list, tuple)), name, expected, value)
    return tuple(value) if isinstance(value, (list, tuple)) else ()


@dataclass(frozen=True)
class SamplingParams:
    """Limits, stops and sampling of one request. Immutable; the engine never changes a caller's copy.

    Attributes:
        max_new_tokens: tokens to produce at most. None: until a stop or the context limit. 0: an empty answer.
        min_new_tokens: stop ids cannot be chosen before this many tokens exist (stop strings still apply).
        temperature: 0 is greedy; otherwise at least 1e-5.
        top_k, top_p, min_p: filters after the temperature, in this order; 0, 1.0 and 0.0 switch them off.
        seed: any 64-bit integer. None draws fresh entropy, recorded in `Output.seed`.
        stop: strings that end the answer; the answer excludes them.
        stop_token_ids: ids that end the answer, beside the model's own. The id is kept in `token_ids`.
        ignore_eos: do not stop at the model's own end ids.
        logprobs: None: none. n: the log-probability of every token and of the n most likely ones, under the
            raw distribution (temperature 1, no filter).
        width: block width for this request, in place of the policy's choice.
        tree: nodes of the tree that is drafted in place of a chain, the anchor included: the likeliest paths that
            `width` columns hold. At least the width; a wider choice of the policy is cut to it. None: a chain, or
            where the policy chooses the width, what it chooses.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    width: int | None = None
    tree: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop, "a tuple of strings")
        ids = _items("stop_token_ids", self.stop_token_ids, "a tuple of token ids")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)
        self._check_limits()
        self._check_sampling()
        self._check_stops()

    def _check_limits(self) -> None:
        new, least = self.max_new_tokens, self.min_new_tokens
        _require(new is None or _is_int(new, 0, 2**128), "max_new_tokens", "None or an int >= 0", new)
        _require(_is_int(least, 0, MAX_COUNT), "min_new_tokens", f"an int in [0, {MAX_COUNT})", least)
        if new is not None:
            _require(least <= new, "min_new_tokens", f"at most max_new_tokens = {new}", least)
        n, width = self.logprobs, self.width
        _require(n is None or _is_int(n, 0, MAX_LOGPROBS + 1), "logprobs", f"None or 0..{MAX_LOGPROBS}", n)
        _require(width is None or _is_int(width, 1, MAX_COUNT), "width", "an int >= 1", width)
        tree, least = self.tree, width or 1
        expected = f"None, for a chain, or an int >= {least}, the width"
        _require(tree is None or _is_int(tree, least, MAX_COUNT), "tree", expected, tree)

    def _check_sampling(self) -> None:
        t = self.temperature
        ok = _is_number(t, 0, MAX_TEMPERATURE) and (t == 0 or t >= MIN_TEMPERATURE)
        _require(ok, "temperature", f"0 (greedy) or {MIN_TEMPERATURE}..{MAX_TEMPERATURE:g}", t)
        _require(
            _is_int(self.top_k, 0, MAX_COUNT), "top_k", f"an int in [0, {MAX_COUNT}) (0 = off)", self.top_k
        )
        ok = _is_number(self.top_p, 0, 1) and self.top_p > 0
        _require(ok, "top_p", "a number in (0, 1] (1 = off)", self.top_p)
        _require(_is_number(self.min_p, 0, 1), "min_p", "a number in [0, 1] (0 = off)", self.min_p)
        seed = self.seed
        _require(seed is None or _is_int(seed), "seed", "None or a 64-bit int", seed)

    def _check_stops(self) -> None:
        for text in self.stop:
            _require(isinstance(text, str) and text != "", "stop", "non-empty strings", text)
        for i in self.stop_token_ids:
            _require(_is_int(i, 0), "stop_token_ids", "token ids >= 0", i)
        n = len(self.stop_token_ids)
        _require(n <= MAX_STOP_IDS, "stop_token_ids", f"at most {MAX_STOP_IDS} ids", n)

    @property
    def filtered(self) -> bool:
        """Whether a filter restricts the target's choices."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
