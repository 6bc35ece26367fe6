"""A forked child goes on with the engine its parent made."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from blockpilot import SamplingParams
from tests.engine.pair import prompts, tiny_llm


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_answers_as_its_parent_does():
    """With log-probabilities, whose sums torch spreads over threads that the child does not have."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        llm, asked = tiny_llm(max_requests=2), prompts(2)
        params = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=2)
        expected = [(o.token_ids, o.logprobs) for o in llm.generate(asked, params)]
        big = torch.randn(64, 4096)
        torch.logsumexp(big, -1)  # torch's own threads exist from here on
        child = os.fork()
        if child == 0:
            torch.logsumexp(big, -1)
            found = [(o.token_ids, o.logprobs) for o in llm.generate(asked, params)]
            os._exit(0 if found == expected else 1)
        end, status = time.monotonic() + 60, (0, 0)
        while status[0] == 0 and time.monotonic() < end:
            status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if status[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert status[0] == child, "the child hung"
        assert os.waitstatus_to_exitcode(status[1]) == 0
    finally:
        torch.set_num_threads(before)
