"""An engine without a model: answers, widths and mistakes as a test scripts them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from blockpilot import Output, SamplingParams, Stats

MISTAKE = 999


class FakeLLM:
    """Emits ids that depend on prompt and seed only. `chosen` is what its policy answers.

    `wrong(prompt, width)` makes one answer differ at token 2. `opened` and `asked` record every call.
    """

    chosen = 4
    fingerprint = "fake-target+fake-drafter"
    weights = "dense"
    drafter = None
    wrong: Callable[[str, int], bool] = staticmethod(lambda prompt, width: False)
    error: Exception | None = None
    interrupt_at: int | None = None
    opened: ClassVar[list[dict]] = []
    asked: ClassVar[list[tuple[str, int | None, int | None]]] = []

    def __init__(self, target, **options) -> None:
        type(self).opened.append({"target": target, **options})
        self.policy_calls = 0

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None:
        pass

    def warmup(self) -> None:
        pass

    def generate(self, prompts, params):
        return [self._answer(prompt, p) for prompt, p in zip(prompts, params, strict=True)]

    def stream(self, prompt, params):
        return FakeStream(self._answer(prompt, params))

    def _answer(self, prompt, params: SamplingParams) -> Output:
        kind = type(self)
        if kind.interrupt_at is not None and len(kind.asked) >= kind.interrupt_at:
            raise KeyboardInterrupt
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        kind.asked.append((text, params.width, params.seed))
        self.policy_calls += params.width is None
        width = kind.chosen if params.width is None else params.width
        digest = hashlib.sha256(f"{text} {params.seed}".encode()).digest()
        ids = [int(b) for b in digest[: params.max_new_tokens]]
        if kind.wrong(text, width):
            ids[2] = MISTAKE
        committed = max(len(ids) - 1, 0)
        steps = -(-committed // width)
        kept = [steps if j == 1 else 0 for j in range(1, width)]
        seconds = dict.fromkeys(("prefill", "policy", "draft", "verify", "accept", "commit", "host"), 1e-9)
        stats = Stats(width, steps, committed, [steps] * (width - 1), kept, 0.01, 0.02, seconds)
        reason = "error" if kind.error else "length"
        seed = 7 if params.seed is None else params.seed
        words = " ".join(map(str, ids))
        return Output(words, ids, [1, 2, 3], reason, None, seed, stats, error=kind.error)


class FakeStream:
    def __init__(self, output: Output) -> None:
        self.output = output

    def __iter__(self):
        half = len(self.output.text) // 2
        yield self.output.text[:half]
        yield self.output.text[half:]


def write_prompts(path: Path, datasets: dict[str, int]) -> Path:
    """A prompt file with this many prompts of each dataset."""
    rows = [
        {"id": f"{name}/{i}", "dataset": name, "prompt": f"{name} question {i}"}
        for name, count in datasets.items()
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
