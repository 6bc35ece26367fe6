"""Steps of training a SpecBlock drafter: losses beside plain loops, what it learns, and that a run resumes exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from blockpilot import LLM
from blockpilot.drafters.specblock_checkpoint import save_specblock
from blockpilot.drafters.specblock_config import SpecBlockConfig
from blockpilot.params import SamplingParams
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.training.draft_data import Answer, read_answer
from blockpilot.training.draft_loss import ABSENT, DraftIds, Labels
from blockpilot.training.draft_training import Recipe
from blockpilot.training.draft_validation import count_steps, right_guesses
from blockpilot.training.specblock_loss import BlockLoss, rank_classes, rank_loss
from blockpilot.training.specblock_model import SpecBlockModel, specblock_config
from blockpilot.training.specblock_training import SpecBlockTrainer
from tests.eagle3 import IDS
from tests.engine.pair import write_tokenizer
from tests.tiny import save_target

LENGTH, SLOTS, VOCAB = 30, 2, 48
PROMPTS = [[5, 9, 4, 11], [3], [20, 4, 6, 8, 12, 30, 3]]
RECIPE = Recipe(blocks=64, batch=2, anchors=5, widths=(SLOTS + 1,) * 2, warm_up=8, rate=3e-3)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = save_target(tmp_path_factory.mktemp("target"), vocab=VOCAB, eos_token_id=1)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def answers(target):
    with LLM(target, max_requests=1, max_length=64) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_new_tokens=LENGTH))
        llm.target.use_features([1, 2, 4])
        made = []
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            features, ids, logp = read_answer(llm.target, prompt, output.token_ids)
            made.append(Answer(prompt + output.token_ids, len(prompt), features, ids.long(), logp.exp()))
    return made


def config_of(target) -> SpecBlockConfig:
    shape = (2, SLOTS + 1, (0, 1, 3), len(IDS))
    return SpecBlockConfig.from_json(specblock_config(load_checkpoint(target).config, *shape))


def trainer(target, answers, recipe=RECIPE, **options) -> SpecBlockTrainer:
    torch.manual_seed(1)
    model = SpecBlockModel(config_of(target), 64, torch.tensor([0.5, 1.0, 0.25]))
    counts = torch.bincount(torch.tensor([t for a in answers for t in a.ids]), minlength=VOCAB).float()
    tensors = load_checkpoint(target).tensors
    tables = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    readers, lengths = [lambda a=a: a for a in answers], [len(a.ids) for a in answers]
    parts = (model, recipe, readers, lengths, *tables, counts, torch.float32, torch.tensor(IDS))
    return SpecBlockTrainer(*parts, **options)


def test_a_trained_drafter_decodes_as_it_was_validated(target, answers, tmp_path):
    """It learns its answers, and every number of accepted drafts occurs in two blocks."""
    run = trainer(target, answers, replace(RECIPE, blocks=10 * 250))
    first = [run.step()["loss"] for _ in range(10)]
    while not run.finished:
        last = run.step()
    assert last["loss"] < 0.6 * sum(first) / len(first)
    save_specblock(tmp_path / "drafter", config_of(target).source, run.model.tensors(), torch.tensor(IDS))
    kept = set()
    with LLM(target, drafter=tmp_path / "drafter", max_length=64) as llm:
        for width in (2, SLOTS + 1, 2 * SLOTS, 2 * SLOTS + 1):
            outputs = llm.generate(PROMPTS, [SamplingParams(max_new_tokens=LENGTH, width=width)] * 3)
            for answer, output in zip(answers, outputs, strict=True):
                assert output.token_ids == answer.ids[answer.start :]
                asked = (run.embedding, run.head, torch.tensor(IDS), width, torch.tensor(IDS))
                right = right_guesses(run.model, lambda a=answer: a, *asked)
                assert count_steps(right) == (output.stats.committed, output.stats.steps)
                kept |= set(right.long().cumprod(1).sum(1).tolist())
    assert kept == set(range(2 * SLOTS + 1))


def test_a_resumed_run_ends_in_the_same_bits(target, answers, tmp_path):
    whole = trainer(target, answers)
    while not whole.finished:
        whole.step()
    part, again = trainer(target, answers), trainer(target, answers)
    for _ in range(3):
        part.step()
    part.save(tmp_path / "state.safetensors")
    again.load(tmp_path / "state.safetensors")
    while not again.finished:
        again.step()
    for (name, a), b in zip(whole.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(a, b[1]), name
    assert (again.tokens, again.steps) == (whole.tokens, whole.steps)


@pytest.mark.parametrize("valid_prefix", [True, False])
def test_the_loss_is_a_plain_loop(target, answers, valid_prefix):
    """Slot by slot; labels beyond the answer and ones that the head has no row of among them."""
    model = trainer(target, answers).model
    ids, gen = torch.tensor(IDS), torch.Generator().manual_seed(5)
    m, k, gamma = 40, 3, 4.5
    hidden = torch.randn(m, k, 32, generator=gen) * 3
    guesses = ids[F.linear(model.normed(hidden), model.lm_head).argmax(-1)]
    drawn = torch.randint(VOCAB, (m, k), generator=gen)
    given = torch.where(torch.rand(m, k, generator=gen) < 0.7, guesses, drawn)
    given[::7, 2] = ABSENT
    given[::14] = ABSENT
    teachers = torch.stack([given.clamp_min(0), (given + 1).clamp_min(0) % VOCAB], -1)
    labels = Labels(given, torch.ones(m, k), teachers, torch.tensor([0.7, 0.2]).expand(m, k, 2))
    measured, right, slot = BlockLoss(gamma, 0.25, valid_prefix)(model, hidden, labels, DraftIds(ids, VOCAB))

    expected, seen, ranks, kept = torch.zeros(()), [], [], DraftIds(ids, VOCAB).keep(labels)
    for i in range(m):
        live = ranked = True
        for s in range(k):
            if given[i, s] == ABSENT or not live:
                break
            normed, label = model.normed(hidden[i, s]), int(given[i, s])
            logits = F.linear(normed, model.lm_head)
            logq, order = logits.log_softmax(-1), ids[logits.argsort(descending=True)].tolist()
            place = order.index(label) + 1 if label in IDS else math.inf
            if place < math.inf:
                pairs = zip(teachers[i, s].tolist(), kept.teacher_p[i, s].tolist(), strict=True)
                taught = sum(p * logq[IDS.index(t)] for t, p in pairs if t in IDS)
                loss = -0.75 * logq[IDS.index(label)] - 0.25 * taught
                expected = expected + math.exp(-s / gamma) * loss
                seen.append((s, place == 1))
            if ranked:
                said = model.ranked(normed[None], logits[None])[0]
                true = 0 if place == 1 else 1 if place <= 4 else 2 if place <= 10 else 3
                ranks.append((said, true))
                ranked = int(said.argmax()) == true
            live = place == 1 or not valid_prefix
    begun = sum(s == 0 for s, _ in seen)
    torch.testing.assert_close(measured, expected / begun + plain_rank_loss(ranks))
    assert sorted(zip(slot.tolist(), right.tolist(), strict=True)) == sorted(seen)
    measured.backward()
    assert model.lm_head.grad.abs().sum() > 0


def plain_rank_loss(rows) -> torch.Tensor:
    total, whole = torch.zeros(()), 0.0
    for said, t in rows:
        soft = torch.tensor([(1 + abs(c - t) + max(t - c, 0)) ** -2.0 for c in range(4)])
        count = sum(true == t for _, true in rows)
        weight, c = min(1.0, 10 / count), int(said.argmax())
        total = (
            total
            - weight * (1 + abs(t - c) + max(t - c, 0)) * (soft / soft.sum() * said.log_softmax(-1)).sum()
        )
        whole += weight
    return total / whole


def test_rank_classes_are_those_of_the_place_in_the_list():
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    column = torch.where(torch.arange(50) % 3 == 0, logits.argmax(-1), torch.arange(50) % 40)
    column[7] = -1
    places = [
        math.inf if c < 0 else row.argsort(descending=True).tolist().index(c) + 1
        for row, c in zip(logits, column.tolist(), strict=True)
    ]
    expected = [0 if p == 1 else 1 if p <= 4 else 2 if p <= 10 else 3 for p in places]
    assert set(expected) == {0, 1, 2, 3}
    assert rank_classes(logits, column).tolist() == expected


def test_many_rows_of_a_class_weigh_as_ten():
    gen = torch.Generator().manual_seed(0)
    scores, true = torch.randn(40, 4, generator=gen), torch.tensor([0] * 25 + [1] * 11 + [2] * 3 + [3])
    expected = plain_rank_loss(list(zip(scores, true.tolist(), strict=True)))
    torch.testing.assert_close(rank_loss(scores, true), expected)
    assert rank_loss(scores[:0], true[:0]) == 0
