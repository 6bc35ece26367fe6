"""A trainable DFlash drafter: the published architecture over many anchors of many answers at once.

Training masks as arXiv 2602.06036 describes: a block sees the target's features strictly before its anchor and
every column of itself. Borrowed embedding and head stay frozen and outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockpilot.drafters.dflash_config import DFlashConfig, default_layer_ids
from blockpilot.targets.config import ModelConfig
from blockpilot.targets.rope import rope_tables

INIT_STD = 0.02
EVERY = 16  # rows of the embedding between two that are looked at
HIDDEN = -1e4  # added to the score of a key that may not be seen


@dataclass(frozen=True)
class Blocks:
    """Blocks cut from S answers, N anchors each, padded.

    Attributes:
        features: [S, T, n·H] of every position; anchor: [S, N] position of column 0.
        tokens: [S, N, B] the anchor's id, then the mask id.
        ids: [S, T + 1] of every position.
    """

    features: Tensor
    anchor: Tensor
    tokens: Tensor
    ids: Tensor

    def to(self, device: torch.device) -> Blocks:
        """The same blocks there."""
        return Blocks(*(t.to(device) for t in vars(self).values()))


def default_features(target: ModelConfig) -> tuple[int, ...]:
    """Five target layers, fewer of a shallow target, as the published rule spreads them; 0 is the first."""
    return default_layer_ids(target.num_layers, max(1, min(5, target.num_layers - 2)))


def drafter_config(
    target: ModelConfig,
    layers: int,
    block_size: int,
    mask_token_id: int,
    feature_layers: Sequence[int] | None,
) -> dict[str, Any]:
    """`config.json` of a drafter with the target's sizes, in the published format.

    Args:
        feature_layers: target layers it reads, 0 = the first; None for `default_features`.
    """
    t = target
    ids = default_features(t) if feature_layers is None else tuple(feature_layers)
    rope = {"rope_type": "default", "rope_theta": t.rope.theta}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": t.hidden_size,
        "num_attention_heads": t.num_heads,
        "num_key_value_heads": t.num_kv_heads,
        "head_dim": t.head_dim,
        "intermediate_size": t.intermediate_size,
        "num_hidden_layers": layers,
        "num_target_layers": t.num_layers,
        "block_size": block_size,
        "rms_norm_eps": t.rms_norm_eps,
        "rope_theta": t.rope.theta,
        "rope_parameters": rope,
        "vocab_size": t.vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": t.rope.max_position,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * layers,
        "max_window_layers": layers,
        "use_sliding_window": False,
        "dflash_config": {
            "target_layer_ids": list(ids),
            "mask_token_id": mask_token_id,
            "block_size": block_size,
        },
    }


class DraftLayer(nn.Module):
    """One layer whose keys come from the context and from the block."""

    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        h, q, kv = m.hidden_size, m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        sizes = {"q": (h, q), "k": (h, kv), "v": (h, kv), "o": (q, h)}
        sizes |= {"gate": (h, m.intermediate_size), "up": (h, m.intermediate_size)}
        sizes |= {"down": (m.intermediate_size, h)}
        self.linear = nn.ModuleDict(
            {k: nn.Linear(*size, bias=False, dtype=torch.float32) for k, size in sizes.items()}
        )
        norms = {"input": h, "post": h, "query": m.head_dim, "key": m.head_dim}
        self.norm = nn.ParameterDict(
            {k: nn.Parameter(torch.ones(n, dtype=torch.float32)) for k, n in norms.items()}
        )


class DraftModel(nn.Module):
    """The trainable drafter.

    Args:
        config: from `DFlashConfig.from_json`. length: positions of the longest answer with a
            block at its end.
        scale: [n] factors on the feature layers, which bring them to unit size; `tensors` folds them into fc.
    """

    cos: Tensor
    sin: Tensor
    scale: Tensor

    def __init__(self, config: DFlashConfig, length: int, scale: Tensor) -> None:
        super().__init__()
        self.config, m = config, config.model
        self.layers = nn.ModuleList([DraftLayer(m) for _ in range(m.num_layers)])
        self.fc = nn.Linear(config.feature_size, m.hidden_size, bias=False, dtype=torch.float32)
        self.hidden_norm = nn.Parameter(torch.ones(m.hidden_size, dtype=torch.float32))
        self.norm = nn.Parameter(torch.ones(m.hidden_size, dtype=torch.float32))
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=INIT_STD)
        cos, sin = rope_tables(m.rope, m.head_dim, length)
        for name, table in (("cos", cos), ("sin", sin), ("scale", scale)):
            self.register_buffer(name, table.float().clone(), persistent=False)

    @property
    def mask_token_id(self) -> int:
        """What stands for a token to be guessed."""
        return self.config.mask_token_id

    def head_rows(self, head: Tensor, ids: Tensor) -> Tensor:
        """Rows of the head [V, H] that it borrows."""
        return head[ids]

    def guesses(self, blocks: Blocks, embedding: Tensor) -> Tensor:
        """Hidden states [S, N, B − 1, H] of the columns that guess."""
        return self(blocks, embedding)[:, :, 1:]

    def forward(self, blocks: Blocks, embedding: Tensor) -> Tensor:
        """Hidden states [S, N, B, H] after the final norm; embedding [V, H]."""
        s, n, b = blocks.tokens.shape
        columns = torch.arange(b, device=blocks.anchor.device)
        position = (blocks.anchor[..., None] + columns).view(s, n * b)
        length = blocks.features.shape[1]
        hidden = torch.arange(length, device=position.device) >= blocks.anchor[..., None]  # [S, N, T]
        mask = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device).masked_fill_(
            hidden, HIDDEN
        )
        context = self._context(blocks.features)
        x = embedding[blocks.tokens].float().view(s, n * b, -1)
        for layer in self.layers:
            x = self._layer(layer, x, context, mask, position, b)
        return self._rms(x, self.norm).view(s, n, b, -1)

    def _context(self, features: Tensor) -> Tensor:
        """[S, T, n·H] → [S, T, H]."""
        s, t, _ = features.shape
        scaled = features.view(s, t, len(self.scale), -1).float() * self.scale[:, None]
        return self._rms(self.fc(scaled.view(s, t, -1)), self.hidden_norm)

    def _layer(
        self, layer: nn.Module, x: Tensor, context: Tensor, mask: Tensor, position: Tensor, b: int
    ) -> Tensor:
        linear: Any = layer.linear
        norm: Any = layer.norm
        h = self._rms(x, norm["input"])
        q = self._heads(linear["q"](h), norm["query"], position)
        everywhere = torch.arange(context.shape[1], device=x.device)
        seen = self._heads(linear["k"](context), norm["key"], everywhere), self._split(linear["v"](context))
        own = self._heads(linear["k"](h), norm["key"], position), self._split(linear["v"](h))
        x = x + linear["o"](self._attend(q, seen, own, mask, b))
        h = self._rms(x, norm["post"])
        return x + linear["down"](F.silu(linear["gate"](h)) * linear["up"](h))

    def _attend(
        self, q: Tensor, seen: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], mask: Tensor, b: int
    ) -> Tensor:
        """q [S, Q, L, D]; seen k, v [S, K, T, D]; own k, v [S, K, L, D]; mask [S, N, T] → [S, L, Q·D]."""
        s, heads, rows, d = q.shape
        kv, n = own[0].shape[1], mask.shape[1]
        g, t = heads // kv, mask.shape[2]
        q = q.view(s, kv, g * rows, d) * d**-0.5
        far = (q @ seen[0].transpose(2, 3)).view(s, kv, g, n, b, t) + mask[:, None, None, :, None]
        blocks = q.view(s, kv, g, n, b, d).transpose(2, 3).reshape(s, kv, n, g * b, d)
        near = blocks @ own[0].view(s, kv, n, b, d).transpose(3, 4)
        near = near.view(s, kv, n, g, b, b).transpose(2, 3)
        p = torch.cat([far, near], -1).float().softmax(-1).to(q.dtype)
        y = (p[..., :t].reshape(s, kv, g * rows, t) @ seen[1]).view(s, kv, g, n, b, d)
        p_own = p[..., t:].transpose(2, 3).reshape(s, kv, n, g * b, b)
        y = y + (p_own @ own[1].view(s, kv, n, b, d)).view(s, kv, n, g, b, d).transpose(2, 3)
        return y.reshape(s, heads, rows, d).transpose(1, 2).reshape(s, rows, heads * d)

    def _split(self, x: Tensor) -> Tensor:
        """[S, L, K·D] → [S, K, L, D]."""
        return x.view(*x.shape[:2], -1, self.config.model.head_dim).transpose(1, 2)

    def _heads(self, x: Tensor, norm: Tensor, position: Tensor) -> Tensor:
        """Split, normalise and rotate at `position` [L] or [S, L]."""
        y = self._rms(self._split(x), norm)
        cos, sin = self.cos[position], self.sin[position]
        if cos.ndim == 3:
            cos, sin = cos[:, None], sin[:, None]
        a, c = y.chunk(2, -1)
        return torch.cat([a * cos - c * sin, c * cos + a * sin], -1).to(x.dtype)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = self.config.model.rms_norm_eps
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps)

    def head_size(self, tensors: Mapping[str, Tensor], prefix: str, name: str, x: Tensor) -> float:
        """Mean root mean square of a target layer's query ("q") or key ("k") heads for inputs x [N, H]."""
        normed = self._rms(x, tensors[f"{prefix}input_layernorm.weight"])
        heads = F.linear(normed, tensors[f"{prefix}self_attn.{name}_proj.weight"].float())
        return float(heads.unflatten(1, (-1, self.config.model.head_dim)).pow(2).mean(-1).sqrt().mean())

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a published drafter's tensors, as `tensors` gives them."""
        for i, layer in enumerate(self.layers):
            for name, parameter in _published(layer):
                parameter.copy_(tensors[f"layers.{i}.{name}.weight"])
        scale = self.scale.repeat_interleave(self.config.model.hidden_size)
        self.fc.weight.copy_(tensors["fc.weight"] / scale)
        self.hidden_norm.copy_(tensors["hidden_norm.weight"])
        self.norm.copy_(tensors["norm.weight"])

    def tensors(self) -> dict[str, Tensor]:
        """Weights under published names, float32, `scale` folded into fc."""
        layers = {
            f"layers.{i}.{published}.weight": parameter.detach().clone()
            for i, layer in enumerate(self.layers)
            for published, parameter in _published(layer)
        }
        width = self.config.model.hidden_size
        fc = self.fc.weight.detach() * self.scale.repeat_interleave(width)
        ends = {"hidden_norm": self.hidden_norm.detach().clone(), "norm": self.norm.detach().clone()}
        return layers | {"fc.weight": fc} | {f"{k}.weight": v for k, v in ends.items()}


