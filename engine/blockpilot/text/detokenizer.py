"""Incremental detokenisation: the joined deltas are the full decode, whatever the chunks.

Each decoder of the `tokenizers` library is replayed as a stream stage that keeps only what later tokens can
still change: the bytes of an unfinished character, a run of byte tokens. Nothing is decoded twice.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

_BYTE_TOKEN = re.compile(r"<0x(\+?[0-9A-Fa-f]+)>")


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's character for each byte: itself if printable Latin-1, else the next from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
BYTE_OF = {char: byte for byte, char in BYTE_ALPHABET.items()}


class _Stage(Protocol):
    """Token texts in, token texts out; `finish` gives up what is held back."""

    def push(self, tokens: Iterable[str]) -> list[str]: ...

    def finish(self) -> list[str]: ...


class _Map:
    """Every token by itself; the very first one may be treated differently."""

    def __init__(self, first: Callable[[str], str], rest: Callable[[str], str]) -> None:
        self.change, self.rest = first, rest

    def push(self, tokens: Iterable[str]) -> list[str]:
        out = []
        for token in tokens:
            out.append(self.change(token))
            self.change = self.rest
        return out

    def finish(self) -> list[str]:
        return []


class _ByteLevel:
    """Characters of the byte alphabet back to bytes, bytes to text; an unfinished character is held back."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[str]) -> list[str]:
        return [self.decoder.decode(b"".join(self._bytes(token) for token in tokens))]

    def _bytes(self, token: str) -> bytes:
        try:
            return bytes([BYTE_OF[char] for char in token])
        except KeyError:  # an added token, spelled as text
            return token.encode()

    def finish(self) -> list[str]:
        return [self.decoder.decode(b"", final=True)]


class _ByteFallback:
    """Runs of `<0xNN>` tokens to text. A run that is not UTF-8 as a whole becomes one U+FFFD a byte.

    So a run is held back until it ends, or until it is past repair.
    """

    def __init__(self) -> None:
        self._start_run()

    def _start_run(self) -> None:
        self.decoder: codecs.IncrementalDecoder | None = codecs.getincrementaldecoder("utf-8")("strict")
        self.text, self.bytes = "", 0

    def push(self, tokens: Iterable[str]) -> list[str]:
        out: list[str] = []
        for token in tokens:
            byte = _fallback_byte(token)
            out += [*self.finish(), token] if byte is None else [self._extend(bytes([byte]))]
        return out

    def _extend(self, byte: bytes) -> str:
        """One more byte; text only once the run is known to be broken (`decoder` is None)."""
        if self.decoder is None:
            return "\ufffd"
        self.bytes += 1
        try:
            self.text += self.decoder.decode(byte)
        except UnicodeDecodeError:
            self.decoder = None
            return "\ufffd" * self.bytes
        return ""

    def finish(self) -> list[str]:
        decoder, text, count = self.decoder, self.text, self.bytes
        self._start_run()
        if decoder is None:
            return []
        try:
            return [text + decoder.decode(b"", final=True)] if count else []
        except UnicodeDecodeError:
            return ["\ufffd" * count]


class _StripStart:
    """Drop up to `count` leading `char`s of the text as a whole (after `Fuse`)."""

    def __init__(self, char: str, count: int) -> None:
        self.char, self.left = char, count

    def push(self, tokens: Iterable[str]) -> list[str]:
        text = "".join(tokens)
        while text and self.left:
            if text[0] != self.char:
                self.left = 0
            else:
                text, self.left = text[1:], self.left - 1
        return [text]

    def finish(self) -> list[str]:
        return []


class Detokenizer:
    """Text of one sequence of token ids, handed out as soon as it is final.

    Args:
        piece: id → token text, None for ids without text (special tokens, padding rows).
        decoder: the `decoder` of a `tokenizer.json`, or None for one that joins tokens with spaces.

    Raises:
        ValueError: a decoder that cannot be replayed; the message lists those that can.
    """

    def __init__(self, piece: Callable[[int], str | None], decoder: Mapping[str, Any] | None) -> None:
        self.piece, self.stages = piece, _stages(decoder)

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids make final; an unfinished character or byte run stays for later."""
        tokens = [token for token in map(self.piece, ids) if token is not None]
        for stage in self.stages:
            tokens = stage.push(tokens)
        return "".join(tokens)

    def finish(self) -> str:
        """What is still held back; a character cut short becomes U+FFFD, as in a full decode."""
        tokens: list[str] = []
        for stage in self.stages:
            tokens = [*stage.push(tokens), *stage.finish()]
        return "".join(tokens)


def _stages(decoder: Mapping[str, Any] | None) -> list[_Stage]:
    if decoder is None:
        return [_Map(lambda token: token, lambda token: f" {token}")]
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    stages, fused = [], False
    for part in parts:
        stages += _stage(part, fused)
        fused = fused or part["type"] in ("Fuse", "ByteLevel")
    return stages


def _stage(part: Mapping[str, Any], fused: bool) -> list[_Stage]:
    """The stage of one decoder; `fused` = the tokens before it are one text already."""
    kind = part["type"]
    if kind == "Fuse":
        return []
    if kind == "ByteLevel" and not fused:
        return [_ByteLevel()]
    if kind == "ByteFallback" and not fused:
        return [_ByteFallback()]
    if kind == "Strip" and fused and part["stop"] == 0:
        return [_StripStart(part["content"], part["start"])]
    if kind == "Replace" and (old := part["pattern"].get("String")) and (len(old) == 1 or not fused):
        new = part["content"]
        return [_Map(lambda token: token.replace(old, new), lambda token: token.replace(old, new))]
    if kind == "Metaspace" and not fused:
        mark = part["replacement"]
        first = " " if part["prepend_scheme"] == "never" else ""
        return [_Map(lambda token: token.replace(mark, first), lambda token: token.replace(mark, " "))]
    raise ValueError(
        f"the tokenizer's decoder {dict(part)} cannot be streamed; supported: ByteLevel, ByteFallback, "
        "Metaspace, Replace of a string, Fuse, and Strip at the start after Fuse"
    )


def _fallback_byte(token: str) -> int | None:
    match = _BYTE_TOKEN.fullmatch(token) if len(token) == 6 else None
    return int(match[1], 16) if match else None
