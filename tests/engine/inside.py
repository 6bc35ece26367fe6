"""Hands into a loaded target, whichever implementation it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from blockpilot import LLM
from blockpilot.targets.torch_target import TorchTarget


def change_logits(llm: LLM, change: Callable[[Tensor], Tensor]) -> None:
    """Have the target answer `change(logits)`, [N, V] → [N, V], wherever it answers logits."""
    target = llm.target
    verify, prefill = target.verify, target.prefill

    def changed_verify(*arguments):
        logits, features = verify(*arguments)
        return change(logits), features

    def changed_prefill(*arguments):
        logits, features = prefill(*arguments)
        return change(logits[None])[0], features

    target.verify, target.prefill, target.verify_commit = changed_verify, changed_prefill, None


def poison_embedding(llm: LLM, token: int, value: float) -> None:
    """Make one entry of a token's embedding `value`; its row of the head stays as it is."""
    target = llm.target
    if isinstance(target, TorchTarget):
        with torch.inference_mode():
            target.embedding[token, 0] = value
        return
    blob, plan = target.blob, target._plan
    _, kind, rows, columns, offset, _ = target.embedding_record
    assert kind == 0, "float32 tables only"
    blocks = -(-columns // 32)
    table = blob[offset : offset + -(-rows // 32) * 2 * blocks * 2048].clone()
    table.view(torch.float32)[token // 16 * blocks * 512 + token % 16] = value
    with torch.inference_mode():
        plan[12] = len(blob)  # the embedding's offset
    target.blob = torch.cat([blob, table])
    target._weights = (target.blob,)


def caches(llm: LLM) -> list[Tensor]:
    """Every tensor of the target's KV cache."""
    cache = llm.target.cache
    return [t for t in (cache.k, cache.v, getattr(cache, "bad", None)) if t is not None]


def spoil_cache(llm: LLM) -> None:
    """NaN in every key and value, and each marked as broken where marks are kept."""
    with torch.inference_mode():
        for tensor in caches(llm):
            tensor.fill_(True if tensor.dtype == torch.bool else float("nan"))
