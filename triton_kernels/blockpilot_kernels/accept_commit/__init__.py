"""Longest accepted prefix, bonus, stop ids, limits and lengths: the one op that moves requests forward."""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.accept_commit import reference
from blockpilot_kernels.accept_commit.reference import FINISH_ERROR, FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from blockpilot_kernels.validate import expect, expect_dim

__all__ = ["FINISH_ERROR", "FINISH_LENGTH", "FINISH_NONE", "FINISH_STOP", "accept_commit"]


def accept_commit(
    block: Tensor,
    choice: Tensor,
    finite: Tensor,
    width: Tensor,
    stop_ids: Tensor,
    limit: Tensor,
    tokens: Tensor,
    length: Tensor,
    done: Tensor,
    finish: Tensor,
    accepted: Tensor,
    count: Tensor,
) -> None:
    """Accept drafts and commit tokens for R slots, in place.

    Per slot that is not done: a = length of the longest prefix with block[j + 1] == choice[j], cut at the
    first row that is not finite. The candidates choice[0 … a] are walked in order, and the first event ends
    the walk: a row that is not finite (FINISH_ERROR, nothing committed for it), a stop id (FINISH_STOP,
    committed), length reaching `limit` (FINISH_LENGTH, committed). A slot that is at its limit already
    finishes with FINISH_LENGTH and commits nothing. Slots that are done get count = accepted = 0 and keep
    everything else.

    Args:
        block: [R, W] int64, anchor and drafts. choice: [R, W] int64, the target's choice after each column.
        finite: [R, W] bool, from `choose`. width: [R] int64; columns at and beyond it are dead and may hold
            anything.
        stop_ids: [R, S] int64, −1 pads. limit: [R] int64, highest length; capacity C caps it.
        tokens: [R, C] int64; only tokens[r, length : length + count] is written.
        length, finish: [R] int64, done: [R] bool, updated. finish becomes FINISH_NONE where nothing ended.
        accepted, count: [R] int64, overwritten: drafts kept = min(a, count), and tokens committed.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    given = (block, choice, finite, width, stop_ids, limit)
    updated = (tokens, length, done, finish, accepted, count)
    _validate(*given, *updated)
    backend = dispatch.backend_for("accept_commit", tokens)
    if backend == "cpp":
        torch.ops.blockpilot.accept_commit(*given, *updated)
    elif backend == "triton":
        from blockpilot_kernels.accept_commit import kernel

        kernel.accept_commit(*given, *updated)
    else:
        reference.accept_commit(*given, *updated)


def _validate(
    block: Tensor,
    choice: Tensor,
    finite: Tensor,
    width: Tensor,
    stop_ids: Tensor,
    limit: Tensor,
    tokens: Tensor,
    length: Tensor,
    done: Tensor,
    finish: Tensor,
    accepted: Tensor,
    count: Tensor,
) -> None:
    op = "accept_commit"
    for name, matrix in (("block", block), ("stop_ids", stop_ids), ("tokens", tokens)):
        expect_dim(op, name, matrix, 2)
    slots, widest = block.shape
    if widest < 1:
        raise ValueError(
            f"{op}: block: expected at least 1 column, got shape {list(block.shape)}; it holds the anchor"
        )
    expect(op, "block", block, torch.int64, (slots, widest), tokens)
    expect(op, "choice", choice, torch.int64, (slots, widest), tokens)
    expect(op, "finite", finite, torch.bool, (slots, widest), tokens)
    expect(op, "stop_ids", stop_ids, torch.int64, (slots, stop_ids.shape[1]), tokens)
    expect(op, "tokens", tokens, torch.int64, (slots, tokens.shape[1]), tokens)
    expect(op, "done", done, torch.bool, (slots,), tokens)
    for name, vector in (
        ("width", width),
        ("limit", limit),
        ("length", length),
        ("finish", finish),
        ("accepted", accepted),
        ("count", count),
    ):
        expect(op, name, vector, torch.int64, (slots,), tokens)


if dispatch.extension_error() is None:

    @torch.library.register_fake("blockpilot::accept_commit")
    def _(*tensors: Tensor) -> None:
        return None
