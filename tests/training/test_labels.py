"""Labelling: what a row says, exactness, and runs that are killed and continued."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from blockpilot.policies.predictor import policy_input
from blockpilot.training.dataset import load_examples
from blockpilot.training.label_store import decode_input, encode_input, read_labels
from blockpilot.training.labels import ExactnessError
from tests.training.fakes import (
    HIDDEN,
    FakeDrafter,
    embedding,
    logits_of,
    prompts,
)
from tests.training.label_runs import WINDOW, Factory, run


@pytest.fixture
def path(tmp_path):
    return tmp_path / "labels.jsonl"


def test_rows_say_what_every_width_was_worth(path):
    factory = Factory()
    summary = run(path, factory=factory)
    settings, rows = read_labels(path)
    assert (summary.prompts, summary.labelled, summary.skipped, summary.identical, summary.unusable) == (
        10,
        10,
        0,
        10,
        0,
    )
    assert settings["pair"] == {"target": "fake-target", "drafter": "fake-drafter"}
    assert [r["id"] for r in rows] == [p["id"] for p in prompts(10)]
    for row, prompt in zip(rows, prompts(10), strict=True):
        assert row["window"] == [1, 2, 4] and row["family"] == prompt["family"]
        assert row["committed"] == [11, 11, 11] and row["steps"][0] == 11 and row["tau"][0] == 1.0
        assert row["tau"] == [c / s for c, s in zip(row["committed"], row["steps"], strict=True)]
        assert [len(k) for k in row["kept"]] == [len(o) for o in row["offered"]] == [0, 1, 3]
        assert (row["prompt_tokens"], row["tokens"], row["finish_reason"]) == (3, 12, "length")
    assert all(llm.closed for llm in factory.made)
    assert [len(c) for c in factory.calls] == [4] * 6 + [2] * 3


def test_the_input_is_bit_for_bit_what_a_predictor_would_read(path):
    run(path)
    for row, prompt in zip(read_labels(path)[1], prompts(10), strict=True):
        wanted = policy_input(logits_of(prompt["prompt"])[None], "mean_likely_embedding", embedding())[0]
        assert torch.equal(decode_input(row["input"], HIDDEN), wanted)


def test_bytes_of_an_input_survive_encoding():
    row = torch.randn(33) * torch.tensor(10.0) ** torch.randint(-30, 30, (33,))
    assert torch.equal(decode_input(encode_input(row), 33), row)
    with pytest.raises(ValueError, match="expected 32 float32 values, found 132 bytes"):
        decode_input(encode_input(row), 32)
    with pytest.raises(ValueError, match="finite"):
        decode_input(encode_input(torch.tensor([float("nan")])), 1)


@pytest.mark.parametrize("torn", [b"", b'{"id": "p/9", "fam', b'{"labels": 1'])
@pytest.mark.parametrize("raw_logits", [False, True])
def test_a_killed_run_continues_and_ends_in_the_same_bytes(path, torn, raw_logits):
    whole = path.with_name("whole.jsonl")
    run(whole, raw_logits=raw_logits)
    with pytest.raises(KeyboardInterrupt):
        run(path, factory=Factory(die_after=4), raw_logits=raw_logits)  # dies at the second width of batch 2
    with path.open("ab") as file:
        file.write(torn)
    again = Factory()
    summary = run(path, factory=again, raw_logits=raw_logits)
    assert (summary.labelled, summary.skipped, summary.identical) == (10, 4, 6)
    assert again.made[0].calls[0] == tuple(p["prompt"] for p in prompts(10)[4:8])
    assert path.read_bytes() == whole.read_bytes()
    for shard in whole.with_suffix(".logits").iterdir() if raw_logits else ():
        twin = path.with_suffix(".logits") / shard.name
        assert torch.equal(load_file(shard)["logits"], load_file(twin)["logits"])


def test_a_file_torn_inside_its_first_line_starts_again(path):
    run(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:20])
    assert run(path).labelled == 10
    assert path.read_bytes() == whole


def test_a_finished_file_is_left_as_it_is_and_can_grow(path):
    run(path)
    before, again = path.read_bytes(), Factory()
    assert run(path, factory=again).skipped == 10
    assert path.read_bytes() == before and again.calls == []
    assert run(path, count=12).labelled == 12
    assert path.read_bytes().startswith(before)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"max_new_tokens": 13}, "max_new_tokens: expected 12, got 13"),
        ({"window": (1, 2)}, "window"),
        ({"seed": 1}, "seed"),
        ({"temperature": 0.5}, "temperature"),
        ({"raw_logits": True}, "raw_logits"),
        ({"factory": Factory(drafter=FakeDrafter(fingerprint="other"))}, "pair"),
        ({"factory": Factory(drafter=FakeDrafter(block_size=5))}, "block_size"),
    ],
)
def test_other_settings_are_refused_by_name_and_change_nothing(path, change, name):
    run(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"other settings.*{name}"):
        run(path, **change)
    assert path.read_bytes() == before


def test_another_prompt_under_a_known_id_is_refused(path):
    run(path)
    items = prompts(10)
    items[3]["prompt"] = "something else"
    with pytest.raises(ValueError, match=r"other prompts under ids \['p/3'\]"):
        run(path, items=items)


def test_a_foreign_file_is_never_overwritten(path):
    path.write_text("my notes")
    with pytest.raises(ValueError, match="found another file"):
        run(path)
    assert path.read_text() == "my notes"


def test_a_broken_line_inside_is_named(path):
    run(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], lines[3][:40] + b"\n", *lines[4:]]))
    with pytest.raises(ValueError, match="line 4: expected a JSON object"):
        run(path)
    path.write_bytes(b"".join([*lines, lines[2]]))
    with pytest.raises(ValueError, match=r"every id once, found \['p/1'\] twice"):
        run(path)


@pytest.mark.parametrize("width", WINDOW[1:])
def test_a_planted_difference_between_widths_ends_the_run(path, width):
    factory = Factory(wrong=("number 6 please", width))
    with pytest.raises(ExactnessError, match=rf"prompt p/6: widths 1 and {width} .* from token 3 on"):
        run(path, factory=factory)
    assert factory.made[0].closed
    assert [r["id"] for r in read_labels(path)[1]] == ["p/0", "p/1", "p/2", "p/3"]


def test_a_row_of_another_request_is_noticed(path):
    with pytest.raises(RuntimeError, match="captured row 0 is not of request 0"):
        run(path, factory=Factory(reverse=True))


def test_answers_without_a_step_and_failures_are_kept_apart(path):
    items = prompts(10)
    items[1]["prompt"], items[5]["prompt"] = "a silent one", "a broken one"
    summary = run(path, items=items)
    assert (summary.labelled, summary.unusable, summary.identical) == (10, 2, 9)
    rows = read_labels(path)[1]
    assert rows[1]["input"] is None and rows[1]["tau"] == [None] * 3 and rows[5]["finish_reason"] == "error"
    wanted = policy_input(logits_of(items[2]["prompt"])[None], "mean_likely_embedding", embedding())[0]
    assert torch.equal(decode_input(rows[2]["input"], HIDDEN), wanted)
    examples = load_examples([path]).examples
    assert examples.ids == tuple(p["id"] for i, p in enumerate(items) if i not in (1, 5))


def test_raw_logits_are_kept_beside_the_rows(path):
    run(path, raw_logits=True)
    wanted = torch.stack([logits_of(p["prompt"]) for p in prompts(10)])
    assert torch.equal(load_examples([path], "raw").examples.inputs, wanted)
    assert load_examples([path], "probabilities").examples.inputs.sum(-1) == pytest.approx([1.0] * 10)
    shard = next(path.with_suffix(".logits").iterdir())
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match="expected a whole safetensors shard"):
        load_examples([path], "raw")
    shard.unlink()
    with pytest.raises(ValueError, match="expected a whole safetensors shard"):
        load_examples([path], "raw")


def test_without_raw_logits_only_the_compact_input_is_there(path):
    run(path)
    with pytest.raises(ValueError, match="no raw logits"):
        load_examples([path], "raw")


def test_sampling_uses_a_seed_of_the_prompt_alone(path):
    run(path, temperature=1.0, batch=3)
    other = path.with_name("other.jsonl")
    run(other, temperature=1.0, batch=10)
    assert path.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": (2, 1)}, "ascending widths"),
        ({"window": ()}, "1 to 64"),
        ({"window": (2, 9)}, r"got \[9\]"),
        ({"max_new_tokens": 1}, "max_new_tokens >= 2"),
        ({"batch": 0}, "batch >= 1"),
        ({"factory": Factory(drafter=None)}, "expected an LLM with a drafter"),
        ({"items": [prompts(1)[0]] * 2}, "unique ids"),
    ],
)
def test_bad_arguments_are_refused(path, options, message):
    with pytest.raises(ValueError, match=message):
        run(path, **options)
    assert not path.exists()


def test_an_engine_that_never_binds_the_policy_is_refused(path):
    with pytest.raises(RuntimeError, match="never bound"):
        run(path, factory=Factory(bind=False))


def test_progress_goes_to_stderr(path, capsys):
    run(path, progress=True)
    captured = capsys.readouterr()
    assert captured.out == "" and "30/30" in captured.err
