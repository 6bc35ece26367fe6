"""What a step reads, writes and computes, kernel group by kernel group.

Counted: every matrix once a pass, norms, embedding rows, keys and values of each request's slot (read once for all
rows of its block, and written for the block), and logits, written and read again as float32. Not counted: activations
between kernels, which stay in the L2 cache, and rows that pad a tile. The drafter's keys and values of a block are
written, read and never kept; its context rows are made of features after verification, for all columns of a block,
as the engine does: how many were accepted is not known on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from roofline_models import Matrix, Model, Stack, values

PHASES = ("draft", "verify", "commit")
NORM_BYTES = LOGIT_BYTES = 4  # both are float32 in every format
# Launches: four products, two norms and SiLU; rotary with the cache write, then attention.
LAYER_LAUNCHES, ATTENTION_LAUNCHES, HEAD_LAUNCHES = 7, 2, 3


@dataclass(frozen=True)
class Sizes:
    """Bytes of a weight of the target and of the drafter, of a cached key or value, of the scale of a matrix row."""

    target: float
    drafter: float
    cache: float
    scale: float = 0.0

    def matrices(self, each: float, *shapes: Matrix) -> float:
        """Bytes of matrices whose weights take `each`."""
        return each * values(*shapes) + self.scale * sum(rows for rows, _ in shapes)


WEIGHTS = {"bf16": Sizes(2, 2, 2), "int8": Sizes(1, 1, 2, scale=4), "fp8": Sizes(1, 1, 2, scale=4)}


@dataclass(frozen=True)
class Load:
    """A step of `requests` requests, each with `context` cached tokens and a block of `width`."""

    requests: int
    context: int
    width: int

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("context", 0), ("width", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected an int >= {least}, got {value!r}")

    @property
    def rows(self) -> int:
        """Σ width."""
        return self.requests * self.width


@dataclass(frozen=True)
class Term:
    """One group of kernels."""

    phase: str
    name: str
    bytes: float
    flops: float = 0.0
    launches: int = 0


def step_terms(model: Model, sizes: Sizes, load: Load) -> list[Term]:
    """All of a step; plain decoding, width 1, is a verification alone."""
    if load.width == 1:
        return verify_terms(model, sizes, load)
    return [
        *draft_terms(model, sizes, load),
        *verify_terms(model, sizes, load),
        *commit_terms(model, sizes, load),
    ]


def verify_terms(model: Model, sizes: Sizes, load: Load) -> list[Term]:
    """The target's pass, its choices and what is accepted."""
    pairs = load.width * load.context + load.width * (load.width + 1) // 2  # causal within the block
    return [
        *pass_terms("verify", model.target, sizes, sizes.target, load, pairs),
        embedding_term("verify", model, sizes, load.rows),
        *head_terms("verify", model.head, sizes, load.rows),
        Term("verify", "accept", 0, launches=1),
    ]


def draft_terms(model: Model, sizes: Sizes, load: Load) -> list[Term]:
    """The drafter's pass; every column sees the whole block, and all but the anchor's guess a token."""
    pairs = load.width * (load.context + load.width)
    return [
        *pass_terms("draft", model.drafter, sizes, sizes.drafter, load, pairs),
        embedding_term("draft", model, sizes, load.rows),
        *head_terms("draft", model.draft_head, sizes, load.rows - load.requests),
    ]


def commit_terms(model: Model, sizes: Sizes, load: Load) -> list[Term]:
    """Context rows of a DFlash drafter, of all columns."""
    made = model.context_matrices
    size, flops = sizes.matrices(sizes.drafter, *made), 2 * load.rows * values(*made)
    size += NORM_BYTES * model.drafter.hidden
    written = load.rows * model.drafter.kv_values * sizes.cache
    return [
        Term("commit", "fc, k and v", size, flops, launches=3),
        Term("commit", "context append", written, launches=model.drafter.layers),
    ]


def policy_terms(model: Model) -> list[Term]:
    """The published predictor, once a request, after prefill; bfloat16 whatever the target's weights are."""
    shapes = model.policy_matrices
    return [Term("policy", "layers", 2 * values(*shapes), 2 * values(*shapes), launches=len(shapes))]


def resident_bytes(model: Model, sizes: Sizes, load: Load) -> float:
    """Weights and caches that must be in memory at once."""
    embeddings = (model.head,) if model.tied else (model.head, model.head)
    own_head = model.draft_vocab < model.vocab  # a head of its own holds copies of the target's rows
    target = sizes.matrices(sizes.target, *model.target.matrices, *embeddings)
    target += sizes.matrices(sizes.target, model.draft_head) if own_head else 0
    draft = sizes.matrices(sizes.drafter, *model.drafter.matrices, *model.context_matrices)
    places = load.requests * (load.context + load.width) * sizes.cache
    return target + draft + places * (model.target.kv_values + model.drafter.kv_values)


def pass_terms(phase: str, stack: Stack, sizes: Sizes, each: float, load: Load, pairs: int) -> list[Term]:
    """Layers over all rows; `pairs` of a query and a key that it sees in one request."""
    shapes = stack.matrices
    moved = load.context + 2 * load.width  # the slot is read, the block in it was written before
    cache = load.requests * moved * stack.kv_values * sizes.cache
    attended = 4 * load.requests * pairs * stack.layers * stack.heads * stack.head_dim
    products = sizes.matrices(each, *shapes), 2 * load.rows * values(*shapes)
    return [
        Term(phase, "layers", *products, launches=LAYER_LAUNCHES * stack.layers),
        Term(phase, "attention", cache, attended, launches=ATTENTION_LAUNCHES * stack.layers),
        Term(phase, "norms", NORM_BYTES * stack.norm_values),
    ]


def embedding_term(phase: str, model: Model, sizes: Sizes, rows: int) -> Term:
    """Rows of the target's embedding."""
    return Term(phase, "embedding", rows * model.target.hidden * sizes.target, launches=1)


def head_terms(phase: str, head: Matrix, sizes: Sizes, rows: int) -> list[Term]:
    """Logits of these rows, written and read."""
    size, flops = sizes.matrices(sizes.target, head), 2 * rows * values(head)
    logits = 2 * rows * head[0] * LOGIT_BYTES
    return [
        Term(phase, "head", size, flops, launches=HEAD_LAUNCHES),
        Term(phase, "logits", logits),
    ]
