"""The tokenizer that a GGUF file's `tokenizer.*` metadata describes, built with the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from blockpilot.targets.stored import CheckpointError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "▁"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre → the pattern that splits text before the merges; None = GPT-2's own.
_PATTERNS: dict[str, str | None] = {
    "gpt-2": None,
    "default": None,
    "smollm": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
# Vocabularies whose entries are taken whole before any merge, and whose prompts begin with BOS by default.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")


def build_backend(metadata: Mapping[str, Any]) -> Backend:
    """A `tokenizers.Tokenizer` for the vocabulary.

    Args:
        metadata: the `tokenizer.*` entries of a GGUF file.

    Raises:
        CheckpointError: a kind of vocabulary or pre-tokenizer that is not supported (the message lists those
            that are), or an inconsistent token table.
    """
    tokens, kinds = _token_table(metadata)
    model = metadata.get("tokenizer.ggml.model")
    try:
        if model == "gpt2":
            backend = _byte_level(metadata, tokens)
        elif model == "llama":
            backend = _sentencepiece(metadata, tokens, kinds)
        else:
            raise CheckpointError(f"unsupported tokenizer.ggml.model {model!r}; supported: gpt2, llama")
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises plain exceptions, straight from Rust
        raise CheckpointError(f"the GGUF token table is not a BPE vocabulary: {error}") from error
    special = (_CONTROL, _UNKNOWN) if model == "llama" else (_CONTROL,)
    named = list(zip(tokens, kinds, strict=True))
    control = [AddedToken(t, normalized=False, special=True) for t, kind in named if kind in special]
    backend.add_special_tokens(control)
    backend.add_tokens([AddedToken(t, normalized=False) for t, kind in named if kind == _USER_DEFINED])
    return backend


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether a raw prompt begins with BOS: what the file says, else llama.cpp's rule for its vocabulary."""
    default = (
        metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    )
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def score_merges(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """The merges that make BPE join pairs as sentencepiece does: best score of the joined piece first.

    Pairs that join into one piece are ranked longest left part first, which is how a run of equal characters
    comes out when joined from the left.
    """
    score = {t: s for t, s, kind in zip(tokens, scores, kinds, strict=True) if kind == _NORMAL}
    pairs = [
        (-value, -cut, token[:cut], token[cut:])
        for token, value in score.items()
        for cut in range(1, len(token))
        if token[:cut] in score and token[cut:] in score
    ]
    pairs.sort(key=lambda pair: pair[:2])
    return [(left, right) for _, _, left, right in pairs]


def _token_table(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError("expected tokenizer.ggml.tokens, a list of strings, found no vocabulary")
    kinds = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise CheckpointError(f"expected one tokenizer.ggml.token_type for each of {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if token in tokens[:i])
        raise CheckpointError(f"the GGUF token table lists {twice!r} more than once")
    return tokens, kinds


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Backend:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PATTERNS:
        raise CheckpointError(
            f"unsupported tokenizer.ggml.pre {pre!r}; supported: {', '.join(_PATTERNS)}. A file without it "
            "was converted before it was recorded: convert the model again"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise CheckpointError("expected tokenizer.ggml.merges, a list of strings, for a gpt2 vocabulary")
    pairs = [_split_merge(merge) for merge in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Backend(BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in _WHOLE_WORDS))
    backend.pre_tokenizer = pre_tokenizers.Sequence(_splits(pre))
    backend.decoder = decoders.ByteLevel()
    if _PATTERNS[pre] is _QWEN2:
        backend.normalizer = normalizers.NFC()
    return backend


def _splits(pre: str) -> list[Any]:
    pattern = _PATTERNS[pre]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pre == "smollm":
        return [pre_tokenizers.Digits(individual_digits=True), bytes_only]
    if pattern is None:
        return [bytes_only]
    return [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), bytes_only]


def _split_merge(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)
    if cut < 0:
        raise CheckpointError(f"expected a merge of two parts, found {merge!r}")
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> Backend:
    """Metaspace BPE with byte fallback, a space put before every text between control tokens.

    That is llama.cpp's rule, and that of the `tokenizer.json` of Llama 2, TinyLlama and Mistral 0.1 and 0.2.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"expected one tokenizer.ggml.scores for each of {len(tokens)} tokens")
    byte_count = kinds.count(_BYTE)
    if byte_count not in (0, 256):
        raise CheckpointError(f"expected 256 byte tokens or none, found {byte_count}")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    unknown = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    model = BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=score_merges(tokens, scores, kinds),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=byte_count == 256,
    )
    backend = Backend(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = [normalizers.Replace(" ", _SPACE)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *replace] if prefix else replace)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend
