"""Small work of a step stays on the thread that asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

_lock, _inside, _usual = Lock(), 0, 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread of the CPU: a team waits for its slowest member, long on a busy machine, and then spins for a
    while on the cores that the decoder's next pass needs, which is more than it saves such work.
    """
    global _inside, _usual
    with _lock:
        before = torch.get_num_threads()
        if _inside == 0:
            _usual = before
        elif before == 1:  # a thread that began meanwhile has the count of those inside, not its own
            before = _usual
        _inside += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            torch.set_num_threads(before)