def _published(layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    linear: Any = layer.linear
    norm: Any = layer.norm
    attention = [(f"self_attn.{k}_proj", linear[k].weight) for k in "qkvo"]
    mlp = [(f"mlp.{k}_proj", linear[k].weight) for k in ("gate", "up", "down")]
    norms = [("input_layernorm", norm["input"]), ("post_attention_layernorm", norm["post"])]
    return attention + mlp + norms + [("self_attn.q_norm", norm["query"]), ("self_attn.k_norm", norm["key"])]


@torch.no_grad()
def start_from_target(
    model: DraftModel, tensors: Mapping[str, Tensor], layers: Sequence[int], states: Tensor
) -> None:
    """Copy `layers` of the target into the drafter's; fc hands on the last feature at first.

    Query and key norms, which the target may lack, start at the size that its own heads have.

    Args:
        tensors: the target's, under HF names. states: [N, H] some of the last feature layer.

    Raises:
        ValueError: another number of layers than the drafter has.
    """
    if len(layers) != len(model.layers):
        raise ValueError(f"expected {len(model.layers)} target layers to start from, got {list(layers)}")
    for layer, source in zip(model.layers, layers, strict=True):
        prefix = f"model.layers.{source}."
        for name, parameter in _published(layer):
            found = tensors.get(f"{prefix}{name}.weight")
            if found is not None:
                parameter.copy_(found)
        norm: Any = layer.norm
        for short, name in (("q", "query"), ("k", "key")):
            if f"{prefix}self_attn.{short}_norm.weight" not in tensors:
                x = states if source else tensors["model.embed_tokens.weight"][::EVERY]
                norm[name].fill_(model.head_size(tensors, prefix, short, x.float()))
    width, last = model.config.model.hidden_size, len(model.scale) - 1
    model.fc.weight.mul_(0.25)
    model.fc.weight[:, last * width :] += torch.eye(width, dtype=torch.float32)
    model.norm.copy_(tensors["model.norm.weight"])
    model.hidden_norm.copy_(tensors[f"model.layers.{layers[-1]}.input_layernorm.weight"])
