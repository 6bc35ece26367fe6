"""A recorder that captures nothing and forbids what a capture forbids."""

from __future__ import annotations

from collections import Counter

from blockpilot.recorders import Uncaptured
from tests.no_host_sync import NoHostSync


class Replaying(Uncaptured):
    """Replays under the mode that forbids host reads, and says that a step takes `seconds`.

    `launches` counts launches by their steps, `records` the captured steps; `broken` fails every capture, `looping`
    ends a launch when every slot is finished, as a loop on the device does.
    """

    def __init__(self, seconds: float = 1e-4, broken: bool = False, looping: bool = False) -> None:
        self.seconds, self.broken, self.looping = seconds, broken, looping
        self.launches: Counter[int] = Counter()
        self.records = self.interrupts = self.ended_early = 0

    def record(self, step, ring):
        if self.broken:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.records += 1

        def replay(steps: int) -> None:
            for _ in range(steps):
                if self.looping and bool(ring.finished.all()):
                    self.ended_early += 1
                    return
                with NoHostSync():
                    step()

        return replay

    def launch(self, replay, steps, ring):
        self.launches[steps] += 1
        rows, _ = super().launch(replay, steps, ring)()
        ring.rows.fill_(-1)  # the host has a copy of its own
        return lambda: (rows, len(rows) * self.seconds)

    def interrupt(self):
        self.interrupts += 1
