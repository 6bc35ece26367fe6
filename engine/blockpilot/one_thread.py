"""Small work of a step stays on the thread that asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread of the CPU: a team waits for its slowest member, long on a busy machine, and then spins for a
    while on the cores that the decoder's next pass needs, which is more than it saves such work.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
