"""The shape of a target, read from a Hugging Face `config.json` (transformers 4.x and 5.x forms)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
MAX_LAYERS = 1024
_ORIGINAL = "original_max_position_embeddings"

# What the config classes of transformers assume when a key is absent.
_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "max_window_layers": 28}
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {**_QWEN, "sliding_window": 4096},
    "qwen3": {**_QWEN, "sliding_window": 4096, "head_dim": 128},
}
# Rotary settings that would change every position and that no supported family uses.
_FOREIGN_ROPE = ("mrope_section", "mrope_interleaved", "llama_4_scaling_beta", "short_factor", "long_factor")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; `rope.py` turns it into numbers.

    Attributes:
        theta: base of the frequencies. type: one of `ROPE_TYPES`. factor: context extension.
        max_position: positions the model declares. original_max_position: positions before the extension.
        low_freq_factor, high_freq_factor: llama3. beta_fast, beta_slow, truncate: yarn's correction range.
        attention_factor, mscale, mscale_all_dim: yarn's attention scale, inferred from `factor` when None.
        frequency_factors: head_dim / 2 divisors of the frequencies (in GGUF files of Llama 3), or None.
    """

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    max_position: int = 2048
    original_max_position: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None

    @property
    def max_exact_position(self) -> int | None:
        """Positions 0 … this − 1 do not depend on the length of the sequence; None = no such limit.

        Dynamic NTK scaling changes the frequencies of all positions once a sequence outgrows `max_position`,
        which keys already in the cache cannot follow.
        """
        return self.max_position if self.type == "dynamic" else None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read `rope_parameters` (5.x) or `rope_theta` with `rope_scaling` (4.x).

        A value inside the dictionary wins over the same one beside it, as in transformers.

        Raises:
            ValueError: an unsupported type, a missing or impossible value, or two dictionaries that disagree.
        """
        rope = _rope_dictionary(config)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in ROPE_TYPES:
            raise ValueError(f"unsupported rope type {kind!r}; supported: {', '.join(ROPE_TYPES)}")
        limit = read_integer(config, "max_position_embeddings", default=2048)
        outer = {k: config[k] for k in ("rope_theta", _ORIGINAL) if config.get(k) is not None}
        rope = {**outer, **{k: v for k, v in rope.items() if v is not None}}
        if _ORIGINAL in outer:  # the one value that wins over the dictionary's
            rope[_ORIGINAL] = outer[_ORIGINAL]
        original = read_integer(rope, _ORIGINAL, limit)
        values: dict[str, Any] = {"theta": _number(rope, "rope_theta", 10000.0, above=1.0)}
        if kind != "default":
            values["factor"] = _number(rope, "factor", limit / original if kind == "yarn" else None)
        if kind == "llama3":
            values["low_freq_factor"] = low = _number(rope, "low_freq_factor")
            values["high_freq_factor"] = _number(rope, "high_freq_factor", above=low)
        if kind == "yarn":
            for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
                if rope.get(name) or (name == "attention_factor" and name in rope):
                    values[name] = _number(rope, name)
            values["truncate"] = bool(rope.get("truncate", True))
        return cls(type=kind, max_position=limit, original_max_position=original, **values)


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder: RMSNorm, rotary grouped-query attention, SwiGLU.

    Attributes:
        family: "llama" (SmolLM2 too), "mistral", "qwen2" or "qwen3".
        qkv_bias, o_bias, mlp_bias: whether those projections have a bias.
        qk_norm: RMSNorm on every query and key head before rotation.
        sliding_window: per layer, how many keys a query sees, its own included; None = all.
        eos_token_ids: every declared end-of-sequence id, config first, then generation config.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: tuple[int | None, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        if not self.sliding_window:
            object.__setattr__(self, "sliding_window", (None,) * self.num_layers)
        if len(self.sliding_window) != self.num_layers:
            raise ValueError(f"expected {self.num_layers} windows, one a layer, got {self.sliding_window}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, got {self.head_dim}")
        named = [*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))]
        if outside := [i for i in named if not 0 <= i < self.vocab_size]:
            raise ValueError(f"special token ids {outside} lie outside the vocabulary of {self.vocab_size}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read the dictionary of a `config.json` (and of `generation_config.json`, for more stop ids).

        Raises:
            ValueError: an architecture, activation, rope type or quantisation that is not supported, or a
                missing or impossible value; the message names what is supported.
        """
        family = _family(config)
        c = {**_FAMILY_DEFAULTS[family], **config}
        heads, hidden = read_integer(c, "num_attention_heads"), read_integer(c, "hidden_size")
        layers = read_integer(c, "num_hidden_layers", most=MAX_LAYERS)
        if c.get("head_dim") is None and hidden % heads:
            raise ValueError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        bias = bool(c.get("attention_bias", False)) and family in ("llama", "qwen3")
        return cls(
            family=family,
            hidden_size=hidden,
            intermediate_size=read_integer(c, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=read_integer(c, "num_key_value_heads", default=heads),
            head_dim=read_integer(c, "head_dim", default=hidden // heads),
            vocab_size=read_integer(c, "vocab_size"),
            rms_norm_eps=_number(c, "rms_norm_eps", default=1e-6),
            rope=RopeConfig.from_hf(c),
            max_position_embeddings=read_integer(c, "max_position_embeddings"),
            tie_word_embeddings=bool(c.get("tie_word_embeddings", False)),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            mlp_bias=bool(c.get("mlp_bias", False)) and family == "llama",
            qk_norm=family == "qwen3",
            sliding_window=_windows(c, family, layers),
            eos_token_ids=_token_ids(config, generation or {}, "eos_token_id"),
            bos_token_id=next(iter(_token_ids(config, generation or {}, "bos_token_id")), None),
        )


def _family(config: Mapping[str, Any]) -> str:
    family, classes = config.get("model_type"), config.get("architectures") or []
    known = ", ".join(f"{k} ({v})" for k, v in ARCHITECTURES.items())
    if (
        not isinstance(family, str)
        or family not in ARCHITECTURES
        or not isinstance(classes, list)
        or (classes and ARCHITECTURES[family] not in classes)
    ):
        raise ValueError(f"unsupported model_type {family!r}, architectures {classes!r}; supported: {known}")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"unsupported activation {activation!r}; supported: silu")
    if config.get("quantization_config"):
        raise ValueError(
            "the checkpoint's weights are quantised (config.json has quantization_config); "
            "use the float safetensors checkpoint, or a GGUF file"
        )
    if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ValueError(f"mixture-of-experts models are not supported; supported: {known}")
    return str(family)


def _rope_dictionary(config: Mapping[str, Any]) -> dict[str, Any]:
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    for name, value in (("rope_scaling", old), ("rope_parameters", new)):
        if not isinstance(value, Mapping) or any(isinstance(v, Mapping) for v in value.values()):
            raise ValueError(f"expected {name} to be one flat dictionary for all layers, got {value!r}")
    clash = [key for key in old.keys() & new.keys() if old[key] != new[key]]
    if clash:
        raise ValueError(f"rope_scaling and rope_parameters disagree on {sorted(clash)}; keep one of them")
    rope = {**new, **old}
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"unsupported partial_rotary_factor {partial}; expected 1.0, the whole head")
    if foreign := [key for key in _FOREIGN_ROPE if rope.get(key)]:
        raise ValueError(f"unsupported rope settings {foreign}; supported types: {', '.join(ROPE_TYPES)}")
    return rope


