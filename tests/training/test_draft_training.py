"""Steps of training: what they see, that they learn, and that a run resumes exactly."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from blockpilot.drafters.dflash_config import DFlashConfig
from blockpilot.errors import TrainingDivergedError
from blockpilot.targets.checkpoint import load_checkpoint
from blockpilot.training.draft_batches import Order, make_blocks, random_anchors
from blockpilot.training.draft_data import Answer
from blockpilot.training.draft_loss import ABSENT
from blockpilot.training.draft_model import DraftModel, drafter_config
from blockpilot.training.draft_training import DraftTrainer, Recipe
from tests.tiny import MASK, save_target

RECIPE = Recipe(blocks=64, batch=2, anchors=4, widths=(2, 5), warm_up=8, vocabulary=16, rate=3e-3)


def answer(i: int) -> Answer:
    """Ids that count upwards from a start that the prompt tells."""
    gen = torch.Generator().manual_seed(i)
    ids = [3 + (i + k) % 25 for k in range(14 + i % 3)]
    features = torch.randn(len(ids) - 1, 2 * 32, generator=gen).bfloat16()
    teacher_ids = torch.tensor(ids[4:])[:, None].expand(-1, 2).clone()
    teacher_ids[:, 1] = 30
    return Answer(ids, 4, features, teacher_ids, torch.tensor([0.8, 0.1]).expand(len(ids) - 4, 2))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_checkpoint(save_target(tmp_path_factory.mktemp("target")))


def trainer(target, recipe=RECIPE, count=10) -> DraftTrainer:
    config = DFlashConfig.from_json(drafter_config(target.config, 1, 4, MASK, (0, 2)))
    torch.manual_seed(1)
    model = DraftModel(config, 20, torch.ones(2))
    answers = [answer(i) for i in range(count)]
    readers = [lambda a=a: a for a in answers]
    tensors = target.tensors
    counts = torch.bincount(torch.tensor([t for a in answers for t in a.ids]), minlength=32).float()
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    return DraftTrainer(model, recipe, readers, [len(a.ids) for a in answers], embedding, head, counts)


def test_blocks_and_labels():
    a = answer(1)
    blocks, labels = make_blocks([a], [torch.tensor([4, 12, -1])], 4, MASK, torch.tensor([1.0, 0.5, 0.25]))
    assert blocks.tokens.tolist() == [
        [[a.ids[4], MASK, MASK, MASK], [a.ids[12], MASK, MASK, MASK], [a.ids[0], MASK, MASK, MASK]]
    ]
    ids = labels.ids.view(3, 3).tolist()
    assert ids == [a.ids[5:8], [*a.ids[13:], *[ABSENT] * (3 - len(a.ids[13:]))], [ABSENT] * 3]
    assert labels.weight.view(3, 3)[0].tolist() == [1.0, 0.5, 0.25]
    assert labels.teacher_ids.view(3, 3, 2)[0, :, 0].tolist() == a.ids[5:8]


def test_anchors_are_answered_positions_with_a_successor():
    a, generator = answer(0), torch.Generator().manual_seed(0)
    places = random_anchors(a, 40, generator)
    assert len(places) == 40 and sorted(p for p in places.tolist() if p >= 0) == list(range(4, 13))
    assert set(random_anchors(a, 3, generator).tolist()) <= set(range(4, 13))


def test_an_order_passes_over_everything_once_and_takes_up_new_answers():
    lengths = list(range(20))
    order = Order(3, 4, 10)
    first = [i for _ in range(2) for i in order.next(lengths)]
    assert len(set(first)) == 8 and max(first) < 10 and order.epoch == 0
    second = [i for _ in range(5) for i in order.next(lengths)]
    assert sorted(second) == list(range(20)) and order.epoch == 1
    resumed = Order(3, 4, 20, epoch=1, at=0)
    assert [i for _ in range(5) for i in resumed.next(lengths)] == second


def test_training_learns(target):
    run = trainer(target, replace(RECIPE, blocks=8 * 400))
    first = [run.step()["loss"] for _ in range(10)]
    while not run.finished:
        last = run.step()
    assert last["loss"] < 0.6 * sum(first) / len(first)
    assert last["rate"] == pytest.approx(0, abs=1e-5)


def test_a_resumed_run_ends_in_the_same_bits(target, tmp_path):
    whole = trainer(target)
    while not whole.finished:
        whole.step()
    part = trainer(target)
    for _ in range(3):
        part.step()
    part.save(tmp_path / "state.safetensors")
    again = trainer(target)
    again.load(tmp_path / "state.safetensors")
    assert (again.steps, again.blocks) == (3, 24)
    while not again.finished:
        again.step()
    for (name, a), b in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert again.tokens == whole.tokens


def test_another_recipe_or_drafter_is_refused(target, tmp_path):
    run = trainer(target)
    run.step()
    run.save(tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match=r"distil: 0\.5, not 0\.1"):
        trainer(target, replace(RECIPE, distil=0.1)).load(tmp_path / "state.safetensors")
    longer = trainer(target, replace(RECIPE, blocks=128))
    longer.load(tmp_path / "state.safetensors")
    assert not longer.finished


def test_the_rate_rises_stays_and_falls():
    recipe = Recipe(blocks=1000, batch=1, anchors=10, warm_up=100, decay=0.3, rate=1.0)
    assert [round(recipe.rate_at(n), 2) for n in (0, 40, 90, 500, 700, 850, 1000)] == [
        0.1,
        0.5,
        1,
        1,
        1,
        0.5,
        0,
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("blocks", 0), ("batch", 0), ("anchors", 0), ("gamma", 0.0), ("gamma", float("nan")), ("rate", -1.0),
        ("rate", float("inf")), ("widths", (1, 4)), ("widths", (5, 4)), ("distil", 1.5),
        ("seed", -1), ("seed", 1 << 32),
    ],
)  # fmt: skip
def test_a_recipe_out_of_range_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        replace(RECIPE, **{name: value})


def test_a_diverged_step_leaves_the_weights(target):
    run = trainer(target)
    run.step()
    before = [p.detach().clone() for p in run.model.parameters()]
    run.readers = [lambda r=r: replace(r(), features=r().features * float("inf")) for r in run.readers]
    with pytest.raises(TrainingDivergedError, match="step 1"):
        run.step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    assert run.steps == 1


def test_a_damaged_state_is_named(target, tmp_path):
    path = tmp_path / "state.safetensors"
    run = trainer(target)
    run.save(path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[:-7]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"state\.safetensors: expected the state of a run"):
            run.load(path)
    path.write_bytes(whole)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    for key in metadata:
        save_file(tensors, path, metadata={k: v for k, v in metadata.items() if k != key})
        with pytest.raises(ValueError, match="expected the state of a run"):
            run.load(path)


@pytest.fixture
def saved(target, tmp_path):
    """A run of one step, the file of its state, its tensors and its metadata."""
    run, path = trainer(target), tmp_path / "state.safetensors"
    run.step()
    run.save(path)
    with safe_open(path, "pt") as file:
        return run, path, load_file(path), file.metadata()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("exp_avg.norm", lambda t: t[:-1], r"exp_avg\.norm: expected float32 \[32\], got float32 \[31\]"),
        ("exp_avg_sq.fc.weight", lambda t: t.T.contiguous(), r"exp_avg_sq\.fc\.weight: expected float32"),
        ("exp_avg.norm", lambda t: t.double(), r"exp_avg\.norm: expected float32 \[32\], got float64 \[32\]"),
        ("exp_avg.norm", lambda t: None, r"exp_avg\.norm: expected float32 \[32\], got nothing"),
        ("exp_avg.other", lambda t: torch.zeros(2), r"exp_avg\.other: expected nothing, got float32 \[2\]"),
        ("model.norm", lambda t: t[:-1], r"model\.norm: expected float32 \[32\], got float32 \[31\]"),
        ("generator", lambda t: t[:-1], r"generator: expected uint8"),
        ("scale", lambda t: t[:-1], r"scale: expected float32"),
        ("scale", lambda t: None, r"scale: expected float32 .* got nothing"),
    ],
)
def test_tensors_of_other_shapes_are_refused(target, saved, name, change, message):
    """Every message names the file, and nothing has changed by then."""
    _, path, tensors, metadata = saved
    changed = {**tensors, name: change(tensors.get(name))}
    save_file({k: v for k, v in changed.items() if v is not None}, path, metadata=metadata)
    fresh = trainer(target)
    before = [p.detach().clone() for p in fresh.model.parameters()]
    with pytest.raises(ValueError, match=rf"state\.safetensors: {message}"):
        fresh.load(path)
    assert all(torch.equal(a, b) for a, b in zip(before, fresh.model.parameters(), strict=True))
    assert fresh.steps == 0 and not fresh.optimiser.state


def test_a_state_of_more_answers_than_there_are_is_refused(target, saved):
    _, path, tensors, metadata = saved
    order = json.loads(metadata["order"])
    order["size"] += 1
    save_file(tensors, path, metadata=metadata | {"order": json.dumps(order)})
    with pytest.raises(ValueError, match=r"order: expected at most the \d+ answers there are"):
        trainer(target).load(path)


@pytest.mark.parametrize("text", ['[[1, 2], ["a", 3]]', "[" * 200_000])
def test_a_state_whose_place_is_no_table_is_refused(target, saved, text):
    _, path, tensors, metadata = saved
    save_file(tensors, path, metadata=metadata | {"place": text})
    with pytest.raises(ValueError, match=r"expected (numbers|the state of a run)"):
        trainer(target).load(path)


def test_a_folder_is_no_state(target, tmp_path):
    with pytest.raises(ValueError, match="expected the state of a run"):
        trainer(target).load(tmp_path)


@pytest.mark.parametrize("part", ["place", "order"])
@pytest.mark.parametrize(
    "change",
    [
        {"step": 1},
        {"finished": True},
        {"model": None},
        {"at": -1, "blocks": -1},
        {"at": "0", "blocks": 1.5},
        {"at": 10**400, "steps": 10**400},
    ],
)
def test_a_state_names_no_attribute_but_its_own(target, saved, part, change):
    _, path, tensors, metadata = saved
    found = {**json.loads(metadata[part]), **change}
    save_file(tensors, path, metadata={**metadata, part: json.dumps(found)})
    fresh = trainer(target)
    model = fresh.model
    with pytest.raises(
        ValueError, match=rf"state\.safetensors: {part}: expected numbers of 0 or more .* got"
    ):
        fresh.load(path)
    assert fresh.model is model and fresh.steps == 0


def test_what_is_no_generator_is_refused(target, saved):
    run, path, tensors, metadata = saved
    save_file({**tensors, "generator": torch.full_like(tensors["generator"], 255)}, path, metadata=metadata)
    with pytest.raises(ValueError, match=r"state\.safetensors: expected the state of a generator"):
        run.load(path)
