"""The `config.json` of a SpecBlock drafter (arXiv 2605.07243), as its authors publish it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockpilot.drafters.headed_config import hidden_states_of, llama_of
from blockpilot.targets.config import ModelConfig, read_integer

SHIFTED, PLAIN = "LlamaForCausalLMSpecBlockShift", "LlamaForCausalLMSpecBlock"
ARCHITECTURES = (SHIFTED, PLAIN)
BLOCKS = 2  # in a draft: so many passes
RANK_CLASSES, RANK_FEATURES, RANK_HIDDEN = 4, 15, 256


@dataclass(frozen=True)
class SpecBlockConfig:
    """Shape and conventions of a drafter.

    Attributes:
        model: its layers; `vocab_size` is the target's. slots: K, ids that a block guesses at once.
        shift: whether a layer beyond the first sees the slot before.
        target_hidden_size, draft_vocab_size, hidden_states, source: as in `Eagle3Config`.
    """

    model: ModelConfig
    target_hidden_size: int
    draft_vocab_size: int
    hidden_states: tuple[int, ...] | None
    slots: int
    shift: bool
    source: Mapping[str, Any]

    @property
    def block_size(self) -> int:
        """The anchor and one block's ids."""
        return self.slots + 1

    @property
    def feature_size(self) -> int:
        """Width of a feature row."""
        return (3 if self.hidden_states is None else len(self.hidden_states)) * self.target_hidden_size

    @classmethod
    def from_json(cls, source: Mapping[str, Any]) -> SpecBlockConfig:
        """Read the dictionary.

        Raises:
            ValueError: another architecture, a setting that would change the computation, or a missing or impossible
                value.
        """
        names = source.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
            raise ValueError(f"expected architectures to be one of {ARCHITECTURES}, got {names!r}")
        model = llama_of(source)
        read_integer(source, "rank_classes", RANK_CLASSES, least=RANK_CLASSES, most=RANK_CLASSES)
        return cls(
            model=model,
            target_hidden_size=read_integer(source, "target_hidden_size", model.hidden_size),
            draft_vocab_size=read_integer(
                source, "draft_vocab_size", model.vocab_size, most=model.vocab_size
            ),
            hidden_states=hidden_states_of(source),
            slots=read_integer(source, "diffspec_draft_token_num", least=1, most=64),
            shift=names[0] == SHIFTED,
            source=source,
        )

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every float tensor that a checkpoint has; its embedding is optional."""
        m = self.model
        h, q, kv = m.hidden_size, m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_layer.condition_proj.weight": (h, self.feature_size),
            "input_layer.fuse.weight": (h, 3 * h),
            "input_layer.position_queries.weight": (self.slots, h),
            "norm.weight": (h,),
            "lm_head.weight": (self.draft_vocab_size, h),
            "rank_head.0.weight": (RANK_HIDDEN, h + RANK_FEATURES),
            "rank_head.2.weight": (RANK_CLASSES, RANK_HIDDEN),
        }
        shapes |= {f"input_layer.{n}_norm.weight": (h,) for n in ("condition", "token", "query")}
        if self.shift:
            shapes |= {f"shift_proj.{i}.weight": (h, 2 * h) for i in range(m.num_layers - 1)}
        inner = m.intermediate_size
        parts = {"self_attn.q": (q, h), "self_attn.k": (kv, h), "self_attn.v": (kv, h), "self_attn.o": (h, q)}
        parts |= {"mlp.gate": (inner, h), "mlp.up": (inner, h), "mlp.down": (h, inner)}
        for i in range(m.num_layers):
            shapes |= {f"layers.{i}.{n}_proj.weight": shape for n, shape in parts.items()}
            shapes |= {f"layers.{i}.{n}_layernorm.weight": (h,) for n in ("input", "post_attention")}
        return shapes
