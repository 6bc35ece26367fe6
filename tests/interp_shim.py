"""Repairs of Triton's CPU interpreter, for tests only (checked with 3.6.0). `install()` before kernels run.

In the interpreter a bfloat16 is a raw uint16. Kernels widen to float32 right after a load, which it does
correctly; what they cannot avoid is repaired here: `tl.dot` on bfloat16 operands multiplies the raw integers,
float32 → bfloat16 truncates where a GPU rounds to nearest even, a scalar bool splat becomes int32, which is
refused as a mask, and `range(n)` of a run-time n fails under NumPy 2.4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Patch the interpreter's builder. Does nothing the second time."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_blockpilot_repaired", False):
        return
    builder._blockpilot_repaired = True
    _repair_dot(builder)
    _repair_rounding(builder)
    _repair_splat(builder)
    _repair_range()


def widen(raw: np.ndarray) -> np.ndarray:
    """bfloat16 as uint16 → float32."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """float32 → bfloat16 as uint16, to nearest even, NaN kept."""
    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)


def _repair_dot(builder: Any) -> None:
    original = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, _as_float32(a), _as_float32(b), *rest)

    builder.create_dot = create_dot


def _repair_rounding(builder: Any) -> None:
    original_cast, original_convert = builder.cast_impl, builder.create_fp_to_fp

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        return _rounded(source) if _narrows(source, target) else original_cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, mode: Any) -> Any:
        return _rounded(source) if _narrows(source, target) else original_convert(self, source, target, mode)

    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp


def _repair_splat(builder: Any) -> None:
    original = builder.create_splat

    def create_splat(self: Any, shaped: Any, value: Any) -> Any:
        if value.data.dtype == np.bool_:
            return interpreter.TensorHandle(np.full(shaped.shape, value.data.reshape(-1)[0]), tl.int1)
        return original(self, shaped, value)

    builder.create_splat = create_splat


def _repair_range() -> None:
    original = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> Any:
        result = original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))
        return result

    interpreter._patch_lang_tensor = patch_lang_tensor


def _narrows(source: Any, target: Any) -> bool:
    return bool(source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16)


def _rounded(source: Any) -> Any:
    return interpreter.TensorHandle(narrow(source.data), tl.bfloat16)


def _as_float32(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle(widen(handle.data), tl.float32)
