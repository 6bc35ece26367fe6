"""Drafts copied from where the last tokens of a request stood before (prompt lookup)."""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.prompt_lookup import reference
from blockpilot_kernels.validate import expect, expect_dim

__all__ = ["prompt_lookup"]


def prompt_lookup(known: Tensor, length: Tensor, drafts: Tensor, shortest: int, longest: int) -> Tensor:
    """Replace a slot's drafts by what followed its last tokens where these stood before.

    Of all earlier places the one with the longest match is taken, of equals the latest. A continuation that reaches
    the end of what is known goes on from its beginning: a repetition is drafted at any width.

    Args:
        known: [R, C] int64 ids. length: [R] int64 that count, at most C. drafts: [R, N] int64.
        shortest: tokens that must match, at least 1. longest: tokens compared at most.

    Returns:
        [R, N] int64: a slot's own drafts where nothing matches.

    Raises:
        ValueError: wrong shape, dtype, device, or not 1 <= shortest <= longest.
    """
    expect_dim("prompt_lookup", "known", known, 2)
    expect_dim("prompt_lookup", "drafts", drafts, 2)
    slots = len(known)
    expect("prompt_lookup", "known", known, torch.int64, tuple(known.shape), known)
    expect("prompt_lookup", "length", length, torch.int64, (slots,), known)
    expect("prompt_lookup", "drafts", drafts, torch.int64, (slots, drafts.shape[1]), known)
    if not 1 <= shortest <= longest:
        raise ValueError(
            f"prompt_lookup: shortest, longest: expected 1 <= shortest <= longest, got {shortest}, {longest}"
        )
    backend = dispatch.backend_for("prompt_lookup", known)
    if backend == "cpp":
        return torch.ops.blockpilot.prompt_lookup(known, length, drafts, shortest, longest)
    if backend == "triton":
        from blockpilot_kernels.prompt_lookup import kernel

        return kernel.prompt_lookup(known, length, drafts, shortest, longest)
    return reference.prompt_lookup(known, length, drafts, shortest, longest)


if dispatch.extension_error() is None:

    @torch.library.register_fake("blockpilot::prompt_lookup")
    def _(known: Tensor, length: Tensor, drafts: Tensor, shortest: int, longest: int) -> Tensor:
        return torch.empty_like(drafts, memory_format=torch.contiguous_format)
