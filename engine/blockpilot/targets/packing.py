"""A model's weights in the packed form that the C++ decoder reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from blockpilot_kernels.packed_decoder import (
    Blocks,
    Geometry,
    LayerPlan,
    Matrix,
    Weights,
    interleave,
    interleaved_rows,
    quantise_q8_0,
    stack,
)

GetMatrix = Callable[[str], Matrix]


def rounding_of(weights: str, dtype: torch.dtype) -> str:
    """How the inputs of products are rounded, for a weight format and a compute dtype."""
    if weights.startswith("stored-"):
        return weights.removeprefix("stored-")
    return "bfloat16" if dtype == torch.bfloat16 else "none"


def stored_or_float(tensors: Mapping[str, Tensor], blocks: Mapping[str, Blocks], weights: str) -> GetMatrix:
    """Matrices by name: as the file stores them unless `weights` is "dense"."""

    def get(name: str) -> Matrix:
        return blocks[name] if weights != "dense" and name in blocks else tensors[name]

    return get


def in_bytes(get: GetMatrix) -> GetMatrix:
    """The same matrices with floats rounded to Q8_0 where 32 divides their width: for drafters, whose rounding no
    output can show."""

    def rounded(name: str) -> Matrix:
        matrix = get(name)
        return matrix if isinstance(matrix, Blocks) or matrix.shape[1] % 32 else quantise_q8_0(matrix)

    return rounded


def padded_size(intermediate: int) -> int:
    """Intermediate size in whole panels."""
    return -(-intermediate // 16) * 16


def pack_layer(
    weights: Weights,
    get: GetMatrix,
    tensors: Mapping[str, Tensor],
    prefix: str,
    geometry: Geometry,
    *,
    causal: bool = True,
    window: int | None = None,
) -> LayerPlan:
    """Add the layer whose HF names start with `prefix`."""

    def bias(names: Sequence[str]) -> Tensor | None:
        found = [tensors[f"{prefix}{n}.bias"].float() for n in names if f"{prefix}{n}.bias" in tensors]
        return torch.cat(found) if found else None

    def vector(name: str) -> int:
        return weights.vector(tensors.get(f"{prefix}{name}.weight"))

    qkv = [f"self_attn.{p}_proj" for p in "qkv"]
    mlp = ["mlp.gate_proj", "mlp.up_proj"]
    gate_up = stack([get(f"{prefix}{n}.weight") for n in mlp])
    size = gate_up.shape[0] // 2
    down = get(f"{prefix}mlp.down_proj.weight")
    if geometry.intermediate != size:  # padded columns meet activations that are 0
        dense = down.dequantise() if isinstance(down, Blocks) else down
        down = torch.nn.functional.pad(dense, (0, geometry.intermediate - size))
    return LayerPlan(
        qkv=weights.linear(stack([get(f"{prefix}{n}.weight") for n in qkv]), bias(qkv)),
        out=weights.linear(get(f"{prefix}self_attn.o_proj.weight"), bias(["self_attn.o_proj"])),
        gate_up=weights.linear(interleave(gate_up, size), _interleaved(bias(mlp), size)),
        down=weights.linear(down, bias(["mlp.down_proj"])),
        input_norm=vector("input_layernorm"),
        post_norm=vector("post_attention_layernorm"),
        query_norm=vector("self_attn.q_norm"),
        key_norm=vector("self_attn.k_norm"),
        window=window or 0,
        causal=causal,
    )


def _interleaved(bias: Tensor | None, size: int) -> Tensor | None:
    if bias is None:
        return None
    index = interleaved_rows(size)
    return torch.where(index < 0, 0, bias[index.clamp_min(0)])
