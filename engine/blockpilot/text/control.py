"""Keeping control tokens out of reach of text that spells them.

A user who writes `<|im_end|>` must get those characters, not the token that ends a turn. Such text goes
through a twin of the tokenizer in which every control token is spelled with a random key: whatever the text
says, it cannot name one. Literals in chat messages are replaced by placeholders while the template runs;
afterwards the literals that the template wrote get their secret spelling and the placeholders become ordinary
text again, encoded in one piece with the text around them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any

from tokenizers import Tokenizer as Backend


class ControlTwin:
    """A copy of a tokenizer whose control tokens nothing but `reveal` can spell.

    Args:
        backend: the tokenizer. control: id → literal of its control tokens.

    Raises:
        ValueError: a vocabulary whose ids do not survive the renaming.

    Attributes:
        key: the random part of every secret spelling; texts must not contain it.
        backend: the copy.
    """

    def __init__(self, backend: Backend, control: Mapping[int, str]) -> None:
        self.key = f"bp{secrets.randbelow(10**20):020d}"
        self._order = sorted(control.values(), key=len, reverse=True)  # the longest wins, as in tokenizers
        self._index = {literal: i for i, literal in enumerate(self._order)}
        self._secret = {literal: f"{self.key}c{i}z" for literal, i in self._index.items()}
        spelled = "|".join(map(re.escape, self._order))
        self._spelled = re.compile(spelled)
        self._rendered = re.compile(rf"{self.key}x(\d+)z|{spelled}")
        self.backend = Backend.from_str(json.dumps(self._renamed(json.loads(backend.to_str()))))
        for token_id, literal in control.items():
            if self.backend.token_to_id(self._secret[literal]) != token_id:
                raise ValueError(
                    f"this tokenizer cannot keep text from spelling its control token {literal!r}"
                )

    def hide(self, text: str, literals: Collection[str]) -> str:
        """Replace these control literals by placeholders that stand for them as text."""

        def placeholder(match: re.Match[str]) -> str:
            return f"{self.key}x{self._index[match[0]]}z" if match[0] in literals else match[0]

        return self._spelled.sub(placeholder, text)

    def reveal(self, rendered: str) -> str:
        """Give control literals their secret spelling and turn placeholders back into literals."""

        def spelling(match: re.Match[str]) -> str:
            return self._secret[match[0]] if match[1] is None else self._order[int(match[1])]

        return self._rendered.sub(spelling, rendered)

    def _renamed(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The `tokenizer.json` with secret spellings and without merges that would build a control token."""
        secret = self._secret
        for token in spec["added_tokens"]:
            token["content"] = secret.get(token["content"], token["content"])
        model = spec["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {secret.get(token, token): i for token, i in model["vocab"].items()}
        else:
            model["vocab"] = [[secret.get(token, token), score] for token, score in model["vocab"]]
        if "merges" in model:
            pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
            model["merges"] = [[a, b] for a, b in pairs if secret.keys().isdisjoint((a, b, a + b))]
        if model.get("unk_token") in secret:
            model["unk_token"] = secret[model["unk_token"]]
        return {**spec, "post_processor": None}
