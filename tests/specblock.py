"""Tiny random SpecBlock drafters in the published format, and what they mean in plain PyTorch.

`Reference` is written from the paper and the published checkpoints alone: no cache, everything is run again each time.
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

from tests.eagle3 import IDS
from tests.tiny import write_drafter


def specblock_config(target: Path, ids: Sequence[int] | None = IDS, **over: Any) -> dict[str, Any]:
    """config.json as the authors write it; `over` replaces or adds keys."""
    t = json.loads((target / "config.json").read_text())
    config = {
        "architectures": ["LlamaForCausalLMSpecBlockShift"],
        "bos_token_id": 1,
        "draft_vocab_size": t["vocab_size"] if ids is None else len(ids),
        "head_dim": t["head_dim"],
        "hidden_act": "silu",
        "hidden_size": t["hidden_size"],
        "intermediate_size": t["intermediate_size"],
        "max_position_embeddings": t["max_position_embeddings"],
        "model_type": "llama",
        "num_attention_heads": t["num_attention_heads"],
        "num_hidden_layers": 2,
        "num_key_value_heads": t["num_key_value_heads"],
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 500.0,
        "tie_word_embeddings": False,
        "vocab_size": t["vocab_size"],
        "diffspec_draft_token_num": 4,
        "rank_classes": 4,
    }
    return {**config, **over}


def specblock_tensors(
    config: dict[str, Any], target: Path, ids: Sequence[int] | None = IDS, seed: int = 3
) -> dict[str, Tensor]:
    """Random fp32 tensors. What is read last goes through almost as it is and the head is the target's, so that guesses
    are often right."""
    gen = torch.Generator().manual_seed(seed)
    h, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    k, layers, vocab = config["diffspec_draft_token_num"], config["num_hidden_layers"], config["vocab_size"]
    shapes = {"input_layer.condition_proj": (h, 3 * h), "input_layer.fuse": (h, 3 * h)}
    for i in range(layers):
        parts = {"self_attn.q": (q, h), "self_attn.k": (kv, h), "self_attn.v": (kv, h), "self_attn.o": (h, q)}
        parts |= {"mlp.gate": (inter, h), "mlp.up": (inter, h), "mlp.down": (h, inter)}
        shapes |= {f"layers.{i}.{n}_proj": shape for n, shape in parts.items()}
    if config["architectures"][0].endswith("Shift"):
        shapes |= {f"shift_proj.{i}": (h, 2 * h) for i in range(layers - 1)}
    tensors = {f"{n}.weight": torch.randn(s, generator=gen) * 0.15 for n, s in shapes.items()}
    tensors["input_layer.condition_proj.weight"][:, -h:] += torch.eye(h)
    tensors["input_layer.fuse.weight"][:, :h] += 3 * torch.eye(h)
    for i in range(layers - 1):
        if f"shift_proj.{i}.weight" in tensors:
            tensors[f"shift_proj.{i}.weight"][:, :h] += torch.eye(h)
    norms = [f"input_layer.{n}_norm" for n in ("condition", "token", "query")] + ["norm"]
    norms += [f"layers.{i}.{n}_layernorm" for i in range(layers) for n in ("input", "post_attention")]
    tensors |= {f"{n}.weight": 1 + 0.1 * torch.randn(h, generator=gen) for n in norms}
    tensors["input_layer.position_queries.weight"] = torch.randn(k, h, generator=gen)
    tensors["rank_head.0.weight"] = torch.randn(256, h + 15, generator=gen) * 0.1
    tensors["rank_head.2.weight"] = torch.randn(4, 256, generator=gen)
    theirs = load_file(target / "model.safetensors")
    head = theirs.get("lm_head.weight", theirs["model.embed_tokens.weight"])
    tensors["lm_head.weight"] = head if ids is None else head[list(ids)]
    if ids is not None:
        known = torch.zeros(vocab, dtype=torch.bool)
        known[list(ids)] = True
        tensors |= {"d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": known}
    return tensors


def save_specblock_drafter(
    folder: Path, target: Path, ids: Sequence[int] | None = IDS, *, seed: int = 3, **over: Any
) -> Path:
    """A drafter's folder for `target`; `over` as for `specblock_config`."""
    config = specblock_config(target, ids, **over)
    write_drafter(folder, config, specblock_tensors(config, target, ids, seed))
    return folder


