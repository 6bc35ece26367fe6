"""Matrix products whose rows do not depend on each other: every product runs in tiles of 16 rows.

A BLAS picks its kernel by the number of rows, so a row's bits usually change with its neighbours' count. At a
fixed M = 16, with K and N padded to multiples of 16, they do not (`row_independence` checks this machine). The Triton
kernel takes 64 rows, which its tensor-core instructions are made for.
"""

from blockpilot_kernels.tiled_linear.reference import TILE, PackedLinear, pad_rows, row_independence

__all__ = ["TILE", "PackedLinear", "pad_rows", "row_independence"]