def _windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    sliding = config.get("sliding_window")
    if family == "llama" or sliding is None:
        return (None,) * layers
    size = read_integer(config, "sliding_window")
    if family == "mistral":
        return (size,) * layers
    if not config.get("use_sliding_window", False):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = read_integer(config, "max_window_layers", least=0)
        return tuple(size if i >= first else None for i in range(layers))
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"expected {layers} layer_types, full_attention or sliding_attention, got {kinds!r}")
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def _token_ids(config: Mapping[str, Any], generation: Mapping[str, Any], key: str) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for value in (config.get(key), generation.get(key)):
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int) or isinstance(token, bool):
                raise ValueError(f"expected {key} to be an integer or a list of integers, got {value!r}")
            found[token] = None
    return tuple(found)


def read_integer(
    values: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1
) -> int:
    """A value of a config, or its default.

    Raises:
        ValueError: it is missing without one, or not an integer in `least` … `most`.
    """
    value = values.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"expected {key} to be an integer in {least}..{most}, got {values.get(key)!r}")
    return value


def _number(
    values: Mapping[str, Any], key: str, default: float | None = None, *, above: float = 0.0
) -> float:
    value = values.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not above < value < math.inf:
        raise ValueError(f"expected {key} to be a finite number above {above}, got {values.get(key)!r}")
    return float(value)
