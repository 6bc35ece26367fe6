"""The machine check that exactness rests on: a row of a 16-row tile has the same bits whatever is beside it.

For contrast it also says whether the plain product, without tiles, has that property; usually it has not.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F

from blockpilot.cli.console import table
from blockpilot_kernels.tiled_linear import row_independence

DTYPES = (torch.float32, torch.bfloat16)


def run(quick: bool) -> dict[str, Any]:
    """`ok`: tiles are row independent at every thread count; `cases`: threads, dtype, tiled, untiled."""
    before, most = torch.get_num_threads(), os.cpu_count() or 1
    counts = sorted({1, most}) if quick else range(1, most + 1)
    cases = []
    try:
        for threads in counts:
            torch.set_num_threads(threads)
            for dtype in DTYPES:
                name = str(dtype).removeprefix("torch.")
                tiled = row_independence(dtype=dtype)
                cases.append({"threads": threads, "dtype": name, "tiled": tiled, "untiled": untiled(dtype)})
    finally:
        torch.set_num_threads(before)
    return {"ok": all(case["tiled"] for case in cases), "cases": cases}


def untiled(dtype: torch.dtype) -> bool:
    """Whether row 0 of one `F.linear` has the same bits among 1, 8, 64 and 512 rows."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(960, 576, generator=generator).to(dtype)
    x = torch.randn(512, 576, generator=generator).to(dtype)
    first = F.linear(x[:1], weight)[0]
    return all(torch.equal(F.linear(x[:rows], weight)[0], first) for rows in (8, 64, 512))


def show(report: dict[str, Any]) -> None:
    """One row a thread count and dtype."""
    rows = [
        [str(case["threads"]), case["dtype"], *("yes" if case[key] else "no" for key in ("tiled", "untiled"))]
        for case in report["cases"]
    ]
    headings = ("threads", "dtype", "16-row tiles independent", "plain product independent")
    table("row independence", rows, left=headings)
