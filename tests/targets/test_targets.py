"""Both targets equal transformers, and their rows are their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blockpilot import LLM, SamplingParams
from blockpilot.rows import kv_bound, make_rows
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.targets.torch_target import PREFILL_ROWS
from tests.implementations import IMPLEMENTATIONS, build, require

FAMILIES = {
    "llama": {},
    "llama-tied": {"family": "llama", "tie_word_embeddings": True},
    "llama-bias": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-linear": {"family": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama-llama3": {
        "family": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama-yarn": {
        "family": "llama",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "llama-dynamic": {"family": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "mistral": {"sliding_window": None},
    "mistral-window": {"family": "mistral", "sliding_window": 9},
    "qwen2": {},
    "qwen2-window": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "qwen3": {"head_dim": 24},
    "qwen3-tied": {"family": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module", params=FAMILIES)
def model_and_folder(request, tmp_path_factory):
    """A tiny random transformers model and the folder it was saved to."""
    from transformers import AutoConfig, AutoModelForCausalLM

    over = dict(FAMILIES[request.param])
    family = over.pop("family", request.param)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=99,
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=2,
        bos_token_id=1,
        attn_implementation="eager",
        **{"tie_word_embeddings": False, **over},
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def pair(request, model_and_folder):
    """(transformers model, our target) of one checkpoint."""
    require(request.param)
    model, folder = model_and_folder
    return model, build(request.param, load_checkpoint(folder), 2, 200)


@torch.inference_mode()
def test_prefill_logits_and_features_equal_transformers(pair):
    model, target = pair
    layers = (0, 1, 2)
    target.use_features(layers)
    for length in (1, 7, 40, PREFILL_ROWS + 5):
        ids = torch.randint(0, 99, (1, length), generator=torch.Generator().manual_seed(length))
        expected = model(ids, output_hidden_states=True)
        logits, features = target.prefill(1, ids[0].tolist())
        torch.testing.assert_close(logits, expected.logits[0, -1], atol=1e-4, rtol=0)
        states = torch.cat([expected.hidden_states[k][0] for k in layers], -1)
        torch.testing.assert_close(features, states, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_last_layer_feature_is_taken_before_the_final_norm(pair):
    model, target = pair
    target.use_features((3,))
    seen = []
    hook = model.model.norm.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    ids = torch.arange(3, 15)[None]
    model(ids)
    hook.remove()
    _, features = target.prefill(0, ids[0].tolist())
    torch.testing.assert_close(features, seen[0][0], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_block_rows_equal_one_by_one_and_transformers(pair):
    """A block over a cached prefix: the bits of single steps, and the values of a fresh forward."""
    model, target = pair
    ids = torch.randint(0, 99, (1, 37), generator=torch.Generator().manual_seed(5))
    expected = model(ids).logits[0]
    start = 29

    def verify(first: int, count: int) -> torch.Tensor:
        rows = make_rows((0,), (count,), target.cache.dump, target.device, target.row_tile)
        tokens = torch.zeros(rows.padded, dtype=torch.long)
        tokens[:count] = ids[0, first : first + count]
        exists = rows.slot != target.cache.dump
        extent = torch.full((3,), first + count)
        bound = kv_bound(first + count)
        return target.verify(rows, tokens, rows.column + first, exists, extent, bound)[0][:count]

    target.prefill(0, ids[0, :start].tolist())
    block = verify(start, 8)
    torch.testing.assert_close(block, expected[start:], atol=1e-4, rtol=0)
    target.prefill(0, ids[0, :start].tolist())
    single = torch.cat([verify(start + j, 1) for j in range(8)])
    assert torch.equal(block, single)


def test_features_outside_the_model_are_refused(pair):
    _, target = pair
    with pytest.raises(ValueError, match=r"hidden states \[4\].*3 layers"):
        target.use_features((1, 4))


PROMPTS = [
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "List three fruits.",
    "Translate 'good morning' into French.",
    "What is 17 + 25?",
    "Tell me a short story about a lighthouse.",
    "Explain what a hash table is.",
    "Rewrite politely: give me the report now.",
    "Name the planets of the solar system.",
    "How do I boil an egg?",
]


@pytest.fixture(scope="module")
def smollm2():
    return LLM("smollm2", max_length=256, max_requests=5)


@torch.inference_mode()
def test_smollm2_greedy_ids_equal_transformers(smollm2):
    """64 tokens for ten prompts; transformers reads the same GGUF file with its own loader and tokenizer."""
    from transformers import AutoModelForCausalLM

    path = Path(load_checkpoint("smollm2").path)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    outputs = smollm2.generate(PROMPTS, SamplingParams(max_new_tokens=64))
    eos = smollm2.tokenizer.eos_token_ids
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        theirs = model.generate(
            ids, max_new_tokens=64, do_sample=False, eos_token_id=list(eos), pad_token_id=0
        )
        assert output.token_ids == theirs[0, ids.shape[1] :].tolist()
