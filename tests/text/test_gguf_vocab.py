"""GGUF vocabularies: how text is split, merged and marked."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.targets.stored import CheckpointError
from blockpilot.text import Tokenizer
from blockpilot.text.gguf_vocab import adds_bos, build_backend, score_merges
from tests.text.vocabularies import NORMAL, byte_level, sentencepiece, tokenizer

SAMPLE = "I'll pay  12345 ÉCUs\n\n x_y9 don'T  "
GPT2 = ["I", "'ll", "Ġpay", "Ġ", "Ġ12345", "ĠÃīCUs", "ĊĊ", "Ġx", "_", "y", "9", "Ġdon", "'", "T", "ĠĠ"]
SMOLLM = [
    "I",
    "'ll",
    "Ġpay",
    "ĠĠ",
    "1",
    "2",
    "3",
    "4",
    "5",
    "ĠÃīCUs",
    "ĊĊ",
    "Ġx",
    "_",
    "y",
    "9",
    "Ġdon",
    "'",
    "T",
    "ĠĠ",
]
LLAMA3 = ["I", "'ll", "Ġpay", "Ġ", "Ġ", "123", "45", "ĠÃīCUs", "ĊĊ", "Ġx", "_y", "9", "Ġdon", "'T", "ĠĠ"]
QWEN2 = [
    "I",
    "'ll",
    "Ġpay",
    "Ġ",
    "Ġ",
    "1",
    "2",
    "3",
    "4",
    "5",
    "ĠÃīCUs",
    "ĊĊ",
    "Ġx",
    "_y",
    "9",
    "Ġdon",
    "'T",
    "ĠĠ",
]
TEKKEN = QWEN2
SPLITS = {
    "gpt-2": GPT2,
    "default": GPT2,
    "smollm": SMOLLM,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": TEKKEN,
}


@pytest.mark.parametrize("pre", SPLITS)
def test_splits(pre: str) -> None:
    backend = build_backend(byte_level(pre))
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(SAMPLE)] == SPLITS[pre]


def test_tekken_splits_camel_case() -> None:
    words = {pre: build_backend(byte_level(pre)).pre_tokenizer for pre in ("tekken", "qwen2")}
    assert [piece for piece, _ in words["tekken"].pre_tokenize_str("camelCase HTTPs")] == [
        "camel",
        "Case",
        "ĠHTTPs",
    ]
    assert [piece for piece, _ in words["qwen2"].pre_tokenize_str("camelCase HTTPs")] == [
        "camelCase",
        "ĠHTTPs",
    ]


def test_qwen2_composes_characters() -> None:
    made = {pre: tokenizer(byte_level(pre)) for pre in ("qwen2", "llama-bpe")}
    assert made["qwen2"].encode("e\u0301") == made["qwen2"].encode("é")
    assert made["llama-bpe"].encode("e\u0301") != made["llama-bpe"].encode("é")


def test_llama3_takes_whole_words_first() -> None:
    metadata = byte_level("llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("Ġqwxz")
    metadata["tokenizer.ggml.token_type"].append(NORMAL)
    whole = tokenizer(metadata)
    assert whole.encode(" qwxz") == [whole.vocab_size - 1]
    assert len(tokenizer({**metadata, "tokenizer.ggml.pre": "qwen2"}).encode(" qwxz")) > 1


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world! It's 2024.", [19556, 28, 905, 17, 657, 506, 216, 34, 32, 34, 36, 30]),
        (
            "def f(x):\n    return x**2  # 12345\n",
            [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 216, 33, 34, 35, 36, 37, 198],
        ),
        ("日本語 😀 café", [23274, 115, 40993, 179, 120, 248, 40303, 218, 37366]),
        ("  two  spaces\t\ttabs\n\n\nlines", [216, 827, 216, 5600, 197, 197, 100, 7366, 1116, 198, 5110]),
    ],
)
def test_smollm2_ids_equal_transformers(smollm2: Tokenizer, text: str, ids: list[int]) -> None:
    """Recorded from transformers reading the same file, texts where its missing digit rule plays no part."""
    assert smollm2.encode(text) == ids
    assert smollm2.decode(ids) == text


def test_smollm2_digits_stand_alone_after_runs_of_spaces(smollm2: Tokenizer) -> None:
    """The model was trained with digits cut off first, so two spaces before one are one token."""
    space, spaces = smollm2.encode(" ")[0], smollm2.encode("  ")[0]
    assert smollm2.encode("  7x") == [spaces, *smollm2.encode("7"), *smollm2.encode("x")]
    assert smollm2.encode(" 7") == [space, *smollm2.encode("7")]


def test_smollm2_table(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.eos_token_ids, smollm2.bos_token_id) == (49152, (2,), 1)
    assert smollm2.has_chat_template and smollm2.encode("") == []


def sentencepiece_reference(text: str, score: dict[str, float]) -> list[str]:
    """Sentencepiece's BPE: join the adjacent pair of the best score, the leftmost of equals, and again."""
    pieces = list(text)
    while True:
        best = max(
            ((score[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in score),
            default=None,
        )
        if best is None:
            return pieces
        at = -best[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("theaonsbc<>/ "), max_size=24))
def test_sentencepiece_merges(text: str) -> None:
    """`ttt` can be joined in two ways; a run of t is where the order of equal pairs would show."""
    metadata = sentencepiece(**{"ggml.add_space_prefix": False})
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = metadata["tokenizer.ggml.scores"]
    score = {t: s for t, s, kind in zip(tokens, scores, kinds, strict=True) if kind == NORMAL and len(t) > 1}
    expected = sentencepiece_reference(text.replace(" ", "▁"), score)
    made = SENTENCEPIECE
    assert [made._backend.id_to_token(i) for i in made.encode(text)] == expected


SENTENCEPIECE = tokenizer(sentencepiece(**{"ggml.add_space_prefix": False}))


def test_control_tokens_take_no_part_in_merges() -> None:
    pairs = score_merges(["a", "b", "ab", "<s>", "<", "s>"], [0.0, 0, -1, -2, 0, 0], [1, 1, 1, 3, 1, 1])
    assert pairs == [("a", "b")]


def test_a_piece_of_equal_characters_is_joined_from_the_left() -> None:
    pairs = score_merges(["a", "aa", "aaa"], [0.0, -2, -1], [NORMAL] * 3)
    assert pairs == [("aa", "a"), ("a", "aa"), ("a", "a")]


def test_sentencepiece_prefix_bytes_and_literals() -> None:
    made = tokenizer(sentencepiece())
    assert made._backend.id_to_token(made.encode("the")[0]) == "▁the"
    assert made.decode(made.encode("the ü")) == "the ü"
    assert {3 + byte for byte in "ü".encode()} <= set(made.encode("ü"))
    literal = made.encode("</s>")
    assert not {0, 1, 2} & set(literal) and made.decode(literal) == "</s>"


def test_user_defined_tokens_are_found_in_text_when_they_are_space() -> None:
    made = tokenizer(byte_level())
    spaces = made._backend.token_to_id("    ")
    assert spaces in made.encode("x    y")
    assert made._backend.token_to_id("<think>") not in made.encode("<think>")


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"tokenizer.ggml.model": "llama"}, True),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}, False),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"}, True),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "qwen2",
                "tokenizer.ggml.add_bos_token": True,
            },
            True,
        ),
    ],
)
def test_bos_rule(metadata: dict[str, Any], expected: bool) -> None:
    assert adds_bos(metadata) is expected


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "expected tokenizer.ggml.tokens, .* found no vocabulary"),
        ({**byte_level(), "tokenizer.ggml.model": "bert"}, "model 'bert'; supported: gpt2, llama"),
        (byte_level("chatglm-bpe"), "pre 'chatglm-bpe'; supported: gpt-2, default, smollm"),
        (
            {k: v for k, v in byte_level().items() if not k.endswith(".pre")},
            "pre None.*convert the model again",
        ),
        ({**byte_level(), "tokenizer.ggml.merges": None}, "expected tokenizer.ggml.merges"),
        ({**byte_level(), "tokenizer.ggml.merges": ["nospace"]}, "merge of two parts, found 'nospace'"),
        ({**byte_level(), "tokenizer.ggml.merges": ["not there"]}, "not a BPE vocabulary"),
        ({**byte_level(), "tokenizer.ggml.token_type": [1]}, "one tokenizer.ggml.token_type for each of"),
        (
            {
                **byte_level(),
                "tokenizer.ggml.tokens": ["a", "b", "a"],
                "tokenizer.ggml.token_type": [1, 1, 1],
            },
            "'a' more",
        ),
        ({**sentencepiece(), "tokenizer.ggml.scores": [0.0]}, "one tokenizer.ggml.scores for each of"),
        (
            {
                **sentencepiece(),
                "tokenizer.ggml.tokens": ["<0x00>"],
                "tokenizer.ggml.token_type": [6],
                "tokenizer.ggml.scores": [0.0],
            },
            "expected 256 byte tokens or none, found 1",
        ),
    ],
)
def test_unsupported_vocabularies(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_backend(metadata)
