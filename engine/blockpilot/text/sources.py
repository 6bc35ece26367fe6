"""Where a tokenizer comes from: a Hugging Face folder or the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from blockpilot.targets.stored import CheckpointError, read_json
from blockpilot.text.gguf_vocab import adds_bos, build_backend

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TokenizerParts:
    """What a model's files say about its tokenizer.

    Attributes:
        special: `bos_token`, `eos_token`, … → literal. template: Jinja source of the chat template, or None.
        prefix: ids put before a raw prompt (BOS, or nothing).
    """

    backend: Backend
    special: Mapping[str, str]
    template: str | None
    prefix: tuple[int, ...]


def from_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """The tokenizer in the `tokenizer.*` metadata of a GGUF file.

    Raises:
        CheckpointError: a kind of vocabulary that is not supported.
    """
    backend = build_backend(metadata)
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    special = {
        name: text
        for name, i in ids.items()
        if isinstance(i, int) and i >= 0 and (text := backend.id_to_token(i)) is not None
    }
    bos = ids["bos_token"] if "bos_token" in special and adds_bos(metadata) else None
    template = metadata.get("tokenizer.chat_template")
    return TokenizerParts(backend, special, template, () if bos is None else (bos,))


def from_folder(folder: Path) -> TokenizerParts:
    """The tokenizer in a folder's `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

    As in transformers, the post-processor of `tokenizer.json` says which ids a raw prompt begins with, and a
    template file wins over one in the configuration.

    Raises:
        CheckpointError: no `tokenizer.json`, or a damaged one.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: expected tokenizer.json, the only tokenizer format that is read; "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one"
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises plain exceptions, straight from Rust
        raise CheckpointError(f"{path}: expected a tokenizer.json, found {error}") from error
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            settings.update(read_json(folder / name))
    special = {name: text for name in _NAMED if (text := _literal(settings.get(name))) is not None}
    _add_declared(backend, settings, special, folder)
    return TokenizerParts(backend, special, _template(folder, settings), _prefix(backend))


def _literal(value: Any) -> str | None:
    """A special token is written as a string or as a dictionary with its content."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) and value else None


def _add_declared(
    backend: Backend, settings: Mapping[str, Any], special: Mapping[str, str], folder: Path
) -> None:
    """Tokens that the configuration declares and `tokenizer.json` does not mark as added."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = settings.get("added_tokens_decoder") or {}
    for token_id, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        if (content := entry["content"]) not in known:
            flags = {flag: bool(entry[flag]) for flag in _FLAGS if flag in entry}
            backend.add_tokens([AddedToken(content, **flags)])
            if backend.token_to_id(content) != int(token_id):
                raise CheckpointError(
                    f"{folder}: token {content!r}: expected id {token_id} from tokenizer_config.json, found "
                    f"{backend.token_to_id(content)}"
                )
    listed = [
        _literal(item) for key in _LISTED if isinstance(settings.get(key), list) for item in settings[key]
    ]
    known |= {entry["content"] for entry in declared.values()}
    for text in dict.fromkeys([*special.values(), *listed]):
        if text is not None and text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    for name in ("chat_template.jinja", "chat_template.json"):
        if (folder / name).is_file():
            path = folder / name
            return path.read_text(encoding="utf-8") if name.endswith("jinja") else _default(read_json(path))
    return _default(settings)


def _default(settings: Mapping[str, Any]) -> str | None:
    """A template is a string, or a list of named ones of which "default" is the plain chat."""
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _prefix(backend: Backend) -> tuple[int, ...]:
    """What the post-processor puts before a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    starts = (k for k in range(len(full)) if full[k : k + len(plain)] == plain)
    return tuple(full[: next(starts, 0)])
