"""Whole steps of a published pair with random weights, beside the bytes that `roofline` counts for them.

Times are of captured steps on the device. A drafter of random weights is hardly ever right, which costs what being
right does: a step computes all its columns. So tokens per second are a projection, from the step's time and a
published τ.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.graphs import key_bucket
from blockpilot.params import SamplingParams
from blockpilot.plan import StepPlan
from blockpilot.policies import Fixed
from blockpilot.policies.predictor import Architecture, Predictor, WidthNetwork
from blockpilot.request import Handle
from blockpilot.scheduler import Scheduler
from blockpilot.state import State
from blockpilot.step import (
    StepClock,
    begin_block,
    choose_rows,
    chosen_position,
    commit_choices,
    put_choices,
    run_step,
)
from blockpilot.targets import Target
from blockpilot_kernels import dispatch
from blockpilot_kernels.step_loop import loop_error
from device_exact import by_the_host
from device_models import model_config, random_drafter, random_target, shrunk
from device_setup import REPLAYS, Put, Setup
from roofline_devices import find_device
from roofline_models import Model, find_model
from roofline_project import tau_of
from roofline_terms import WEIGHTS, Load, step_terms, verify_terms

WIDTHS = (8, 16, 18)  # verified, and drafted; 1 is plain decoding
CONTEXT = 1024
ENGINE_STEPS = 48
SMALL = 1e6  # bytes, so that a short part is repeated within one graph


class Silent:
    """A tokenizer for requests whose text nobody reads."""

    def detokenizer(self) -> Silent:
        """One object is both."""
        return self

    def push(self, tokens: list[int]) -> str:
        """No text."""
        return ""

    def finish(self) -> str:
        """No text."""
        return ""


def steps(name: str, setup: Setup, put: Put) -> None:
    """Every width of one pair, the predictor of its vocabulary, and transformers on the same shape."""
    published = find_model(name)
    model = shrunk(published) if setup.dry else published
    context = setup.size(CONTEXT, 20)
    bandwidth = setup.copy_bandwidth()
    put("bytes_per_s", bandwidth)
    with torch.inference_mode(), dispatch.forced(setup.models):
        target = random_target(model, 1, 2 * setup.size(CONTEXT, 64), setup.device, torch.bfloat16)
        drafter = random_drafter(model, target, 1)
        entries: list[dict[str, Any]] = []
        for width in sorted({1, *WIDTHS, model.block_size}):
            if width <= model.widest:
                entries.append(_entry(setup, model, target, drafter, context, width, bandwidth))
                put("entries", entries)
        with by_the_host():
            put("engine", _engine(setup, target, drafter, context, model.block_size))
        if setup.dry or loop_error() is None:
            put("engine_looped", _engine(setup, target, drafter, context, model.block_size))
        del target, drafter
        _release()
        put("predictor", _predictor(setup, model))
        _release()
        put("transformers", _transformers(setup, model, context))


def _entry(
    setup: Setup,
    model: Model,
    target: Target,
    drafter: DFlashDrafter,
    context: int,
    width: int,
    bandwidth: float,
) -> dict[str, Any]:
    """One width, as `roofline --measured` reads it."""
    state, plan = _started(target, drafter, context, width)
    load = Load(1, context, width)
    terms = step_terms(model, WEIGHTS["bf16"], load)
    moved = sum(term.bytes for term in terms)
    rewind = partial(_rewind, state, context)
    whole = setup.milliseconds([partial(_step, state, plan, target, drafter)], moved, rewind)
    limit = moved / bandwidth * 1e3
    entry: dict[str, Any] = {
        "model": model.name,
        "weights": "bf16",
        "requests": 1,
        "context": context,
        "width": width,
        "step_ms": whole["ms"],
        "captured": whole["captured"],
        "uncaptured_ms": setup.wall_ms(partial(_step, state, plan, target, drafter)),
        "bytes": moved,
        "limit_ms": limit,
        "share_of_copy": limit / whole["ms"],
        "share_of_peak": _peak_share(setup, moved, whole["ms"]),
        "verify_bytes": sum(term.bytes for term in verify_terms(model, WEIGHTS["bf16"], load)),
    }
    for phase, call in _phases(state, plan, target, drafter).items():
        size = SMALL if phase in ("choose", "accept_commit") else moved
        entry[f"{phase}_ms"] = setup.milliseconds([call], size, rewind)["ms"]
    tau, source = tau_of(model, width, "gsm8k")
    entry["tau"], entry["tau_source"] = tau, source
    entry["projected_tokens_per_s"] = None if tau is None else tau / whole["ms"] * 1e3
    return entry


def _started(target: Target, drafter: DFlashDrafter, context: int, width: int) -> tuple[State, StepPlan]:
    """The state after a prompt of `context` random tokens, and a plan with room for what is timed."""
    draw = random.Random(context)
    vocab = target.config.vocab_size
    scheduler = _scheduler(target, drafter, width)
    params = SamplingParams(max_new_tokens=None, ignore_eos=True, width=width)
    prompt = [draw.randrange(vocab - 1) for _ in range(context)]
    handle = Handle(prompt, params, Silent(), None)  # type: ignore[arg-type]
    scheduler.submit(handle)
    scheduler.step()
    if handle.output is not None:
        raise handle.output.error or RuntimeError(f"the request ended: {handle.output.finish_reason}")
    bound = key_bucket(context + (REPLAYS + 1) * 8 * width, target.capacity)
    return scheduler.state, scheduler._family({0: handle}, (0,), (width,), bound)


def _scheduler(target: Target, drafter: DFlashDrafter, width: int, **options: Any) -> Scheduler:
    widest = max(drafter.window)
    return Scheduler(target, drafter, Fixed(width), slots=1, widest=widest, eos=(), max_queue=1, **options)


def _rewind(state: State, context: int) -> None:
    state.length[0] = context + 1
    state.done[0] = False


def _step(state: State, plan: StepPlan, target: Target, drafter: DFlashDrafter) -> None:
    run_step(state, plan, target, drafter if plan.drafts else None, StepClock())


def _phases(
    state: State, plan: StepPlan, target: Target, drafter: DFlashDrafter
) -> Mapping[str, Callable[[], object]]:
    """Parts of a step, each to be timed alone on what the one before left."""
    rows = plan.rows
    begin_block(state)
    exists = rows.column < state.effective[rows.slot]
    position, extent = chosen_position(state, plan), state.length - 1 + state.effective
    tokens = state.block[rows.slot, rows.column]

    def verify() -> tuple[Tensor, Tensor]:
        return target.verify(rows, tokens, position - 1, exists, extent, plan.bound)

    logits, features = verify()

    def choice() -> None:
        put_choices(state, plan, *choose_rows(state, plan, logits, None, position))

    parts: dict[str, Callable[[], object]] = {"verify": verify, "choose": choice}
    if plan.drafts:
        parts["draft"] = partial(drafter.propose, state, plan, None)
        parts["context"] = partial(drafter.commit, state, plan, features)
    parts["accept_commit"] = partial(commit_choices, state)
    return parts


def _engine(setup: Setup, target: Target, drafter: DFlashDrafter, context: int, width: int) -> dict[str, Any]:
    """Milliseconds of a step as a request sees it, the host's work and all, through launches of captured steps."""
    scheduler = _scheduler(target, drafter, width, recorder=setup.recorder)
    params = SamplingParams(max_new_tokens=setup.size(ENGINE_STEPS, 3) + 1, ignore_eos=True, width=width)
    for _ in range(2):  # the first one captures
        handle = Handle([3 + i % 50 for i in range(context)], params, Silent(), None)  # type: ignore[arg-type]
        scheduler.submit(handle)
        while scheduler.step():
            pass
        assert handle.output is not None  # nothing is left to do
        if handle.output.error:
            raise handle.output.error
    stats = handle.stats
    return {
        "width": width,
        "steps": stats.steps,
        "step_ms_with_host": stats.decode_seconds / stats.steps * 1e3,
    }


