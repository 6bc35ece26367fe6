"""`accept_commit` in plain PyTorch: the meaning of the op. No value is read on the host."""

from __future__ import annotations

import torch
from torch import Tensor

FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_ERROR = 0, 1, 2, 3


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
    prefix = accepted_prefix(block, choice, finite, width)
    column = torch.arange(block.shape[1], device=block.device)  # [W]
    bound = limit.clamp(max=tokens.shape[1])[:, None]  # [R, 1]
    after = length[:, None] + column + 1  # length once column j is committed
    candidate = (column <= prefix[:, None]) & (column < width[:, None]) & (after <= bound) & ~done[:, None]

    stop = (choice[:, :, None] == stop_ids[:, None, :]).any(-1)
    ends = candidate & (~finite | stop | (after == bound))
    first = (ends.to(torch.int64).cumsum(-1) - ends.to(torch.int64)) == 0  # no event in an earlier column
    committed = candidate & finite & first
    code = torch.where(~finite, FINISH_ERROR, torch.where(stop, FINISH_STOP, FINISH_LENGTH))
    event = torch.where(ends & first, code, FINISH_NONE).amax(-1)
    event = torch.where(length >= bound[:, 0], FINISH_LENGTH, event)

    count.copy_(committed.sum(-1))
    accepted.copy_(torch.minimum(prefix, count))
    write(tokens, choice, length, count)
    length.add_(count)
    finish.copy_(torch.where(done, finish, event))
    done.logical_or_(finish != FINISH_NONE)


def accepted_prefix(block: Tensor, choice: Tensor, finite: Tensor, width: Tensor) -> Tensor:
    """[R] int64: drafts in a row that equal the target's choice, cut at a row that is not finite."""
    draft = torch.arange(1, block.shape[1], device=block.device)  # columns that hold drafts
    same = (block[:, 1:] == choice[:, :-1]) & finite[:, :-1] & (draft < width[:, None])
    return same.to(torch.int64).cumprod(-1).sum(-1)


def write(tokens: Tensor, choice: Tensor, length: Tensor, count: Tensor) -> None:
    """tokens[r, length : length + count] = choice[r, : count], everything else unchanged."""
    column = (
        torch.arange(tokens.shape[1], device=tokens.device) - length[:, None]
    )  # [R, C], column of the block
    new = choice.gather(1, column.clamp(0, choice.shape[1] - 1))
    tokens.copy_(torch.where((column >= 0) & (column < count[:, None]), new, tokens))
