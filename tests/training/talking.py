"""Targets that answer in chat turns: a tiny random one on disk, and one that says what a script tells it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from blockpilot import Output, SamplingParams, Stats
from blockpilot.text import Tokenizer
from blockpilot.text.sources import TokenizerParts, from_gguf
from tests.text.vocabularies import byte_level
from tests.tiny import save_target

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|pad|>", "<|im_end|>", "[INST]", "[/INST]")
END = CONTROL.index("<|im_end|>")
CHAT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)


def tokenizer(template: str | None = CHAT) -> Tokenizer:
    """Byte-level, so that any text survives."""
    parts = from_gguf(byte_level(control=CONTROL))
    return Tokenizer(TokenizerParts(parts.backend, parts.special, template, ()), (END,))


def save_talker(folder: Path, template: str | None = CHAT) -> Path:
    """A tiny target whose favourite tokens are a few letters and, now and then, the end of the turn."""
    parts = from_gguf(byte_level(control=CONTROL))
    vocabulary = parts.backend.get_vocab_size(with_added_tokens=True)
    save_target(folder, vocab=vocabulary, eos_token_id=END, favourites=12)
    parts.backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class ScriptedLLM:
    """Says `script(prompt text, opened)`: (text, finish reason); `opened` where a user's turn has not ended."""

    max_length = 4096
    weights, device = "dense", torch.device("cpu")
    target = SimpleNamespace(fingerprint="scripted", dtype=torch.float32)

    def __init__(self, script: Callable[[str, bool], tuple[str, str]], template: str | None = CHAT) -> None:
        self.tokenizer, self.script = tokenizer(template), script
        self.asked: list[tuple[str, SamplingParams]] = []

    def submit(self, ids: list[int], params: SamplingParams) -> Any:
        text = self.tokenizer.decode(ids)
        opened = not text.endswith("assistant\n")
        self.asked.append((text, params))
        said, reason = self.script(text, opened)
        error = ArithmeticError("not finite") if reason == "error" else None
        answer = self.tokenizer.encode(said) + [END] * (reason == "stop")
        output = Output(said, answer, ids, reason, None, params.seed or 0, Stats(), error=error)
        return SimpleNamespace(finished=True, output=output)

    def step(self) -> bool:
        return False

    def cancel(self, handle: Any) -> None:
        pass
