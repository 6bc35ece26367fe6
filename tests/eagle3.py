"""Tiny random EAGLE-3 drafters in exactly the published formats, and what they mean in plain PyTorch.

`logits_of` is written from the paper and the published checkpoints alone: no cache, every pair of (feature, token)
is run again for every guess.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.tiny import write_drafter

IDS = [0, 2, 3, 4, 5, 6, 7, 9, 11, 12, 15, 17, 18, 21, 24, 26, 29, 31]  # of a tiny target's 32


def eagle3_config(target: Path, ids: Sequence[int] | None = IDS, **over: Any) -> dict[str, Any]:
    """config.json as SpecForge writes it; `over` replaces or adds top keys."""
    t = json.loads((target / "config.json").read_text())
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": t["vocab_size"] + 5,
        "draft_vocab_size": t["vocab_size"] if ids is None else len(ids),
        "head_dim": t["head_dim"],
        "hidden_act": "silu",
        "hidden_size": t["hidden_size"],
        "intermediate_size": t["intermediate_size"],
        "max_position_embeddings": t["max_position_embeddings"],
        "model_type": "llama",
        "num_attention_heads": t["num_attention_heads"],
        "num_hidden_layers": 1,
        "num_key_value_heads": t["num_key_value_heads"],
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 500.0,
        "tie_word_embeddings": False,
        "vocab_size": t["vocab_size"],
    }
    return {**config, **over}


def eagle3_tensors(
    config: dict[str, Any], target: Path, ids: Sequence[int] | None = IDS, features: int = 3, seed: int = 3
) -> dict[str, Tensor]:
    """Random fp32 tensors under SafeAILab's names.

    The feature read last goes through almost as it is and the head is the target's, so that guesses are often right.
    """
    gen = torch.Generator().manual_seed(seed)
    h, wide = config["hidden_size"], config.get("target_hidden_size") or config["hidden_size"]
    inter, dim, vocab = config["intermediate_size"], config["head_dim"], config["vocab_size"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "fc": (h, features * wide),
        "midlayer.self_attn.q_proj": (q, 2 * h),
        "midlayer.self_attn.k_proj": (kv, 2 * h),
        "midlayer.self_attn.v_proj": (kv, 2 * h),
        "midlayer.self_attn.o_proj": (h, q),
        "midlayer.mlp.gate_proj": (inter, h),
        "midlayer.mlp.up_proj": (inter, h),
        "midlayer.mlp.down_proj": (h, inter),
    }
    tensors = {f"{n}.weight": torch.randn(s, generator=gen) * 0.15 for n, s in shapes.items()}
    if config["attention_bias"]:
        for n in ("q", "k", "v", "o"):
            name = f"midlayer.self_attn.{n}_proj"
            tensors[f"{name}.bias"] = torch.randn(shapes[name][0], generator=gen)
    tensors["fc.weight"][:, -wide : -wide + min(h, wide) or None] += torch.eye(h, wide)[:, : min(h, wide)]
    for n in (
        "norm",
        "midlayer.hidden_norm",
        "midlayer.input_layernorm",
        "midlayer.post_attention_layernorm",
    ):
        tensors[f"{n}.weight"] = 1 + 0.1 * torch.randn(h, generator=gen)
    theirs = load_file(target / "model.safetensors")
    head = theirs.get("lm_head.weight", theirs["model.embed_tokens.weight"])
    rows = head if ids is None else head[list(ids)]
    tensors["lm_head.weight"] = F.pad(rows, (0, h - wide)) if h >= wide else rows[:, :h].clone()
    if wide != h:
        tensors["embed_tokens.weight"] = torch.randn(vocab, h, generator=gen)
    if ids is not None:
        known = torch.zeros(vocab, dtype=torch.bool)
        known[list(ids)] = True
        tensors |= {"d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": known}
    return tensors


def save_eagle3_drafter(
    folder: Path, target: Path, ids: Sequence[int] | None = IDS, *, seed: int = 3, **over: Any
) -> Path:
    """A drafter's folder for `target`; `over` as for `eagle3_config`."""
    config = eagle3_config(target, ids, **over)
    named = config.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_config", {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    write_drafter(folder, config, eagle3_tensors(config, target, ids, len(named or "123"), seed))
    return folder


def as_speculators(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """The same drafter as vllm's speculators writes it, with an embedding beside it."""
    own = ("architectures", "draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids")
    layer = {k: v for k, v in config.items() if k not in own}
    top = {k: config[k] for k in own[1:] if k in config}
    top |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
    top |= {"transformer_layer_config": layer, "target_hidden_size": None}
    write_drafter(folder, top, {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()})


@dataclass(frozen=True)
class Reference:
    """EAGLE-3 in plain PyTorch: config and float tensors of a checkpoint, and the table [V, H] it embeds with."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    embedding: Tensor

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def rms(self, name: str, x: Tensor) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + self.config["rms_norm_eps"]) * self.tensors[f"{name}.weight"]

    def rotated(self, x: Tensor) -> Tensor:
        """x [T, heads, D] at positions 0 … T − 1."""
        dim = x.shape[-1]
        powers = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        angle = torch.arange(len(x), dtype=torch.float32)[:, None] / self.config["rope_theta"] ** powers
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def layer(self, g: Tensor, said: Tensor) -> Tensor:
        """Pairs g, said [T, H] → h [T, H]."""
        c, dim, heads = self.config, self.config["head_dim"], self.config["num_attention_heads"]
        normed = self.rms("midlayer.hidden_norm", g)
        residual = normed if c.get("norm_before_residual") else g
        a = torch.cat([self.rms("midlayer.input_layernorm", said), normed], -1)
        q, k, v = (self.linear(f"midlayer.self_attn.{n}_proj", a).view(len(a), -1, dim) for n in "qkv")
        q, k = self.rotated(q), self.rotated(k)
        groups = heads // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        seen = torch.ones(len(a), len(a), dtype=torch.bool).tril()
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        x = residual + self.linear("midlayer.self_attn.o_proj", mixed.reshape(len(a), -1))
        y = self.rms("midlayer.post_attention_layernorm", x)
        gate, up = self.linear("midlayer.mlp.gate_proj", y), self.linear("midlayer.mlp.up_proj", y)
        return x + self.linear("midlayer.mlp.down_proj", F.silu(gate) * up)

    def logits_of(self, features: Tensor, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:
        """[V'] after `tokens` and `drafted`; features [len(tokens) − 1, n·H], one less than there are tokens."""
        g, said = self.linear("fc", features), self.embedding[torch.tensor(tokens[1:])]
        for id in drafted:
            h = self.layer(g, said)[-1:]
            g, said = torch.cat([g, h]), torch.cat([said, self.embedding[id][None]])
        return self.linear("lm_head", self.rms("norm", self.layer(g, said)[-1]))


def reference_of(target: Path, folder: Path) -> Reference:
    """The drafter in `folder`, SafeAILab's names, beside `target`."""
    tensors = load_file(folder / "model.safetensors")
    theirs = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    config = json.loads((folder / "config.json").read_text())
    return Reference(config, tensors, tensors.get("embed_tokens.weight", theirs))
