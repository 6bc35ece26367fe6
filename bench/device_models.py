"""Models of published shapes with random weights, made on the device: no host could make and move 15 GB in time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from blockpilot.drafters.dflash import DFlashDrafter
from blockpilot.drafters.dflash_checkpoint import DFlashCheckpoint
from blockpilot.drafters.dflash_config import DFlashConfig, default_layer_ids
from blockpilot.loading import build_target
from blockpilot.targets import Target
from blockpilot.targets.checkpoint import Checkpoint, expected_tensors
from blockpilot.targets.config import ModelConfig, RopeConfig
from roofline_models import Model, Stack

STD = 0.02
MAX_POSITIONS = 40960
SOURCE = Path("random")


class Random(Mapping[str, Tensor]):
    """Tensors by name, each drawn on the device when it is asked for; norms are ones."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._shapes, self._device, self._dtype = shapes, device, dtype

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device, dtype=self._dtype)
        return torch.empty(shape, device=self._device, dtype=self._dtype).normal_(std=STD)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def model_config(stack: Stack, vocab: int, tied: bool) -> ModelConfig:
    """A decoder of that shape."""
    return ModelConfig(
        family="qwen3" if stack.qk_norm else "llama",
        hidden_size=stack.hidden,
        intermediate_size=stack.intermediate,
        num_layers=stack.layers,
        num_heads=stack.heads,
        num_kv_heads=stack.kv_heads,
        head_dim=stack.head_dim,
        vocab_size=vocab,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6, max_position=MAX_POSITIONS, original_max_position=MAX_POSITIONS),
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=tied,
        qk_norm=stack.qk_norm,
    )


def random_target(
    model: Model, slots: int, capacity: int, device: torch.device, dtype: torch.dtype
) -> Target:
    """The target as the engine builds one on that device."""
    config = model_config(model.target, model.vocab, model.tied)
    tensors = Random(dict(expected_tensors(config)), device, dtype)
    checkpoint = Checkpoint(config, tensors, SOURCE, "safetensors", "random", {})
    return build_target(checkpoint, slots, capacity, dtype, device, "dense")


def random_drafter(model: Model, target: Target, slots: int) -> DFlashDrafter:
    """A drafter of the published shape beside it, attached."""
    layers = model.target.layers
    ids = default_layer_ids(layers, model.features)
    config = DFlashConfig(
        model=model_config(model.drafter, model.vocab, tied=False),
        causal=(False,) * model.drafter.layers,
        block_size=model.block_size,
        num_target_layers=layers,
        target_layer_ids=ids,
        mask_token_id=model.vocab - 1,
        output_multiplier=1.0,
        final_logit_softcapping=None,
        input_embedding_scale=1.0,
        source={},
    )
    tensors = dict(Random(config.expected_tensors(), target.device, target.dtype))
    drafter = DFlashDrafter(DFlashCheckpoint(config, tensors, SOURCE, "random"), target, slots)
    drafter.attach(target, slots)
    target.use_features(drafter.feature_layers)
    return drafter


def shrunk(model: Model) -> Model:
    """The same model at a size that a dry run can afford."""
    small = {"layers": 4, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "head_dim": 16}
    target = Stack(**small, qk_norm=model.target.qk_norm)
    drafter = Stack(**{**small, "layers": 2}, qk_norm=True)
    return Model(
        model.name,
        target,
        160,
        model.tied,
        drafter,
        model.block_size,
        160,
        features=2,
        published=model.published,
    )
