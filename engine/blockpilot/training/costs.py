"""Seconds of a step by width, from whatever they are given as."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from blockpilot.policies.contract import Pair
from blockpilot.policies.policy_file import check_cost
from blockpilot.training.calibration import Calibration

Cost = Mapping[int, float] | str | Path


def read_cost(
    cost: Cost, window: Sequence[int], pair: Pair, trees: Mapping[int, int] | None = None
) -> dict[int, float]:
    """Seconds by width, for every width of the window, and for plain decoding (1) where the source has it.

    Args:
        cost: a table, a JSON file of one, or a calibration of the pair, which is read at its smallest context and
            number of requests and always has plain decoding. trees: nodes by width of those that stand for trees.

    Raises:
        ValueError: the file is neither, another pair's, or lacks a width.
    """
    table = dict(cost) if isinstance(cost, Mapping) else _from_file(Path(cost), window, pair, trees or {})
    return check_cost(table, tuple(sorted({*window, *({1} & table.keys())})))


def _from_file(path: Path, window: Sequence[int], pair: Pair, trees: Mapping[int, int]) -> dict[int, float]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(table, dict) and "calibration" in table:
            measured = Calibration.load(path)
            measured.check_pair(pair.target, pair.drafter)
            context, requests = measured.contexts[0], measured.requests[0]
            chains = {1, *window} - set(trees)
            grown = {w: measured.node_cost(w, trees[w])[-1] for w in trees.keys() & set(window)}
            return {
                w: ms / 1000
                for w, ms in (grown | {w: measured.cost(w, context, requests) for w in chains}).items()
            }
        return {int(w): seconds for w, seconds in table.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: expected a JSON object of seconds by width, got {error}") from error
