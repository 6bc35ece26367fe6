"""`LLM` with a drafter that drafts only some ids: answers are the plain ones, ids it cannot draft among them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blockpilot import LLM, SamplingParams
from blockpilot.drafters.dflash_checkpoint import write_draft_vocabulary
from tests.engine.pair import VOCAB, prompts, sized, write_tokenizer
from tests.tiny import save_drafter, save_target

IDS = [0, 3, *range(5, VOCAB, 2)]  # not 4, which the target likes
GREEDY = SamplingParams(max_new_tokens=sized(24, 8), ignore_eos=True)
MODES = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=1.5, seed=3),
    "filtered": replace(GREEDY, temperature=4.0, top_k=9, top_p=0.95, seed=5),
    "banned": replace(GREEDY, temperature=1.5, seed=7, stop_token_ids=(9, 12), min_new_tokens=6),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = save_target(folder / "target", vocab=VOCAB, eos_token_id=1)
    write_tokenizer(target)
    drafter = save_drafter(folder / "drafter", target, block_size=4)
    write_draft_vocabulary(drafter, IDS)
    return target, drafter


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_answers_are_plain(pair, mode, dtype, monkeypatch):
    """At mixed widths in one batch; drafts hold no other id, answers do, and some drafts are accepted."""
    asked = prompts(sized(6, 3), seed=2)
    widths = [(2, 3, 4, 6, 8, 5)[i % 6] for i in range(len(asked))]
    llm = LLM(pair[0], drafter=pair[1], max_requests=3, max_length=96, dtype=dtype)
    plain = [o.token_ids for o in llm.generate(asked, replace(MODES[mode], width=1))]
    propose, drafted = llm.drafter.propose, set()

    def recording(state, plan, noise):
        found = propose(state, plan, noise)
        for slot, width in zip(plan.slots, plan.widths, strict=True):
            offered = max(0, min(width, int(state.effective[slot])) - 1)
            drafted.update(found.tokens[slot, :offered].tolist())
        return found

    monkeypatch.setattr(llm.drafter, "propose", recording)
    outputs = llm.generate(asked, [replace(MODES[mode], width=w) for w in widths])
    assert [o.token_ids for o in outputs] == plain
    assert len(drafted) > 1 and drafted <= set(IDS)
    assert 4 in {i for ids in plain for i in ids}
    assert any(o.stats.committed > o.stats.steps for o in outputs)
