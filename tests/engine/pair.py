"""A tiny random target on disk and a drafter that is right for as many tokens as a script says."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from blockpilot import LLM, Output, SamplingParams
from blockpilot.drafters import Proposal

INTERPRETED = os.environ.get("BLOCKPILOT_BACKEND") == "triton"
VOCAB = 48
EOS = 1
WIDEST = 6
LAYERS = 2


def tiny_config() -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": EOS,
        "bos_token_id": 2,
    }


def tiny_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights large enough for answers that wander instead of falling into a short cycle."""
    c = tiny_config()
    gen = torch.Generator().manual_seed(seed)
    h, m, kv = c["hidden_size"], c["intermediate_size"], c["num_key_value_heads"] * c["head_dim"]

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=gen) * scale

    tensors = {
        "model.embed_tokens.weight": draw(VOCAB, h, scale=1.0),
        "model.norm.weight": torch.ones(h),
        "lm_head.weight": draw(VOCAB, h, scale=0.6),
    }
    for i in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (h, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, h),
            "mlp.gate_proj": (m, h),
            "mlp.up_proj": (m, h),
            "mlp.down_proj": (h, m),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{i}.{name}.weight"] = draw(*shape, scale=0.35)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = torch.ones(h)
    return tensors


def write_tokenizer(folder: Path) -> None:
    """One printable character per id; ids 0..2 are special."""
    special = ["<pad>", "<eos>", "<bos>"]
    letters = [chr(c) for c in range(ord("A"), ord("A") + VOCAB - len(special))]
    vocab = {t: i for i, t in enumerate(special + letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = {"eos_token": "<eos>", "bos_token": "<bos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(text))


@lru_cache
def tiny_folder(seed: int = 0) -> Path:
    folder = Path(mkdtemp(prefix="tiny-target-"))
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    save_file(tiny_tensors(seed), folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def sized(full: Any, interpreted: Any) -> Any:
    """A test's size: the full one, or a smaller one where Triton's interpreter runs the ops."""
    return interpreted if INTERPRETED else full


Script = Callable[[int, int], int]


def cycling(slot: int, call: int) -> int:
    """Right for 0, 1, 2, … tokens in turn."""
    return call


class ScriptedDrafter:
    """Proposes the target's own next tokens, right for `script(slot, call) mod width` of them, then wrong.

    `answers` maps a prompt and its sampling settings to what plain decoding says; `seen` collects every
    (effective width, accepted) that occurred.
    """

    kind = "scripted"
    block_size = WIDEST
    window = tuple(range(1, WIDEST + 1))
    largest_tree = 0
    feature_layers = (0, 2)
    fingerprint = "scripted"

    def __init__(self, script: Script = cycling) -> None:
        self.script = script
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.seen: set[tuple[int, int]] = set()
        self.begun: list[int] = []
        self.poison = 0
        self._prompt: dict[int, tuple[int, ...]] = {}
        self._calls: dict[int, int] = {}

    def attach(self, target, max_requests) -> None:
        pass

    def begin(self, slot, features, tokens) -> None:
        assert features.shape == (len(tokens), 2 * tiny_config()["hidden_size"])
        self._prompt[slot] = tuple(tokens)
        self._calls[slot] = 0
        self.begun.append(slot)

    def propose(self, state, plan, noise) -> Proposal:
        shape = (state.block.shape[0], state.widest - 1)
        tokens = torch.full(shape, self.poison, dtype=torch.long)
        for slot, width in zip(plan.slots, plan.widths, strict=True):
            if width > 1:
                tokens[slot, : width - 1] = torch.tensor(self._draft(state, slot, width))
        order = torch.arange(shape[1])
        return Proposal(tokens, (order - 1).expand(shape), (order + 1).expand(shape))

    def _draft(self, state, slot: int, width: int) -> list[int]:
        prompt = self._prompt[slot]
        done = int(state.length[slot]) - len(prompt)
        truth = self.answers[prompt][done : done + width - 1]
        truth = truth + [0] * (width - 1 - len(truth))
        right = self.script(slot, self._calls[slot]) % width
        self._calls[slot] += 1
        return [t if j < right else (t + 1) % VOCAB for j, t in enumerate(truth)]

    def commit(self, state, plan, features) -> None:
        assert features.shape == (plan.rows.padded, 2 * tiny_config()["hidden_size"])
        for slot, width in zip(plan.slots, plan.widths, strict=True):
            if width > 1:
                self.seen.add((int(state.effective[slot]), int(state.accepted[slot])))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Distinct random prompts of 1 … 20 ids."""
    gen = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 21, (count,), generator=gen).tolist()
    return [
        [3 + i, *torch.randint(0, VOCAB, (n - 1,), generator=gen).tolist()] for i, n in enumerate(lengths)
    ]


def tiny_llm(drafter=None, **options) -> LLM:
    options = {"max_length": 192, "dtype": "float32", **options}
    return LLM(tiny_folder(), drafter=drafter, **options)


@lru_cache
def plain_llm(dtype: str = "float32") -> LLM:
    return tiny_llm(dtype=dtype, max_requests=1)


def plain(prompt: Sequence[int], params: SamplingParams, dtype: str = "float32") -> Output:
    """What plain decoding of this prompt alone returns (kept: it never changes)."""
    return _plain(tuple(prompt), params, dtype)


@cache
def _plain(prompt: tuple[int, ...], params: SamplingParams, dtype: str) -> Output:
    return plain_llm(dtype).generate([prompt], params)[0]


def script_answers(
    drafter: ScriptedDrafter, wanted: Sequence[tuple[Sequence[int], SamplingParams]], dtype: str, length: int
) -> None:
    """Teach the drafter what plain decoding says, past any stop or limit."""
    for prompt, p in wanted:
        free = SamplingParams(
            max_new_tokens=length,
            ignore_eos=True,
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            min_p=p.min_p,
            seed=p.seed,
        )
        drafter.answers[tuple(prompt)] = plain(prompt, free, dtype).token_ids
