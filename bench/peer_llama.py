"""Arms of the peer benchmark that run llama.cpp, through the C functions of llama-cpp-python.

Its `Llama.generate` builds a sampler and copies arrays in Python for every token; the loop here is the one of
llama.cpp's own programs.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

from peer_types import Decode, Request, Run, Setup, Unavailable

PROBE_WIDTHS, PROBE_CONTEXT, PROBE_REPEATS = (1, 2, 4, 8), 128, 15


def open_llama(setup: Setup, *, threads: int | None = None) -> Decode:
    """`threads` None: as many as every other arm has.

    Raises:
        Unavailable: llama-cpp-python is not installed or does not load, or this arm repeats another.
    """
    if threads is None and setup.threads == 1:
        raise Unavailable("one thread is the limit, and llama.cpp-1 has it")
    return _load(setup, threads or setup.threads).decode


def probe_llama(setup: Setup, *, threads: int | None = None) -> dict[str, Any]:
    """Median seconds of a forward pass over 1 to 8 tokens whose logits are all wanted: one verify step."""
    return {"forward_seconds": _load(setup, threads or setup.threads).forward_seconds()}


@cache
def _load(setup: Setup, threads: int) -> _Llama:
    return _Llama(setup, threads)


class _Llama:
    """A model and its context; one sequence at a time."""

    def __init__(self, setup: Setup, threads: int) -> None:
        try:
            import llama_cpp
        except (ImportError, OSError, RuntimeError) as error:
            raise Unavailable(f"pip install llama-cpp-python ({error})") from error
        self._lib = lib = cast(Any, llama_cpp)
        length = max(setup.max_length, PROBE_CONTEXT + max(PROBE_WIDTHS))
        # Kept: it owns the context and frees it.
        self._llama = lib.Llama(
            str(setup.gguf),
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
