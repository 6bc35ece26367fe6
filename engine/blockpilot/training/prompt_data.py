"""Prompt families about given material: extraction, summaries, tables, lists, labels."""

from __future__ import annotations

from blockpilot.training.prompt_text import sentence
from blockpilot.training.prompt_words import (
    AUDIENCES,
    COLOURS,
    CONTAINERS,
    FOODS,
    HOBBIES,
    JOBS,
    MONTHS,
    NAMES,
    OBJECTS,
    PRODUCTS,
    PROJECTS,
    THINGS,
    TOPICS,
    TOWNS,
    WEEKDAYS,
)
from blockpilot.training.randomness import Draw, article


def _report(draw: Draw) -> str:
    """A made-up local news item of five to seven sentences."""
    town, project, n = draw.pick(TOWNS), draw.pick(PROJECTS), draw.number(2, 90)
    month, job = draw.pick(MONTHS), draw.pick(JOBS)
    parts = [
        f"The council of {town} has voted for {project}.",
        draw.pick((f"Work will begin in {month} and should take {n} weeks.",
                   f"The plan had been delayed since {month}.")),
        f"It will cost about {n * 10} thousand dollars, "
        f"{draw.pick(('half of it from donations', 'paid from the town budget'))}.",
        draw.pick((f"A local {job} said the idea had come from a school class.",
                   f"Some neighbours, among them {article(job)}, fear noise and traffic.")),
        draw.pick((f"More than {n * 7} people signed a petition in favour.",
                   f"Only {n} people came to the last public meeting.")),
        draw.pick(("The mayor promised to publish the accounts every month.",
                   "A second vote is possible if the price rises.",
                   f"The nearest comparable site, in {draw.pick(TOWNS)}, is already in use.")),
    ]  # fmt: skip
    return " ".join(parts[: draw.number(4, 6)])


def _notes(draw: Draw) -> str:
    """Minutes of a made-up meeting."""
    a, b, c = draw.some(NAMES, 3)
    product, day = draw.pick(PRODUCTS), draw.pick(WEEKDAYS)
    parts = [
        f"{a} opened the meeting and showed the sales of the {product}.",
        f"{draw.number(3, 60)} customers returned it because "
        f"{draw.pick(('the handle broke', 'the manual was missing', 'it was too loud'))}.",
        f"{b} suggested "
        f"{draw.pick(('a stronger case', 'a lower price', 'a longer warranty', 'a short video'))}.",
        f"{c} disagreed and asked for numbers from {draw.pick(MONTHS)} first.",
        f"They agreed that {a} writes to the supplier before {day}.",
        f"The next meeting takes place in {draw.pick(TOWNS)} on {day} at {draw.number(8, 17)} o'clock.",
    ]  # fmt: skip
    return " ".join(parts[: draw.number(4, 6)])


def _experiment(draw: Draw) -> str:
    """Notes on a made-up school experiment."""
    n, days, a = draw.number(4, 40), draw.number(3, 28), draw.pick(NAMES)
    light, dark = draw.number(5, 30), draw.number(1, 9)
    parts = [
        f"To learn more about {draw.pick(TOPICS)}, the class of {a} set up {n} {draw.pick(CONTAINERS)}.",
        "Half of them stood "
        f"{draw.pick(('in the sun', 'near the heater', 'in salt water', 'on wet cotton'))}.",
        f"After {days} days the first group had changed by {light} mm and the second by {dark} mm.",
        draw.pick((f"{draw.number(1, 3)} of the {n} had to be thrown away.",
                   "One thermometer broke on the way.",
                   "The measurements were repeated at night.")),
        draw.pick(("The result surprised everybody except the teacher.",
                   "The class wants to repeat it in winter.",
                   f"A {draw.pick(('parent', 'visitor', 'pupil'))} suspected an error in the scale.")),
    ]  # fmt: skip
    return " ".join(parts)


def _journey(draw: Draw) -> str:
    """A made-up travel diary."""
    start, middle, end = draw.some(TOWNS, 3)
    a, thing = draw.pick(NAMES), draw.pick(OBJECTS)
    parts = [
        f"On {draw.pick(WEEKDAYS)} I left {start} with {a} and {draw.number(2, 30)} {draw.pick(THINGS)} in "
        "the trunk.",
        f"The road to {middle} was {draw.pick(('flooded', 'empty', 'full of sheep', 'under repair'))}.",
        f"There {article(draw.pick(JOBS))} sold us {draw.pick(FOODS)} for {draw.number(2, 15)} dollars.",
        f"In the evening we found {thing} under the {draw.pick(('bridge', 'seat', 'oak', 'stairs'))}.",
        f"We reached {end} {draw.number(2, 9)} hours late, "
        f"{draw.pick(('tired but happy', 'without a map', 'in rain'))}.",
    ]  # fmt: skip
    return " ".join(parts[: draw.number(4, 5)])


_TEXTS = (_report, _notes, _experiment, _journey)


def _review(draw: Draw) -> str:
    """A made-up product review with a mixed or clear opinion."""
    product, months = draw.pick(PRODUCTS), draw.number(2, 18)
    return draw.pick((
        f"I have used this {product} for {months} months. It is sturdy and easy to clean, although the "
        f"{draw.pick(COLOURS)} paint came off.",
        f"The {product} arrived {months} days late and one part was missing. Support never answered.",
        f"Best {product} I ever owned! After {months} months it still works like on the first day.",
        f"The {product} is fine for the price, nothing special. My {draw.pick(JOBS)} friend has the same "
        "one.",
    ))  # fmt: skip


