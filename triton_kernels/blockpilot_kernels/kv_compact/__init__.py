"""Rollback of a tree: the keys and values of the path that was taken move to the positions they are now those of."""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.kv_compact import reference
from blockpilot_kernels.validate import expect, expect_dim

__all__ = ["kv_compact"]


def kv_compact(k: Tensor, v: Tensor, bad: Tensor, begin: Tensor, source: Tensor, count: Tensor) -> None:
    """Copy places begin[r] + source[r, j] to begin[r] + j for j < count[r], in place; every source is read first.

    Args:
        k, v: [L, S, H, C, D] of one dtype, contiguous. bad: [L, S, C] bool, contiguous.
        begin: [R] int64, R at most S. source: [R, W] int64. count: [R] int64, at most W. What is below count[r] is
            within slot r; the rest of `source` may hold anything.

    Raises:
        ValueError: wrong shape, dtype, strides or device.
    """
    _validate(k, v, bad, begin, source, count)
    if dispatch.backend_for("kv_compact", k) == "triton":
        from blockpilot_kernels.kv_compact import kernel

        kernel.kv_compact(k, v, bad, begin, source, count)
    else:
        reference.kv_compact(k, v, bad, begin, source, count)


def _validate(k: Tensor, v: Tensor, bad: Tensor, begin: Tensor, source: Tensor, count: Tensor) -> None:
    op = "kv_compact"
    expect_dim(op, "k", k, 5)
    expect_dim(op, "source", source, 2)
    slots, rows = k.shape[1], source.shape[0]
    expect(op, "v", v, k.dtype, tuple(k.shape), k)
    expect(op, "bad", bad, torch.bool, (k.shape[0], slots, k.shape[3]), k)
    expect(op, "source", source, torch.int64, (min(rows, slots), source.shape[1]), k)
    expect(op, "begin", begin, torch.int64, (rows,), k)
    expect(op, "count", count, torch.int64, (rows,), k)
    for name, tensor in (("k", k), ("v", v), ("bad", bad)):
        if not tensor.is_contiguous():
            raise ValueError(f"{op}: {name}: expected contiguous memory, got strides {tensor.stride()}")
