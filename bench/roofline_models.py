"""Shapes of published models and of their DFlash drafters, and the matrices that these are made of.

Targets: `config.json` of Qwen/Qwen3-4B, Qwen/Qwen3-8B, meta-llama/Llama-3.1-8B and HuggingFaceTB/SmolLM2-135M.
Drafters: z-lab's are five Qwen3 layers of the target's width that read five of its layers (Qwen3-4B-DFlash-b16,
published as 0.5B; Qwen3-8B-DFlash-b16 and LLaMA3.1-8B-Instruct-DFlash-UltraChat, published as 1B); for SmolLM2 it is
the bundled one. τ: README of z-lab/dflash, at the drafter's own width, greedy; none is known here for the other two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Matrix = tuple[int, int]
POLICY_HIDDEN, POLICY_WIDTHS = 2048, 5  # the published predictor: two hidden layers, widths B−2 … B+2


@dataclass(frozen=True)
class Stack:
    """Decoder layers: grouped-query attention and SwiGLU, no biases.

    Attributes:
        qk_norm: a norm on every query and key head. inputs: hidden states that queries, keys and values are made of.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = True
    inputs: int = 1

    @property
    def context_matrices(self) -> tuple[Matrix, ...]:
        """Key and value projections of every layer."""
        return self.layers * ((self.kv_heads * self.head_dim, self.inputs * self.hidden),) * 2

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Rows and columns of every matrix of every layer."""
        h, q, i = self.hidden, self.heads * self.head_dim, self.intermediate
        return self.context_matrices + self.layers * ((q, self.inputs * h), (h, q), (i, h), (i, h), (h, i))

    @property
    def norm_values(self) -> int:
        """Weights of all norms, the final one included."""
        layer = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return self.layers * layer + self.hidden

    @property
    def kv_values(self) -> int:
        """Keys and values that one position has in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Model:
    """A target with its drafter.

    Attributes:
        tied: the head is the embedding. features: target layers that the drafter reads. block_size: its own width B.
        draft_vocab: rows of the drafter's head; those of the target's where it has no own vocabulary.
        published: τ by workload at width B.
    """

    name: str
    target: Stack
    vocab: int
    tied: bool
    drafter: Stack
    block_size: int
    draft_vocab: int
    features: int = 5
    published: Mapping[str, float] = field(default_factory=dict)

    @property
    def widest(self) -> int:
        """The widest block that the engine lets this drafter draft."""
        return 2 * self.block_size

    @property
    def head(self) -> Matrix:
        """The target's head, which embeds as well where it is tied."""
        return self.vocab, self.target.hidden

    @property
    def draft_head(self) -> Matrix:
        """The rows of the head that the drafter uses."""
        return self.draft_vocab, self.target.hidden

    @property
    def context_matrices(self) -> tuple[Matrix, ...]:
        """What makes the drafter's context keys and values of features: fc, then k and v of every layer."""
        fc = (self.drafter.hidden, self.features * self.target.hidden)
        return (fc, *self.drafter.context_matrices)

    @property
    def policy_matrices(self) -> tuple[Matrix, ...]:
        """The published predictor, which reads the whole vocabulary."""
        h = POLICY_HIDDEN
        return (h, self.vocab), (h, h), (POLICY_WIDTHS, h)


def values(*matrices: Matrix) -> int:
    """How many weights these are."""
    return sum(rows * columns for rows, columns in matrices)


def find_model(name: str) -> Model:
    """The model of this name, in any case.

    Raises:
        ValueError: there is none; the message lists them.
    """
    for model in MODELS:
        if model.name.lower() == name.lower():
            return model
    raise ValueError(f"model: expected one of {', '.join(m.name for m in MODELS)}, got {name!r}")


def _published(gsm8k: float, math500: float, humaneval: float, mt_bench: float) -> dict[str, float]:
    return {"gsm8k": gsm8k, "math500": math500, "humaneval": humaneval, "mt-bench": mt_bench}


def _z_lab(
    name: str, target: Stack, vocab: int, block_size: int, tied: bool, published: Mapping[str, float]
) -> Model:
    drafter = replace(target, layers=5, qk_norm=True)
    return Model(name, target, vocab, tied, drafter, block_size, draft_vocab=vocab, published=published)


_TAU_4B, _TAU_8B = _published(6.50, 7.84, 6.63, 4.35), _published(6.55, 7.87, 6.55, 4.25)
_QWEN3_4B = Stack(36, 2560, 9728, heads=32, kv_heads=8, head_dim=128)
_QWEN3_8B = Stack(36, 4096, 12288, heads=32, kv_heads=8, head_dim=128)
_LLAMA_8B = Stack(32, 4096, 14336, heads=32, kv_heads=8, head_dim=128, qk_norm=False)
_SMOLLM2 = Stack(30, 576, 1536, heads=9, kv_heads=3, head_dim=64, qk_norm=False)
MODELS = (
    _z_lab("Qwen3-4B", _QWEN3_4B, 151936, 16, tied=True, published=_TAU_4B),
    _z_lab("Qwen3-8B", _QWEN3_8B, 151936, 16, tied=False, published=_TAU_8B),
    _z_lab("Llama-3.1-8B", _LLAMA_8B, 128256, 10, tied=False, published={}),
    Model(
        "SmolLM2-135M", _SMOLLM2, 49152, True, replace(_SMOLLM2, layers=2, qk_norm=True), 6, draft_vocab=8192
    ),
)
WORKLOADS = tuple(_TAU_8B)
