"""Policies choose each request's block width."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from blockpilot.policies.contract import (
    BlockPolicy,
    Fixed,
    Pair,
    check_node_cost,
    check_trees,
    check_window,
    trees_of,
)

__all__ = ["BlockPolicy", "Fixed", "Pair", "check_window", "load_policy", "parse_fixed"]

_SPELT = re.compile(r"([0-9]+)(?:/([0-9]+)(?:@(.+))?)?")


class Spelt(NamedTuple):
    """A fixed shape as it is written: N, N/M for trees of M nodes, N/M@FILE with the calibration that cuts them."""

    width: int
    tree: int | None
    costs: str | None


def parse_fixed(text: str) -> Spelt | None:
    """The fixed shape that `text` spells, whatever its numbers; None for any other text."""
    if (found := _SPELT.fullmatch(text)) is None:
        return None
    tree = None if found[2] is None else int(found[2])
    return Spelt(int(found[1]), tree, found[3])


def load_policy(
    source: str | Path | int | BlockPolicy,
    target: str,
    drafter: str,
    widths: Sequence[int],
    largest_tree: int = 0,
) -> BlockPolicy:
    """The policy that `source` names, checked against the pair it is to steer.

    Args:
        source: "bundled" (the policy that ships), "predictor" (the predictor that ships), a policy file, a fixed
            width (int or decimal text), a width and a tree's nodes, as "6/16", the same cut by the costs of a
            calibration, as "6/16@costs.json", or a policy object.
        target, drafter: fingerprints of the loaded pair.
        widths: what the drafter can draft; width 1 never drafts and is always allowed.
        largest_tree: nodes of its largest tree.

    Raises:
        ValueError: the file is missing or malformed, was made for another pair, or chooses a width that the
            drafter cannot draft.
    """
    spelt = parse_fixed(str(source)) if isinstance(source, (str, Path, int)) else None
    known = isinstance(source, (str, Path, BlockPolicy)) or spelt is not None
    if not known or (spelt and 0 in spelt):
        raise ValueError(
            "policy: expected 'bundled', 'predictor', a policy file, a width of at least 1, a width and a tree's "
            f"nodes, as in '6/16', or a BlockPolicy, got {source!r}"
        )
    policy: BlockPolicy
    if isinstance(source, BlockPolicy):
        policy = source
    elif spelt is not None:
        policy = _fixed(spelt, Pair(target, drafter))
    else:
        assert not isinstance(source, int)  # every number was spelt
        policy = _from_file(source, Pair(target, drafter))
    _check_shapes(policy, repr(source), widths, largest_tree)
    return policy


def _check_shapes(policy: BlockPolicy, name: str, widths: Sequence[int], largest_tree: int) -> None:
    """Refuse widths and trees that the drafter does not draft."""
    window = check_window(policy.window)
    trees = check_trees(getattr(policy, "trees", {}), window)
    most = max(trees.values(), default=0)
    if most > largest_tree:
        raise ValueError(
            f"policy {name}: expected trees of at most {largest_tree} nodes, as they are drafted here, got {most}; "
            "use fewer nodes or a chain"
        )
    cost = getattr(policy, "node_cost", None)
    if cost is not None and check_node_cost(cost) != cost:
        raise ValueError(f"policy {name}: node_cost: expected a tuple, got {cost!r}")
    outside = [w for w in window if w != 1 and w not in widths]
    if outside:
        raise ValueError(
            f"policy {name}: expected widths that are drafted here, {_span(widths)}, got {outside}; use one of these, "
            "another policy or another drafter"
        )


def _fixed(spelt: Spelt, pair: Pair) -> Fixed:
    width, tree = spelt.width, spelt.tree or 0
    if spelt.costs is None:
        return Fixed(width, tree)
    from blockpilot.training.calibration import Calibration

    measured = Calibration.load(spelt.costs)
    measured.check_pair(pair.target, pair.drafter)
    return Fixed(width, tree, measured.node_cost(width, tree))


def _from_file(source: str | Path, pair: Pair) -> BlockPolicy:
    from blockpilot.policies.policy_file import read_policy

    path, ships = Path(source), source in ("bundled", "predictor")
    if ships:
        from blockpilot import bundled

        path = bundled.policy_path() if source == "bundled" else bundled.predictor_path()
    loaded = read_policy(path)
    if loaded.pair != pair:
        raise ValueError(
            f"{path}: expected a policy made for {pair}, got one made for {loaded.pair}; make one for this "
            "pair with `blockpilot label` and `blockpilot train-policy`, or pass a fixed width"
            + (f"; {source!r} is for target 'smollm2' with drafter 'bundled+lookup'" if ships else "")
        )
    if source == "predictor" and isinstance(loaded.policy, Fixed):
        raise ValueError(
            f"policy 'predictor': {path} is {loaded.policy!r} and no predictor ships with this installation; "
            "train one with `blockpilot train-policy` and pass its file"
        )
    labels = loaded.training.get("labels")
    labels = labels if isinstance(labels, dict) else {}
    loaded.policy.sampled = _sampled(labels)
    try:
        loaded.policy.trees = {**loaded.policy.trees, **trees_of(labels, loaded.policy.window)}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: training labels: {error}") from error
    return loaded.policy


def _sampled(labels: dict[str, Any]) -> bool | None:
    """Whether the labels a policy was fitted to came from sampled answers; None if its file does not say."""
    temperature = labels.get("temperature")
    return temperature > 0 if isinstance(temperature, (int, float)) else None


def _span(widths: Sequence[int]) -> str:
    ordered = sorted(set(widths))
    contiguous = len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1
    return f"{ordered[0]} to {ordered[-1]}" if contiguous else f"only {ordered}"
