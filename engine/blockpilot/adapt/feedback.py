"""What serving teaches for nothing: the target's own tokens, and the features that it hands to the drafter anyway."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from blockpilot.request import Handle
from blockpilot.rows import Rows
from blockpilot.state import State
from blockpilot.training.draft_data import Answer

SPAN = 128  # answered tokens of a piece, and tokens before them that it sees
SHORTEST = 8  # answered tokens of an answer's last piece
PIECES = 32  # kept, the newest


class History:
    """The newest features of every slot: that of position p lies at p mod `room`.

    Its tensors are of the device and never move, so that a captured step writes to them too. Steps that are not
    captured write nothing while it is not `open`.

    Args:
        slots: of the engine. size: of a feature. ahead: positions that the device may be ahead of the host.

    Attributes:
        kept: [R + 1, room, n·H] float32. whole: slots whose requests began while it was open, and it has been since.
    """

    def __init__(self, slots: int, size: int, ahead: int, device: torch.device) -> None:
        self.room = 2 * SPAN + 2 * ahead
        self.kept = torch.zeros(slots + 1, self.room, size, dtype=torch.float32, device=device)
        self.whole: set[int] = set()
        self._always = device.type == "cuda"
        self._open = self._always

    @property
    def open(self) -> bool:
        """Whether features are kept."""
        return self._open

    @open.setter
    def open(self, wanted: bool) -> None:
        self._open = wanted or self._always
        if not self._open:
            self.whole.clear()

    @staticmethod
    def bytes_needed(slots: int, size: int, ahead: int) -> int:
        """Bytes of such a history."""
        return 4 * (slots + 1) * 2 * (SPAN + ahead) * size

    def begin(self, slot: int, features: Tensor) -> None:
        """Those of a prompt [P, n·H], as many as there is room for."""
        self.whole.discard(slot)
        if not self._open:
            return
        self.whole.add(slot)
        last = features[-self.room :]
        first = len(features) - len(last)
        place = torch.arange(first, len(features), device=last.device) % self.room
        self.kept[slot].index_copy_(0, place, last)

    def put(self, state: State, rows: Rows, features: Tensor) -> None:
        """Those [N, n·H] of a step's drafting rows; where `column` is not below `count`, the next step's come."""
        if not self._open:
            return
        if "history" not in rows.kept:
            rows.kept["history"] = rows.column - 1, rows.slot * self.room
        behind, base = rows.kept["history"]
        first = (state.length - state.count).index_select(0, rows.slot)
        place = first.add_(behind).remainder_(self.room).add_(base)
        self.kept.view(-1, self.kept.shape[2]).index_copy_(0, place, features)

    def read(self, slot: int, first: int, end: int) -> Tensor:
        """Of positions first … end − 1, at most 2 · `SPAN` of the newest, as bfloat16."""
        place = torch.arange(first, end, device=self.kept.device) % self.room
        return self.kept[slot].index_select(0, place).bfloat16()


class Feedback:
    """Pieces of answers, cut while they are made, as a drafter trains on them; the newest `PIECES`.

    Attributes:
        pieces: oldest first. rows: answered tokens of all pieces so far, those dropped since included.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.pieces: deque[Answer] = deque(maxlen=PIECES)
        self.rows = 0
        # Ids of a request that are its prompt or in pieces; weak, as one that is cancelled ends without a word here.
        self._cut: WeakKeyDictionary[Handle, int] = WeakKeyDictionary()

    def take(self, handles: Collection[Handle]) -> list[Answer]:
        """Cut what these drafting requests have said since; returns the pieces."""
        made = []
        for handle in handles:
            assert handle.slot is not None  # they were served just now
            if handle.slot not in self.history.whole:
                continue
            known = len(handle.prompt) + len(handle.token_ids)
            done = self._cut.get(handle, len(handle.prompt))
            if known - done >= (SHORTEST if handle.finished else SPAN):
                made.append(self._piece(handle, done, known))
                self._cut[handle] = known
        self.pieces.extend(made)
        self.rows += sum(len(p.ids) - p.start for p in made)
        return made

    def newest(self, rows: int) -> list[Answer]:
        """The pieces that the last `rows` answered tokens are in."""
        found: list[Answer] = []
        for piece in reversed(self.pieces):
            rows -= len(piece.ids) - piece.start
            if rows < 0:
                break
            found.insert(0, piece)
        return found

    def _piece(self, handle: Handle, done: int, known: int) -> Answer:
        first = max(0, known - 2 * SPAN)
        ids: Sequence[int] = [*handle.prompt, *handle.token_ids][first:known]
        assert handle.slot is not None
        features = self.history.read(handle.slot, first, known - 1)
        start = max(done - first, 1)
        # Which token the target chose, and no more: a fused step hands out no logits.
        nothing = torch.zeros(len(ids) - start, 1, dtype=torch.float32)
        return Answer(list(ids), start, features, nothing.long(), nothing)
