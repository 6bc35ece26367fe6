"""Arms of the peer benchmark that run llama.cpp, through the C functions of llama-cpp-python.

Its `Llama.generate` builds a sampler and copies arrays in Python for every token; the loop here is the one of
llama.cpp's own programs.
"""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from peer_types import PROBE_CONTEXT, Decode, Request, Run, Setup, Unavailable

# llama.cpp keeps the pointer: the object must live as long as the process.
_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
PROBE_WIDTHS, PROBE_REPEATS = (1, 2, 4, 8), 15


def open_llama(setup: Setup, *, threads: int | None = None, quantised: str | None = None) -> Decode:
    """`threads` None: as many as every other arm has. `quantised`: a type that the file is converted to first.

    Raises:
        Unavailable: llama-cpp-python is not installed or does not load, or this arm repeats another.
    """
    if threads is None and setup.threads == 1:
        raise Unavailable("one thread is the limit, and llama.cpp-1 has it")
    return _load(setup, threads or setup.threads, quantised).decode


def probe_llama(setup: Setup, *, threads: int | None = None, quantised: str | None = None) -> dict[str, Any]:
    """Median seconds of a forward pass over 1 to 8 tokens whose logits are all wanted: one verify step."""
    return {"forward_seconds": _load(setup, threads or setup.threads, quantised).forward_seconds()}


@cache
def _load(setup: Setup, threads: int, quantised: str | None) -> _Llama:
    if quantised is None:
        return _Llama(_library(), setup.gguf, setup, threads)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{quantised}.gguf"
        _convert(_library(), setup.gguf, path, quantised)
        return _Llama(_library(), path, setup, threads)  # a mapped file outlives its name


def _library() -> Any:
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(f"pip install llama-cpp-python ({error})") from error
    return cast(Any, llama_cpp)


def _convert(lib: Any, source: Path, to: Path, quantised: str) -> None:
    """Write the file's weights anew as `quantised`; the answers are then another model's."""
    options = lib.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{quantised}"), True
    lib.llama_log_set(_SILENT, None)
    if lib.llama_model_quantize(str(source).encode(), str(to).encode(), ctypes.byref(options)):
        raise Unavailable(f"llama.cpp does not convert {source.name} to {quantised}")


class _Llama:
    """A model and its context; one sequence at a time."""

    def __init__(self, lib: Any, gguf: Path, setup: Setup, threads: int) -> None:
        self._lib = lib
        length = setup.max_length
        # Kept: it owns the context and frees it.
        self._llama = lib.Llama(
            str(gguf),
            n_ctx=length,
            n_batch=length,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        self._context = self._llama.ctx
        self._memory = lib.llama_get_memory(self._context)
        self._eos = setup.eos

    def decode(self, request: Request) -> Run:
        """Answer one request."""
        self._lib.llama_memory_clear(self._memory, False)
        sampler = self._sampler(request)
        try:
            start = time.perf_counter()
            answer = [self._next(request.ids, sampler)]
            first = time.perf_counter()
            while answer[-1] not in self._eos and len(answer) < request.max_new_tokens:
                answer.append(self._next(answer[-1:], sampler))
            return Run(tuple(answer), first - start, time.perf_counter() - first)
        finally:
            self._lib.llama_sampler_free(sampler)

    def forward_seconds(self) -> dict[str, float]:
        """Median seconds by width, after a context of 128 tokens."""
        self._lib.llama_memory_clear(self._memory, False)
        tokens = [1 + i for i in range(PROBE_CONTEXT)]
        self._check(self._lib.llama_decode(self._context, self._one(tokens)))
        return {str(width): self._timed_forward(width) for width in PROBE_WIDTHS}

    def _timed_forward(self, width: int) -> float:
        batch = self._lib.llama_batch_init(width, 0, 1)
        batch.n_tokens = width
        for i in range(width):
            batch.token[i], batch.pos[i] = 1 + i, PROBE_CONTEXT + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
        seconds = []
        for _ in range(PROBE_REPEATS):
            start = time.perf_counter()
            self._check(self._lib.llama_decode(self._context, batch))
            self._lib.llama_synchronize(self._context)
            seconds.append(time.perf_counter() - start)
            self._lib.llama_memory_seq_rm(self._memory, 0, PROBE_CONTEXT, -1)
        self._lib.llama_batch_free(batch)
        return statistics.median(seconds)

    def _sampler(self, request: Request) -> Any:
        lib = self._lib
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if request.temperature == 0:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_greedy())
        else:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(request.temperature))
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(request.seed & 0xFFFFFFFF))
        return chain

    def _next(self, ids: Sequence[int], sampler: Any) -> int:
        self._check(self._lib.llama_decode(self._context, self._one(ids)))
        return int(self._lib.llama_sampler_sample(sampler, self._context, -1))

    def _one(self, ids: Sequence[int]) -> Any:
        # The batch points into this array and keeps nothing alive: the array must outlive the call.
        self._ids = (ctypes.c_int32 * len(ids))(*ids)
        return self._lib.llama_batch_get_one(self._ids, len(ids))

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
