"""The peers' decode loops: a tiny model in torch, and llama.cpp's functions played by a script."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import peer_llama
import peer_torch
from peer_types import Request, Setup
from tests.tiny import save_drafter, save_target

PROMPT = (5, 7, 9)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(transformers model, drafter folder)."""
    root = tmp_path_factory.mktemp("pair")
    target = save_target(root / "target")
    drafter = save_drafter(root / "drafter", target)
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval(), drafter


@pytest.fixture
def tiny(pair, monkeypatch):
    """The tiny pair in place of SmolLM2 and the bundled drafter."""
    monkeypatch.setattr(peer_torch, "_load_target", lambda setup, dtype: pair[0])
    monkeypatch.setattr(peer_torch.bundled, "drafter_path", lambda: pair[1])
    peer_torch._load_drafter.cache_clear()
    yield
    peer_torch._load_drafter.cache_clear()


def setup(*eos):
    return Setup(Path("target.gguf"), eos, 1, 64)


def ask(count, temperature=0.0, seed=3):
    return Request(PROMPT, seed, temperature, count)


def test_torch_arms_agree_and_stop_where_they_should(tiny):
    long = peer_torch.open_loop(setup(999), dtype=torch.float32)(ask(12))
    assert len(long.token_ids) == 12 and long.decoded == 11
    stop = next(i for i, t in enumerate(long.token_ids) if i >= 2 and t not in long.token_ids[:i])
    for opened in (peer_torch.open_loop, peer_torch.open_generate):
        for count, eos, kept in ((12, 31999, 12), (12, long.token_ids[stop], stop + 1), (1, 31999, 1)):
            run = opened(setup(eos), dtype=torch.float32)(ask(count))
            assert run.token_ids == long.token_ids[:kept]
            assert run.first_token > 0 and run.decoding >= 0 and run.steps is None
    assert run.decoded == 0 and run.decoding == 0  # of `generate`: one token is prefill's alone


@pytest.mark.parametrize("name", ["open_loop", "open_generate"])
def test_torch_arms_sample_by_seed(tiny, name):
    decode = getattr(peer_torch, name)(setup(999), dtype=torch.float32)
    answers = [decode(ask(16, 1.0, seed)).token_ids for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_the_published_loop_counts_its_steps(tiny):
    pytest.importorskip("dflash.model")
    plain = peer_torch.open_loop(setup(999), dtype=torch.float32)(ask(20))
    run = peer_torch.open_dflash(setup(999), dtype=torch.float32, width=4)(ask(20))
    assert run.token_ids == plain.token_ids
    assert -(-run.decoded // 4) <= run.steps <= run.decoded
    assert run.first_token > 0 and run.decoding > 0
    drawn = peer_torch.open_dflash(setup(999), dtype=torch.float32, width=4)(ask(20, 1.0))
    assert len(drawn.token_ids) == 20


class Script(ModuleType):
    """The functions of llama_cpp that the arm calls, with a log. It "chooses" the count of tokens it holds."""

    def __init__(self, code=0):
        super().__init__("llama_cpp")
        self.code, self.held, self.log, self.live = code, 0, [], 0

    def Llama(self, path, **options):
        self.log.append((path, options["n_threads"], options["n_threads_batch"]))
        return SimpleNamespace(ctx="context")

    def llama_get_memory(self, context):
        return "memory"

    def llama_memory_clear(self, memory, data):
        self.held = 0

    def llama_memory_seq_rm(self, memory, sequence, start, end):
        self.held = start

    def llama_batch_get_one(self, ids, count):
        return SimpleNamespace(n_tokens=count, token=list(ids))

    def llama_batch_init(self, count, embedding, sequences):
        rows = {name: [None] * count for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(n_tokens=0, seq_id=[[None] for _ in range(count)], **rows)

    def llama_batch_free(self, batch):
        self.log.append(("freed", batch.n_tokens, batch.pos, batch.logits))

    def llama_decode(self, context, batch):
        self.held += batch.n_tokens
        return self.code

    def llama_synchronize(self, context):
        pass

    def llama_sampler_chain_default_params(self):
        return None

    def llama_sampler_chain_init(self, params):
        self.live += 1
        return []

    def llama_sampler_chain_add(self, chain, sampler):
        chain.append(sampler)

    def llama_sampler_init_greedy(self):
        return "greedy"

    def llama_sampler_init_temp(self, temperature):
        return ("temperature", temperature)

    def llama_sampler_init_dist(self, seed):
        return ("draw", seed)

    def llama_sampler_sample(self, chain, context, index):
        self.log.append(tuple(chain))
        return self.held

    def llama_sampler_free(self, chain):
        self.live -= 1


@pytest.fixture
def script(monkeypatch):
    played = Script()
    monkeypatch.setitem(sys.modules, "llama_cpp", played)
    peer_llama._load.cache_clear()
    yield played
    peer_llama._load.cache_clear()


def test_llama_feeds_the_prompt_then_each_token(script):
    decode = peer_llama.open_llama(setup(6), threads=2)
    assert script.log.pop() == ("target.gguf", 2, 2)
    assert decode(ask(3)).token_ids == (3, 4, 5)
    assert decode(ask(9)).token_ids == (3, 4, 5, 6)  # starts afresh, and keeps the id that ends it
    assert set(script.log) == {("greedy",)} and script.live == 0


def test_llama_samples_with_the_seed_it_can_hold(script):
    peer_llama.open_llama(setup(0), threads=1)(ask(2, 0.7, (1 << 40) + 5))
    assert script.log[-1] == (("temperature", 0.7), ("draw", 5))


def test_a_failing_forward_is_an_error_and_frees_the_sampler(script):
    decode = peer_llama.open_llama(setup(0), threads=1)
    script.code = 1
    with pytest.raises(RuntimeError, match="llama_decode returned 1"):
        decode(ask(2))
    assert script.live == 0


def test_the_probe_times_verify_steps_at_one_place(script):
    found = peer_llama.probe_llama(setup(0), threads=1)["forward_seconds"]
    assert set(found) == {"1", "2", "4", "8"} and all(seconds >= 0 for seconds in found.values())
    start = peer_llama.PROBE_CONTEXT
    assert script.log[-1] == ("freed", 8, list(range(start, start + 8)), [1] * 8)
    assert script.held == start
