"""Stop strings over a growing text: nothing of a possible match is released before it is refuted."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Feed text piece by piece; what `push` returns is safe to show.

    The stop string that is complete first ends the answer (of two, the one that starts first); the result does
    not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text released by this piece; sets `stopped` when a stop string is complete."""
        if self.stopped or not text:
            return ""
        self._held += text
        found = [(i + len(s), i) for s in self._stops if (i := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            return self._release(min(found)[1], drop=True)
        return self._release(len(self._held) - self._possible_tail())

    def finish(self) -> str:
        """Release what was held back: the text ended without a match."""
        return self._release(len(self._held))

    def _release(self, n: int, drop: bool = False) -> str:
        out, self._held = self._held[:n], "" if drop else self._held[n:]
        return out

    def _possible_tail(self) -> int:
        """Length of the longest suffix that could still grow into a stop string."""
        longest = 0
        for stop in self._stops:
            for n in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:n]):
                    longest = n
                    break
        return longest
