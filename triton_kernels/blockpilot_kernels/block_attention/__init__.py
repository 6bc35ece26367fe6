"""Attention of ragged blocks over a static KV cache, bitwise independent of everything beside the row."""

from blockpilot_kernels.block_attention.reference import KV_CHUNK, AttentionTiles, block_attention

__all__ = ["KV_CHUNK", "AttentionTiles", "block_attention"]
