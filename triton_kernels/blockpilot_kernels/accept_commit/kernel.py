"""Triton kernel and launcher of `accept_commit`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
OPTIONS = {"num_warps": 1}


@triton.jit
def accept_commit_kernel(
    BLOCK, CHOICE, FINITE, WIDTH, STOPS, LIMIT, TOKENS, LENGTH, DONE, FINISH, ACCEPTED, COUNT, R, W, S, C,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program takes ROWS slots. Flags are int8. Launched with one warp: a row is read before it is
    updated."""
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.arange(0, COLUMNS)[None, :]
    m_r = r < R
    m = m_r[:, None] & (j < W)
    p = r[:, None] * W + j
    live = m_r & (tl.load(DONE + r, mask=m_r, other=1) == 0)
    width = tl.load(WIDTH + r, mask=m_r, other=0)
    length = tl.load(LENGTH + r, mask=m_r, other=0)
    bound = tl.minimum(tl.load(LIMIT + r, mask=m_r, other=0), C)
    choice = tl.load(CHOICE + p, mask=m, other=0)
    finite = tl.load(FINITE + p, mask=m, other=0) != 0
    draft = tl.load(BLOCK + p + 1, mask=m & (j + 1 < W), other=0)

    same = finite & (draft == choice) & (j + 1 < W) & (j + 1 < width[:, None])
    prefix = tl.min(tl.where(same, COLUMNS, j), 1)
    after = length[:, None] + j + 1  # length once column j is committed
    candidate = live[:, None] & m & (j <= prefix[:, None]) & (j < width[:, None]) & (after <= bound[:, None])

    hits = tl.zeros([ROWS, COLUMNS], tl.int32)
    for s in range(S):
        stop_id = tl.load(STOPS + r * S + s, mask=m_r, other=-1)
        hits += tl.where(choice == stop_id[:, None], 1, 0)
    stop = hits > 0
    event = candidate & ((finite == 0) | stop | (after == bound[:, None]))
    first = tl.min(tl.where(event, j, COLUMNS), 1)
    committed = candidate & finite & (j <= first[:, None])
    count = tl.sum(tl.where(committed, 1, 0), 1)
    code = tl.where(finite, tl.where(stop, 1, 2), 3)
    finish = tl.sum(tl.where(j == first[:, None], code, 0), 1)
    finish = tl.where(length >= bound, 2, finish)

    tl.debug_barrier()
    tl.store(TOKENS + r[:, None] * C + length[:, None] + j, choice, mask=committed & (length >= 0)[:, None])
    tl.store(COUNT + r, count.to(tl.int64), mask=m_r)
    tl.store(ACCEPTED + r, tl.minimum(prefix, count).to(tl.int64), mask=m_r)
    tl.store(LENGTH + r, length + count, mask=live)
    tl.store(FINISH + r, finish.to(tl.int64), mask=live)
    tl.store(DONE + r, tl.where(finish != 0, 1, 0).to(tl.int8), mask=live)


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
    """See `blockpilot_kernels.accept_commit.accept_commit`."""
    slots, widest = block.shape
    if slots == 0:
        return
    given = [_flags(t.contiguous()) for t in (block, choice, finite, width, stop_ids, limit)]
    updated = (tokens, length, done, finish, accepted, count)
    dense = [t.contiguous() for t in updated]
    accept_commit_kernel[(triton.cdiv(slots, ROWS),)](
        *given,
        *[_flags(t) for t in dense],
        slots,
        widest,
        stop_ids.shape[1],
        tokens.shape[1],
        ROWS=ROWS,
        COLUMNS=triton.next_power_of_2(widest),
        **OPTIONS,
    )
    for target, source in zip(updated, dense, strict=True):
        if target is not source:
            target.copy_(source)


def _flags(tensor: Tensor) -> Tensor:
    """bool as int8 over the same memory."""
    return tensor.view(torch.int8) if tensor.dtype == torch.bool else tensor
