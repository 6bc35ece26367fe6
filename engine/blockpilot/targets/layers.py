"""One pre-norm decoder layer on the fixed-tile ops, shared by targets and drafters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockpilot.rows import KVCache, Rows
from blockpilot_kernels.block_attention import AttentionTiles, block_attention
from blockpilot_kernels.norm_rope import residual_norm, swiglu
from blockpilot_kernels.qk_rope_append import qk_rope_append
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
        to: [N] places from `KVCache.destination`.
        extent: [S] keys that exist per slot once this pass has written; bound: host bound on them.
        path: [N, P] places of each row's ancestors in a pass with trees, or None.
    """

    rows: Rows
    position: Tensor
    cos: Tensor
    sin: Tensor
    to: Tensor
    extent: Tensor
    bound: int
    path: Tensor | None = None

    def tiles(self, groups: int) -> AttentionTiles:
        """Tiles of `groups` query heads per KV head; rows of trees share none."""
        return self.rows.tiles(groups, apart=self.path is not None)


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

    def own(self) -> None:
        """Keep its norms apart from the tensors that it was made of, which `replace` must not write to."""
        self.input_norm, self.post_norm = self.input_norm.clone(), self.post_norm.clone()

    def replace(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Write other weights, under the same names, over those of a layer without biases and norms of heads."""
        products = {
            self.qkv: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            self.out: ("self_attn.o_proj",),
            self.gate_up: ("mlp.gate_proj", "mlp.up_proj"),
            self.down: ("mlp.down_proj",),
        }
        for linear, names in products.items():
            linear.replace(torch.cat([tensors[f"{prefix}{n}.weight"] for n in names]))
        self.input_norm.copy_(tensors[f"{prefix}input_layernorm.weight"])
        self.post_norm.copy_(tensors[f"{prefix}post_attention_layernorm.weight"])

    def forward(
        self, x: Tensor, normed: Tensor, cache: KVCache, layer: int, step: Pass, next_norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x [N, H] float32 and its input norm, as wide as q, k and v weights → x behind the layer and its `next_norm`;
        writes this pass's keys and values in place."""
        s, held = self.shape, (cache.k[layer], cache.v[layer], cache.bad[layer])
        qkv = self.qkv(normed).view(len(x), -1, s.head_dim)
        q = qk_rope_append(qkv, self.q_norm, self.k_norm, step.cos, step.sin, step.to, *held, s.eps)
        attended = block_attention(
            q,
            *held,
            step.tiles(s.groups),
            step.position,
            step.extent,
            step.bound,
            causal=self.causal,
            window=self.window,
            path=step.path,
        )
        x, normed = residual_norm(x, self.out(attended), self.post_norm, s.eps)
        return residual_norm(x, self.down(swiglu(self.gate_up(normed))), next_norm, s.eps)


def own_place(path: Tensor | None, position: Tensor) -> Tensor:
    """Where in the cache rows put their keys, [N]: their position, or what their path [N, P] says of it."""
    if path is None:
        return position
    return path.gather(1, (position - path[:, 0]).clamp(0, path.shape[1] - 1)[:, None])[:, 0]


def run_layers(
    layers: Sequence[DecoderLayer],
    x: Tensor,
    normed: Tensor,
    cache: KVCache,
    step: Pass,
    last_norm: Tensor,
    keep: Collection[int] = (),
) -> tuple[Tensor, dict[int, Tensor]]:
    """x [N, H] and its input norm through every layer → what `last_norm` makes of it, and x behind layers k of `keep`,
    by k: the embeddings are 0."""
    states = {0: x} if 0 in keep else {}
    after = [*(layer.input_norm for layer in layers[1:]), last_norm]
    for i, (layer, norm) in enumerate(zip(layers, after, strict=True)):
        x, normed = layer.forward(x, normed, cache, i, step, norm)
        if i + 1 in keep:
            states[i + 1] = x
    return normed, states
