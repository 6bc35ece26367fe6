"""One pre-norm decoder layer on the fixed-tile ops, shared by targets and drafters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.rows import KVCache, Rows
from blockpilot_kernels.block_attention import AttentionTiles, block_attention
from blockpilot_kernels.norm_rope import norm_rope, rms_norm, swiglu
from blockpilot_kernels.tiled_linear import PackedLinear


@dataclass(frozen=True)
class LayerShape:
    """Sizes a layer needs; `groups` is query heads per KV head."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Pass:
    """What every layer of one forward pass shares.

    Attributes:
        rows: packed rows; position: [N] absolute; cos, sin: [N, D/2] at those positions.
        to: KV destinations from `KVCache.destination`.
        extent: [S] keys that exist per slot once this pass has written; bound: host bound on them.
        places: [rows.total, bound] where each row of a pass with trees finds its keys, or None.
    """

    rows: Rows
    position: Tensor
    cos: Tensor
    sin: Tensor
    to: tuple[Tensor, Tensor]
    extent: Tensor
    bound: int
    places: Tensor | None = None

    def tiles(self, groups: int) -> AttentionTiles:
        """Tiles of `groups` query heads per KV head; rows that find their keys by themselves share none."""
        return self.rows.tiles(groups) if self.places is None else self.rows.single_tiles(groups)


class DecoderLayer:
    """Norm → attention → residual → norm → SwiGLU → residual; the residual stays fp32.

    Weights come under HF names below `prefix`: `self_attn.{q,k,v,o}_proj`, optional `self_attn.{q,k}_norm`,
    `mlp.{gate,up,down}_proj`, `input_layernorm`, `post_attention_layernorm`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        prefix: str,
        shape: LayerShape,
        dtype: torch.dtype,
        *,
        causal: bool = True,
        window: int | None = None,
    ) -> None:
        def get(name: str) -> Tensor | None:
            return tensors.get(prefix + name)

        def linear(*names: str) -> PackedLinear:
            weight = torch.cat([tensors[f"{prefix}{n}.weight"] for n in names])
            bias = [b.float() for n in names if (b := get(f"{n}.bias")) is not None]
            return PackedLinear(weight, torch.cat(bias) if bias else None, dtype)

        self.shape, self.causal, self.window = shape, causal, window
        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out = linear("self_attn.o_proj")
        self.gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self.down = linear("mlp.down_proj")
        self.input_norm = tensors[prefix + "input_layernorm.weight"].float()
        self.post_norm = tensors[prefix + "post_attention_layernorm.weight"].float()
        q_norm, k_norm = get("self_attn.q_norm.weight"), get("self_attn.k_norm.weight")
        self.q_norm = None if q_norm is None else q_norm.float()
        self.k_norm = None if k_norm is None else k_norm.float()

    def forward(self, x: Tensor, cache: KVCache, layer: int, step: Pass) -> Tensor:
        """x [N, H] float32 → [N, H]; writes this pass's keys and values in place."""
        return self.mix(x, rms_norm(x, self.input_norm, self.shape.eps), cache, layer, step)

    def mix(self, x: Tensor, normed: Tensor, cache: KVCache, layer: int, step: Pass) -> Tensor:
        """`forward` with queries, keys and values of `normed` [N, K] float32, as wide as their weights."""
        s = self.shape
        qkv = self.qkv(normed).view(len(x), -1, s.head_dim)
        q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], 1)
        q = norm_rope(q, self.q_norm, step.cos, step.sin, s.eps)
        k = norm_rope(k, self.k_norm, step.cos, step.sin, s.eps)
        cache.write(layer, step.to, k, v)
        attended = block_attention(
            q,
            cache.k[layer],
            cache.v[layer],
            cache.bad[layer],
            step.tiles(s.groups),
            step.position,
            step.extent,
            step.bound,
            causal=self.causal,
            window=self.window,
            places=step.places,
        )
        x = x + self.out(attended)
        return x + self.down(swiglu(self.gate_up(rms_norm(x, self.post_norm, s.eps))))
