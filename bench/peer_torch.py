"""Arms of the peer benchmark that run in torch: transformers, and the published loop of `dflash`."""

from __future__ import annotations

import time
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import disable_progress_bar

from blockpilot import bundled
from peer_types import Decode, Request, Run, Setup, Unavailable


@cache
def _load_target(setup: Setup, dtype: torch.dtype) -> Any:
    folder, name = setup.gguf.parent, setup.gguf.name
    torch.set_num_threads(setup.threads)
    disable_progress_bar()  # they would break this benchmark's own
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=dtype).eval()


def open_loop(setup: Setup, *, dtype: torch.dtype) -> Decode:
    """Forward passes over a `DynamicCache`, with nothing around them."""
    return partial(_loop, _load_target(setup, dtype), setup.eos)


def open_generate(setup: Setup, *, dtype: torch.dtype) -> Decode:
    """`model.generate` with its defaults."""
    return partial(_generate, _load_target(setup, dtype), setup.eos)


def open_dflash(setup: Setup, *, dtype: torch.dtype, width: int) -> Decode:
    """`dflash_generate` of the dflash package, with the bundled drafter and the transformers target.

    Raises:
        Unavailable: the package is not installed.
    """
    return partial(_dflash, _load_drafter(dtype), _load_target(setup, dtype), setup.eos, width)


@cache
def _load_drafter(dtype: torch.dtype) -> Any:
    try:
        from dflash import model as published
    except ImportError as error:
        raise Unavailable(f"pip install --no-deps dflash==0.1.0 ({error})") from error
    # Its own clock synchronises CUDA, which fails where there is none.
    published._cuda_time = time.perf_counter
    return published.DFlashDraftModel.from_pretrained(bundled.drafter_path(), dtype=dtype).eval()


def _choose(logits: Tensor, temperature: float) -> Tensor:
    """Ids [rows] from logits [rows, vocabulary]."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial(torch.softmax(logits.float() / temperature, -1), 1)[:, 0]


@torch.inference_mode()
def _loop(model: Any, eos: tuple[int, ...], request: Request) -> Run:
    torch.manual_seed(request.seed)
    ids = torch.tensor([request.ids])
    start = time.perf_counter()
    cache = DynamicCache(config=model.config)
    logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    token = _choose(logits[:, -1], request.temperature)
    answer = [int(token)]
    first = time.perf_counter()
    while answer[-1] not in eos and len(answer) < request.max_new_tokens:
        logits = model(token[:, None], past_key_values=cache, use_cache=True).logits
        token = _choose(logits[:, -1], request.temperature)
        answer.append(int(token))
    return Run(tuple(answer), first - start, time.perf_counter() - first)


class _Clock(BaseStreamer):
    """Notes when `generate` hands over the prompt and each token: it tells no times itself."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """The prompt, then one token at a time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""


def _generate(model: Any, eos: tuple[int, ...], request: Request) -> Run:
    torch.manual_seed(request.seed)
    sampling: dict[str, Any] = {"do_sample": False}
    if request.temperature > 0:
        sampling = {"do_sample": True, "temperature": request.temperature, "top_k": 0, "top_p": 1.0}
    ids, clock = torch.tensor([request.ids]), _Clock()
    start = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_new_tokens,
        eos_token_id=list(eos),
        pad_token_id=eos[0],
        streamer=clock,
        **sampling,
    )
    first, last = clock.times[1], clock.times[-1]
    return Run(tuple(output[0, ids.shape[1] :].tolist()), first - start, last - first)


def _dflash(drafter: Any, target: Any, eos: tuple[int, ...], width: int, request: Request) -> Run:
    from dflash.model import dflash_generate

    torch.manual_seed(request.seed)
    found = dflash_generate(
        drafter,
        target,
        torch.tensor([request.ids]),
        request.max_new_tokens,
        list(eos),
        temperature=request.temperature,
        block_size=width,
        return_stats=True,
    )
    answer = found.output_ids[0, len(request.ids) :].tolist()
    return Run(
        token_ids=tuple(answer),
        first_token=found.time_to_first_token,
        decoding=found.time_per_output_token * found.num_output_tokens,
        steps=len(found.acceptance_lengths),
    )
