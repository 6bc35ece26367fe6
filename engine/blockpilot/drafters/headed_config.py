"""What the configs of drafters with a head of their own share: a Llama stack, and the hidden states they read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from blockpilot.targets.config import ModelConfig

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NESTED = "transformer_layer_config"  # of speculators
_UNSUPPORTED = ("fc_norm", "norm_output", "norm_before_fc", "parallel_drafting", "bias")
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # the target's business


class HeadedConfig(Protocol):
    """What is asked of a config; see `Eagle3Config`."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def target_hidden_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def hidden_states(self) -> tuple[int, ...] | None: ...
    @property
    def block_size(self) -> int: ...
    @property
    def feature_size(self) -> int: ...
    @property
    def source(self) -> Mapping[str, Any]: ...
    def expected_tensors(self) -> dict[str, tuple[int, ...]]: ...


def default_states(target_layers: int) -> tuple[int, ...]:
    """Hidden states that are read where the config names none: the inputs of layers 2, L // 2 and L − 3."""
    return (2, target_layers // 2, target_layers - 3)


def llama_of(source: Mapping[str, Any]) -> ModelConfig:
    """The drafter's layers.

    Raises:
        ValueError: a setting that would change the computation, or a missing or impossible value.
    """
    nested = source.get(_NESTED) or {}
    if not isinstance(nested, Mapping):
        raise ValueError(f"expected {_NESTED} to be a dictionary, got {nested!r}")
    values = {k: v for k, v in {**source, **nested}.items() if k not in _SPECIAL_IDS}
    if changed := [k for k in _UNSUPPORTED if values.get(k)]:
        raise ValueError(f"drafters with {', '.join(changed)} are not supported; use a plain one")
    values |= {"architectures": ["LlamaForCausalLM"], "model_type": values.get("model_type", "llama")}
    return ModelConfig.from_hf(values)


def hidden_states_of(source: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The hidden states that the config names (HF convention), None where it names none.

    Raises:
        ValueError: a list that is none, or two of them.
    """
    nested = source.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise ValueError(f"expected eagle_config to be a dictionary, got {nested!r}")
    if nested.get("use_aux_hidden_state") is False:
        raise ValueError(
            "expected eagle_config.use_aux_hidden_state to be true: EAGLE-3 reads several layers"
        )
    outputs, states = nested.get(_LAYER_IDS), source.get(_LAYER_IDS)
    if outputs is not None and states is not None:
        raise ValueError(f"{_LAYER_IDS} is at the top and in eagle_config, which count differently; keep one")
    ids = states if outputs is None else outputs
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"expected {_LAYER_IDS} to be a list of integers >= 0, got {ids!r}")
    return tuple(ids) if outputs is None else tuple(i + 1 for i in ids)
