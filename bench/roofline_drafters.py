"""What a step of any drafter should take on a GPU, from the shapes of what is loaded.

Added to the terms of `roofline_terms`: the passes of EAGLE-3 and SpecBlock, every row that the engine lays out. Not
counted: what chooses a tree's nodes between passes, and where prompt lookup looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockpilot.drafters import Drafter
from blockpilot.drafters.lookup import SUFFIX, WithLookup
from blockpilot.targets.config import ModelConfig
from peer_types import Run
from roofline_devices import Device
from roofline_models import Matrix, Model, Stack, values
from roofline_project import Settings, duration
from roofline_terms import (
    WEIGHTS,
    Load,
    Term,
    commit_terms,
    draft_terms,
    embedding_term,
    head_terms,
    pass_terms,
    verify_terms,
)

SIZES = WEIGHTS["bf16"]
FEATURE_BYTES = 4


@dataclass(frozen=True)
class Pass:
    """One pass of a drafter: its rows, those that guess ids, and matrices beside those of its layers."""

    rows: int
    guesses: int
    beside: tuple[Matrix, ...] = ()


def stack_of(config: ModelConfig, inputs: int = 1) -> Stack:
    """The decoder layers of a config; `inputs` as in `Stack`."""
    c = config
    sizes = (c.num_layers, c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim)
    return Stack(*sizes, qk_norm=c.qk_norm, inputs=inputs)


def model_of(target: ModelConfig, drafter: Any) -> Model:
    """A target with a drafter's layers; `drafter` None or one without layers: the target's, of which no term tells."""
    own: Any = getattr(drafter, "config", None)
    stack = stack_of(own.model if own else target, 2 if getattr(drafter, "kind", "") == "eagle3" else 1)
    return Model(
        target.family,
        stack_of(target),
        target.vocab_size,
        target.tie_word_embeddings,
        stack,
        drafter.block_size if own else 1,
        draft_vocab=_head_rows(drafter) if own else target.vocab_size,
        features=own.feature_size // target.hidden_size if own else 0,
    )


def _head_rows(drafter: Any) -> int:
    """Ids that a drafter with layers drafts."""
    if drafter.kind != "dflash":
        return int(drafter.config.draft_vocab_size)
    listed = drafter._vocabulary.listed
    return int(drafter.config.model.vocab_size) if listed is None else len(listed)


def step_terms_of(target: ModelConfig, drafter: Drafter | None, load: Load, tree: int = 0) -> list[Term]:
    """All of a step of blocks of `load.width`, with trees of `tree` nodes or, at 0, chains."""
    inner: Any = drafter.drafter if isinstance(drafter, WithLookup) else drafter
    model = model_of(target, inner)
    verify = verify_terms(model, SIZES, replace(load, width=tree or load.width))
    if load.width == 1 or drafter is None:
        return verify
    lookup = [Term("draft", "lookup", 8 * load.context, launches=1)] if SUFFIX[1:] in drafter.kind else []
    if inner.kind == "dflash":
        chosen = [Term("draft", "tree", 0, launches=1)] if tree else []
        drafting = [*draft_terms(model, SIZES, load), *chosen, *commit_terms(model, SIZES, load)]
    elif inner.kind in PASSES:
        drafting = _passes(model, inner, load, PASSES[inner.kind](inner, load.width, tree))
    else:
        drafting = []
    return [*drafting, *lookup, *verify]


def eagle3_passes(drafter: Any, width: int, tree: int) -> list[Pass]:
    """The pairs that wait, then a pass for every further depth: of one row, or of a tree's beam."""
    c = drafter.config
    beam = drafter.beam if tree else 1
    fuse = ((c.model.hidden_size, c.feature_size),)
    return [Pass(width, 1, fuse), *(Pass(beam, beam) for _ in range(2, width))]


def specblock_passes(drafter: Any, width: int, tree: int) -> list[Pass]:
    """K rows for each pair that waits, then the second block, or a beam of them."""
    from blockpilot.drafters.specblock_tree import BEAM

    c, h, k = drafter.config, drafter.config.model.hidden_size, drafter.config.slots
    shared = ((h, 3 * h), *((h, 2 * h),) * (c.model.num_layers - 1 if c.shift else 0))
    passes = [Pass(width * k, k, ((h, c.feature_size), *shared))]
    if width > (2 if tree else k + 1):
        rows = (BEAM if tree else 1) * k
        passes.append(Pass(rows, rows, shared))
    return passes


PASSES = {"eagle3": eagle3_passes, "specblock": specblock_passes}


def _passes(model: Model, drafter: Any, load: Load, passes: Sequence[Pass]) -> list[Term]:
    """Terms of these passes, which see all places before them, and of the features that are kept for the next."""
    places = load.context * getattr(drafter.config, "slots", 1)
    found = []
    for one in passes:
        own = Load(load.requests, places, one.rows)
        pairs = one.rows * places + one.rows * (one.rows + 1) // 2
        beside = SIZES.matrices(SIZES.drafter, *one.beside), 2 * own.rows * values(*one.beside)
        found += [
            *pass_terms("draft", model.drafter, SIZES, SIZES.drafter, own, pairs),
            Term("draft", "beside", *beside, launches=len(one.beside)),
            embedding_term("draft", model, SIZES, own.rows),
            *head_terms("draft", model.draft_head, SIZES, load.requests * one.guesses),
        ]
    kept = 2 * load.rows * drafter.config.feature_size * FEATURE_BYTES
    return [*found, Term("commit", "features", kept, launches=1)]


def projected(
    runs: Sequence[Run], target: ModelConfig, drafter: Drafter | None, context: int, device: Device
) -> dict[str, float | None]:
    """What these answers would take on `device`, step by step of the shapes they had.

    Returns:
        `step_ms`, `draft_share` of it, `tokens_per_s`, and `ratio` to plain steps; None without a step.
    """
    settings, steps, spent, drafting = Settings(), 0, 0.0, 0.0
    plain = _milliseconds(target, None, Load(1, context, 1), 0, device, settings)[0]
    for run in runs:
        count = run.decoded if run.steps is None else run.steps
        found = _milliseconds(target, drafter, Load(1, context, run.width), run.tree, device, settings)
        steps, spent, drafting = steps + count, spent + count * found[0], drafting + count * found[1]
    if not steps:
        return dict.fromkeys(("step_ms", "draft_share", "tokens_per_s", "ratio"))
    tokens = sum(run.decoded for run in runs)
    return {
        "step_ms": spent / steps,
        "draft_share": drafting / spent,
        "tokens_per_s": tokens / spent * 1e3,
        "ratio": tokens * plain / spent,
    }


def _milliseconds(
    target: ModelConfig, drafter: Drafter | None, load: Load, tree: int, device: Device, settings: Settings
) -> tuple[float, float]:
    """Of a step, and of its drafting with what is committed to the drafter."""
    found = duration(step_terms_of(target, drafter, load, tree), device, settings)
    return found["ms"], found["phases"]["draft"] + found["phases"]["commit"]
