"""A drafter that learns while it serves: between two steps, a little at a time, and only if that pays.

The target decides every token, so nothing here can change an output, only how fast it comes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from blockpilot.adapt.bandit import Bandit, Choice
from blockpilot.adapt.feedback import SPAN, Feedback
from blockpilot.adapt.learner import HELD_OUT, Learner, Outcome, Work, sizes_of
from blockpilot.adapt.pulse import ROUNDS, Pulse, Watch
from blockpilot.adapt.state import save
from blockpilot.drafters.pairs import PairDrafter
from blockpilot.request import Handle
from blockpilot.targets import Target

ROWS = 2048  # fresh answered tokens that an update looks at
_log = logging.getLogger(__name__)
GUESS = 400  # steps that an update is taken to cost before one was timed


class Adapter:
    """Watches the steps of an engine and updates its drafter.

    Args:
        drafter: whose `history` is there. state: file that `close` writes, None for none. seed: as in `Learner`.
        clock: seconds.

    Attributes:
        bandit: decides. pulse, feedback: what it knows. learner: None before the first update.
        counts: of "skipped", "kept", "dropped" and "reverted". seconds: that all of it took.
        changed: the arm whose weights the drafter does not have from its checkpoint; "" before the first update.
        failed: the error that ended adapting; None while there is none.
    """

    def __init__(
        self,
        drafter: PairDrafter,
        target: Target,
        state: Path | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert drafter.history is not None
        self.drafter, self.target, self.bandit = drafter, target, Bandit()
        self.pulse, self.feedback = Pulse(), Feedback(drafter.history)
        self.learner: Learner | None = None
        self.counts: Counter[str] = Counter()
        self.seconds, self.changed = 0.0, ""
        self._history, self._unsayable = drafter.history, unsayable(drafter)
        self._state, self._seed, self._clock, self._watch = state, seed, clock, Watch()
        self._work: Work | None = None
        self._choice: Choice | None = None
        self._context: list[float] = []
        self._spent = 0.0
        self._rows, self._gathers = 0, False
        self.failed: str | None = None

    def around(self, handles: Mapping[int, Handle], run: Callable[[], None]) -> None:
        """Run a step of these requests, by slot, and take in what it did; then go on with whatever is in hand."""
        drafting = [h for h in handles.values() if h.stats.width > 1]
        done = [(len(h.stats.step_tokens), len(h.token_ids)) for h in drafting]
        begun = self._clock()
        run()
        ended = self._clock()
        if not drafting or self.failed is not None:
            return
        try:
            self._take_in(drafting, done, ended - begun)
        except Exception as error:  # a drafter that no longer learns must cost no answer
            self.failed = repr(error)
            _log.warning("blockpilot: the drafter no longer adapts, requests go on: %s", self.failed)
            self.stop()
        self.seconds += self._clock() - ended

    def _take_in(self, drafting: list[Handle], done: list[tuple[int, int]], seconds: float) -> None:
        """What a step did; `done`: step tokens and tokens of each request before it."""
        pulse = self.pulse
        pulse.seconds += seconds
        pulse.passes += 1
        for handle, (steps, tokens) in zip(drafting, done, strict=True):
            unsayable = sum(map(self._unsayable.__getitem__, handle.token_ids[tokens:]))
            pulse.count(handle.stats.step_tokens[steps:], unsayable, handle.stats.width)
        self._advance(drafting)

    def _advance(self, drafting: list[Handle]) -> None:
        """From a decision to feedback to the work on it, a little a step."""
        look = self.pulse.close() if self.pulse.look.steps >= ROUNDS else None
        fell = look is not None and self._watch.fell(look)
        if self._work is not None:
            with torch.inference_mode(False):
                self._go_on(self._work)
        elif self._gathers:
            self.feedback.take(drafting)
            if self.feedback.rows - self._rows >= ROWS and len(self.feedback.pieces) >= HELD_OUT:
                self._gather(False)
                self._spent, self._work = 0.0, self._update() if self._choice else self._trial()
        elif look is not None:
            self._decide(fell)

    def _decide(self, fell: bool) -> None:
        """Begin to gather feedback for an update that should pay, or to see whether the last one did harm."""
        pulse = self.pulse
        self._context, self._rows = pulse.context(), self.feedback.rows
        if not fell:
            guess = GUESS * pulse.seconds / pulse.passes
            self._choice = self.bandit.decide(self._context, pulse.seconds, guess)
            self.counts["skipped"] += self._choice is None
        self._gather(fell or self._choice is not None)

    def _gather(self, wanted: bool) -> None:
        self._gathers = self._history.open = wanted

    def _update(self) -> Work:
        """`Learner.update`, and the weights into the drafter if they gained."""
        assert self._choice is not None
        arm, pieces = self._choice.arm, list(self.feedback.pieces)
        self._watch.end()
        if self.learner is None:
            self.learner = self.twin(sizes_of(pieces, len(self.drafter.feature_layers)))
            yield
        outcome = yield from self.learner.update(arm, pieces, self._width)
        if outcome.gain > 0:
            self.install(arm)
            self._watch.begin()
        else:
            self.learner.undo()
        self.pulse.waited = 0
        self.counts["kept" if outcome.gain > 0 else "dropped"] += 1
        return outcome

    def _trial(self) -> Work:
        """τ fell behind an update: its fault only if the weights before it do better on what came since."""
        assert self.learner is not None  # there was an update
        self._watch.end()
        undone = yield from self.learner.trial(
            self.feedback.newest(self.feedback.rows - self._rows), self._width
        )
        if undone.gain > 0:
            self.learner.undo()
            self.install(self.changed)
            self.counts["reverted"] += 1
        return undone

    def _go_on(self, work: Work) -> None:
        """A little of an update or a trial; what it took is known once it ends."""
        begun = self._clock()
        ended: Outcome | None = None
        try:
            next(work)
        except StopIteration as end:
            ended, self._work = end.value, None
        except BaseException:
            self._work = None
            raise
        self._spent += self._clock() - begun
        if ended is None:
            return
        if self._choice is None:
            self.bandit.explored += self._spent
        else:
            self.bandit.learn(self._choice, self._context, ended.gain, ended.error, self._spent)
            self._choice = None

    def stop(self) -> None:
        """Give up an update under way, as if it had not begun."""
        if self._work is not None:
            self._work.close()
        self._work = self._choice = None
        self._gather(False)

    def close(self) -> None:
        """Keep what was learned, where a file for it was named."""
        self.stop()
        if self._state is not None:
            save(self, self._state)

    def install(self, arm: str) -> None:
        """Give the drafter the learner's weights, those that an arm changes."""
        assert self.learner is not None
        self.changed = "full" if "full" in (arm, self.changed) else arm
        with torch.inference_mode():
            self.drafter.replace(self.learner.tensors(arm), self.target)

    def twin(self, scale: torch.Tensor) -> Learner:
        """A learner for features of these sizes."""
        length = 2 * SPAN + self.drafter.block_size
        return Learner(self.drafter, self.target, length, scale, self._seed)

    @property
    def _width(self) -> int:
        """Blocks to measure on: as wide as requests have them, and no wider than was trained."""
        return max(2, min(round(self.pulse.width), self.drafter.block_size))

    def report(self) -> dict[str, Any]:
        """What was done and what it took, JSON-ready.

        `share`: of the seconds of steps with drafts and of adapting, what adapting took. `arms`: for each, updates
        made, seconds of one, and the gain expected in the present context with its standard deviation. `failed`: as the
        attribute.
        """
        context = self.pulse.context() if self.pulse.slow else None
        arms = {
            name: {
                "updates": arm.tried,
                "seconds": arm.seconds,
                "gain": None if context is None else arm.gain(context),
            }
            for name, arm in self.bandit.arms.items()
        }
        total = self.seconds + self.pulse.seconds
        return {
            **{n: self.counts[n] for n in ("skipped", "kept", "dropped", "reverted")},
            "seconds": self.seconds,
            "share": self.seconds / total if total else 0.0,
            "explored": self.bandit.explored,
            "tau": self.pulse.fast or None,
            "tau_long_run": self.pulse.slow or None,
            "pieces": len(self.feedback.pieces),
            "failed": self.failed,
            "arms": arms,
        }


def unsayable(drafter: PairDrafter) -> bytes:
    """By id of the target, 1 where the drafter's head has no row for it."""
    columns = drafter.vocabulary.columns(torch.arange(drafter.config.model.vocab_size))
    return bytes((columns < 0).tolist())
