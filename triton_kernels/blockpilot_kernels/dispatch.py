"""Which implementation of an op runs: decided here, in one place, and explained on request.

Backends: `reference` (plain PyTorch: the meaning), `cpp` (the C++ extension, CPU tensors) and `triton` (CUDA
tensors, or CPU tensors under Triton's interpreter). The environment variable BLOCKPILOT_BACKEND forces one.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from torch import Tensor

BACKENDS = ("reference", "cpp", "triton")
INSIDE_CPP_PASS = (
    "tiled_linear",
    "block_attention",
    "norm_rope",
    "qk_rope_append",
    "head_choice",
    "kv_compact",
)
"""Ops that the C++ extension has only within its passes over a whole model: called alone, they are PyTorch's."""
OPS = ("gumbel_noise", "choose", "accept_commit", "draft_tree", "prompt_lookup", *INSIDE_CPP_PASS)
ENVIRONMENT = "BLOCKPILOT_BACKEND"

calls: Counter[tuple[str, str]] = Counter()
"""How often each (op, backend) pair was dispatched in this process."""

_log = logging.getLogger(__name__)
_forced: ContextVar[str | None] = ContextVar("blockpilot_forced_backend", default=None)


def backend_for(op: str, tensor: Tensor) -> str:
    """The backend that runs `op` on `tensor`'s device, counted in `calls`.

    Raises:
        ValueError: BLOCKPILOT_BACKEND names no backend.
        RuntimeError: the forced backend is absent, or does not run on this device.
    """
    backend, _, warning = _current(tensor.device.type)
    if warning:
        _report(warning)
    if backend == "cpp" and op in INSIDE_CPP_PASS:
        backend = "reference"
    calls[op, backend] += 1
    return backend


def backend_of(device: str) -> str:
    """The backend that runs ops on `device` now; errors as in `backend_for`."""
    return _current(device)[0]


def count(op: str, backend: str) -> None:
    """Count a call of an op that exists on one backend only."""
    calls[op, backend] += 1


def explain(device: str = "cpu") -> list[dict[str, str]]:
    """For every op the backend that runs on `device` now, and why: dicts with keys op, backend, why."""
    backend, why, _ = _current(device)
    rows = [{"op": op, "backend": backend, "why": why} for op in OPS]
    if backend == "cpp":
        for row in rows[-len(INSIDE_CPP_PASS) :]:
            row["why"] += "; within its passes over a whole model, and by itself in PyTorch"
    return rows


@contextmanager
def forced(backend: str) -> Iterator[None]:
    """Force `backend` inside the block, whatever the environment says."""
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


@cache
def extension_error() -> str | None:
    """None if the C++ extension is loaded, else one line saying why not. A broken one counts as absent."""
    try:
        importlib.import_module("blockpilot_kernels._C")
    except ModuleNotFoundError:
        return "it was not built"
    except (ImportError, OSError) as error:
        return f"it does not load: {_first_line(error)}"
    return None


@cache
def triton_error() -> str | None:
    """None if Triton can be imported, else one line saying why not."""
    try:
        importlib.import_module("triton")
    except ModuleNotFoundError:
        return "it is not installed"
    except (ImportError, OSError) as error:
        return f"it does not load: {_first_line(error)}"
    return None


def reset() -> None:
    """Forget what was probed and decided; for tests that take a backend away."""
    for function in (extension_error, triton_error, _decide, _report):
        function.cache_clear()


def _current(device: str) -> tuple[str, str, str | None]:
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    return _decide(_forced.get(), os.environ.get(ENVIRONMENT), interpreting, device)


@cache
def _decide(
    inner: str | None, environment: str | None, interpreting: bool, device: str
) -> tuple[str, str, str | None]:
    """(backend, why, line to report once or None)."""
    wanted = inner or environment or None
    if wanted is not None and wanted not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise ValueError(f"{ENVIRONMENT}: expected one of {known}, got {wanted!r}; unset it for the default")
    if device == "meta":
        return "reference", "meta tensors carry shapes only", None
    if wanted is not None:
        _require(wanted, device, interpreting)
        return wanted, "forced by dispatch.forced" if inner else f"forced by {ENVIRONMENT}", None
    return _automatic(device)


def _automatic(device: str) -> tuple[str, str, str | None]:
    if device == "cpu":
        error = extension_error()
        if error is None:
            return "cpp", "CPU tensors and the C++ extension is loaded", None
        why = f"the C++ extension is absent: {error}"
    elif device == "cuda":
        error = triton_error()
        if error is None:
            return "triton", "CUDA tensors", None
        why = f"Triton is absent: {error}"
    else:
        why = f"no kernels exist for device {device!r}"
    return "reference", why, f"blockpilot_kernels: the PyTorch reference runs on {device} because {why}"


def _require(backend: str, device: str, interpreting: bool) -> None:
    """Raise RuntimeError unless the forced backend can run on `device`."""
    problem = None
    if backend == "cpp":
        error = extension_error()
        if error is not None:
            problem = (f"the C++ extension is absent ({error}); build it with "
                       "`BLOCKPILOT_REQUIRE_EXT=1 pip install --no-build-isolation .`")  # fmt: skip
        elif device != "cpu":
            problem = f"it runs on CPU tensors, got {device!r}"
    elif backend == "triton":
        error = triton_error()
        if error is not None:
            problem = f"Triton is absent ({error}); `pip install 'blockpilot[triton]'`"
        elif device == "cpu" and not interpreting:
            problem = ("CPU tensors need Triton's interpreter, which is for tests: set TRITON_INTERPRET=1 before "
                       "Python starts")  # fmt: skip
    if problem is not None:
        raise RuntimeError(f"backend {backend!r} is forced but cannot run: {problem}")


@cache
def _report(line: str) -> None:
    _log.warning(line)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
