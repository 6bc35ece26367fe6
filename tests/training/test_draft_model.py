"""The trainable drafter guesses what the engine's does, sees what it may, and is worth what decoding finds."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockpilot import LLM
from blockpilot.drafters.dflash_checkpoint import load_dflash, save_dflash, write_draft_vocabulary
from blockpilot.drafters.dflash_config import DFlashConfig
from blockpilot.params import SamplingParams
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.training.draft_batches import all_anchors, make_blocks
from blockpilot.training.draft_data import Answer, FeatureCache, read_answer
from blockpilot.training.draft_model import DraftModel, drafter_config, start_from_target
from blockpilot.training.draft_validation import count_steps, right_guesses, validate
from tests.engine.pair import write_tokenizer
from tests.tiny import save_drafter, save_target

LENGTH = 24
PROMPTS = [[5, 9, 4, 11], [3, 3, 7], [20, 4, 6, 8, 12, 30, 3]]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    target = save_target(folder / "target", request.param, vocab=48, eos_token_id=1)
    write_tokenizer(target)
    return target, save_drafter(folder / "drafter", target, block_size=6, rope_theta=10000.0)


@pytest.fixture(scope="module")
def decoded(pair):
    """width → outputs."""
    with LLM(pair[0], drafter=pair[1], max_length=64) as llm:
        return {
            w: llm.generate(PROMPTS, [SamplingParams(max_new_tokens=LENGTH, width=w)] * len(PROMPTS))
            for w in (1, 2, 4, 6, 8)
        }


def rows_of(decoded):
    return [{"prompt_ids": p, "output_ids": o.token_ids} for p, o in zip(PROMPTS, decoded[1], strict=True)]


def listening(pair) -> LLM:
    llm = LLM(pair[0], max_requests=1, max_length=64)
    llm.target.use_features([i + 1 for i in load_dflash(Path(pair[1])).config.target_layer_ids])
    return llm


def read(pair, decoded, folder: Path):
    """Readers of the decoded answers through a cache."""
    rows, cache = rows_of(decoded), FeatureCache(folder, {"target": "tiny"})
    with listening(pair) as llm:
        cache.write("0.jsonl", "digest", llm.target, rows, lambda n: None)
    return list(cache.answers("0.jsonl", rows))


def unrounded(pair, decoded):
    """The same answers with features as decoding has them."""
    readers = []
    with listening(pair) as llm:
        for row in rows_of(decoded):
            features, ids, logp = read_answer(llm.target, row["prompt_ids"], row["output_ids"])
            tokens, start = row["prompt_ids"] + row["output_ids"], len(row["prompt_ids"])
            answer = Answer(tokens, start, features, ids.long(), logp.exp())
            readers.append(lambda answer=answer: answer)
    return readers


def model_of(pair) -> tuple[DraftModel, torch.Tensor, torch.Tensor]:
    drafter, target = load_dflash(Path(pair[1])), load_checkpoint(pair[0])
    scale = torch.tensor([0.5, 2.0, 3.0])[: len(drafter.config.target_layer_ids)]
    model = DraftModel(drafter.config, 64, scale)
    model.take(drafter.tensors)
    return model, target.tensors["model.embed_tokens.weight"], target.tensors["lm_head.weight"]


def test_validation_counts_the_steps_of_decoding(pair, decoded):
    readers = unrounded(pair, decoded)
    model, embedding, head = model_of(pair)
    every = torch.arange(len(head))
    kept = set()
    for width in (2, 4, 6, 8):
        for reader, output, plain in zip(readers, decoded[width], decoded[1], strict=True):
            assert output.token_ids == plain.token_ids
            right = right_guesses(model, reader, embedding, head, every, width)
            assert count_steps(right) == (output.stats.committed, output.stats.steps)
            kept |= set(right.long().cumprod(1).sum(1).tolist())
    assert kept >= {0, 1, 2}
    taus, accuracy = validate(model, readers, embedding, head, every, [2, 4])
    for width in (2, 4):
        expected = [o.stats.committed / o.stats.steps for o in decoded[width]]
        assert taus[width] == pytest.approx(sum(expected) / len(expected))
    assert len(accuracy) == 3 and all(0 <= a <= 1 for a in accuracy)


def test_ids_that_training_saw_are_a_short_cut_and_no_help(pair, decoded):
    """Guesses among few ids are right more often than a decoding step's; τ must not be."""
    readers = unrounded(pair, decoded)
    model, embedding, head = model_of(pair)
    seen = torch.tensor(sorted({i for reader in readers for i in reader().ids[reader().start :]}))
    assert len(seen) < len(head)
    whole = validate(model, readers, embedding, head, torch.arange(len(head)), [2, 6])
    for ids in (seen, seen[:1]):
        assert validate(model, readers, embedding, head, ids, [2, 6]) == whole


