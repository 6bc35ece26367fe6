"""Times the same step again and again, at every width in turn, and with trees of some numbers of nodes.

Every slot is filled once with a random prompt. After each step the requests are put back to their first token,
so every measured step sees exactly `context` cached tokens and one anchor. That is sound because rollback is a
move of `length`: keys, values and context rows below the anchor are never written again.

A step computes all Σ width rows whatever is accepted, so random prompts, which a drafter seldom guesses, cost
what real ones do; only detokenising, in `host`, grows with the accepted tokens. Nothing in them stood before, so a
drafter with lookup never copies here, and a step that does costs less than is measured. Requests are greedy: noise and
filters of sampled ones are not in these figures. On CUDA a step is a captured one, awaited: all that the device does
is `verify`.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from blockpilot.llm import LLM
from blockpilot.output import Stats
from blockpilot.params import SamplingParams
from blockpilot.policies import Fixed, Pair
from blockpilot.recorders import recorder_for
from blockpilot.request import Handle
from blockpilot.scheduler import Scheduler
from blockpilot.training.calibration import Calibration
from blockpilot.training.calibration_rows import PHASES, Spread, StepCost

DEFAULT_CONTEXTS = (128, 512, 1024)
SETTLE = 4  # steps of a width before the one that is timed: large caches are not filled by one pass
NODES = (1, 2, 3, 4, 6, 8, 12, 16)  # of trees that are measured, and the largest
FAR = 1e9  # cost of the node counts that a tree must not have
WARMUP = 1  # rounds whose steps lay out plans and touch memory for the first time
SEED = 0

Shape = tuple[int, int]  # a width, and a tree's nodes or 0


class Progress(Protocol):
    """Told of every round: steps done since the last call, and what is being measured."""

    def __call__(self, steps: int, /, doing: str) -> object: ...


@dataclass(frozen=True)
class Grid:
    """The cells to measure, each axis ascending; `repeats` steps a cell. `trees`: widths and nodes of whole trees."""

    requests: tuple[int, ...]
    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    repeats: int
    trees: tuple[Shape, ...] = ()

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Width and nodes of every step, 0 nodes for a chain; each tree whole and cut to fewer nodes."""
        grown = [(w, n) for w, most in self.trees for n in sorted({*NODES, most}) if n <= most]
        return (*((w, 0) for w in self.widths), *grown)

    @property
    def steps(self) -> int:
        """Steps of the whole measurement, warm-up included."""
        return len(self.requests) * len(self.contexts) * len(self.shapes) * (WARMUP + self.repeats)

    @classmethod
    def resolve(
        cls,
        llm: LLM,
        *,
        requests: Sequence[int] = (1, 4),
        contexts: Sequence[int] | None = None,
        widths: Sequence[int] | None = None,
        repeats: int = 15,
        trees: Mapping[int, int] | None = None,
    ) -> Grid:
        """Apply defaults and check.

        Args:
            requests: at most `llm.max_requests`. contexts: None for those of 128, 512 and 1024 that fit.
            widths: None for all up to the drafter's block size; width 1 is measured in any case.
            trees: nodes of trees by width, which are measured at fewer nodes too.

        Raises:
            ValueError: widths or trees the drafter cannot draft, contexts without room, or too many requests.
        """
        window = llm.drafter.window if llm.drafter else (1,)
        if widths is None:
            widths = range(1, llm.drafter.block_size + 1) if llm.drafter else (1,)
        wide = _ascending("widths", {1, *widths})
        outside = [w for w in wide if w not in (1, *window)]
        if outside:
            raise ValueError(f"widths: expected widths among {window}, got {outside}")
        grown = tuple(sorted((trees or {}).items()))
        _check_trees(llm, grown)
        # A request that reaches the end of its slot would stop, and there would be no next step to measure.
        most = max((*wide, *(nodes for _, nodes in grown)))
        room = llm.max_length - most - 2
        fitting = [c for c in DEFAULT_CONTEXTS if c <= room] if contexts is None else contexts
        if not fitting or max(fitting) > room:
            asked = DEFAULT_CONTEXTS if contexts is None else tuple(contexts)
            raise ValueError(
                f"contexts: expected at most {room} tokens (max_length {llm.max_length} less a block of "
                f"{most} and 2), got {asked}; raise max_length or name shorter contexts"
            )
        many = _ascending("requests", requests)
        if max(many) > llm.max_requests:
            raise ValueError(f"requests: expected at most max_requests {llm.max_requests}, got {many}")
        (times,) = _ascending("repeats", (repeats,))
        return cls(many, _ascending("contexts", fitting), wide, times, grown)


def _check_trees(llm: LLM, trees: Sequence[Shape]) -> None:
    window = llm.drafter.window if llm.drafter else (1,)
    largest = getattr(llm.drafter, "largest_tree", 0)
    for width, nodes in trees:
        if width not in window or not 2 <= width <= nodes <= largest:
            raise ValueError(
                f"trees: expected widths among {window} and at most {largest} nodes, no fewer than the width, got "
                f"{width}/{nodes}"
            )


def _silent(steps: int, /, doing: str) -> None:
    """No progress is shown."""


