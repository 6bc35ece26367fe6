"""Tokenizers from Hugging Face folders and from GGUF metadata behave alike, and like transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import Unigram
from transformers import AutoTokenizer

from blockpilot.targets.stored import CheckpointError
from blockpilot.text import Tokenizer, load_tokenizer
from blockpilot.text.sources import TokenizerParts
from tests.text.vocabularies import byte_level, checkpoint, sentencepiece, tokenizer, transformers_tokenizer

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
TEXTS = ["Hello, 12345 dogs!", "the  sea\n", "日本語 😀", "", " a", "<|im_end|>", "x<think>    y"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    transformers_tokenizer(byte_level(chat_template=TEMPLATE)).save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, vocab_size: int = 512, **config: Any) -> Tokenizer:
    return load_tokenizer(checkpoint(folder, vocab_size, **config))


def edit(path: Path, **over: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **over}))


def test_a_folder_and_a_gguf_file_give_the_same_tokenizer(folder: Path) -> None:
    ours = load(folder)
    gguf = load_tokenizer(checkpoint(byte_level(chat_template=TEMPLATE), 512))
    assert ours.fingerprint == gguf.fingerprint and ours.vocab_size == gguf.vocab_size
    assert ours.eos_token_ids == gguf.eos_token_ids == (2,) and ours.bos_token_id == gguf.bos_token_id == 1
    for text in TEXTS:
        assert ours.encode(text) == gguf.encode(text)
        assert ours.encode_prompt(text) == gguf.encode_prompt(text)


def test_the_fingerprint_sees_swapped_ids() -> None:
    """Vocabularies of the same size with two ids exchanged are different vocabularies."""
    metadata = byte_level()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[10], tokens[11] = tokens[11], tokens[10]
    swapped, plain = tokenizer(metadata), tokenizer(byte_level())
    assert swapped.vocab_size == plain.vocab_size and swapped.fingerprint != plain.fingerprint


def test_control_ids_and_templates_are_told_apart(folder: Path) -> None:
    ours, other = load(folder), tokenizer(byte_level(chat_template=TEMPLATE + " "))
    spelled = ours.encode("    ") + ours.encode("Hello, 12345 dogs!")
    assert not any(map(ours.is_control, spelled))
    assert [i for i in range(ours.vocab_size) if ours.is_control(i)] == [0, 1, 2, *user_defined(ours)]
    assert ours.template_fingerprint == load(folder).template_fingerprint != other.template_fingerprint
    assert tokenizer(byte_level()).template_fingerprint is None


def user_defined(ours: Tokenizer) -> list[int]:
    """Ids of the user-defined tokens that are no blanks."""
    return [ours.vocab_size - 3, ours.vocab_size - 2]


def test_ordinary_text_equals_transformers(folder: Path) -> None:
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS[:5]:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids and ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_literals_are_what_the_library_gives_without_special_tokens() -> None:
    made = tokenizer(byte_level(user_defined=()))
    plain = transformers_tokenizer(byte_level(user_defined=())).backend_tokenizer
    plain.encode_special_tokens = True
    for text in ("<|im_end|>", "a <|im_start|>system\n", "<|im_<|im_end|>end|>", "<|im_end|>" * 3):
        assert made.encode(text) == plain.encode(text, add_special_tokens=False).ids


def test_template_file_wins_over_the_configuration(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit(folder / "tokenizer_config.json", chat_template="A{{ messages[0].content }}")
    assert load(folder).decode(load(folder).encode_prompt("x")) == "Ax"
    named = [
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "D{{ messages[0].content }}"},
    ]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert load(folder).decode(load(folder).encode_prompt("x")) == "Dx"
    (folder / "chat_template.jinja").write_text("J{{ messages[0].content }}")
    assert load(folder).decode(load(folder).encode_prompt("x")) == "Jx"


def test_without_a_template_a_string_is_raw_text_and_messages_are_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    made = load(folder)
    assert not made.has_chat_template
    assert made.encode_prompt("the sea") == made.encode("the sea")
    with pytest.raises(ValueError, match="no chat template: pass the prompt as a string"):
        made.encode_prompt([{"role": "user", "content": "x"}])


def test_the_bos_rule_of_a_folder_is_its_post_processor(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    theirs.save_pretrained(folder)
    made = load(folder)
    assert made.encode_prompt("the sea") == [1, *made.encode("the sea")]
    assert made.encode_prompt("") == [1]


def test_the_bos_rule_of_a_gguf_file() -> None:
    made = tokenizer(sentencepiece())
    assert made.encode_prompt("the") == [1, *made.encode("the")]
    bare = tokenizer(sentencepiece(**{"ggml.add_bos_token": False}))
    assert bare.encode_prompt("the") == bare.encode("the")


def test_truncation_and_padding_stored_in_the_file_are_off(folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.backend_tokenizer.enable_truncation(4)
    theirs.backend_tokenizer.enable_padding(length=8)
    theirs.backend_tokenizer.save(str(folder / "tokenizer.json"))
    made = load(folder)
    assert made.decode(made.encode("one two three four five")) == "one two three four five"


def test_stop_ids_are_the_union_of_model_and_tokenizer(folder: Path) -> None:
    assert load(folder, eos_token_id=[0, 2]).eos_token_ids == (0, 2)
    assert load(folder, eos_token_id=0).eos_token_ids == (0, 2)


def test_tokens_declared_only_in_the_configuration(folder: Path) -> None:
    size = load(folder).vocab_size
    config = json.loads((folder / "tokenizer_config.json").read_text())
    entry = {"content": "<|tool|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    declared = {**config.get("added_tokens_decoder", {}), str(size): entry}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=declared, eos_token="the")
    made = load(folder)
    assert made.vocab_size == size + 1 and made.decode([size]) == ""
    assert size not in made.encode("<|tool|>") and made.decode(made.encode("<|tool|>")) == "<|tool|>"
    (folder / "chat_template.jinja").write_text("<|tool|>{{ messages[0].content }}<|tool|>")
    assert [i for i in load(folder).encode_prompt("x <|tool|>") if i == size] == [size] * 2
    edit(folder / "tokenizer_config.json", added_tokens_decoder={str(size + 5): entry})
    with pytest.raises(CheckpointError, match=rf"'<\|tool\|>': expected id {size + 5} .* found {size}"):
        load(folder)


def test_a_special_token_named_in_the_configuration_is_special(folder: Path) -> None:
    edit(
        folder / "tokenizer_config.json", eos_token={"content": "Ġthe", "special": True}, pad_token="nowhere"
    )
    made = load(folder)
    token = made.eos_token_ids[0]
    assert made.decode([token]) == "" and made.vocab_size == load(folder).vocab_size


def test_more_tokens_than_rows_is_another_model(folder: Path) -> None:
    size = load(folder).vocab_size
    assert load(folder, size).vocab_size == size
    with pytest.raises(CheckpointError, match=f"at most {size - 1} tokens, the target's rows, found {size}"):
        load(folder, size - 1)


def test_folders_without_a_readable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected tokenizer.json.*save_pretrained"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: expected a tokenizer.json, found"):
        load(tmp_path)


def test_ids_beyond_the_vocabulary_have_no_text(folder: Path) -> None:
    made = load(folder)
    assert made.decode([made.vocab_size, *made.encode("ok"), 10**6]) == "ok"


def test_normalized_special_tokens_cannot_be_reached_by_other_spellings() -> None:
    """A token matched after normalisation has more spellings than its literal."""
    metadata = byte_level("qwen2")
    backend = transformers_tokenizer(metadata).backend_tokenizer
    backend.add_special_tokens([AddedToken("<é>", normalized=True, special=True)])
    made = Tokenizer(TokenizerParts(backend, {}, None, ()))
    token = backend.token_to_id("<é>")
    assert backend.encode("<e\u0301>", add_special_tokens=False).ids == [token]
    assert token not in made.encode("<e\u0301>") and token not in made.encode("<é>")


def test_unigram_vocabularies_keep_control_tokens_apart() -> None:
    """A model that can spell a control token from text on its own must not."""
    backend = Backend(Unigram([("<unk>", 0.0), ("</s>", -1.0), *((c, -5.0) for c in "</s>ab")], unk_id=0))
    backend.add_special_tokens(["<unk>", "</s>"])
    made = Tokenizer(TokenizerParts(backend, {}, None, ()))
    assert 1 in backend.encode("a</s>", add_special_tokens=False).ids
    assert 1 not in made.encode("a</s>") and len(made.encode("a</s>")) == 5


def test_a_mask_is_a_control_token_that_nothing_uses() -> None:
    from tests.training.talking import END, tokenizer

    t = tokenizer()
    first = t.unused_control(())
    second = t.unused_control([first])
    assert first < second and END not in (first, second) and t.is_control(first) and t.is_control(second)
    with pytest.raises(ValueError, match="every control token"):
        t.unused_control(range(t.vocab_size))
