"""Errors a caller may want to catch by name. User mistakes are `ValueError`s."""

from __future__ import annotations


class BlockPilotError(Exception):
    """Base of every error this library defines."""


class NonFiniteLogitsError(BlockPilotError, ArithmeticError):
    """The target produced NaN or infinite logits for this request; its neighbours are unaffected."""


class QueueFullError(BlockPilotError, RuntimeError):
    """`submit` was called with `max_queue` requests already waiting."""


class EngineClosedError(BlockPilotError, RuntimeError):
    """The engine was used after `close()`."""


class MemoryLimitError(BlockPilotError, ValueError):
    """What was asked for does not fit into the device's memory."""


class TrainingDivergedError(BlockPilotError, ArithmeticError):
    """A loss is no longer a finite number; what was saved before is unharmed."""
