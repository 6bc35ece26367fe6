"""How many kernels a step starts on the Triton backend: each costs microseconds, whatever it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blockpilot.plan import StepPlan
from blockpilot.state import State
from blockpilot.step import commit_choices
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.targets.layers import DecoderLayer
from blockpilot.targets.torch_target import TorchTarget
from blockpilot_kernels import dispatch
from tests.kernels.conftest import INTERPRETED, missing
from tests.tiny import save_target

CAPACITY = 640  # more keys than one program of attention takes
ALLOCATIONS = ("aten::empty", "aten::new_empty")


class Launches(TorchDispatchMode):
    """Counts Triton's kernels and PyTorch's, by name; views and allocations start none."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if not (self.inside or view or schema.name.startswith(ALLOCATIONS)):
            self.seen[schema.name] += 1
        return func(*args, **(kwargs or {}))

    def triton(self, name: str, run: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen[name] += 1
        self.inside = True  # what the interpreter does itself
        try:
            return run(*args, **kwargs)
        finally:
            self.inside = False


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    if reason := missing("triton"):
        pytest.skip(f"triton: {reason}")
    if not INTERPRETED:
        pytest.skip("triton: kernels are counted in the interpreter")
    from triton.runtime.interpreter import GridExecutor

    counted, run = Launches(), GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return counted.triton(self.fn.__name__, run, self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", call)
    with dispatch.forced("triton"):
        yield counted


@pytest.mark.parametrize("path", [False, True])
def test_a_layer_starts_ten_kernels_at_most(tmp_path, launches, monkeypatch, path):
    """Qwen3's layer, with norms of queries and keys, over several chunks of keys."""
    target = TorchTarget(load_checkpoint(save_target(tmp_path, "qwen3")), 1, CAPACITY, torch.bfloat16)
    plan = StepPlan((0,), (4,), 1, CAPACITY, target.device, trees=(4,) if path else None)
    rows, start = plan.rows, torch.full((plan.rows.padded,), 600)
    place = (start[:, None] + torch.arange(4)) if path else None
    layers: list[Counter[str]] = []
    forward = DecoderLayer.forward

    def counting(*args: Any) -> tuple[Tensor, Tensor]:
        before = Counter(launches.seen)
        found = forward(*args)
        layers.append(launches.seen - before)
        return found

    monkeypatch.setattr(DecoderLayer, "forward", counting)
    rows.tiles(target.shape.groups, apart=path)
    extent, exists = torch.full((2,), 604), rows.slot == 0
    with torch.inference_mode(), launches:
        target.verify(rows, rows.every, start + rows.column, exists, extent, CAPACITY, place)
    once = ("append_kernel", "attend_kernel", "combine_kernel", "swiglu_kernel")
    expected = {**dict.fromkeys(once, 1), "linear_kernel": 4, "residual_norm_kernel": 2}
    assert layers == [Counter(expected)] * target.config.num_layers
    assert layers[0].total() == 10


def test_acceptance_and_commit_are_one_kernel(launches):
    state = State.allocate(3, 64, 8, 4, "cpu")
    with torch.inference_mode(), launches:
        commit_choices(state)
    assert launches.seen == {"accept_commit_kernel": 1}


def test_a_count_can_be_wrong(launches):
    with launches:
        torch.zeros(3) + 1
        torch.zeros(3).view(3, 1)
    assert launches.seen.total() > 1
