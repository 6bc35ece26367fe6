"""The `config.json` of an EAGLE-3 drafter (arXiv 2503.01840), as SafeAILab, SpecForge and speculators publish it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockpilot.drafters.headed_config import hidden_states_of, llama_of
from blockpilot.targets.config import ModelConfig, read_integer

ARCHITECTURE = "LlamaForCausalLMEagle3"
ARCHITECTURES = (ARCHITECTURE, "Eagle3Speculator", "Eagle3DraftModel")
PUBLISHED_DEPTH = 7  # drafts that the published recipe trains for, and depth of the published tree


@dataclass(frozen=True)
class Eagle3Config:
    """Shape and conventions of a drafter.

    Attributes:
        model: its one layer; `vocab_size` is the target's.
        target_hidden_size: of the target's hidden states; `model.hidden_size` unless the config names another.
        draft_vocab_size: rows of its head.
        hidden_states: the target's hidden states that are its features (HF convention), None for `default_states`.
        norm_before_residual: whether the residual is the normed feature.
        block_size: the anchor and the drafts that it was trained for.
        source: the parsed JSON.
    """

    model: ModelConfig
    target_hidden_size: int
    draft_vocab_size: int
    hidden_states: tuple[int, ...] | None
    norm_before_residual: bool
    block_size: int
    source: Mapping[str, Any]

    @property
    def feature_size(self) -> int:
        """Width of a feature row."""
        return (3 if self.hidden_states is None else len(self.hidden_states)) * self.target_hidden_size

    @classmethod
    def from_json(cls, source: Mapping[str, Any]) -> Eagle3Config:
        """Read the dictionary.

        The layer ids under `eagle_config` (SpecForge) are those of layers whose outputs are read, 0 = the first
        layer's; those at the top (speculators) are indices of hidden states, 0 = the embeddings.

        Raises:
            ValueError: another architecture, more than one layer, a setting that would change the computation, or a
                missing or impossible value.
        """
        names = source.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
            raise ValueError(f"expected architectures to be one of {ARCHITECTURES}, got {names!r}")
        model = llama_of(source)
        if model.num_layers != 1:
            raise ValueError(f"expected num_hidden_layers to be 1, got {model.num_layers}")
        hidden, vocab = model.hidden_size, model.vocab_size
        return cls(
            model=model,
            target_hidden_size=read_integer(source, "target_hidden_size", hidden),
            draft_vocab_size=read_integer(source, "draft_vocab_size", vocab, most=vocab),
            hidden_states=hidden_states_of(source),
            norm_before_residual=_flag(source, "norm_before_residual"),
            block_size=read_integer(source, "block_size", PUBLISHED_DEPTH + 1, least=2),
            source=source,
        )

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every float tensor that a checkpoint has; its embedding is optional."""
        m = self.model
        h, q, kv = m.hidden_size, m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        shapes = {
            "fc.weight": (h, self.feature_size),
            "norm.weight": (h,),
            "lm_head.weight": (self.draft_vocab_size, h),
        }
        norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        shapes |= {f"midlayer.{name}.weight": (h,) for name in norms}
        for name, rows, columns, bias in (
            ("self_attn.q", q, 2 * h, m.qkv_bias),
            ("self_attn.k", kv, 2 * h, m.qkv_bias),
            ("self_attn.v", kv, 2 * h, m.qkv_bias),
            ("self_attn.o", h, q, m.o_bias),
            ("mlp.gate", m.intermediate_size, h, m.mlp_bias),
            ("mlp.up", m.intermediate_size, h, m.mlp_bias),
            ("mlp.down", h, m.intermediate_size, m.mlp_bias),
        ):
            shapes[f"midlayer.{name}_proj.weight"] = (rows, columns)
            if bias:
                shapes[f"midlayer.{name}_proj.bias"] = (rows,)
        return shapes


def _flag(source: Mapping[str, Any], name: str) -> bool:
    value = source.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"expected {name} to be true or false, got {value!r}")
    return value
