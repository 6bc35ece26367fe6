"""Replayed labels are the labels of real decoding."""

from __future__ import annotations

import pytest

from blockpilot import LLM
from blockpilot.drafters.dflash_checkpoint import write_draft_vocabulary
from blockpilot.graphs import Graphs
from blockpilot.recorders import Uncaptured
from blockpilot.training.label_store import read_labels
from blockpilot.training.labels import label_prompts
from blockpilot.training.replay import Answer, ReplayTarget
from tests.engine.pair import write_tokenizer
from tests.tiny import save_drafter, save_target

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.fixture(scope="module", params=["all ids", "some ids"])
def pair(request, tmp_path_factory):
    """With a drafter of every id, and one of some: the target says others too."""
    folder = tmp_path_factory.mktemp("pair")
    target = save_target(folder / "target", vocab=48, eos_token_id=1)
    write_tokenizer(target)
    drafter = save_drafter(folder / "drafter", target, block_size=4, seed=1)
    if request.param == "some ids":
        write_draft_vocabulary(drafter, [0, 3, *range(5, 48, 2)])
    return target, drafter


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("window", [(1, 2, 3, 4, 8), (3, 5)])
def test_rows_equal_those_of_decoding_at_every_width(pair, tmp_path, window, temperature):
    """The same prompt twice among them: with noise of its own, so with an answer of its own."""
    texts = [LETTERS[i : i + 1 + i % 5] for i in range(10)] + ["ABC", "ABC"]
    prompts = [{"id": f"p{i}", "family": f"f{i % 3}", "prompt": t} for i, t in enumerate(texts)]
    found = {}
    for replay in (True, False):
        path = tmp_path / f"{replay}.jsonl"
        label_prompts(
            lambda policy: LLM(pair[0], drafter=pair[1], policy=policy, max_requests=3, max_length=64),
            prompts,
            window=window,
            max_new_tokens=17,
            temperature=temperature,
            output=path,
            batch=6,
            replay=replay,
            progress=False,
        )
        found[replay] = read_labels(path)
    assert found[True] == found[False]
    for row in found[True][1]:
        sums = [[sum(part) for part in zip(*halves, strict=True)] for halves in row["halves"]]
        assert sums == [list(pair) for pair in zip(row["committed"], row["steps"], strict=True)]
    taus = [row["tau"] for row in found[True][1] if row["tau"][-1] is not None]
    assert len({tuple(t) for t in taus}) > 3


def test_captured_steps_do_not_ask_the_real_target(pair, tmp_path):
    """An engine that captures its steps holds a target of its own in them; labels go around."""
    prompts = [{"id": f"p{i}", "family": "f", "prompt": LETTERS[i : i + 2]} for i in range(4)]
    found = []
    for captured in (False, True):

        def make(policy, captured=captured):
            llm = LLM(pair[0], drafter=pair[1], policy=policy, max_requests=2, max_length=64)
            if captured:
                s = llm._scheduler
                s.graphs = Graphs(s.state, s.target, s.drafter, Uncaptured())
            return llm

        path = tmp_path / f"{captured}.jsonl"
        label_prompts(make, prompts, window=(1, 2, 4), max_new_tokens=9, output=path, progress=False)
        found.append(read_labels(path))
    assert found[0] == found[1]


def test_another_order_is_refused(pair):
    import torch

    answer = Answer([3, 4], torch.zeros(48), torch.zeros(2, 8), 5)
    with pytest.raises(RuntimeError, match="order"):
        ReplayTarget(None, [answer]).prefill(0, [3, 5])