@dataclass(frozen=True)
class Reference:
    """SpecBlock in plain PyTorch: config and tensors of a checkpoint, and the table [V, H] it embeds with."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    embedding: Tensor

    @classmethod
    def of(cls, target: Path, folder: Path) -> Reference:
        theirs = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
        return cls(
            json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"), theirs
        )

    @property
    def slots(self) -> int:
        return self.config["diffspec_draft_token_num"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"])

    def rms(self, name: str, x: Tensor) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + self.config["rms_norm_eps"]) * self.tensors[f"{name}.weight"]

    def opened(self, condition: Tensor, said: Tensor) -> Tensor:
        """condition, said [T, H] → u [T, K, H]."""
        c = self.rms("input_layer.condition_norm", condition)[:, None].expand(-1, self.slots, -1)
        e = self.rms("input_layer.token_norm", said)[:, None].expand_as(c)
        q = self.rms("input_layer.query_norm", self.tensors["input_layer.position_queries.weight"])
        return self.linear("input_layer.fuse", torch.cat([c, e, q.expand_as(c)], -1))

    def rotated(self, x: Tensor, position: Tensor) -> Tensor:
        """x [R, heads, D] at `position` [R]."""
        dim = x.shape[-1]
        powers = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        angle = position[:, None] / self.config["rope_theta"] ** powers
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def layers(self, x: Tensor, position: Tensor, seen: Tensor) -> Tensor:
        """x [B, K, H] of blocks, `position` [B, K], seen [B·K, B·K] → h [B, K, H]."""
        dim = self.config["head_dim"]
        for i in range(self.config["num_hidden_layers"]):
            if i and f"shift_proj.{i - 1}.weight" in self.tensors:
                before = torch.cat([x[:, :1], x[:, :-1]], 1)
                x = self.linear(f"shift_proj.{i - 1}", torch.cat([x, before], -1))
            flat, at = x.flatten(0, 1), f"layers.{i}."
            y = self.rms(f"{at}input_layernorm", flat)
            q, k, v = (self.linear(f"{at}self_attn.{n}_proj", y).view(len(y), -1, dim) for n in "qkv")
            q, k = self.rotated(q, position.flatten()), self.rotated(k, position.flatten())
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
            mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
            flat = flat + self.linear(f"{at}self_attn.o_proj", mixed.reshape(len(flat), -1))
            y = self.rms(f"{at}post_attention_layernorm", flat)
            gate, up = self.linear(f"{at}mlp.gate_proj", y), self.linear(f"{at}mlp.up_proj", y)
            x = (flat + self.linear(f"{at}mlp.down_proj", F.silu(gate) * up)).view(x.shape)
        return x

    def draft(self, features: Tensor, tokens: Sequence[int]) -> Tensor:
        """h [K, H] of the last pair's slots; features [len(tokens) − 1, 3H]."""
        return self._run(features, tokens, None)[-1]

    def go_on(self, features: Tensor, tokens: Sequence[int], slot: int, id: int) -> Tensor:
        """h [K, H] of a second block, which goes on from a slot of the first that said `id`."""
        return self._run(features, tokens, (slot, id))[-1]

    def _run(self, features: Tensor, tokens: Sequence[int], start: tuple[int, int] | None) -> Tensor:
        pairs, k = len(features), self.slots
        said = self.embedding[torch.tensor(tokens[1:])]
        x = self.opened(self.linear("input_layer.condition_proj", features), said)
        number, slot = torch.arange(pairs), torch.arange(k)
        seen = torch.ones(pairs * k, pairs * k, dtype=torch.bool).tril()
        if start is not None:
            hidden = self.draft(features, tokens)[start[0]]
            more = self.opened(hidden[None], self.embedding[start[1]][None])
            x, number = torch.cat([x, more]), torch.cat([number, torch.tensor([pairs + start[0]])])
            seen = F.pad(seen, (0, k, 0, k))
            seen[-k:, : (pairs - 1) * k + start[0] + 1] = True
            seen[-k:, -k:] = torch.ones(k, k, dtype=torch.bool).tril()
        return self.layers(x, number[:, None] + 1 + slot, seen)

    def logits(self, h: Tensor) -> Tensor:
        return self.linear("lm_head", self.rms("norm", h))

    def branches(self, h: Tensor) -> list[int]:
        """Children that each slot of h [K, H] should have, by its rank head."""
        logits = self.logits(h)
        top = logits.topk(min(20, logits.shape[1])).values
        logp = top.log_softmax(-1)
        p = logp.exp()
        gaps = top[:, :1] - top[:, [1, 2, 4]]
        entropy = -(p * logp).sum(-1, keepdim=True)
        x = torch.cat([self.rms("norm", h), logp[:, :10], gaps, p[:, :1], entropy], -1)
        classes = self.linear("rank_head.2", F.silu(self.linear("rank_head.0", x))).argmax(-1)
        return [(2, 4, 10, 0)[i] for i in classes.tolist()]
