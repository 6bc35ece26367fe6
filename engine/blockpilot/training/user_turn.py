"""Where a chat template puts the user's words, so that the target can go on with them itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockpilot.text import Tokenizer

# Messages that share neither their first nor their last letters: what all have in common is the template's.
_MARKERS = ("alpha", "Seven 7", "(x) = 2", "Bridge over.")
_INSTEAD = "take prompts of --source own or of a file"


@dataclass(frozen=True)
class UserTurn:
    """Ids around the words of a first user turn.

    Attributes:
        start: ids before the words, a system prompt included. gap: blanks after them.
        end: ids from the control token that ends the turn up to where the answer begins.
    """

    tokenizer: Tokenizer
    start: tuple[int, ...]
    gap: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The control token that ends the turn."""
        return self.end[0]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> UserTurn:
        """The turn as the tokenizer's template writes it, found by rendering messages that differ.

        Raises:
            ValueError: no template, one that changes the words, or one without an end-of-turn token.
        """
        if not tokenizer.has_chat_template:
            raise ValueError(
                f"source: prompts made by the target need a chat template, this model has none; {_INSTEAD}"
            )
        turns = [_ids(tokenizer, marker) for marker in _MARKERS]
        start = min((_common(turns[0], t) for t in turns[1:]), key=len)
        end = min((_common(turns[0][::-1], t[::-1]) for t in turns[1:]), key=len)[::-1]
        for marker, turn in zip(_MARKERS, turns, strict=True):
            words = tokenizer.decode(turn[len(start) : len(turn) - len(end)])
            if words.strip() != marker:
                raise ValueError(
                    f"source: expected a chat template that keeps the user's words together, got {words!r} for "
                    f"{marker!r}; {_INSTEAD}"
                )
        stop = next((i for i, t in enumerate(end) if tokenizer.is_control(t)), None)
        if stop is None or tokenizer.decode(end[:stop]).strip():
            raise ValueError(
                "source: expected a chat template that ends the user's turn with a control token, got "
                f"{tokenizer.decode(end)!r}; {_INSTEAD}"
            )
        return cls(tokenizer, tuple(start), tuple(end[:stop]), tuple(end[stop:]))

    def open(self, opening: str) -> list[int]:
        """Ids of a turn that begins with these words and has not ended."""
        if not opening.strip():
            return list(self.start)
        ids = _ids(self.tokenizer, opening)
        cut = len(ids) - len(self.end)
        if tuple(ids[cut:]) != self.end:
            raise ValueError(f"source: the chat template ends the turn {opening!r} unlike others; {_INSTEAD}")
        # Blanks may have become one token with the end of the words; those stay.
        blanks = len(self.gap) if tuple(ids[:cut][-len(self.gap) or cut :]) == self.gap else 0
        return ids[: cut - blanks]

    def words(self, ids: Sequence[int]) -> str:
        """Text of the user's words in the ids of a turn, blanks around it removed."""
        return self.tokenizer.decode(ids[len(_common(self.start, ids)) :]).strip()


def _ids(tokenizer: Tokenizer, words: str) -> list[int]:
    return tokenizer.encode_prompt([{"role": "user", "content": words}])


def _common(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """The longest common beginning."""
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return list(a[:n])
