"""Small vocabularies as GGUF metadata, and tokenizers built from them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from blockpilot.targets.checkpoint import Checkpoint
from blockpilot.targets.config import ModelConfig
from blockpilot.text import Tokenizer
from blockpilot.text.sources import TokenizerParts, from_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and it's 12345 times faster than 67 dogs.",
    "def add(a, b):\n    return a + b  # sum\n\n\nprint(add(1, 2))\n",
    "Ünïcödé café naïve Ωμέγα 日本語のテキスト 😀😀 don't we'll I'M they'RE",
    "one  two   three    four\t\tfive\r\n six <think> user assistant system im_start im_end",
] * 3


@cache
def trained() -> tuple[list[str], list[str]]:
    """Tokens and merges of a small byte-level BPE."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def byte_level(
    pre: str = "smollm",
    control: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    user_defined: tuple[str, ...] = ("<think>", "</think>", "    "),
    **over: Any,
) -> dict[str, Any]:
    """A gpt2-type vocabulary with control tokens first and user-defined tokens last."""
    tokens, merges = trained()
    kinds = [CONTROL] * len(control) + [NORMAL] * len(tokens) + [USER_DEFINED] * len(user_defined)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*control, *tokens, *user_defined],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.{key}": value for key, value in over.items()},
    }


def sentencepiece(**over: Any) -> dict[str, Any]:
    """A llama-type vocabulary: control tokens, all bytes, letters, words, and runs of spaces."""
    words = ["▁", "e", "t", "a", "o", "h", "n", "s", "<", ">", "/", "b", "c", "é", "日"]
    joined = [
        "▁t",
        "he",
        "▁the",
        "▁▁",
        "▁▁▁",
        "▁▁▁▁",
        "an",
        "on",
        "▁a",
        "at",
        "the",
        "ttt",
        "tt",
        "</",
        "</s",
        "es",
    ]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *words, *joined]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(words) + len(joined))]
    scores = [0.0] * (259 + len(words)) + [-float(rank) for rank in range(len(joined))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.{key}": value for key, value in over.items()},
    }


def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(from_gguf(metadata))


def with_decoder(decoder: Any) -> Tokenizer:
    """The sentencepiece vocabulary under another decoder."""
    backend = from_gguf(sentencepiece()).backend
    spec = json.loads(backend.to_str())
    spec["decoder"] = decoder
    return Tokenizer(TokenizerParts(Backend.from_str(json.dumps(spec)), {}, None, ()))


def transformers_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The same vocabulary in transformers' own class."""
    parts = from_gguf(metadata)
    return PreTrainedTokenizerFast(
        tokenizer_object=parts.backend, chat_template=parts.template, **dict(parts.special)
    )


def checkpoint(source: Path | dict[str, Any], vocab_size: int, **over: Any) -> Checkpoint:
    """A checkpoint without weights, for `load_tokenizer`."""
    config = ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            **over,
        }
    )
    return Checkpoint(config, {}, Path("model"), "gguf", "", source)
