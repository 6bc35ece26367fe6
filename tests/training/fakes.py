"""A stand-in for the engine that labels quickly, and label files with a planted rule."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from blockpilot.output import Output, Stats, TokenLogprob
from blockpilot.training.label_store import LabelStore, encode_input

VOCAB, HIDDEN, BLOCK = 40, 16, 4


class FakeTarget:
    fingerprint = "fake-target"
    dtype = torch.float32


@dataclass
class FakeDrafter:
    fingerprint: str = "fake-drafter"
    block_size: int = BLOCK
    window: tuple[int, ...] = tuple(range(1, 9))


def embedding() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))


def logits_of(text: str) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(_number(text))) * 2


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


@dataclass
class FakeLLM:
    """Answers by a hash of the prompt; a prompt with "silent" ends at prefill, one with "broken" fails.

    Attributes:
        policy: what `label_prompts` passes on.
        wrong: (prompt, width) whose answer gets one wrong id.
        die_after: generate calls before a KeyboardInterrupt.
        reverse: show the prompts to the policy in reverse.
    """

    policy: object
    weights: str = "dense"
    drafter: FakeDrafter | None = field(default_factory=FakeDrafter)
    wrong: tuple[str, int] | None = None
    die_after: int | None = None
    reverse: bool = False
    bind: bool = True
    target: FakeTarget = field(default_factory=FakeTarget)
    calls: list[tuple[str, ...]] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        if self.bind:
            self.policy.bind(embedding())

    def generate(self, prompts, params):
        if self.die_after is not None and len(self.calls) >= self.die_after:
            raise KeyboardInterrupt
        self.calls.append(tuple(prompts))
        widths = {}
        for text, p in (
            reversed(list(zip(prompts, params, strict=True)))
            if self.reverse
            else zip(prompts, params, strict=True)
        ):
            if p.width is not None:
                widths[text] = p.width
            elif "silent" not in text and "broken" not in text:
                widths[text] = int(self.policy.choose(logits_of(text)[None])[0])
        return [self._answer(t, p, widths.get(t, 1)) for t, p in zip(prompts, params, strict=True)]

    def close(self) -> None:
        self.closed = True

    def _answer(self, text, params, width) -> Output:
        row = logits_of(text)
        gen = torch.Generator().manual_seed(_number(text) + params.seed)
        ids = [
            int(row.argmax()),
            *torch.randint(0, VOCAB, (params.max_new_tokens - 1,), generator=gen).tolist(),
        ]
        if "silent" in text or "broken" in text:
            ids = ids[:1]
        if self.wrong == (text, width):
            ids[3] = (ids[3] + 1) % VOCAB
        logprobs = None
        if params.logprobs is not None:
            first = float(torch.log_softmax(row, -1)[ids[0]])
            logprobs = [TokenLogprob(ids[0], first), *(TokenLogprob(i, -1.0) for i in ids[1:])]
        error = ArithmeticError("NaN") if "broken" in text else None
        return Output(
            text="",
            token_ids=ids,
            prompt_token_ids=[0] * len(text.split()),
            finish_reason="error" if error else "stop" if len(ids) == 1 else "length",
            logprobs=logprobs,
            seed=params.seed,
            stats=_stats(text, width, len(ids) - 1),
            error=error,
        )


def _stats(text: str, width: int, committed: int) -> Stats:
    steps = math.ceil(committed / min(width, 1 + _number(text) % 5)) if committed else 0
    pace = -(-committed // steps) if steps else 0
    step_tokens = [min(pace, committed - done) for done in range(0, committed, pace or 1)]
    offered, kept = [steps] * (width - 1), [steps // 2] * (width - 1)
    return Stats(width, steps, committed, offered, kept, step_tokens=step_tokens)


def prompts(count: int) -> list[dict[str, str]]:
    return [{"id": f"p/{i}", "family": f"f{i % 4}", "prompt": f"number {i} please"} for i in range(count)]


WINDOW = (2, 3, 4, 5)


def planted(count: int, rule: bool = True, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs [N, 16], tau [N, 4]): with a rule the best width follows from the signs of two inputs."""
    gen = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, HIDDEN, generator=gen)
    inputs[:, :2] += 2 * inputs[:, :2].sign()  # a margin between the classes
    hidden = inputs if rule else torch.randn(count, HIDDEN, generator=gen)
    best = 2 * (hidden[:, 0] > 0).long() + (hidden[:, 1] > 0).long()
    tau = 2 - 0.4 * (torch.arange(4) - best[:, None]).abs()
    return inputs, tau + 0.02 * torch.rand(count, 4, generator=gen)


def write_labels(
    path: Path, inputs: torch.Tensor, tau: torch.Tensor, row: dict | None = None, **over
) -> Path:
    """A label file of the given inputs and τ; `over` replaces settings, `row` keys of every row."""
    settings = {
        "pair": {"target": "fake-target", "drafter": "fake-drafter"},
        "block_size": BLOCK,
        "window": list(WINDOW),
        "input_kind": "mean_likely_embedding",
        "input_size": HIDDEN,
        "vocabulary": VOCAB,
        **over,
    }
    with LabelStore(path, settings) as store:
        store.append([label_row(i, inputs[i], tau[i].tolist(), **(row or {})) for i in range(len(tau))])
    return path


def label_row(i: int, inputs: torch.Tensor, tau: list[float], name: str = "p", **over) -> dict:
    return {
        "id": f"{name}/{i}",
        "family": f"f{i % 6}",
        "dataset": None,
        "prompt_hash": f"{name}/{i}",
        "prompt_tokens": 4,
        "window": list(WINDOW),
        "tau": tau,
        "steps": [10] * 4,
        "committed": [20] * 4,
        "halves": None,
        "kept": [[5]] * 4,
        "offered": [[10]] * 4,
        "tokens": 21,
        "finish_reason": "length",
        "input": encode_input(inputs),
        "logits": None,
        **over,
    }