def calibrate(
    llm: LLM,
    grid: Grid,
    *,
    hardware: dict[str, Any],
    versions: dict[str, str | None],
    progress: Progress = _silent,
) -> Calibration:
    """Measure every cell of `grid`; nothing else may use `llm` meanwhile.

    Args:
        hardware, versions: JSON-ready, recorded as they are.
        progress: called with steps done and what comes next, never while a step is timed.

    Raises:
        BlockPilotError: the pair's logits are not finite.
    """
    rows = measure(llm, grid, progress)
    return Calibration(
        pair=Pair(llm.target.fingerprint, llm.drafter.fingerprint if llm.drafter else "none"),
        dtype=str(llm.target.dtype).removeprefix("torch."),
        weights=llm.weights,
        device=str(llm.device),
        backend=os.environ.get("BLOCKPILOT_BACKEND") or "auto",
        threads=torch.get_num_threads(),
        hardware=hardware,
        versions=versions,
        rows=tuple(row for row in rows if not row.nodes),
        trees=tuple(row for row in rows if row.nodes),
    )


def measure(llm: LLM, grid: Grid, progress: Progress) -> tuple[StepCost, ...]:
    """The cells of `grid` in order: requests, then contexts, then shapes."""
    rows: list[StepCost] = []
    with torch.inference_mode():
        scheduler = Scheduler(
            llm.target,
            llm.drafter,
            Fixed(1),
            slots=llm.max_requests,
            widest=max(*llm.drafter.window, *(nodes for _, nodes in grid.trees)) if llm.drafter else 1,
            eos=(),
            max_queue=llm.max_requests,
            recorder=recorder_for(llm.device),
            latency=0.0,
        )
        for requests in grid.requests:
            for context in grid.contexts:
                place = f"{requests} x {context} tokens"
                progress(0, f"{place}: prefill")
                handles = _prefill(llm, scheduler, requests, context, max(grid.widths))
                samples = _rounds(scheduler, handles, grid, partial(progress, doing=place))
                rows += [_row(requests, context, shape, samples[shape]) for shape in grid.shapes]
                for handle in handles:
                    scheduler.cancel(handle)
    return tuple(rows)


def _prefill(llm: LLM, scheduler: Scheduler, requests: int, context: int, widest: int) -> list[Handle]:
    """Requests with random prompts, begun at the widest width so that the drafter knows them."""
    draw = random.Random(f"{SEED} {requests} {context}")
    vocab = llm.target.config.vocab_size
    params = SamplingParams(max_new_tokens=None, ignore_eos=True, width=widest)
    handles = [
        Handle([draw.randrange(vocab) for _ in range(context)], params, llm.tokenizer, None)
        for _ in range(requests)
    ]
    for handle in handles:
        scheduler.submit(handle)
    scheduler.step()
    _require_running(handles)
    return handles


def _rounds(
    scheduler: Scheduler, handles: Sequence[Handle], grid: Grid, advance: Callable[[int], object]
) -> dict[Shape, list[dict[str, float]]]:
    """Seconds by phase of every measured step, by shape.

    A round takes every shape once in a random order, so that drift of the machine hits all alike. A request keeps its
    shape, so the step that is timed follows some of the same shape: what they leave in the caches is part of it.
    """
    order, draw = list(grid.shapes), random.Random(SEED)
    samples: dict[Shape, list[dict[str, float]]] = {shape: [] for shape in order}
    whole = dict(grid.trees)
    for i in range(WARMUP + grid.repeats):
        draw.shuffle(order)
        for width, nodes in order:
            most = whole[width] if nodes else 0
            only = [1.0 if n == nodes else FAR for n in range(1, most + 1)]
            scheduler.policy = Fixed(1, node_cost=only or None)
            for _ in range(SETTLE):
                _timed_step(scheduler, handles, width, most)
            sample = _timed_step(scheduler, handles, width, most)
            if i >= WARMUP:
                samples[width, nodes].append(sample)
        advance(len(order))
    return samples


def _timed_step(scheduler: Scheduler, handles: Sequence[Handle], width: int, tree: int) -> dict[str, float]:
    """Seconds by phase of one step; `host` is all that is not draft, verify, accept or commit."""
    _rewind(scheduler, handles, width, tree)
    start = time.perf_counter()
    scheduler.step()
    total = time.perf_counter() - start
    _require_running(handles)
    seconds = {p: sum(h.stats.seconds[p] for h in handles) for p in PHASES if p not in ("host", "total")}
    return {**seconds, "host": max(total - sum(seconds.values()), 0.0), "total": total}


def _rewind(scheduler: Scheduler, handles: Sequence[Handle], width: int, tree: int) -> None:
    """Forget everything after the first token and take another shape."""
    state = scheduler.state
    for handle in handles:
        state.length[handle.slot] = len(handle.prompt) + 1
        state.width[handle.slot] = width
        del handle.token_ids[1:]
        handle.stats = Stats()
        handle.choose_shape(width, tree)


def _require_running(handles: Sequence[Handle]) -> None:
    for handle in handles:
        if handle.output is not None:
            raise handle.output.error or RuntimeError(f"a request ended: {handle.output.finish_reason}")


def _row(requests: int, context: int, shape: Shape, samples: Sequence[dict[str, float]]) -> StepCost:
    ms = {phase: Spread.of([sample[phase] for sample in samples]) for phase in PHASES}
    return StepCost(requests, context, shape[0], len(samples), ms, shape[1])


def _ascending(name: str, values: Sequence[int] | set[int]) -> tuple[int, ...]:
    bad = [v for v in values if isinstance(v, bool) or not isinstance(v, int) or v < 1]
    if bad or not values:
        raise ValueError(f"{name}: expected ints >= 1, got {bad or 'none'}")
    return tuple(sorted(set(values)))
