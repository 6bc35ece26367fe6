"""A trainable EAGLE-3 drafter, fed its own hidden states for as many depths as it will draft (arXiv 2503.01840).

Pair t is the feature of position t and the id of t + 1. A block anchored at p begins at pair p − 1, which guesses the
id of p + 1, and goes on with its own hidden state and the answer's next id: where decoding accepts the drafts so far,
these are the ids it would have drafted. It sees the pairs up to its own and its own depths, as decoding does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockpilot.drafters.eagle3_config import ARCHITECTURE, Eagle3Config
from blockpilot.drafters.headed_config import default_states
from blockpilot.targets.checkpoint import EMBEDDING, HEAD
from blockpilot.targets.config import ModelConfig
from blockpilot.targets.rope import rope_tables
from blockpilot.training.draft_model import HIDDEN, INIT_STD, Blocks

_LINEAR = {f"self_attn.{k}_proj": k for k in "qkvo"} | {f"mlp.{k}_proj": k for k in ("gate", "up", "down")}
_NORM = {"hidden_norm": "hidden", "input_layernorm": "input", "post_attention_layernorm": "post"}


def eagle3_config(
    target: ModelConfig, block_size: int, feature_layers: Sequence[int] | None, draft_ids: int
) -> dict[str, Any]:
    """`config.json` of a drafter with the target's sizes, as SpecForge writes it.

    Args:
        feature_layers: target layers whose outputs it reads, 0 = the first; None for the published ones.
    """
    t = target
    layers = [k - 1 for k in default_states(t.num_layers)] if feature_layers is None else list(feature_layers)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": t.hidden_size,
        "num_attention_heads": t.num_heads,
        "num_key_value_heads": t.num_kv_heads,
        "head_dim": t.head_dim,
        "intermediate_size": t.intermediate_size,
        "num_hidden_layers": 1,
        "rms_norm_eps": t.rms_norm_eps,
        "rope_theta": t.rope.theta,
        "rope_scaling": None,
        "vocab_size": t.vocab_size,
        "draft_vocab_size": draft_ids,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": t.rope.max_position,
        "tie_word_embeddings": False,
        "block_size": block_size,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers},
    }


class Eagle3Model(nn.Module):
    """The trainable drafter.

    Args:
        config: from `Eagle3Config.from_json`. length: positions of the longest answer with a block at its end.
        scale: [n] factors on the features, which bring them to unit size; `tensors` folds them into fc.
    """

    mask_token_id = 0  # of columns that it never reads
    linear: Any
    norm: Any
    cos: Tensor
    sin: Tensor
    scale: Tensor

    def __init__(self, config: Eagle3Config, length: int, scale: Tensor) -> None:
        super().__init__()
        self.config, m = config, config.model
        h, q, kv = m.hidden_size, m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        sizes = {"q": (2 * h, q), "k": (2 * h, kv), "v": (2 * h, kv), "o": (q, h)}
        sizes |= {"gate": (h, m.intermediate_size), "up": (h, m.intermediate_size)}
        sizes |= {"down": (m.intermediate_size, h), "fc": (config.feature_size, h)}
        self.linear = nn.ModuleDict(
            {k: nn.Linear(*size, bias=False, dtype=torch.float32) for k, size in sizes.items()}
        )
        norms = ("hidden", "input", "post", "final")
        self.norm = nn.ParameterDict({k: nn.Parameter(torch.ones(h, dtype=torch.float32)) for k in norms})
        self.lm_head = nn.Parameter(torch.empty(config.draft_vocab_size, h, dtype=torch.float32))
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=INIT_STD)
        cos, sin = rope_tables(m.rope, m.head_dim, length)
        for name, table in (("cos", cos), ("sin", sin), ("scale", scale)):
            self.register_buffer(name, table.float().clone(), persistent=False)

    def head_rows(self, head: Tensor, ids: Tensor) -> Tensor:
        """Its own head's, whatever the target's; `ids` are its draft ids."""
        return self.lm_head

    def guesses(self, blocks: Blocks, embedding: Tensor) -> Tensor:
        """Hidden states [S, N, B − 1, H] after the final norm, of depths 1 … B − 1; embedding [V, H]."""
        first = blocks.anchor - 1
        said = embedding[blocks.ids].float()
        g = self._fused(blocks.features)
        pairs = self._both(said[:, 1 : g.shape[1] + 1], g)
        everywhere = torch.arange(g.shape[1], device=g.device)
        seen = [self._heads(self.linear["k"](pairs), everywhere), self._split(self.linear["v"](pairs))]
        mask = torch.zeros(*first.shape, g.shape[1], dtype=torch.float32, device=g.device)
        mask.masked_fill_(everywhere > first[..., None], HIDDEN)
        at = first.clamp_min(0)[..., None].expand(-1, -1, g.shape[2])
        x, a, own, made = g.gather(1, at), pairs.gather(1, at.repeat(1, 1, 2)), [], []
        for depth in range(blocks.tokens.shape[2] - 1):
            if depth:
                place = (first + depth + 1).clamp_max(said.shape[1] - 1)[..., None].expand_as(at)
                a = self._both(said.gather(1, place), x)
                position = first.clamp_min(0) + depth
                own.append((self._heads(self.linear["k"](a), position), self._split(self.linear["v"](a))))
            x = self._layer(x, a, first.clamp_min(0) + depth, seen, own, mask)
            made.append(self._rms(x, "final"))
        return torch.stack(made, 2)

    def _fused(self, features: Tensor) -> Tensor:
        """[S, T, n·H] → [S, T, H]."""
        s, t, _ = features.shape
        scaled = features.view(s, t, len(self.scale), -1).float() * self.scale[:, None]
        return self.linear["fc"](scaled.view(s, t, -1)).float()

    def _both(self, said: Tensor, x: Tensor) -> Tensor:
        return torch.cat([self._rms(said, "input"), self._rms(x, "hidden")], -1)

    def _layer(
        self,
        x: Tensor,
        a: Tensor,
        position: Tensor,
        seen: list[Tensor],
        own: list[tuple[Tensor, Tensor]],
        mask: Tensor,
    ) -> Tensor:
        """Blocks x [S, N, H], a [S, N, 2H] at `position` [S, N] → [S, N, H]."""
        linear = self.linear
        y = self._attend(self._heads(linear["q"](a), position), seen, own, mask)
        x = x + linear["o"](y)
        y = self._rms(x, "post")
        return x + linear["down"](F.silu(linear["gate"](y)) * linear["up"](y))

    def _attend(
        self, q: Tensor, seen: list[Tensor], own: list[tuple[Tensor, Tensor]], mask: Tensor
    ) -> Tensor:
        """q [S, Q, N, D]; seen k, v [S, K, T, D]; own k, v [S, K, N, D] by depth; mask [S, N, T] → [S, N, Q·D]."""
        s, heads, n, d = q.shape
        kv, t = seen[0].shape[1], mask.shape[2]
        q = q.reshape(s, kv, heads // kv, n, d) * d**-0.5
        scores = [(q.flatten(2, 3) @ seen[0].transpose(2, 3)).view(*q.shape[:4], t) + mask[:, None, None]]
        scores += [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]
        p = torch.cat([x.float() for x in scores], -1).softmax(-1).to(q.dtype)
        y = (p[..., :t].flatten(2, 3) @ seen[1]).view(q.shape)
        for i, (_, v) in enumerate(own):
            y = y + p[..., t + i : t + i + 1] * v[:, :, None]
        return y.reshape(s, heads, n, d).transpose(1, 2).reshape(s, n, heads * d)

    def _split(self, x: Tensor) -> Tensor:
        """[S, L, K·D] → [S, K, L, D]."""
        return x.view(*x.shape[:2], -1, self.config.model.head_dim).transpose(1, 2)

    def _heads(self, x: Tensor, position: Tensor) -> Tensor:
        """Split and rotate at `position` [L] or [S, L]."""
        y = self._split(x).float()
        cos, sin = self.cos[position], self.sin[position]
        if cos.ndim == 3:
            cos, sin = cos[:, None], sin[:, None]
        a, b = y.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def _rms(self, x: Tensor, name: str) -> Tensor:
        weight = self.norm[name]
        return F.rms_norm(x.float(), weight.shape, weight.float(), self.config.model.rms_norm_eps)

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a published drafter's tensors, as `tensors` gives them."""
        for name, parameter in self._published().items():
            parameter.copy_(tensors[name])
        self.linear["fc"].weight.div_(self._fc_scale())

    def tensors(self) -> dict[str, Tensor]:
        """Weights under SafeAILab's names, float32, `scale` folded into fc."""
        made = {name: p.detach().clone() for name, p in self._published().items()}
        made["fc.weight"] *= self._fc_scale()
        return made

    def _fc_scale(self) -> Tensor:
        return self.scale.repeat_interleave(self.config.target_hidden_size)

    def _published(self) -> dict[str, Any]:
        layer = {f"midlayer.{name}.weight": self.linear[k].weight for name, k in _LINEAR.items()}
        layer |= {f"midlayer.{name}.weight": self.norm[k] for name, k in _NORM.items()}
        ends = {"norm.weight": self.norm["final"], "lm_head.weight": self.lm_head}
        return layer | ends | {"fc.weight": self.linear["fc"].weight}


@torch.no_grad()
def start_eagle3(model: Eagle3Model, tensors: Mapping[str, Tensor], layer: int, ids: Tensor) -> None:
    """Begin as a layer of the target over the last feature it reads, with its head's rows `ids`.

    Args:
        tensors: the target's, under HF names.
    """
    h, last, prefix = model.config.model.hidden_size, len(model.scale) - 1, f"model.layers.{layer}."
    for name, k in _LINEAR.items():
        found = tensors[f"{prefix}{name}.weight"]
        model.linear[k].weight[:, -found.shape[1] :].copy_(found)
    model.norm["hidden"].copy_(tensors[f"{prefix}input_layernorm.weight"])
    model.norm["post"].copy_(tensors[f"{prefix}post_attention_layernorm.weight"])
    model.norm["final"].copy_(tensors["model.norm.weight"])
    model.lm_head.copy_(tensors[HEAD if HEAD in tensors else EMBEDDING][ids])
    # The residual is of the feature's own size, which the layer's outputs go with.
    fc = model.linear["fc"].weight
    fc.mul_(0.25)
    fc[:, last * h :] += torch.eye(h, dtype=torch.float32) / model.scale[last]
