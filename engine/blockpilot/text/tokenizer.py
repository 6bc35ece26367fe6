"""Text to token ids and back, whatever file the tokenizer came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend

from blockpilot.targets.stored import CheckpointError
from blockpilot.text.chat import ChatTemplate, Message, checked, map_strings
from blockpilot.text.control import ControlTwin
from blockpilot.text.detokenizer import Detokenizer
from blockpilot.text.sources import TokenizerParts, from_folder, from_gguf

if TYPE_CHECKING:
    from blockpilot.targets.checkpoint import Checkpoint


class Tokenizer:
    """A model's tokenizer and chat template; made by `load_tokenizer`.

    Control tokens come only from the chat template and the BOS rule. Text that spells one is encoded as
    ordinary text (`control.py`).

    Args:
        parts: from a folder or a GGUF file.
        eos_token_ids, bos_token_id: what the model's config declares.

    Attributes:
        vocab_size: highest id + 1; a target may have more rows, as padding.
        eos_token_ids: union of the ids that config, generation config and tokenizer declare.
        fingerprint: SHA-256 of the (id, token) table: equal for equal vocabularies from whatever files.
        template_fingerprint: SHA-256 of the chat template's source, or None.
    """

    def __init__(
        self, parts: TokenizerParts, eos_token_ids: Sequence[int] = (), bos_token_id: int | None = None
    ) -> None:
        self._backend = backend = parts.backend
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        added = backend.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        # Some models store runs of whitespace as added tokens; those are text.
        self._control = {i: token.content for i, token in added.items() if token.content.strip()}
        self._twin: ControlTwin | None = None
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.fingerprint = _fingerprint(vocabulary)
        eos, bos = (vocabulary.get(parts.special.get(name, "")) for name in ("eos_token", "bos_token"))
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *([] if eos is None else [eos])]))
        self.bos_token_id: int | None = bos_token_id if bos is None else bos
        self._prefix = list(parts.prefix)
        self._template = ChatTemplate(parts.template, parts.special) if parts.template else None
        self.template_fingerprint = (
            hashlib.sha256(parts.template.encode()).hexdigest() if parts.template else None
        )
        state = backend.decoder.__getstate__() if backend.decoder is not None else None
        self._decoder: Mapping[str, Any] | None = json.loads(state) if state else None
        self.detokenizer()  # refuses a decoder that cannot be streamed, now and not at the first token

    @property
    def has_chat_template(self) -> bool:
        """Whether string prompts are chat turns; without a template they are raw text."""
        return self._template is not None

    def is_control(self, token_id: int) -> bool:
        """Whether an id is one that no text spells: a special token or another added one that is no blank."""
        return token_id in self._control

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text: no BOS, and control tokens that the text spells out are text."""
        ids = _ids(self._backend, text)
        if self._control.keys().isdisjoint(ids):
            return ids
        return _ids(self._twin_for([text]).backend, text)

    def encode_prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        """Ids of a prompt, up to where the answer begins.

        Args:
            prompt: a string (one user turn through the chat template; BOS rule and raw text where the model
                has no template) or chat messages, oldest first.

        Raises:
            ValueError: messages for a model without a template, or messages the template refuses.
        """
        if isinstance(prompt, str):
            if self._template is None:
                return [*self._prefix, *self.encode(prompt)]
            prompt = [{"role": "user", "content": prompt}]
        if self._template is None:
            raise ValueError("this model has no chat template: pass the prompt as a string or as token ids")
        return self._chat_ids(self._template, checked(prompt))

    def unused_control(self, used: Collection[int]) -> int:
        """The lowest control token that is no BOS or EOS and not among `used`: a mask for drafters.

        Raises:
            ValueError: there is none.
        """
        taken = {*used, *self.eos_token_ids, self.bos_token_id}
        free = sorted(self._special.keys() - taken)
        if not free:
            raise ValueError(
                "every control token of this tokenizer is in use; name the id that stands for a mask"
            )
        return free[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens and ids beyond the vocabulary have none."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def detokenizer(self) -> Detokenizer:
        """A fresh stream; its joined pieces equal `decode` of all its ids."""
        return Detokenizer(self._piece, self._decoder)

    def _piece(self, token: int) -> str | None:
        return None if token in self._special else self._backend.id_to_token(token)

    def _chat_ids(self, template: ChatTemplate, messages: list[dict[str, Any]]) -> list[int]:
        texts = list(_strings(messages))
        if all(self._control.keys().isdisjoint(_ids(self._backend, text)) for text in texts):
            return _ids(self._backend, template.render(messages))
        twin = self._twin_for(texts)
        control = set(self._control.values())
        # A model writes markers such as <think> itself: in its own turns only special tokens are text.
        own = control & set(self._special.values())
        hidden = [
            map_strings(
                message, partial(twin.hide, literals=own if message["role"] == "assistant" else control)
            )
            for message in messages
        ]
        return _ids(twin.backend, twin.reveal(template.render(hidden)))

    def _twin_for(self, texts: Sequence[str]) -> ControlTwin:
        """The twin, made on first need, under a key that none of the texts contains."""
        while self._twin is None or any(self._twin.key in text for text in texts):
            self._twin = ControlTwin(self._backend, self._control)
        return self._twin


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a loaded target.

    Raises:
        CheckpointError: none in the checkpoint, an unsupported kind, or more tokens than the target has rows.
        ValueError: a chat template that does not compile, or a decoder that cannot be streamed.
    """
    source, config = checkpoint.tokenizer_source, checkpoint.config
    parts = from_folder(source) if isinstance(source, Path) else from_gguf(source)
    tokenizer = Tokenizer(parts, config.eos_token_ids, config.bos_token_id)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{checkpoint.path}: expected a tokenizer of at most {config.vocab_size} tokens, the target's "
            f"rows, found {tokenizer.vocab_size}; it belongs to another model"
        )
    return tokenizer


def _ids(backend: Backend, text: str) -> list[int]:
    return list(backend.encode(text, add_special_tokens=False).ids)


def _fingerprint(vocabulary: Mapping[str, int]) -> str:
    table = sorted((token_id, token) for token, token_id in vocabulary.items())
    return hashlib.sha256("".join(f"{i}\0{token}\n" for i, token in table).encode()).hexdigest()


def _strings(value: Any) -> Iterator[str]:
    """Every string in nested lists and dictionaries, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
