"""The property exactness rests on, checked on this machine: a row's bits are its own."""

from __future__ import annotations

import torch

from blockpilot_kernels.packed_decoder.formats import Matrix, quantise_q8_0
from blockpilot_kernels.packed_decoder.ops import packed_linear
from blockpilot_kernels.packed_decoder.plan import ROUNDINGS, Weights

_CASES = (("F32", torch.float32), ("BF16", torch.bfloat16), ("Q8_0", torch.float32))


def row_independence() -> list[str]:
    """Formats and roundings whose rows depend on their neighbours, at torch's current number of threads."""
    gen = torch.Generator().manual_seed(0)
    dense, x = (torch.randn(n, 64, dtype=torch.float32, generator=gen) for n in (96, 21))
    x[3] = float("nan")
    broken = []
    for name, dtype in _CASES:
        matrix: Matrix = quantise_q8_0(dense) if name == "Q8_0" else dense
        weights = Weights(dtype)
        record = weights.linear(matrix)
        blob = weights.blob()
        for rounding in ROUNDINGS:
            whole = packed_linear(x, blob, record, rounding)
            alone = [packed_linear(x[i : i + 1], blob, record, rounding) for i in range(len(x))]
            if not torch.equal(torch.cat(alone).view(torch.int32), whole.view(torch.int32)):
                broken.append(f"{name} with {rounding} rounding")
    return broken
