"""Joined deltas equal the full decode, for every decoder, any ids and any chunks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.text import Detokenizer, Tokenizer
from tests.text.vocabularies import byte_level, sentencepiece, tokenizer, with_decoder

METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
TOKENIZERS = {
    "byte level": tokenizer(byte_level()),
    "sentencepiece": tokenizer(sentencepiece()),
    "no prefix": tokenizer(sentencepiece(**{"ggml.add_space_prefix": False})),
    "metaspace": with_decoder(METASPACE),
    "metaspace never": with_decoder({**METASPACE, "prepend_scheme": "never"}),
    "bytes then metaspace": with_decoder(
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, METASPACE]}
    ),
    "strip two": with_decoder(
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁t"}, "content": "  T"},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "Strip", "content": " ", "start": 2, "stop": 0},
            ],
        }
    ),
    "none": with_decoder(None),
}
EMOJI = "family 👩‍👩‍👧‍👦, flag 🇳🇴, 日本語のテキスト, 한국어, café, Ωμέγα, \ufffd, \x00, ﷽𝔘"


def stream(made: Tokenizer, chunks: list[list[int]]) -> str:
    detokenizer = made.detokenizer()
    return "".join([*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()])


def chunked(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Split by the sizes, taken round and round; 0 is an empty push."""
    chunks, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)] if any(sizes) else 1
        chunks.append(ids[at : at + size])
        at, turn = at + size, turn + 1
    return chunks


CHUNKS = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_random_ids(name: str, data: st.DataObject) -> None:
    """Ids of special tokens and ids beyond the vocabulary included."""
    made = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, made.vocab_size + 3), max_size=40))
    assert stream(made, chunked(ids, data.draw(CHUNKS))) == made.decode(ids)


@pytest.mark.parametrize("name", ["sentencepiece", "no prefix", "bytes then metaspace"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_byte_runs(name: str, data: st.DataObject) -> None:
    """Mostly bytes of real text, some cut or replaced: runs that are whole, unfinished and broken."""
    made = TOKENIZERS[name]
    text = data.draw(st.text(st.sampled_from("aé日😀 "), max_size=8)).encode()
    ids = [3 + byte for byte in text]
    for at in data.draw(st.lists(st.integers(0, 40), max_size=3)):
        if at < len(ids):
            ids[at] = data.draw(st.sampled_from([1, 259, 261, 3 + 0x80, 3 + 0xF0]))
    assert stream(made, chunked(ids, data.draw(CHUNKS))) == made.decode(ids)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=60), sizes=CHUNKS)
def test_smollm2_random_ids(smollm2: Tokenizer, ids: list[int], sizes: list[int]) -> None:
    assert stream(smollm2, chunked(ids, sizes)) == smollm2.decode(ids)


# SmolLM2 has no tokens for a few control characters and for the lead bytes of the unassigned planes 4 to 11.
TEXT = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d")


@settings(max_examples=150, deadline=None)
@given(text=st.text(TEXT, max_size=60), sizes=CHUNKS)
def test_smollm2_random_text_comes_back(smollm2: Tokenizer, text: str, sizes: list[int]) -> None:
    assert stream(smollm2, chunked(smollm2.encode(text), sizes)) == text


@pytest.mark.parametrize("size", range(1, 13))
def test_smollm2_emoji_and_scripts(smollm2: Tokenizer, size: int) -> None:
    assert stream(smollm2, chunked(smollm2.encode(EMOJI), [size])) == EMOJI


@pytest.mark.parametrize("size", range(1, 13))
def test_byte_fallback_emoji_and_scripts(size: int) -> None:
    made = TOKENIZERS["sentencepiece"]
    assert stream(made, chunked(made.encode(EMOJI), [size])) == EMOJI


def test_text_is_handed_out_as_soon_as_it_is_final(smollm2: Tokenizer) -> None:
    """Only the bytes of one unfinished character are ever held back."""
    ids, detokenizer, seen = smollm2.encode(EMOJI), smollm2.detokenizer(), ""
    for at, token in enumerate(ids, start=1):
        seen += detokenizer.push([token])
        assert smollm2.decode(ids[:at]) in (seen, seen + "\ufffd")


def test_an_unfinished_character_is_flushed_at_the_end(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("ok 😀")
    detokenizer = smollm2.detokenizer()
    assert detokenizer.push(ids[:-1]) == "ok "
    assert detokenizer.finish() == "\ufffd" and detokenizer.finish() == ""
    assert smollm2.decode(ids[:-1]) == "ok \ufffd"


def test_a_byte_run_waits_for_its_end_and_a_broken_one_does_not() -> None:
    made = TOKENIZERS["no prefix"]
    letter, smile = made.encode("t")[0], [3 + byte for byte in "😀".encode()]
    detokenizer = made.detokenizer()
    assert [detokenizer.push([token]) for token in [*smile, letter]] == ["", "", "", "", "😀t"]
    pushed = [detokenizer.push([3 + byte]) for byte in (0x41, 0xF0, 0x41, 0x42)]
    assert pushed == ["", "", "\ufffd\ufffd\ufffd", "\ufffd"]
    assert made.decode([3 + byte for byte in (0x41, 0xF0, 0x41, 0x42)]) == "\ufffd" * 4


def test_the_prefix_space_is_dropped_once() -> None:
    made = TOKENIZERS["sentencepiece"]
    assert made.decode(made.encode("the the")) == "the the"
    detokenizer = made.detokenizer()
    pieces = [detokenizer.push([token]) for token in made.encode(" the the")]
    assert "".join(pieces) == " the the"


def test_each_id_is_looked_up_once(smollm2: Tokenizer) -> None:
    """The cost of a push does not grow with what came before."""
    asked: list[int] = []

    def piece(token: int) -> str:
        asked.append(token)
        return "x"

    detokenizer = Detokenizer(piece, {"type": "ByteLevel"})
    for token in range(100):
        assert detokenizer.push([token]) == "x"
    assert asked == list(range(100)) and detokenizer.finish() == ""


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, METASPACE]},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
    ],
)
def test_decoders_that_cannot_be_streamed_are_refused_at_load(decoder: Any) -> None:
    with pytest.raises(ValueError, match="cannot be streamed; supported: ByteLevel, ByteFallback"):
        with_decoder(decoder)
