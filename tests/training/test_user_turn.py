"""Where the user's words begin and end in a rendered chat template."""

from __future__ import annotations

import pytest

from blockpilot.training.user_turn import UserTurn
from tests.training.talking import CHAT, CONTROL, tokenizer

BRACKETS = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
TRIMMED = CHAT.replace("m.content", "m.content | trim")


@pytest.mark.parametrize(
    ("template", "start", "gap", "end", "stop"),
    [
        (CHAT, "system\nBe brief.\nuser\n", "", "\nassistant\n", "<|im_end|>"),
        (TRIMMED, "system\nBe brief.\nuser\n", "", "\nassistant\n", "<|im_end|>"),
        (BRACKETS, "", " ", "", "[/INST]"),
        ("Q: {{ messages[0].content }}\n<|endoftext|>A:", "Q:", "\n", "A:", "<|endoftext|>"),
    ],
)
def test_templates_are_parted_around_the_words(template, start, gap, end, stop):
    t = tokenizer(template)
    turn = UserTurn.of(t)
    assert t.decode(turn.start).rstrip(" ") == start
    assert (t.decode(turn.gap), t.decode(turn.end)) == (gap, end)
    assert turn.stop == CONTROL.index(stop)


@pytest.mark.parametrize("template", [CHAT, TRIMMED, BRACKETS])
@pytest.mark.parametrize(
    "opening", ["", "What is", "Fix this:\n\n```python\n", "'t is  é 日本", "alpha", "a  "]
)
def test_an_opened_turn_is_the_beginning_of_the_whole_one(template, opening):
    t = tokenizer(template)
    turn = UserTurn.of(t)
    opened = turn.open(opening)
    kept = opening.strip() if template is TRIMMED else opening
    before = t.decode(t.encode_prompt("|")).split("|")[0]
    assert t.decode(opened).rstrip(" ") == (before + kept).rstrip(" ")
    assert turn.stop not in opened[len(turn.start) :]
    words = turn.words([*opened, *t.encode("and so on")])
    assert words.replace(" ", "") == f"{kept}and so on".replace(" ", "")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "need a chat template, this model has none; take prompts of --source own"),
        ("User: {{ messages[0].content }}\nAssistant:", "ends the user's turn with a control token"),
        ("{{ messages[0].content }} says the user<|im_end|>", "ends the user's turn with a control token"),
        ("<|im_start|>{{ messages[0].content | upper }}<|im_end|>", "keeps the user's words together"),
        ("{{ messages[0].content }}<|im_end|>{{ messages[0].content }}", "keeps the user's words together"),
    ],
)
def test_templates_without_a_turn_to_continue_are_refused(template, message):
    with pytest.raises(ValueError, match=message):
        UserTurn.of(tokenizer(template))


def test_a_template_that_ends_some_turns_otherwise_is_refused():
    picky = "{{ messages[0].content }}{{ '[INST]' if 'code' in messages[0].content else '<|im_end|>' }}"
    with pytest.raises(ValueError, match="ends the turn 'Some code' unlike others"):
        UserTurn.of(tokenizer(picky)).open("Some code")
