"""What was learned, kept between starts in one safetensors file: the weights, and as JSON what decisions rest on.

No text of a request is in it: feedback is gathered anew.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockpilot.adapt.bandit import ARMS, Bandit
from blockpilot.adapt.learner import Learner
from blockpilot.adapt.pulse import Pulse
from blockpilot.policies.atomic import replacing

if TYPE_CHECKING:
    from blockpilot.adapt.adapter import Adapter

FORMAT = 1


def save(adapter: Adapter, path: Path) -> None:
    """Write the state, with no update under way; the file appears whole or not at all."""
    tensors = _tensors(adapter.learner)
    with replacing(path) as temporary:
        text = json.dumps(_known(adapter))
        save_file(tensors, temporary, metadata={"state": text, "seal": _seal(text, tensors)})


def restore(adapter: Adapter, path: Path) -> None:
    """Go on from a `save`.

    Raises:
        ValueError: a damaged file, or one of another drafter.
    """
    try:
        known, tensors = _read(path)
        _check_known(known, _known(adapter))
        bandit, pulse = Bandit.from_dict(known["bandit"]), Pulse.from_dict(known["pulse"])
        for arm in bandit.arms.values():
            np.linalg.cholesky(arm.precision)
    except (SafetensorError, ValueError, OSError) as error:
        raise _damaged(path, error) from error
    if known["drafter"] != adapter.drafter.fingerprint:
        raise ValueError(
            f"{path}: expected the state of drafter {adapter.drafter.fingerprint[:12]}, found that of "
            f"{known['drafter'][:12]}; name another file for this drafter"
        )
    untouched = not known["changed"] and tensors.keys() == _tensors(None).keys()
    learner = None if untouched else _learner(adapter, tensors, path)
    adapter.bandit, adapter.pulse, adapter.learner = bandit, pulse, learner
    adapter.counts, adapter.seconds = Counter(known["counts"]), known["seconds"]
    if known["changed"]:
        adapter.install(known["changed"])


def _damaged(path: Path, found: object) -> ValueError:
    return ValueError(f"{path}: expected what adapting saved, found {found}; delete the file to begin again")


def _known(adapter: Adapter) -> dict[str, Any]:
    return {
        "drafter": adapter.drafter.fingerprint,
        "changed": adapter.changed,
        "bandit": adapter.bandit.to_dict(),
        "pulse": adapter.pulse.to_dict(),
        "counts": dict(adapter.counts),
        "seconds": adapter.seconds,
    }


def _check_known(found: Any, fresh: dict[str, Any]) -> None:
    """ValueError unless `found` has the fields and kinds of values that a fresh adapter would save."""
    counts = found.get("counts") if isinstance(found, dict) else None
    if isinstance(counts, dict):  # it has what happened, a fresh one nothing
        fresh = {**fresh, "counts": dict.fromkeys(counts, 0)}
    _check("state", found, fresh)
    if found["changed"] not in ("", *ARMS):
        raise ValueError(f"state.changed {found['changed']!r} in place of '' or one of {', '.join(ARMS)}")


def _check(name: str, found: Any, like: Any) -> None:
    """ValueError unless both have the same kind, keys and lengths all the way down; None stands for any number."""
    if isinstance(like, (dict, list)) and type(found) is type(like):
        keys, expected = (sorted(x) if isinstance(x, dict) else list(range(len(x))) for x in (found, like))
        if keys != expected:
            raise ValueError(f"{name} of {keys} in place of {expected}")
        for key in expected:
            _check(f"{name}.{key}", found[key], like[key])
        return
    kinds = {float: (int, float), type(None): (int, float, type(None))}.get(type(like), (type(like),))
    finite = type(found) not in (int, float) or abs(found) < 2**63
    if type(found) not in kinds or not finite:
        raise ValueError(f"{name} {found!r} in place of a value such as {like!r}")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    text, tensors = metadata.get("state", ""), load_file(path)
    if metadata.get("seal") != _seal(text, tensors):
        raise ValueError("contents that its seal is not of")
    return json.loads(text), tensors


def _seal(text: str, tensors: dict[str, Tensor]) -> str:
    """Hex SHA-256 of everything in a file and of its format: what fits it is what `save` wrote."""
    digest = hashlib.sha256(f"{FORMAT} {text}".encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors(learner: Learner | None) -> dict[str, Tensor]:
    made = {"format": torch.tensor(FORMAT)}  # a file has at least one
    if learner is not None:
        named = learner.model.named_parameters(prefix="weight")
        made |= {name: p.detach().cpu().clone().contiguous() for name, p in named}
        made |= {"scale": learner.model.scale.cpu(), "generator": learner.generator.get_state()}
    return made


@torch.inference_mode(False)
def _learner(adapter: Adapter, tensors: dict[str, Tensor], path: Path) -> Learner:
    made = adapter.twin(torch.ones(len(adapter.drafter.feature_layers)))
    try:
        _check_tensors(tensors, _tensors(made))
        made.generator.set_state(tensors["generator"])
    except (ValueError, RuntimeError) as error:
        raise _damaged(path, error) from error
    with torch.no_grad():
        for name, value in (*made.model.named_parameters(prefix="weight"), ("scale", made.model.scale)):
            value.copy_(tensors[name])
    return made


def _check_tensors(found: dict[str, Tensor], like: dict[str, Tensor]) -> None:
    """ValueError unless both have the same names, shapes and dtypes, and `found` is finite."""
    if found.keys() != like.keys():
        lacking, more = sorted(like.keys() - found.keys()), sorted(found.keys() - like.keys())
        raise ValueError(f"tensors without {lacking} and with {more} beside those it needs")
    for name, tensor in found.items():
        shapes = [f"{x.dtype} {list(x.shape)}" for x in (tensor, like[name])]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{name} {shapes[0]} in place of {shapes[1]}")
        if not tensor.isfinite().all():
            raise ValueError(f"{name} with values that are not finite")
