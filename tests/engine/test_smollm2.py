"""The bundled trio on the real model: what it says is what plain decoding says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blockpilot import LLM, SamplingParams
from blockpilot.bundled import demo_prompts
from tests.engine.pair import INTERPRETED

PARAMS = SamplingParams(max_new_tokens=20)
MODES = [PARAMS, replace(PARAMS, temperature=0.8, top_p=0.95, top_k=40)]
WIDTHS = (2, 3, 4, 6, 8, 12)

pytestmark = pytest.mark.skipif(INTERPRETED, reason="a vocabulary of 49152 is too large for the interpreter")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dozen_prompts_equal_plain_decoding(dtype):
    """Greedy and sampled, widths mixed in a batch, the policy's own choice among them."""
    asked = [p["prompt"] for p in demo_prompts()][::2]
    assert len(asked) == 12
    each = [replace(MODES[i % 2], seed=i) for i in range(len(asked))]
    plain = LLM("smollm2", dtype=dtype, max_length=256, max_requests=4).generate(asked, each)
    llm = LLM(
        "smollm2", drafter="bundled+lookup", policy="predictor", dtype=dtype, max_length=256, max_requests=6
    )
    wide = [replace(p, width=WIDTHS[i % 6] if i >= 6 else None) for i, p in enumerate(each)]
    outputs = llm.generate(asked, wide)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert [o.text for o in outputs] == [o.text for o in plain]
    assert llm.policy_calls == 3  # its labels are of greedy answers, so it is asked about no others
    assert all(o.stats.width in llm.policy.window for o in outputs[:6:2])
    assert [o.stats.width for o in outputs[1:6:2]] == [1, 1, 1]
    assert sum(o.stats.committed for o in outputs) > sum(o.stats.steps for o in outputs)
