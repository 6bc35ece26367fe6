"""The engine as a library: load a target, a drafter and a policy, then generate, stream or step."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from blockpilot.adapt import Adapt, resolve_adapter
from blockpilot.drafters import Drafter
from blockpilot.errors import EngineClosedError
from blockpilot.loading import (
    build_target,
    resolve_checkpoint,
    resolve_device,
    resolve_drafter,
    resolve_max_length,
    resolve_policy,
    resolve_weights,
)
from blockpilot.output import Output
from blockpilot.params import SamplingParams
from blockpilot.policies import BlockPolicy
from blockpilot.progress import progress_bar
from blockpilot.recorders import recorder_for
from blockpilot.request import Handle
from blockpilot.scheduler import Scheduler
from blockpilot.stream import Stream
from blockpilot.targets.checkpoint import Checkpoint
from blockpilot.text import load_tokenizer

if hasattr(os, "register_at_fork"):
    # A forked child has none of OpenMP's threads, and torch would wait for them for ever.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class LLM:
    """An exact decoder for one target, with an optional drafter and a width policy.

    Args:
        target: "smollm2", a safetensors folder, a GGUF file, a hub id, or a loaded `Checkpoint`.
        drafter: "bundled", a folder in DFlash, EAGLE-3 or SpecBlock format or a hub id, each also with "+lookup" behind
            it, to copy from the request what stood there before; "lookup" for that alone, a `Drafter`, or None for
            plain decoding.
        policy: "bundled" or "predictor" (of "bundled+lookup"), a policy file, a width, "6/16" for trees of 16 nodes
            from blocks of width 6, "6/16@FILE" to cut them by the costs of a calibration, a `BlockPolicy`, or None for
            the drafter's block size.
        device: torch device. dtype: "float32" or "bfloat16": KV cache, float weights, inputs of products.
        weights: "stored" keeps a GGUF file's blocks; "stored-int16" and "stored-int8" round the inputs of products to
            16-bit codes or bytes as well; "dense" makes floats of them; "auto" picks, and `weights` says what.
        max_requests: requests decoded at once. max_length: positions per request (prompt and answer).
        threads: CPU threads, for the whole process; None keeps torch's setting.
        max_queue: requests that may wait. draft_temperature: factor on a request's temperature for drafting.
        adapt: True or an `Adapt`: an EAGLE-3 or SpecBlock drafter learns from what it serves, where that pays;
            `adapter.report()` tells.

    Raises:
        ValueError: unknown names, mismatched pairs, corrupt files, or sizes that do not fit into memory.

    Methods may be called from several threads; one call runs at a time.
    """

    def __init__(
        self,
        target: str | Path | Checkpoint,
        *,
        drafter: str | Path | Drafter | None = None,
        policy: str | Path | int | BlockPolicy | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        weights: str = "auto",
        max_requests: int = 8,
        max_length: int | None = None,
        threads: int | None = None,
        max_queue: int = 1024,
        draft_temperature: float | None = None,
        adapt: bool | Adapt = False,
    ) -> None:
        _check_sizes(max_requests=max_requests, max_queue=max_queue)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {sorted(DTYPES)}, got {dtype!r}")
        self.device = resolve_device(device)
        if threads is not None:
            _check_sizes(threads=threads)
            torch.set_num_threads(threads)
        checkpoint = resolve_checkpoint(target)
        self.max_requests = max_requests
        self.max_length = resolve_max_length(max_length, checkpoint)
        sizes = (max_requests, self.max_length, DTYPES[dtype])
        self.weights = resolve_weights(weights, checkpoint, self.device)
        self.tokenizer = load_tokenizer(checkpoint)
        with torch.inference_mode():
            keep = not isinstance(target, Checkpoint)  # a caller may have changed one
            self.target = build_target(checkpoint, *sizes, self.device, self.weights, keep)
            self.drafter = resolve_drafter(drafter, self.target, max_requests, draft_temperature)
            self.policy = resolve_policy(policy, self.target, self.drafter)
        eos = tuple(sorted({*checkpoint.config.eos_token_ids, *self.tokenizer.eos_token_ids}))
        self._scheduler = Scheduler(
            self.target,
            self.drafter,
            self.policy,
            slots=max_requests,
            widest=max(*self.drafter.window, self._largest_tree) if self.drafter else 1,
            eos=eos,
            max_queue=max_queue,
            recorder=recorder_for(self.device),
        )
        self.adapter = resolve_adapter(adapt, self.drafter, self.target, max_requests)
        self._scheduler.adapter = self.adapter
        self._lock = threading.RLock()
        self._closed = False

    @property
    def fingerprint(self) -> str:
        """Identity of the target and drafter pair."""
        return f"{self.target.fingerprint}+{self.drafter.fingerprint if self.drafter else 'none'}"

    @property
    def policy_calls(self) -> int:
        """How often the policy was asked: once per request that reached its first step."""
        return self._scheduler.policy_calls

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Output]:
        """Answer every prompt; outputs come in the order of the prompts.

        Args:
            prompts: each a user message (str), chat messages ({"role", "content"}), or token ids.
            params: one for all, or one per prompt.
            progress: show a progress bar on stderr.
        """
        if not isinstance(prompts, (list, tuple)):
            raise ValueError(f"prompts: expected a list of prompts, got {type(prompts).__name__}")
        each = _spread(params, len(prompts))
        requests = [self._handle(p, s, None) for p, s in zip(prompts, each, strict=True)]
        waiting = list(reversed(requests))
        try:
            with progress_bar("generating", len(requests), show=progress) as advance:
                while waiting or not all(h.finished for h in requests):
                    self._fill(waiting)
                    self.step()
                    advance(sum(h.finished for h in requests))
        finally:
            for handle in requests:
                self.cancel(handle)
        return [h.output for h in requests if h.output is not None]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Answer one prompt as an iterator of text pieces; joined they equal `Output.text`."""
        return Stream(self, self.submit(prompt, params))

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, deadline: float | None = None
    ) -> Handle:
        """Queue a request; `step` moves it. `deadline`: seconds from now after which it ends as it stands.

        Raises:
            ValueError: a prompt or parameter that cannot be served. QueueFullError: too many waiting.
        """
        with self._lock:
            self._check_open()
            handle = self._handle(prompt, SamplingParams() if params is None else params, deadline)
            self._scheduler.submit(handle)
            return handle

    def step(self) -> bool:
        """Admit waiting requests and advance every active one: by a step, or on CUDA by a launch of several, whose
        tokens arrive with the next call. Returns whether work is left."""
        with self._lock, torch.inference_mode():
            self._check_open()
            return self._scheduler.step()

    def cancel(self, handle: Handle) -> None:
        """End a request now, keeping what it has; nothing happens to a finished one."""
        with self._lock:
            self._scheduler.cancel(handle)

    def abandon(self, handle: Handle) -> None:
        """Cancel at the next `submit` or `step`; safe from a finaliser, whatever else is running."""
        self._scheduler.abandoned.append(handle)

    def warmup(self) -> None:
        """Run a short request through prefill, draft and verify, so that the first real one pays no set-up."""
        width = self.drafter.block_size if self.drafter else 1
        params = SamplingParams(max_new_tokens=2, ignore_eos=True, width=min(width, self.max_length - 1))
        self.generate([[0]], params)

    def close(self) -> None:
        """Cancel everything and refuse further work; calling it again is harmless."""
        with self._lock:
            for handle in [*self._scheduler.queue, *self._scheduler.active.values()]:
                self._scheduler.cancel(handle)
            if self.adapter is not None and not self._closed:
                self.adapter.close()
            self._closed = True

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self, waiting: list[Handle]) -> None:
        with self._lock:
            self._check_open()
            while waiting and len(self._scheduler.queue) < self._scheduler.max_queue:
                self._scheduler.submit(waiting.pop())

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("this LLM was closed; make a new one")

    def _handle(self, prompt: Prompt, params: SamplingParams, deadline: float | None) -> Handle:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params: expected SamplingParams, got {type(params).__name__}")
        ids = self._prompt_ids(prompt)
        self._check_request(ids, params)
        if deadline is not None and not (isinstance(deadline, (int, float)) and deadline > 0):
            raise ValueError(f"deadline: expected seconds > 0 or None, got {deadline!r}")
        return Handle(ids, params, self.tokenizer, deadline)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        wrong = "prompt: expected a str, a list of chat messages or a list of token ids"
        if not isinstance(prompt, (str, list, tuple)):
            raise ValueError(f"{wrong}, got {type(prompt).__name__}")
        items: list[Any] = [] if isinstance(prompt, str) else list(prompt)
        if isinstance(prompt, str) or (items and all(isinstance(i, Mapping) for i in items)):
            try:
                return self.tokenizer.encode_prompt(prompt if isinstance(prompt, str) else items)
            except (TypeError, UnicodeError) as error:  # a lone surrogate, a message that is not text
                raise ValueError(f"prompt: expected valid Unicode text, got {prompt!r}: {error}") from error
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in items):
            raise ValueError(wrong)
        return items

    def _check_request(self, ids: list[int], params: SamplingParams) -> None:
        vocab, longest = self.target.config.vocab_size, self.max_length - 1
        if not ids:
            raise ValueError("prompt: expected at least one token, got none")
        if len(ids) > longest and params.max_new_tokens != 0:
            raise ValueError(
                f"prompt: expected at most {longest} tokens (max_length {self.max_length} less one to produce), "
                f"got {len(ids)}; shorten it or raise max_length"
            )
        bad = [i for i in (*ids, *params.stop_token_ids) if not 0 <= i < vocab]
        if bad:
            raise ValueError(f"token ids: expected 0..{vocab - 1}, got {bad[:5]}")
        widths = self.drafter.window if self.drafter else (1,)
        if params.width is not None and params.width not in widths:
            raise ValueError(f"SamplingParams.width: expected one of {widths}, got {params.width}")
        if params.tree is not None:
            self._check_tree(params.tree)

    @property
    def _largest_tree(self) -> int:
        """Nodes of a tree at most; a drafter of somebody else's may know of chains only."""
        return getattr(self.drafter, "largest_tree", 0)

    def _check_tree(self, tree: int) -> None:
        largest = self._largest_tree
        if tree > largest:
            raise ValueError(
                f"SamplingParams.tree: expected None or at most {largest} nodes, what the drafter makes, got {tree}"
            )


def _spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)):
        raise ValueError(f"params: expected SamplingParams or a list of them, got {type(params).__name__}")
    if len(params) != count:
        raise ValueError(f"params: expected one or {count} (one per prompt), got {len(params)}")
    return params


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}: expected an int >= 1, got {size!r}")
