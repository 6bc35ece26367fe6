"""The token a row of logits chooses: greedy argmax, or a filtered draw with given Gumbel noise."""

from __future__ import annotations

import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from blockpilot_kernels.choose import reference
from blockpilot_kernels.validate import expect, expect_dim

__all__ = ["choose"]

MAX_VOCAB = 2**22  # 2²² masses of at most 2⁴⁰ each fit in int64


def choose(
    logits: Tensor,
    noise: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    banned: Tensor | None,
    *,
    filtered: bool,
) -> tuple[Tensor, Tensor]:
    """Choose one id per row; a row's result depends on nothing but that row, bit for bit.

    Greedy rows (temperature 0) take the highest logit, lowest id first among equals. The others take argmax(z
    + g) over the ids that the filters keep, z = (logits − max) / temperature; filters cut the order "highest
    logit first, lowest id first among equals": top_k (0 = off), then top_p of the remaining mass (1 = off, at
    least one id stays), then min_p relative to the most probable id (0 = off).

    Args:
        logits: [N, V] float32.
        noise: [N, V] float32 from `gumbel_noise`, or None: every row is then greedy, whatever its
            temperature.
        temperature: [N] float32, 0 or at least 1e-5.
        top_k: [N] int64. top_p, min_p: [N] float32 in [0, 1].
        banned: [N, S] int64 ids that cannot be chosen and count in no filter; values outside [0, V) are
            ignored.
        filtered: False says that no row uses a filter, and skips that work.

    Returns:
        ids [N] int64 and finite [N] bool, false where a row holds NaN or ±inf before banning. The id is 0
        there, and where every id is banned.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    _validate(logits, noise, temperature, top_k, top_p, min_p, banned)
    backend = dispatch.backend_for("choose", logits)
    if backend == "cpp":
        return torch.ops.blockpilot.choose(logits, noise, temperature, top_k, top_p, min_p, banned, filtered)
    if backend == "triton":
        from blockpilot_kernels.choose import kernel

        return kernel.choose(logits, noise, temperature, top_k, top_p, min_p, banned, filtered)
    return reference.choose(logits, noise, temperature, top_k, top_p, min_p, banned, filtered)


def _validate(
    logits: Tensor,
    noise: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    banned: Tensor | None,
) -> None:
    expect_dim("choose", "logits", logits, 2)
    rows, vocab = logits.shape
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(f"choose: logits: expected 1 … {MAX_VOCAB} ids a row, got {vocab}; pass [rows, ids]")
    expect("choose", "logits", logits, torch.float32, (rows, vocab), logits)
    if noise is not None:
        expect("choose", "noise", noise, torch.float32, (rows, vocab), logits)
    for name, value, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int64),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
    ):
        expect("choose", name, value, dtype, (rows,), logits)
    if banned is not None:
        expect_dim("choose", "banned", banned, 2)
        expect("choose", "banned", banned, torch.int64, (rows, banned.shape[1]), logits)


if dispatch.extension_error() is None:

    @torch.library.register_fake("blockpilot::choose")
    def _(
        logits: Tensor,
        noise: Tensor | None,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        banned: Tensor | None,
        filtered: bool,
    ) -> tuple[Tensor, Tensor]:
        rows = logits.shape[:1]
        return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.bool)
