"""The trainable SpecBlock drafter guesses what the engine's does, and sees what it may."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from blockpilot import LLM
from blockpilot.drafters.specblock_checkpoint import load_specblock, save_specblock
from blockpilot.drafters.specblock_config import SpecBlockConfig
from blockpilot.params import SamplingParams
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.training.draft_batches import all_anchors, make_blocks
from blockpilot.training.draft_data import Answer, read_answer
from blockpilot.training.draft_validation import count_steps, right_guesses, validate
from blockpilot.training.specblock_model import SpecBlockModel, specblock_config, start_specblock
from tests.eagle3 import IDS
from tests.engine.pair import write_tokenizer
from tests.specblock import Reference, save_specblock_drafter
from tests.tiny import save_target

LENGTH, SLOTS = 24, 3
PROMPTS = [[5, 9, 4, 11], [3], [20, 4, 6, 8, 12, 30, 3]]
VARIANTS = {
    "published": {},
    "without shift": {"architectures": ["LlamaForCausalLMSpecBlock"]},
    "three layers": {"num_hidden_layers": 3},
    "one layer": {"num_hidden_layers": 1},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = save_target(tmp_path_factory.mktemp("target"), vocab=48, eos_token_id=1)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, target, tmp_path_factory):
    over = {"diffspec_draft_token_num": SLOTS, **VARIANTS[request.param]}
    return target, save_specblock_drafter(tmp_path_factory.mktemp("drafter"), target, **over)


@pytest.fixture(scope="module")
def decoded(pair):
    """width → outputs."""
    with LLM(pair[0], drafter=pair[1], max_length=64) as llm:
        return {
            w: llm.generate(PROMPTS, [SamplingParams(max_new_tokens=LENGTH, width=w)] * len(PROMPTS))
            for w in (1, 2, SLOTS + 1, SLOTS + 2, 2 * SLOTS + 1)
        }


@pytest.fixture(scope="module")
def answers(pair, decoded):
    with LLM(pair[0], max_requests=1, max_length=64) as llm:
        llm.target.use_features([2, 2, 1])
        made = []
        for prompt, output in zip(PROMPTS, decoded[1], strict=True):
            features, ids, logp = read_answer(llm.target, prompt, output.token_ids)
            made.append(Answer(prompt + output.token_ids, len(prompt), features, ids.long(), logp.exp()))
    return made


def model_of(pair) -> tuple[SpecBlockModel, torch.Tensor]:
    drafter, target = load_specblock(pair[1]), load_checkpoint(pair[0])
    model = SpecBlockModel(drafter.config, 64, torch.tensor([0.5, 2.0, 3.0]))
    model.take(drafter.tensors)
    return model, target.tensors["model.embed_tokens.weight"]


def test_validation_counts_the_steps_of_decoding(pair, decoded, answers):
    """In the first block, and where a second goes on."""
    model, embedding = model_of(pair)
    ids, kept = torch.tensor(IDS), set()
    for width in (2, SLOTS + 1, SLOTS + 2, 2 * SLOTS + 1):
        for answer, output in zip(answers, decoded[width], strict=True):
            right = right_guesses(model, lambda a=answer: a, embedding, embedding, ids, width, ids)
            assert count_steps(right) == (output.stats.committed, output.stats.steps)
            kept |= set(right.long().cumprod(1).sum(1).tolist())
    assert kept >= {0, 1}
    readers = [lambda a=a: a for a in answers]
    taus, _ = validate(model, readers, embedding, embedding, ids, [2, SLOTS + 2], ids)
    for width in (2, SLOTS + 2):
        expected = [o.stats.committed / o.stats.steps for o in decoded[width]]
        assert taus[width] == pytest.approx(sum(expected) / len(expected))


def test_logits_are_the_references(pair, answers):
    """Every anchor's first block, and a second from every slot, fed the answer's own ids."""
    model, embedding = model_of(pair)
    reference, answer = Reference.of(*pair), answers[2]
    anchors = all_anchors(answer)
    blocks, _ = make_blocks([answer], [anchors], 2, 0, torch.ones(1))
    for start in range(1, SLOTS + 1):
        with torch.no_grad():
            starts = torch.full((1, len(anchors), 1), start)
            first, second = (
                F.linear(model.normed(x), model.lm_head)[0] for x in model.drafts(blocks, embedding, starts)
            )
        for i, anchor in enumerate(anchors.tolist()):
            features, ids = answer.features[:anchor], answer.ids[: anchor + 1]
            expected = reference.logits(reference.draft(features, ids))
            torch.testing.assert_close(first[i], expected, rtol=1e-3, atol=1e-3)
            if anchor + start < len(answer.ids):
                h = reference.go_on(features, ids, start - 1, answer.ids[anchor + start])
                torch.testing.assert_close(second[i], reference.logits(h), rtol=1e-3, atol=1e-3)


def test_the_rank_head_is_the_references(pair, answers):
    model, embedding = model_of(pair)
    reference, answer = Reference.of(*pair), answers[0]
    blocks, _ = make_blocks([answer], [all_anchors(answer)], 2, 0, torch.ones(1))
    h = model.drafts(blocks, embedding, torch.zeros(1, len(all_anchors(answer)), 0, dtype=torch.long))[0]
    normed = model.normed(h[0].detach().flatten(0, 1)).detach().requires_grad_()
    logits = F.linear(normed, model.lm_head)
    scores = model.ranked(normed, logits)
    expected = [b for block in h[0].detach() for b in reference.branches(block)]
    assert [(2, 4, 10, 0)[i] for i in scores.argmax(-1).tolist()] == expected
    scores.sum().backward()
    assert normed.grad is None and model.lm_head.grad is None


def test_third_blocks_see_the_two_before(pair, answers):
    """What changes nothing: ids behind the start, features at and after the anchor, other anchors and answers."""
    model, embedding = model_of(pair)
    answer = answers[2]
    anchors = all_anchors(answer)[1::4]
    starts = torch.tensor([2, 1]).expand(2, len(anchors), 2).clone()
    blocks, _ = make_blocks([answer, answer], [anchors, anchors], 2, 0, torch.ones(1))
    before = model.drafts(blocks, embedding, starts)
    for i, anchor in enumerate(anchors.tolist()):
        features, ids, others = blocks.features.clone(), blocks.ids.clone(), starts.clone()
        features[0, anchor:] = 7.0
        features[1] = -3.0
        others[:, [n for n in range(len(anchors)) if n != i]] = 3
        read = anchor, anchor + 2, anchor + 3  # the last ids that each block is fed
        for j, last in enumerate(read):
            changed = ids.clone()
            changed[0, last + 1 :] = 9
            after = model.drafts(replace(blocks, features=features, ids=changed), embedding, others)
            assert torch.allclose(after[j][0, i], before[j][0, i], atol=1e-4)
            if last < len(answer.ids):
                changed[0, last] = 9 if answer.ids[last] != 9 else 8
                after = model.drafts(replace(blocks, features=features, ids=changed), embedding, others)
                assert not torch.allclose(after[j][0, i], before[j][0, i], atol=1e-2)
        features[0, anchor - 1] += 1.0
        after = model.drafts(replace(blocks, features=features), embedding, others)
        assert all(
            not torch.allclose(a[0, i], b[0, i], atol=1e-2) for a, b in zip(after, before, strict=True)
        )


def test_no_gradient_reaches_a_feature_at_or_after_an_anchor(pair, answers):
    model, embedding = model_of(pair)
    answer = answers[2]
    anchor = len(answer.ids) - 9
    blocks, _ = make_blocks([answer], [torch.tensor([anchor])], 2, 0, torch.ones(1))
    features = blocks.features.float().requires_grad_()
    made = model.drafts(replace(blocks, features=features), embedding, torch.tensor([[[1, SLOTS]]]))
    for hidden in made:
        (grad,) = torch.autograd.grad(hidden.pow(2).sum(), features, retain_graph=True)
        assert not grad[0, anchor:].any() and grad[0, :anchor].any(-1).all()


def test_weights_survive_the_published_format(pair, tmp_path):
    model, _ = model_of(pair)
    first = load_specblock(pair[1])
    save_specblock(tmp_path / "out", first.config.source, model.tensors(), first.vocabulary)
    again = load_specblock(tmp_path / "out")
    assert torch.equal(again.vocabulary, first.vocabulary)
    for name, tensor in first.tensors.items():
        torch.testing.assert_close(again.tensors[name], tensor)


def test_a_start_is_layers_of_the_target_over_the_feature_it_reads_last(target):
    source, ids = load_checkpoint(target), torch.tensor(IDS)
    config = SpecBlockConfig.from_json(specblock_config(source.config, 2, 4, None, len(ids)))
    assert (config.slots, config.shift, config.hidden_states) == (3, True, (2, 2, 1))
    model = SpecBlockModel(config, 32, torch.tensor([0.5, 2.0, 3.0]))
    with torch.no_grad():
        model.weights["input_layer/condition_proj"].zero_()
    start_specblock(model, source.tensors, (1, 3), ids)
    made = model.tensors()
    assert torch.equal(made["lm_head.weight"], source.tensors["lm_head.weight"][ids])
    for ours, theirs in ((0, 1), (1, 3)):
        for name in ("self_attn.q_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"):
            expected = source.tensors[f"model.layers.{theirs}.{name}.weight"]
            assert torch.equal(made[f"layers.{ours}.{name}.weight"], expected)
    features = torch.randn(5, 96)
    condition = F.linear(features, made["input_layer.condition_proj.weight"])
    torch.testing.assert_close(condition, 3 * features[:, 64:])
    opened = F.linear(torch.cat([condition, torch.zeros(5, 64)], -1), made["input_layer.fuse.weight"])
    torch.testing.assert_close(opened, condition / 3)
    assert torch.equal(made["shift_proj.0.weight"], torch.cat([torch.eye(32), torch.zeros(32, 32)], 1))
