"""Addresses of row-major matrices in Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_offsets(r, i, width):
    """[ROWS], [COLUMNS] → [ROWS, COLUMNS] int64 offsets r · width + i: rows × ids pass 2³¹ long before memory
    ends."""
    return r.to(tl.int64)[:, None] * width + i[None, :]
