"""What a drafter was built for, and that it is not used for more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blockpilot.targets import Target


@dataclass(frozen=True)
class Room:
    """The target a drafter was built on, by its embedding, and the requests and positions that its cache has."""

    embedding: Any
    requests: int
    positions: int

    def check(self, target: Target, max_requests: int) -> None:
        """Refuse another target, or more room than there is.

        Raises:
            ValueError: what was built and what is asked for.
        """
        if target.embedding is not self.embedding:
            raise ValueError("drafter: it was built on another target; build it on the one it is used with")
        if self.requests < max_requests or self.positions < target.capacity:
            raise ValueError(
                f"drafter: expected room for {max_requests} requests of {target.capacity} positions, "
                f"got one built for {self.requests} of {self.positions}"
            )