def _predictor(setup: Setup, model: Model) -> dict[str, Any]:
    """The published predictor over the whole vocabulary, once a request."""
    size = setup.size(2048, 32)
    network = WidthNetwork(Architecture("full", "raw", model.vocab, size, (14, 15, 16, 17, 18)), None)
    network = network.to_empty(device=setup.device)
    for parameter in network.parameters():
        parameter.normal_(std=0.02)
    predictor = Predictor(network)
    predictor.bind(torch.empty(model.vocab, 1, device=setup.device))
    logits = torch.empty(1, model.vocab, device=setup.device).normal_()
    moved = 4.0 * (model.vocab * size + size * size)
    timed = setup.milliseconds([partial(predictor.scores, logits)], moved)
    return {**timed, "bytes": moved, "choose_ms": setup.wall_ms(partial(predictor.choose, logits))}


def _transformers(setup: Setup, model: Model, context: int) -> dict[str, Any]:
    """An eager forward of transformers over a cache of `context` tokens, awaited: 1 token, then a block."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
    except ImportError as error:
        return {"skipped": str(error)}
    c = model_config(model.target, model.vocab, model.tied)
    config = AutoConfig.for_model(
        c.family,
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        tie_word_embeddings=c.tie_word_embeddings,
    )
    with torch.device(setup.device):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    found: dict[str, Any] = {"context": context}
    for width in (1, 16):
        cache = DynamicCache()

        def forward(count: int, cache: Any = cache) -> None:
            ids = torch.randint(model.vocab, (1, count), device=setup.device)
            made(
                input_ids=ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=count if count <= 16 else 1,
            )

        forward(context)
        found[f"forward_{width}_ms"] = setup.wall_ms(partial(forward, width))
    return found


def _peak_share(setup: Setup, moved: float, ms: float) -> float | None:
    """Share of the published peak bandwidth, where this GPU's is known."""
    if setup.dry:
        return None
    try:
        return moved / find_device(torch.cuda.get_device_name()).bandwidth * 1e3 / ms
    except ValueError:
        return None


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
