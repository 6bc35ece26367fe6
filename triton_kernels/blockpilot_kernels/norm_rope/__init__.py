"""Norm, rotary embedding and gated activation whose bits do not depend on a value's place in memory."""

from blockpilot_kernels.norm_rope.reference import apply_rope, rms_norm, swiglu

__all__ = ["apply_rope", "rms_norm", "swiglu"]