def _order(draw: Draw) -> str:
    """An order sentence with the facts to extract."""
    name, town = draw.pick(NAMES), draw.pick(TOWNS)
    first, second = draw.some(THINGS, 2)
    return (
        f"{name} from {town} ordered {draw.number(2, 90)} {first} and {draw.number(2, 90)} {second} on "
        f"{draw.number(1, 28)} {draw.pick(MONTHS)}, to be delivered on a {draw.pick(WEEKDAYS)}; the bill of "
        f"${draw.number(5, 400)} {draw.pick(('is paid', 'is still open', 'was paid in cash'))}."
    )


def summarise(draw: Draw) -> str:
    """Summarise a generated text."""
    text = draw.pick(_TEXTS)(draw)
    wish = draw.pick(("in one sentence", "in two sentences", "in at most 25 words", "as three bullet points",
                      "for a text message",
                      f"for {draw.pick(AUDIENCES)}"))  # fmt: skip
    return draw.pick((f"Shorten this text {wish}:\n\n{text}", f"{text}\n\nSum up the text above {wish}.",
                      f"What are the main points here? Answer {wish}.\n\n{text}"))  # fmt: skip


def extract_json(draw: Draw) -> str:
    """Turn a text into JSON with given keys."""
    if draw.number(0, 1):
        keys: tuple[str, ...] = ("customer", "town", "items", "quantities", "date", "total", "paid")
        text = " ".join(_order(draw) for _ in range(draw.number(1, 2)))
    else:
        keys = ("people", "places", "numbers", "decisions", "dates", "topic")
        text = draw.pick(_TEXTS)(draw)
    wanted = ", ".join(draw.some(keys, draw.number(2, 5)))
    return draw.pick((
        f"Extract the facts below as JSON with the keys {wanted}. Answer with JSON only.\n\n{text}",
        f"Read the text and return a JSON object with the keys {wanted}.\n\n{text}",
        f"{text}\n\nPut this into JSON. Use these keys: {wanted}.",
        f"Which {wanted} are named here? Give a JSON object and nothing else.\n\nText: {text}",
        f"{text}\n\nFill in a JSON object with {wanted}; write null where the text says nothing.",
    ))  # fmt: skip


def classify(draw: Draw) -> str:
    """Label texts."""
    count = draw.number(1, 3)
    reviews = "\n".join(f"{i + 1}. {_review(draw)}" for i in range(count))
    labels = draw.pick(
        ("positive, negative or neutral", "a score from 1 to 5", "satisfied, unsatisfied or undecided")
    )
    return (
        f"Label each review as {labels}{draw.pick((' and give a reason', '', ' in one word'))}:\n\n{reviews}"
    )


def table(draw: Draw) -> str:
    """A Markdown table from given or invented facts."""
    people = draw.some(NAMES, draw.number(3, 5))
    rows = "; ".join(f"{p}, {draw.pick(JOBS)}, {draw.pick(TOWNS)}, {draw.number(19, 70)}" for p in people)
    topic = draw.pick(TOPICS)
    return draw.pick((
        f"Make a Markdown table with the columns Name, Job, Town, Age from: {rows}. Sort it by "
        f"{draw.pick(('age', 'name', 'town'))}.",
        f"Make a Markdown table of {draw.number(3, 6)} facts about {topic}, with the columns Fact and Why "
        "it matters.",
        f"Draw up a weekly plan as a table for {draw.pick(HOBBIES)}, one row per day from "
        f"{draw.pick(WEEKDAYS)} on.",
        f"Turn this into CSV with a header line: {rows}.",
    ))  # fmt: skip


def list_items(draw: Draw) -> str:
    """Lists of a given length."""
    n = draw.number(3, 12)
    return draw.pick((
        f"List {n} things {article(draw.pick(JOBS))} needs on the first day at work.",
        f"Give {n} tips for {draw.pick(HOBBIES)}.",
        f"Name {n} ingredients that go well with {draw.pick(FOODS)}.",
        f"List {n} questions a student could ask about {draw.pick(TOPICS)}.",
        f"Suggest {n} names for a shop that sells {draw.pick(THINGS)} in {draw.pick(TOWNS)}.",
        f"Write {n} short slogans for {article(draw.pick(PRODUCTS))}.",
        f"List {n} words that rhyme with "
        f"\"{draw.pick(('light', 'stone', 'tree', 'day', 'rain', 'house', 'ring', 'bell'))}\" "
        f"and use one of them in a line about {draw.pick(TOWNS)}.",
    ))  # fmt: skip


def grammar(draw: Draw) -> str:
    """Questions about the words of a sentence."""
    text = sentence(draw)
    return draw.pick((
        f"List all verbs in this sentence and give their tense: {text}",
        f"Count the words in the following sentence and name the longest one: {text}",
        f"Which words in this sentence are nouns? Put them in alphabetical order. {text}",
        f"Write three questions that this sentence answers, and answer them: {text}",
        f"Break the sentence into clauses and explain how they are connected: {text}",
    ))  # fmt: skip
