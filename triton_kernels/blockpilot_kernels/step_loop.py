"""A captured CUDA graph repeated on the device until nothing is left to do (`csrc/cuda/step_loop.cu`)."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

LIBRARY = Path(__file__).with_name("_step_loop.so")


@cache
def loop_error() -> str | None:
    """None if the loop's library can be loaded, else one line saying why not."""
    if not LIBRARY.exists():
        return "it was not built, which takes nvcc"
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        return "this torch keeps its captured graphs to itself; 2.8 hands them out"
    try:
        _library()
    except OSError as error:
        return f"it does not load: {next(iter(str(error).splitlines()), '')}"
    return None


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    pointer = ctypes.c_void_p
    library.blockpilot_loop_create.argtypes = [pointer] * 5 + [ctypes.c_int, ctypes.POINTER(pointer)]
    library.blockpilot_loop_launch.argtypes = [pointer, pointer]
    library.blockpilot_loop_destroy.argtypes = [pointer]
    library.blockpilot_loop_error.restype = ctypes.c_char_p
    return library


class StepLoop:
    """An executable graph: step after step while a slot is not finished, `cursor` < `bounds[0]` and `stopped` <
    `bounds[1]`; all are read before each step.

    Args:
        step: a captured step, which advances `cursor`, made with `keep_graph`.
        cursor: [1] int64. bounds: [2] int64. finished: [R] bool, all on the device.
        stopped: [1] int64 in pinned memory of the host, which may write it at any time.

    Raises:
        RuntimeError: the library is absent, or the driver cannot build the graph.
    """

    def __init__(
        self, step: torch.cuda.CUDAGraph, cursor: Tensor, bounds: Tensor, stopped: Tensor, finished: Tensor
    ) -> None:
        self._loop = ctypes.c_void_p()
        if error := loop_error():
            raise RuntimeError(error)
        pointers = [t.data_ptr() for t in (cursor, bounds, stopped, finished)]
        create = _library().blockpilot_loop_create
        _check(create(step.raw_cuda_graph(), *pointers, len(finished), ctypes.byref(self._loop)))
        self._used = (step, cursor, bounds, stopped, finished)  # the step's memory is its graph's

    def launch(self, stream: int) -> None:
        """Start it on a `cudaStream_t`."""
        _check(_library().blockpilot_loop_launch(self._loop, stream))

    def __del__(self) -> None:
        if getattr(self, "_loop", None):
            _library().blockpilot_loop_destroy(self._loop)


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code}: {_library().blockpilot_loop_error(code).decode()}")
