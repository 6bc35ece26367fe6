"""Policies choose each request's block width."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockpilot.policies.contract import BlockPolicy, Fixed, Pair, check_window

__all__ = ["BlockPolicy", "Fixed", "Pair", "check_window", "load_policy"]


def load_policy(
    source: str | Path | int | BlockPolicy, target: str, drafter: str, widths: Sequence[int]
) -> BlockPolicy:
    """The policy that `source` names, checked against the pair it is to steer.

    Args:
        source: "bundled" (the policy that ships), "predictor" (the predictor that ships), a policy file, a fixed
            width (int or decimal text), or a policy object.
        target, drafter: fingerprints of the loaded pair.
        widths: what the drafter can draft; width 1 never drafts and is always allowed.

    Raises:
        ValueError: the file is missing or malformed, was made for another pair, or chooses a width that the
            drafter cannot draft.
    """
    if isinstance(source, bool) or not isinstance(source, (str, Path, int, BlockPolicy)):
        raise ValueError(
            f"policy: expected 'bundled', 'predictor', a policy file, a width or a BlockPolicy, got {source!r}"
        )
    policy: BlockPolicy
    if isinstance(source, (str, Path)):
        text = str(source)
        policy = Fixed(int(text)) if text.isdecimal() else _from_file(source, Pair(target, drafter))
    else:
        policy = Fixed(source) if isinstance(source, int) else source
    window = check_window(policy.window)
    outside = [w for w in window if w != 1 and w not in widths]
    if outside:
        raise ValueError(
            f"policy {source!r} chooses from widths {list(window)}, but drafter {drafter} drafts "
            f"{_span(widths)}: {outside} cannot be drafted; use another policy or a fixed width"
        )
    return policy


def _from_file(source: str | Path, pair: Pair) -> BlockPolicy:
    from blockpilot.policies.policy_file import read_policy

    source_name = source
    if source in ("bundled", "predictor"):
        from blockpilot import bundled

        source = bundled.policy_path() if source == "bundled" else bundled.predictor_path()
    loaded = read_policy(source)
    if loaded.pair != pair:
        ships = source != source_name
        raise ValueError(
            f"{source}: expected a policy made for {pair}, got one made for {loaded.pair}; make one for this "
            "pair with `blockpilot label` and `blockpilot train-policy`, or pass a fixed width"
            + (f"; {source_name!r} is for target 'smollm2' with drafter 'bundled+lookup'" if ships else "")
        )
    if source_name == "predictor" and isinstance(loaded.policy, Fixed):
        raise ValueError(
            f"policy 'predictor': {source} is {loaded.policy!r} and no predictor ships with this installation; "
            "train one with `blockpilot train-policy` and pass its file"
        )
    loaded.policy.sampled = _sampled(loaded.training)
    return loaded.policy


def _sampled(training: dict[str, Any]) -> bool | None:
    """Whether the labels a policy was fitted to came from sampled answers; None if its file does not say."""
    labels = training.get("labels")
    temperature = labels.get("temperature") if isinstance(labels, dict) else None
    return temperature > 0 if isinstance(temperature, (int, float)) else None


def _span(widths: Sequence[int]) -> str:
    ordered = sorted(set(widths))
    contiguous = len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1
    return f"{ordered[0]} to {ordered[-1]}" if contiguous else f"only {ordered}"
