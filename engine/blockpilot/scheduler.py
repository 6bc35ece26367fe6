"""Admission, stepping and retirement of requests over the fixed slots."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from blockpilot.admission import load_slot
from blockpilot.drafters import Drafter
from blockpilot.errors import QueueFullError
from blockpilot.graphs import LATENCY, Graphs, Launch, horizon, key_bucket, slot_bucket
from blockpilot.output import TokenLogprob
from blockpilot.params import MAX_STOP_IDS
from blockpilot.plan import StepPlan, step_plan
from blockpilot.policies import BlockPolicy
from blockpilot.recorders import Recorder, say_once
from blockpilot.request import Handle
from blockpilot.rows import kv_bound
from blockpilot.state import State
from blockpilot.step import Logprobs, Report, StepClock, first_token, read_commit, run_step
from blockpilot.targets import Target
from blockpilot_kernels.accept_commit import FINISH_ERROR, FINISH_LENGTH, FINISH_NONE, FINISH_STOP

if TYPE_CHECKING:
    from blockpilot.adapt.adapter import Adapter

REASONS = {FINISH_NONE: None, FINISH_STOP: "stop", FINISH_LENGTH: "length", FINISH_ERROR: "error"}


class Scheduler:
    """Owns the state and moves requests through it: queue → prefill → steps → output.

    Args:
        slots: requests decoded at once. widest: widest block any request may use.
        eos: ids that end an answer unless a request ignores them. max_queue: requests that may wait.
        recorder: captures steps, or None: each is run as it is. latency: see `Graphs`.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: BlockPolicy,
        *,
        slots: int,
        widest: int,
        eos: tuple[int, ...],
        max_queue: int,
        recorder: Recorder | None = None,
        latency: float = LATENCY,
    ) -> None:
        self.target, self.drafter, self.policy = target, drafter, policy
        self.eos, self.max_queue, self.dump = eos, max_queue, slots
        self.state = State.allocate(slots, target.capacity, widest, MAX_STOP_IDS + len(eos), target.device)
        self.queue: deque[Handle] = deque()
        self.abandoned: deque[Handle] = deque()
        self.active: dict[int, Handle] = {}
        self.policy_calls = 0
        self.graphs = Graphs(self.state, target, drafter, recorder, latency) if recorder else None
        self.adapter: Adapter | None = None  # runs steps, to see what they do
        self._under_way: Launch | None = None

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.active)

    def submit(self, handle: Handle) -> None:
        """Queue a checked request; an empty budget finishes at once."""
        if handle.params.max_new_tokens == 0:
            handle.close("length")
            return
        self._drop_abandoned()
        if len(self.queue) >= self.max_queue:
            raise QueueFullError(f"{self.max_queue} requests are waiting; call step() or raise max_queue")
        self.queue.append(handle)

    def cancel(self, handle: Handle, reason: str = "cancelled") -> None:
        """End a request now and free its slot; a finished one is left alone."""
        if handle in self.queue:
            self.queue.remove(handle)
        if self.graphs is not None and handle.slot is not None and not handle.finished:
            self.graphs.interrupt()
        handle.close(reason)
        self._retire(handle)

    def step(self) -> bool:
        """Admit what fits, run one step for every active slot, deliver. Returns whether work is left."""
        self._drop_abandoned()
        self._expire()
        for slot in range(self.dump):
            while self.queue and slot not in self.active:
                self._admit(slot, self.queue.popleft())
        if self.active:
            self._run() if self.adapter is None else self.adapter.around(dict(self.active), self._run)
        if not self.active:
            self._under_way = None  # what is left of it is nobody's
        return self.busy

    def _drop_abandoned(self) -> None:
        """Cancel requests whose stream was garbage collected, which may happen at any moment and thread."""
        while self.abandoned:
            self.cancel(self.abandoned.popleft())

    def _expire(self) -> None:
        now = time.perf_counter()
        for handle in [*self.queue, *self.active.values()]:
            if handle.expires is not None and now >= handle.expires:
                self.cancel(handle, "deadline")

    def _retire(self, handle: Handle) -> None:
        if handle.slot is not None and self.active.get(handle.slot) is handle:
            del self.active[handle.slot]
            self.state.done[handle.slot] = True

    def _admit(self, slot: int, handle: Handle) -> None:
        """Start a request in a slot; whatever goes wrong ends this request, never leaves it half started."""
        handle.slot = slot
        self.active[slot] = handle
        try:
            self._start(slot, handle)
        except BaseException as error:
            handle.fail(error)
            self._retire(handle)
            if not isinstance(error, Exception):
                raise

    def _start(self, slot: int, handle: Handle) -> None:
        """Prefill, first token, policy, drafter: the only place where a request's width is decided."""
        clock = StepClock()
        load_slot(self.state, slot, handle, self.eos)
        logits, features = self.target.prefill(slot, handle.prompt)
        plan = self._plan({slot: handle}, (1,))
        logprobs = first_token(self.state, plan, logits)
        clock.lap("prefill")
        self._deliver({slot: handle}, plan, read_commit(self.state, plan), logprobs, first=True)
        if not handle.finished:
            width, tree = self._shape(handle, logits[None])
            clock.lap("policy")
            if width > 1:
                assert self.drafter is not None  # _shape refuses wider blocks without a drafter
                self.drafter.begin(slot, features, handle.prompt)
            handle.choose_shape(width, tree)
            self.state.width[slot] = width
            clock.lap("draft")
        self._charge([handle], clock)

    def _shape(self, handle: Handle, last_logits: torch.Tensor) -> tuple[int, int]:
        """Width and nodes of a tree, 0 for a chain."""
        tree = handle.params.tree
        if handle.params.width is not None:
            return handle.params.width, tree or 0
        sampled = getattr(self.policy, "sampled", None)
        if sampled is not None and sampled != (handle.params.temperature > 0):
            kind, others = ("sampled", "greedy") if sampled else ("greedy", "sampled")
            say_once(
                f"the policy was fitted to {kind} answers, so {others} requests without a width decode plain"
            )
            return 1, 0  # they accept drafts at another rate
        self.policy_calls += 1
        width = int(self.policy.choose(last_logits)[0])
        widths = self.drafter.window if self.drafter else (1,)
        if width not in (1, *widths):
            raise ValueError(f"policy chose width {width}; expected one of {widths}")
        if tree is None:
            return width, getattr(self.policy, "trees", {}).get(width, 0)
        return min(width, tree), tree

    def _plan(self, handles: dict[int, Handle], widths: Sequence[int]) -> StepPlan:
        """Exactly the rows of these requests, for one step."""
        longest = max(
            len(h.prompt) + len(h.token_ids) + max(w, h.stats.tree)
            for h, w in zip(handles.values(), widths, strict=True)
        )
        bound = min(kv_bound(longest), kv_bound(self.state.capacity))
        trees = tuple(h.stats.tree for h in handles.values())
        return self._family(handles, tuple(handles), tuple(widths), bound, trees if any(trees) else None)

    def _family(
        self,
        handles: dict[int, Handle],
        slots: tuple[int, ...],
        widths: tuple[int, ...],
        bound: int,
        trees: tuple[int, ...] | None = None,
    ) -> StepPlan:
        params = [h.params for h in handles.values()]
        wanted = [p.logprobs for p in params if p.logprobs is not None]
        return step_plan(
            slots,
            widths,
            self.dump,
            bound,
            self.state.tokens.device,
            any(p.temperature > 0 for p in params),
            any(p.filtered for p in params),
            any(p.min_new_tokens > 0 for p in params),
            max(wanted) if wanted else None,
            self.target.row_tile,
            trees,
            getattr(self.policy, "node_cost", None) if trees else None,
        )

    def _run(self) -> None:
        """One step or launch for every active slot. If it breaks, its requests end: their tokens may be half
        committed."""
        handles = dict(sorted(self.active.items()))
        try:
            if self.graphs is not None and self.graphs.takes(handles):
                self._launch(self.graphs, handles)
                return
            if self._under_way is not None:
                self._drain()
                handles = dict(sorted(self.active.items()))
            if handles:
                self._advance(handles)
        except BaseException as error:
            self._under_way = None
            for handle in handles.values():
                handle.fail(error)
                self._retire(handle)
            raise

    def _launch(self, graphs: Graphs, handles: dict[int, Handle]) -> None:
        """Start the next steps, then deliver what those before them did."""
        before, capacity = self._under_way, self.state.capacity
        most, longest = horizon(handles, before, capacity)
        started = None
        if most > 0:
            count = slot_bucket(max(handles), self.dump)
            widths = (max(h.stats.width for h in handles.values()),) * count
            plan = self._family(handles, tuple(range(count)), widths, key_bucket(longest, capacity))
            started = graphs.launch(plan, handles, most)
        if before is not None:
            self._drain()
        self._under_way = started
        if graphs.latency == 0:
            self._drain()

    def _drain(self) -> None:
        """Wait for the launch that is under way and deliver it; what a request did after its end is dropped."""
        launch, self._under_way = self._under_way, None
        assert self.graphs is not None and launch is not None  # asked only where there is one
        waiting = [h for h in launch.handles.values() if not h.finished]
        steps, seconds = self.graphs.read(launch)
        clock = StepClock()
        for reports in steps:
            live = {slot: h for slot, h in launch.handles.items() if not h.finished and slot in reports}
            for slot, handle in live.items():
                self._hand_over(handle, reports[slot], None, first=False)
                handle.stats.seconds["verify"] += seconds / len(live)
        clock.lap("host")
        self._charge(waiting, clock)

    def _advance(self, handles: dict[int, Handle]) -> None:
        clock = StepClock()
        plan = self._plan(handles, [h.stats.width for h in handles.values()])
        clock.lap("host")
        drafter = self.drafter if plan.drafts else None
        reports, logprobs = run_step(self.state, plan, self.target, drafter, clock)
        if reports is None:
            reports = read_commit(self.state, plan)
        self._deliver(handles, plan, reports, logprobs, first=False)
        clock.lap("host")
        self._charge(list(handles.values()), clock)

    def _charge(self, handles: Sequence[Handle], clock: StepClock) -> None:
        for handle in handles:
            for phase, seconds in clock.seconds.items():
                handle.stats.seconds[phase] += seconds / len(handles)

    def _deliver(
        self,
        handles: dict[int, Handle],
        plan: StepPlan,
        reports: Sequence[Report],
        logprobs: Logprobs | None,
        first: bool,
    ) -> None:
        """Hand over what the last commit wrote."""
        for i, (handle, report) in enumerate(zip(handles.values(), reports, strict=True)):
            top, entries = handle.params.logprobs, None
            if logprobs is not None and top is not None:
                entries = logprobs.entries(plan.rows.starts[i], report.tokens, top)
            self._hand_over(handle, report, entries, first)

    def _hand_over(
        self, handle: Handle, report: Report, entries: list[TokenLogprob] | None, first: bool
    ) -> None:
        delivered = handle.advance(report.tokens, entries, REASONS[report.finish])
        if not first:
            handle.count_step(report.effective, report.accepted, delivered)
        if handle.finished:
            self._retire(handle)
