"""Streaming the text of one request."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from blockpilot.output import Output
from blockpilot.request import Handle

if TYPE_CHECKING:
    from blockpilot.llm import LLM


class Stream:
    """Iterator over the text pieces of one request; joined they equal `Output.text`.

    Closing it, leaving its `with` block or dropping it early frees the request's slot.
    """

    def __init__(self, llm: LLM, handle: Handle) -> None:
        self._llm, self.handle, self._shown = llm, handle, 0

    @property
    def output(self) -> Output | None:
        """The finished output, once the iterator is exhausted or closed."""
        return self.handle.output

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while True:
            text = self.handle.text
            if len(text) > self._shown:
                piece, self._shown = text[self._shown :], len(text)
                return piece
            if self.handle.finished:
                raise StopIteration
            try:
                self._llm.step()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Stop early, keeping what was delivered."""
        self._llm.cancel(self.handle)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A finaliser may run anywhere, inside a step too: only leave a note.
        if not self.handle.finished:
            self._llm.abandon(self.handle)
