"""The `config.json` of a DFlash drafter, as z-lab publishes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockpilot.targets.config import ModelConfig

ARCHITECTURE = "DFlashDraftModel"
DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
LAYER_TYPES = ("full_attention", "sliding_attention")
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # the target's business


@dataclass(frozen=True)
class DFlashConfig:
    """Shape and conventions of a drafter.

    Attributes:
        model: the Qwen3-style stack. `num_layers` counts draft layers; embedding and head are the target's.
        causal: per layer, whether a row sees only keys at or before it. Sliding layers are causal and full
            ones are not, unless the config's `is_causal` decides for all.
        block_size: training width B, anchor included.
        num_target_layers: layers of the target it was trained for.
        target_layer_ids: target layers whose outputs are its features, 0 = the first layer's.
        mask_token_id: target id whose embedding stands for a token to be guessed.
        output_multiplier, final_logit_softcapping: applied to the logits in this order; None caps nothing.
        input_embedding_scale: factor on the block's embeddings.
        source: the parsed JSON.
    """

    model: ModelConfig
    causal: tuple[bool, ...]
    block_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    output_multiplier: float
    final_logit_softcapping: float | None
    input_embedding_scale: float
    source: Mapping[str, Any]

    @property
    def feature_size(self) -> int:
        """Width of a feature row: one hidden state per target layer id."""
        return len(self.target_layer_ids) * self.model.hidden_size

    @classmethod
    def from_json(cls, source: Mapping[str, Any]) -> DFlashConfig:
        """Read the dictionary; a DFlash value may sit at the top, under `dflash_config`, or equal in both.

        Raises:
            ValueError: DFlash 2, another architecture, a missing, impossible or contradicted value.
        """
        values = _Values(source)
        _check_architecture(source, values)
        plain = {k: v for k, v in source.items() if k not in _SPECIAL_IDS}
        model = ModelConfig.from_hf({**plain, "architectures": ["Qwen3ForCausalLM"]})
        count = values.integer("num_target_layers", 1)
        ids = _layer_ids(values.get("target_layer_ids"), count, model.num_layers)
        cap = values.number("final_logit_softcapping", 0.0)
        return cls(
            model=model,
            causal=_causal(source, values, model.num_layers),
            block_size=values.integer("block_size", 2),
            num_target_layers=count,
            target_layer_ids=ids,
            mask_token_id=values.integer("mask_token_id", 0, model.vocab_size - 1),
            output_multiplier=values.number("output_multiplier", 1.0),
            final_logit_softcapping=cap if cap > 0 else None,
            input_embedding_scale=values.number("input_embedding_scale", 1.0),
            source=source,
        )

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the checkpoint."""
        m = self.model
        h, q, kv = m.hidden_size, m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (h, self.feature_size),
            "hidden_norm.weight": (h,),
            "norm.weight": (h,),
        }
        projections = {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}
        mlp = {
            "gate": (m.intermediate_size, h),
            "up": (m.intermediate_size, h),
            "down": (h, m.intermediate_size),
        }
        for i in range(m.num_layers):
            attention = f"layers.{i}.self_attn"
            for name, shape in projections.items():
                shapes[f"{attention}.{name}_proj.weight"] = shape
                if m.qkv_bias:
                    shapes[f"{attention}.{name}_proj.bias"] = shape[:1]
            shapes |= {f"{attention}.{n}_norm.weight": (m.head_dim,) for n in "qk"}
            shapes |= {f"layers.{i}.mlp.{n}_proj.weight": shape for n, shape in mlp.items()}
            shapes |= {f"layers.{i}.{n}_layernorm.weight": (h,) for n in ("input", "post_attention")}
        return shapes


def default_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """Feature layers when a config names none: spread from 1 to target_layers − 3, or the middle one."""
    if draft_layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers))


class _Values:
    """DFlash values, wherever they sit."""

    def __init__(self, source: Mapping[str, Any]) -> None:
        nested = source.get("dflash_config") or {}
        if not isinstance(nested, Mapping):
            raise ValueError(f"expected dflash_config to be a dictionary, got {nested!r}")
        self._top, self._nested = source, nested

    def get(self, name: str) -> Any:
        """The value, or None where there is none."""
        top = self._top.get(name)
        nested = self._nested.get(name, top)
        if top is not None and nested != top:
            raise ValueError(
                f"{name} is {top!r} at the top of the config but {nested!r} in dflash_config; make them equal"
            )
        return nested

    def integer(self, name: str, least: int, most: int | None = None) -> int:
        """A required integer in least … most."""
        value = self.get(name)
        span = f">= {least}" if most is None else f"in {least}..{most}"
        if value is None:
            raise ValueError(f"{name} is missing: expected an integer {span}, at the top or in dflash_config")
        if not _is_integer(value) or value < least or (most is not None and value > most):
            raise ValueError(f"expected {name} to be an integer {span}, got {value!r}")
        return int(value)

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"expected {name} to be a finite number, got {value!r}")
        return float(value)


def _check_architecture(source: Mapping[str, Any], values: _Values) -> None:
    names = source.get("architectures")
    second = [k for k in DFLASH2_KEYS if values.get(k) is not None]
    if second or (isinstance(names, list) and any("DFlash2" in str(n) for n in names)):
        found = second or names
        raise ValueError(f"DFlash 2 drafters are not supported (found {found}); use a DFlash drafter")
    if names != [ARCHITECTURE]:
        raise ValueError(f"expected architectures to be [{ARCHITECTURE!r}], got {names!r}")


def _layer_ids(value: Any, target_layers: int, draft_layers: int) -> tuple[int, ...]:
    if value is None:
        value = list(default_layer_ids(target_layers, draft_layers))
    if not isinstance(value, list) or not value or not all(map(_is_integer, value)):
        raise ValueError(f"expected target_layer_ids to be a list of integers, got {value!r}")
    if bad := [i for i in value if not 0 <= i < target_layers]:
        raise ValueError(
            f"target_layer_ids {bad} lie outside 0..{target_layers - 1}: num_target_layers is {target_layers}"
        )
    return tuple(value)


def _causal(source: Mapping[str, Any], values: _Values, layers: int) -> tuple[bool, ...]:
    forced = values.get("is_causal")
    if forced is not None:
        return (bool(forced),) * layers
    kinds = source.get("layer_types")
    if kinds is None:
        if not source.get("use_sliding_window", False) or source.get("sliding_window", 4096) is None:
            return (False,) * layers
        first = source.get("max_window_layers", 28)
        return tuple(i >= first for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= set(LAYER_TYPES):
        raise ValueError(f"expected layer_types to be {layers} of {LAYER_TYPES}, got {kinds!r}")
    return tuple(kind == "sliding_attention" for kind in kinds)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
