"""Whether answers on a device depend on anything but the request: a tiny pair through the library itself."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from blockpilot import LLM, Output, SamplingParams, recorders
from blockpilot.graphs import Graphs
from blockpilot_kernels import dispatch
from blockpilot_kernels.step_loop import loop_error
from device_setup import Setup

VOCAB = 48  # of the tests' tokenizer
BLOCK = 8
GREEDY = SamplingParams(max_new_tokens=48, ignore_eos=True)
MODES = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=1.5, seed=3),
    "filtered": replace(GREEDY, temperature=3.0, top_k=9, top_p=0.95, seed=5),
    "banned": replace(GREEDY, temperature=1.5, seed=7, stop_token_ids=(9, 12), min_new_tokens=6),
}
WIDTHS = (1, 2, 3, 5, 8, 12, 16)


@contextmanager
def tiny_pair(setup: Setup, dtype: str, slots: int) -> Iterator[LLM]:
    """A random target and a drafter that agrees with it now and then, with heads that tensor cores take."""
    tiny, pair = (import_module(f"tests.{name}") for name in ("tiny", "engine.pair"))
    with tempfile.TemporaryDirectory(prefix="tiny-") as folder, dispatch.forced(setup.models):
        target = tiny.save_target(Path(folder) / "target", "qwen3", vocab=VOCAB, head_dim=16, eos_token_id=1)
        pair.write_tokenizer(target)
        drafter = tiny.save_drafter(Path(folder) / "drafter", target, block_size=BLOCK)
        sizes: dict[str, Any] = {"max_requests": slots, "max_length": 128, "dtype": dtype}
        with LLM(target, drafter=drafter, device=setup.device.type, **sizes) as llm:
            if setup.dry:  # there are no graphs on a CPU; the recorder calls the step
                s = llm._scheduler
                s.graphs = Graphs(s.state, s.target, s.drafter, setup.recorder)
            yield llm


def compare(setup: Setup, dtype: str) -> dict[str, Any]:
    """`same` by what was changed, `seen`: accepted counts by width, and `complete`: widths where all occurred."""
    count = setup.size(8, 3)
    asked = [[3 + i, *((7 * i + j) % VOCAB for j in range(1 + 5 * i))] for i in range(count)]
    modes = list(MODES.values())
    budget = setup.size(48, 12)
    each = [replace(modes[i % 4], max_new_tokens=budget) for i in range(count)]
    with tiny_pair(setup, dtype, slots=4) as llm:
        alone = [_ids(llm.generate([p], replace(e, width=1))) for p, e in zip(asked, each, strict=True)]
        plain = [ids for (ids,) in alone]
        seen, widths_same = {}, True
        for width in setup.size(WIDTHS, (1, 4)):
            outputs = llm.generate(asked, [replace(e, width=width) for e in each])
            widths_same &= _ids(outputs) == plain
            seen[str(width)] = _accepted(outputs, width)
        mixed = [replace(e, width=WIDTHS[i % len(WIDTHS)]) for i, e in enumerate(each)]
        captured = _ids(llm.generate(asked, mixed))
        backwards = _ids(llm.generate(asked[::-1], mixed[::-1]))[::-1]  # other slots, other neighbours
        graphs, llm._scheduler.graphs = llm._scheduler.graphs, None
        single = _ids(llm.generate(asked, mixed))
        llm._scheduler.graphs = graphs
    same = {
        "graphs": captured == single,
        "widths": widths_same,
        "batch and slot": captured == backwards == plain,
    }
    complete = [width for width, counts in seen.items() if counts == list(range(int(width)))]
    return {"same": same, "seen": seen, "complete": complete, "launches": graphs is not None}


def loop_is_the_same(setup: Setup) -> dict[str, Any]:
    """Whether a loop on the device gives what repeating by the host does, stops in the middle of launches included."""
    if lacking := None if setup.dry else loop_error():
        return {"absent": lacking}
    asked = [[3 + i, 5] for i in range(setup.size(8, 2))]
    params = replace(MODES["banned"], min_new_tokens=1, max_new_tokens=setup.size(48, 12), width=4)
    with tiny_pair(setup, "bfloat16", slots=4) as llm:
        looped = _ids(llm.generate(asked, params))
        with by_the_host():
            s = llm._scheduler
            s.graphs = Graphs(s.state, s.target, s.drafter, setup.recorder)
            repeated = _ids(llm.generate(asked, params))
    return {"same": looped == repeated}


@contextmanager
def by_the_host() -> Iterator[None]:
    """Graphs recorded inside are repeated by the host, even where the device could."""
    with mock.patch.object(recorders, "loop_error", lambda: "left out, to compare with"):
        yield


def _ids(outputs: list[Output]) -> list[list[int]]:
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [o.token_ids for o in outputs]


def _accepted(outputs: list[Output], width: int) -> list[int]:
    """Tokens that steps of this width delivered, each less the bonus."""
    return sorted({n - 1 for o in outputs for n in o.stats.step_tokens if n <= width})
