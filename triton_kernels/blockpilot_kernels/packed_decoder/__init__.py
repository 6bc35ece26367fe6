"""A whole decoder pass on the CPU in one call, over packed weights. C++ only: the meaning of each op is the
engine's PyTorch target and drafter on the same (dequantised) weights."""

from __future__ import annotations

from blockpilot_kernels.packed_decoder.eagle_ops import draft_chain, eagle_forward
from blockpilot_kernels.packed_decoder.formats import (
    FORMATS,
    LAYOUT,
    Blocks,
    Matrix,
    interleave,
    interleaved_rows,
    quantise_q8_0,
    stack,
)
from blockpilot_kernels.packed_decoder.independence import row_independence
from blockpilot_kernels.packed_decoder.large_pages import large_pages
from blockpilot_kernels.packed_decoder.ops import (
    commit_context,
    context_append,
    decoder_forward,
    draft_block,
    move_places,
    packed_linear,
    verify_commit,
    weighted_rows,
)
from blockpilot_kernels.packed_decoder.plan import (
    ROUNDINGS,
    Geometry,
    LayerPlan,
    Record,
    Weights,
    borrowed,
    context_plan,
    decoder_plan,
    eagle3_plan,
    head_of,
    overwrite,
    records_of,
    specblock_plan,
)
from blockpilot_kernels.packed_decoder.rows import packed_rows
from blockpilot_kernels.packed_decoder.specblock_ops import specblock_chain, specblock_forward

__all__ = [
    "FORMATS",
    "LAYOUT",
    "ROUNDINGS",
    "Blocks",
    "Geometry",
    "LayerPlan",
    "Matrix",
    "Record",
    "Weights",
    "borrowed",
    "commit_context",
    "context_append",
    "context_plan",
    "decoder_forward",
    "decoder_plan",
    "draft_block",
    "draft_chain",
    "eagle3_plan",
    "eagle_forward",
    "head_of",
    "interleave",
    "interleaved_rows",
    "large_pages",
    "move_places",
    "overwrite",
    "packed_linear",
    "packed_rows",
    "quantise_q8_0",
    "records_of",
    "row_independence",
    "specblock_chain",
    "specblock_forward",
    "specblock_plan",
    "stack",
    "verify_commit",
    "weighted_rows",
]
