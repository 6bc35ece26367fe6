"""How well drafts do while requests are served, from what every step commits anyway."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

ROUNDS = 64  # steps of requests between two looks
FAST, SLOW = 0.1, 0.01  # weight of a look in the averages
RECENT = 8  # looks that say how it was before an update
FALL = 0.02  # of τ, as a share, that is harm
LOOKED_AT = (256, 512, 1024, 2048)  # steps behind an update after which harm is looked for
SIGMAS = 1.64


@dataclass
class Moments:
    """Of tokens that steps committed."""

    steps: int = 0
    tokens: int = 0
    squares: int = 0

    def add(self, tokens: int) -> None:
        """One step."""
        self.steps, self.tokens, self.squares = (
            self.steps + 1,
            self.tokens + tokens,
            self.squares + tokens * tokens,
        )

    @property
    def tau(self) -> float:
        """Mean."""
        return self.tokens / max(1, self.steps)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return math.sqrt(max(0.0, self.squares / max(1, self.steps) - self.tau**2) / max(1, self.steps))

    @staticmethod
    def sum(parts: Iterable[Moments]) -> Moments:
        """Of all their steps."""
        made = Moments()
        for p in parts:
            made = Moments(made.steps + p.steps, made.tokens + p.tokens, made.squares + p.squares)
        return made


@dataclass
class Pulse:
    """Averages over looks of `ROUNDS` steps.

    Attributes:
        fast, slow: τ, lately and in the long run. rejected: share of steps that keep no draft. unsayable: share of
            answered tokens that the head has no row for. width: mean width.
        seconds: that steps with drafts took; passes: how many there were, of any number of requests.
        look: since the last one. waited: steps since the last update.
    """

    fast: float = 0.0
    slow: float = 0.0
    rejected: float = 0.0
    unsayable: float = 0.0
    width: float = 0.0
    seconds: float = 0.0
    passes: int = 0
    waited: int = 0
    look: Moments = field(default_factory=Moments)
    _bare: int = 0
    _unsaid: int = 0
    _columns: int = 0
    _looks: int = 0

    def count(self, tokens: Sequence[int], unsayable: int, width: int) -> None:
        """Steps of a request: tokens of each, and how many of all these the head has no row for."""
        for n in tokens:
            self.look.add(n)
            self._bare += n == 1
        self._unsaid += unsayable
        self._columns += width * len(tokens)

    def close(self) -> Moments:
        """End a look."""
        look = self.look
        weight = [max(w, 1 / (self._looks + 1)) for w in (FAST, SLOW)]
        self.fast += weight[0] * (look.tau - self.fast)
        self.slow += weight[1] * (look.tau - self.slow)
        self.rejected += weight[0] * (self._bare / look.steps - self.rejected)
        self.unsayable += weight[0] * (self._unsaid / max(1, look.tokens) - self.unsayable)
        self.width += weight[0] * (self._columns / look.steps - self.width)
        self.waited += look.steps
        self.look, self._bare, self._unsaid, self._columns = Moments(), 0, 0, 0
        self._looks += 1
        return look

    def context(self) -> list[float]:
        """As `bandit.CONTEXT` names it."""
        drop = 1 - self.fast / self.slow
        return [1.0, drop, self.rejected, self.unsayable, math.log1p(self.waited) / 10]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `Pulse.from_dict` makes the same of it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Pulse:
        """See `to_dict`."""
        return cls(**{**found, "look": Moments(**found["look"])})


class Watch:
    """Whether τ is lower behind an update than before it."""

    def __init__(self) -> None:
        self._recent: deque[Moments] = deque(maxlen=RECENT)
        self._before: Moments | None = None
        self._since = Moments()
        self._due: list[int] = []

    def begin(self) -> None:
        """An update was made now."""
        self._before, self._since, self._due = Moments.sum(self._recent), Moments(), list(LOOKED_AT)
        self._recent.clear()

    def end(self) -> None:
        """No more of it."""
        self._before = None

    def fell(self, look: Moments) -> bool:
        """Take in a look → whether it is time to say so, and τ fell by more than `FALL`, noise aside."""
        self._recent.append(look)
        if self._before is None:
            return False
        self._since = Moments.sum([self._since, look])
        if self._since.steps < self._due[0]:
            return False
        del self._due[0]
        before, since = self._before, self._since
        fall = (1 - FALL) * before.tau - since.tau
        if not self._due:
            self.end()
        return fall > SIGMAS * math.hypot(before.error, since.error)
