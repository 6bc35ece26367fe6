"""The trainable EAGLE-3 drafter guesses what the engine's does, sees what it may, learns, and resumes exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from blockpilot import LLM
from blockpilot.drafters.eagle3_checkpoint import load_eagle3, save_eagle3
from blockpilot.drafters.eagle3_config import Eagle3Config
from blockpilot.params import SamplingParams
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.training.draft_batches import all_anchors, make_blocks
from blockpilot.training.draft_data import Answer, read_answer
from blockpilot.training.draft_loss import ABSENT, DraftIds, Labels
from blockpilot.training.draft_training import DraftTrainer, Recipe
from blockpilot.training.draft_validation import count_steps, right_guesses, validate
from blockpilot.training.eagle3_model import Eagle3Model, eagle3_config, start_eagle3
from tests.eagle3 import reference_of, save_eagle3_drafter
from tests.engine.pair import write_tokenizer
from tests.tiny import save_target

LENGTH, VOCAB = 24, 48
IDS = [0, 1, 3, *range(4, 48, 2), 9, 11]
PROMPTS = [[5, 9, 4, 11], [3], [20, 4, 6, 8, 12, 30, 3]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = save_target(folder / "target", vocab=VOCAB, eos_token_id=1)
    write_tokenizer(target)
    named = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 1]}, "norm_before_residual": False}
    return target, save_eagle3_drafter(folder / "drafter", target, sorted(IDS), block_size=6, **named)


@pytest.fixture(scope="module")
def decoded(pair):
    """width → outputs."""
    with LLM(pair[0], drafter=pair[1], max_length=64) as llm:
        return {
            w: llm.generate(PROMPTS, [SamplingParams(max_new_tokens=LENGTH, width=w)] * len(PROMPTS))
            for w in (1, 2, 4, 6)
        }


@pytest.fixture(scope="module")
def answers(pair, decoded):
    with LLM(pair[0], max_requests=1, max_length=64) as llm:
        llm.target.use_features([1, 3, 2])
        made = []
        for prompt, output in zip(PROMPTS, decoded[1], strict=True):
            features, ids, logp = read_answer(llm.target, prompt, output.token_ids)
            made.append(Answer(prompt + output.token_ids, len(prompt), features, ids.long(), logp.exp()))
    return made


def model_of(pair) -> tuple[Eagle3Model, torch.Tensor]:
    drafter, target = load_eagle3(pair[1]), load_checkpoint(pair[0])
    model = Eagle3Model(drafter.config, 64, torch.tensor([0.5, 2.0, 3.0]))
    model.take(drafter.tensors)
    return model, target.tensors["model.embed_tokens.weight"]


def test_validation_counts_the_steps_of_decoding(pair, decoded, answers):
    model, embedding = model_of(pair)
    ids, kept = torch.tensor(sorted(IDS)), set()
    for width in (2, 4, 6):
        for answer, output in zip(answers, decoded[width], strict=True):
            right = right_guesses(model, lambda a=answer: a, embedding, embedding, ids, width, ids)
            assert count_steps(right) == (output.stats.committed, output.stats.steps)
            kept |= set(right.long().cumprod(1).sum(1).tolist())
    assert kept >= {0, 1, 2}
    readers = [lambda a=a: a for a in answers]
    taus, _ = validate(model, readers, embedding, embedding, ids, [2, 4], ids)
    for width in (2, 4):
        expected = [o.stats.committed / o.stats.steps for o in decoded[width]]
        assert taus[width] == pytest.approx(sum(expected) / len(expected))


def test_logits_are_the_references(pair, answers):
    """Every anchor and depth, fed the answer's own ids."""
    model, embedding = model_of(pair)
    reference, answer = reference_of(*pair), answers[2]
    anchors = all_anchors(answer)
    blocks, _ = make_blocks([answer], [anchors], 5, 0, torch.ones(4))
    with torch.no_grad():
        logits = F.linear(model.guesses(blocks, embedding), model.lm_head)[0]
    for i, anchor in enumerate(anchors.tolist()):
        for depth in range(min(4, len(answer.ids) - 1 - anchor)):
            drafted = answer.ids[anchor + 1 : anchor + 1 + depth]
            expected = reference.logits_of(answer.features[:anchor], answer.ids[: anchor + 1], drafted)
            torch.testing.assert_close(logits[i, depth], expected, rtol=1e-3, atol=1e-3)