def test_validation_of_a_drafter_of_some_ids(pair, decoded, tmp_path):
    """τ is that of decoding with these ids, whatever training saw; the answers hold others, which cost steps."""
    ids = torch.tensor([0, 3, *range(5, 48, 2)])
    drafter = shutil.copytree(pair[1], tmp_path / "drafter")
    write_draft_vocabulary(drafter, ids)
    readers = unrounded(pair, decoded)
    model, embedding, head = model_of(pair)
    with LLM(pair[0], drafter=drafter, max_length=64) as llm:
        outputs = {
            w: llm.generate(PROMPTS, [SamplingParams(max_new_tokens=LENGTH, width=w)] * len(PROMPTS))
            for w in (2, 6)
        }
    for seen in (torch.arange(len(head)), torch.tensor([4])):
        taus, _ = validate(model, readers, embedding, head, seen, [2, 6], ids)
        for width, found in outputs.items():
            assert [o.token_ids for o in found] == [o.token_ids for o in decoded[1]]
            expected = [o.stats.committed / o.stats.steps for o in found]
            assert taus[width] == pytest.approx(sum(expected) / len(expected))
    assert taus != validate(model, readers, embedding, head, seen, [2, 6])[0]


def test_teachers_begin_with_what_the_target_chose(pair, decoded, tmp_path):
    for reader, output in zip(read(pair, decoded, tmp_path), decoded[1], strict=True):
        answer = reader()
        assert answer.teacher_ids[:, 0].tolist() == output.token_ids
        assert answer.features.shape == (len(answer.ids) - 1, 2 * 32)
        assert answer.teacher_p.sum(1).max() <= 1.01 and answer.teacher_p.min() >= 0


def test_a_cache_of_another_origin_is_made_anew(pair, decoded, tmp_path):
    read(pair, decoded, tmp_path)
    assert FeatureCache(tmp_path, {"target": "tiny"}).has("0.jsonl", "digest")
    assert not FeatureCache(tmp_path, {"target": "tiny"}).has("0.jsonl", "another")
    assert not FeatureCache(tmp_path, {"target": "other"}).has("0.jsonl", "digest")
    assert not FeatureCache(tmp_path, {"target": "tiny"}).has("1.jsonl", "digest")
    (tmp_path / "0.safetensors").write_bytes(b"torn")
    assert not FeatureCache(tmp_path, {"target": "tiny"}).has("0.jsonl", "digest")


def test_a_block_sees_nothing_at_or_after_its_anchor(pair, decoded, tmp_path):
    """Nor the other blocks, nor the other answers."""
    answer = read(pair, decoded, tmp_path)[2]()
    model, embedding, _ = model_of(pair)
    anchors = all_anchors(answer)[::5]
    weights = torch.ones(5)
    blocks, _ = make_blocks([answer, answer], [anchors, anchors], 6, 1, weights)
    before = model(blocks, embedding)
    for i, anchor in enumerate(anchors.tolist()):
        features = blocks.features.clone()
        features[0, anchor:] = 7.0
        features[1] = -3.0
        changed = blocks.tokens.clone()
        changed[:, [k for k in range(len(anchors)) if k != i]] = 9
        after = model(replace(blocks, features=features, tokens=changed), embedding)
        assert torch.allclose(after[0, i], before[0, i], atol=1e-5)
        features[0, anchor - 1] += 1.0
        seen = model(replace(blocks, features=features, tokens=changed), embedding)
        assert not torch.allclose(seen[0, i], before[0, i], atol=1e-3)


def test_weights_survive_the_published_format(pair, tmp_path):
    model, *_ = model_of(pair)
    config = load_dflash(Path(pair[1])).config
    save_dflash(tmp_path / "out", config.source, model.tensors())
    again = load_dflash(tmp_path / "out").tensors
    for name, tensor in load_dflash(Path(pair[1])).tensors.items():
        torch.testing.assert_close(again[name], tensor)


def test_a_start_from_target_layers(pair):
    target = load_checkpoint(pair[0])
    source = drafter_config(target.config, 2, 4, 1, None)
    config = DFlashConfig.from_json(source)
    assert config.block_size == 4 and config.num_target_layers == 4
    model = DraftModel(config, 32, torch.ones(len(config.target_layer_ids)))
    states = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)) * 7
    start_from_target(model, target.tensors, (0, 3), states)
    made = model.tensors()
    for ours, theirs in ((0, 0), (1, 3)):
        for name in ("self_attn.q_proj", "mlp.down_proj", "input_layernorm"):
            expected = target.tensors[f"model.layers.{theirs}.{name}.weight"]
            assert torch.equal(made[f"layers.{ours}.{name}.weight"], expected.float())
    if not target.config.qk_norm:
        scaled = states / states.pow(2).mean(-1, keepdim=True).sqrt()
        scaled = scaled * target.tensors["model.layers.3.input_layernorm.weight"]
        key = (scaled @ target.tensors["model.layers.3.self_attn.k_proj.weight"].T).view(50, -1, 8)
        expected = key.pow(2).mean(-1).sqrt().mean()
        torch.testing.assert_close(
            made["layers.1.self_attn.k_norm.weight"], expected.expand(8), rtol=1e-3, atol=0
        )
    with pytest.raises(ValueError, match="expected 2 target layers"):
        start_from_target(model, target.tensors, (0,), states)