def test_a_block_sees_no_feature_at_or_after_its_anchor(pair, answers):
    """Nor the other answers, nor ids behind those it guesses from."""
    model, embedding = model_of(pair)
    answer = answers[2]
    anchors = all_anchors(answer)[::5]
    blocks, _ = make_blocks([answer, answer], [anchors, anchors], 6, 0, torch.ones(5))
    before = model.guesses(blocks, embedding)
    for i, anchor in enumerate(anchors.tolist()):
        features, ids = blocks.features.clone(), blocks.ids.clone()
        features[0, anchor:] = 7.0
        features[1] = -3.0
        ids[0, anchor + 3 :] = 9
        after = model.guesses(replace(blocks, features=features, ids=ids), embedding)
        assert torch.allclose(after[0, i, :3], before[0, i, :3], atol=1e-5)
        features[0, anchor - 1] += 1.0
        seen = model.guesses(replace(blocks, features=features, ids=ids), embedding)
        assert not torch.allclose(seen[0, i, :3], before[0, i, :3], atol=1e-3)


def test_weights_survive_the_published_format(pair, tmp_path):
    model, _ = model_of(pair)
    first = load_eagle3(pair[1])
    save_eagle3(tmp_path / "out", first.config.source, model.tensors(), first.vocabulary)
    again = load_eagle3(tmp_path / "out").tensors
    for name, tensor in first.tensors.items():
        torch.testing.assert_close(again[name], tensor)


def test_a_start_is_the_layer_over_the_feature_it_reads_last(pair):
    target = load_checkpoint(pair[0])
    ids = torch.tensor(sorted(IDS))
    config = Eagle3Config.from_json(eagle3_config(target.config, 4, None, len(ids)))
    assert (config.block_size, config.hidden_states) == (4, (2, 2, 1))
    scale = torch.tensor([0.5, 2.0, 3.0])
    model = Eagle3Model(config, 32, scale)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    start_eagle3(model, target.tensors, 3, ids)
    made = model.tensors()
    assert torch.equal(made["lm_head.weight"], target.tensors["lm_head.weight"][ids])
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        theirs = target.tensors[f"model.layers.3.{name}.weight"]
        ours = made[f"midlayer.{name}.weight"]
        assert torch.equal(ours[:, -theirs.shape[1] :], theirs) and not ours[:, : -theirs.shape[1]].any()
    features = torch.randn(5, 96)
    torch.testing.assert_close(F.linear(features, made["fc.weight"]), features[:, 64:])


def test_labels_it_cannot_say_are_left_out():
    ids = torch.tensor([1, 4, 6])
    labels = Labels(
        torch.tensor([4, 5, ABSENT, 1]),
        torch.ones(4),
        torch.tensor([[4, 5], [5, 6], [0, 0], [0, 2]]),
        torch.tensor([[0.6, 0.2], [0.5, 0.25], [0.0, 0.0], [0.3, 0.3]]),
    )
    kept = DraftIds(ids, 8).keep(labels)
    assert kept.ids.tolist() == [4, ABSENT, ABSENT, 1]
    torch.testing.assert_close(
        kept.teacher_p, torch.tensor([[0.8, 0.0], [0.0, 0.75], [0.0, 0.0], [0.0, 0.0]])
    )


RECIPE = Recipe(blocks=64, batch=2, anchors=4, widths=(2, 5), warm_up=8, vocabulary=16, rate=3e-3)


def trainer(pair, answers, recipe=RECIPE) -> DraftTrainer:
    target, ids = load_checkpoint(pair[0]), torch.tensor(sorted(IDS))
    config = Eagle3Config.from_json(eagle3_config(target.config, 4, (0, 2, 1), len(ids)))
    torch.manual_seed(1)
    model = Eagle3Model(config, 64, torch.ones(3))
    counts = torch.bincount(torch.tensor([t for a in answers for t in a.ids]), minlength=VOCAB).float()
    tensors = target.tensors
    tables = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    readers = [lambda a=a: a for a in answers]
    return DraftTrainer(model, recipe, readers, [len(a.ids) for a in answers], *tables, counts, own_ids=ids)


def test_training_learns(pair, answers):
    run = trainer(pair, answers, replace(RECIPE, blocks=8 * 300))
    first = [run.step()["loss"] for _ in range(10)]
    while not run.finished:
        last = run.step()
    assert last["loss"] < 0.6 * sum(first) / len(first)


def test_a_resumed_run_ends_in_the_same_bits(pair, answers, tmp_path):
    whole = trainer(pair, answers)
    while not whole.finished:
        whole.step()
    part, again = trainer(pair, answers), trainer(pair, answers)
    for _ in range(3):
        part.step()
    part.save(tmp_path / "state.safetensors")
    again.load(tmp_path / "state.safetensors")
    while not again.finished:
        again.step()
    for (name, a), b in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b), name
