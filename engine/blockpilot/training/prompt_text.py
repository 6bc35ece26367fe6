"""Prompt families that ask for prose: explanations, letters, stories, dialogue, definitions, questions."""

from __future__ import annotations

from blockpilot.training.prompt_words import (
    ANIMALS,
    AUDIENCES,
    COMPARED,
    FOODS,
    HOBBIES,
    JOBS,
    LANGUAGES,
    MONTHS,
    NAMES,
    OBJECTS,
    PRODUCTS,
    PROJECTS,
    TERMS,
    TOPICS,
    TOWNS,
    WEEKDAYS,
)
from blockpilot.training.randomness import Draw, article


def sentence(draw: Draw) -> str:
    """One plain sentence to rewrite or translate."""
    a, b = draw.some(NAMES, 2)
    day, town, n = draw.pick(WEEKDAYS), draw.pick(TOWNS), draw.number(2, 40)
    return draw.pick((
        f"{a} forgot the keys at the station in {town}, so {b} had to wait for {n} minutes.",
        f"We would like to invite you to the opening of our workshop on {day}.",
        f"The {draw.pick(JOBS)} repaired the roof before the storm arrived on {day}.",
        f"Because of the heavy snow, the {draw.pick(JOBS)} could not reach {town} until {day} evening.",
        f"{a} bought a new {draw.pick(PRODUCTS)}, but it stopped working after {n} days.",
        f"My {draw.pick(('brother', 'sister', 'aunt', 'neighbour'))} likes {draw.pick(HOBBIES)} more than "
        "anything else.",
        f"The {draw.pick(ANIMALS)} slept under the bridge while the children of {town} played nearby.",
        f"Please send the report to {a} by {day}, and do not forget the {n} photographs.",
        f"If {a} arrives early, we can cook {draw.pick(FOODS)} together and talk about the journey.",
        f"I have never seen so many people in {town} as on that {day} in {draw.pick(MONTHS)}.",
        f"After {n} years abroad, {a} returned to {town} and opened a school for {draw.pick(HOBBIES)}.",
        f"Although the museum was closed, {b} found {draw.pick(OBJECTS)} near the entrance.",
        f"{a} explained {draw.pick(TOPICS)} so well that even {b} asked for another lesson.",
        f"Do you know whether the {draw.pick(PRODUCTS)} in the window costs less than {n} dollars?",
        f"The neighbours built {draw.pick(PROJECTS)} with their own hands and {n} bags of cement.",
        f"When the lights went out, nobody in the room spoke except {a}, {article(draw.pick(JOBS))}.",
        f"{b} would rather wait until {day} than pay {n} dollars for {draw.pick(FOODS)}.",
        f"The letter that {a} wrote in {draw.pick(MONTHS)} was read aloud at the wedding of {b}.",
    ))  # fmt: skip


def explain(draw: Draw) -> str:
    """Explain a topic to an audience."""
    topic, audience = draw.pick(TOPICS), draw.pick(AUDIENCES)
    extra = draw.pick(("Use one everyday example.", "Keep it under 120 words.", "Use a short analogy.",
                       "Avoid technical words.", "End with one question to think about.", ""))  # fmt: skip
    opening = draw.pick((f"Explain {topic} to {audience}.", f"How would you describe {topic} to {audience}?",
                         f"Give a short introduction to {topic} for {audience}."))  # fmt: skip
    return f"{opening} {extra}".strip()


def rewrite(draw: Draw) -> str:
    """Rewrite a sentence in another manner."""
    manner = draw.pick((
        "in a formal "
        "tone", "in simple words for a child", "as a question", "in the past tense", "in half as many words",
        "as a newspaper "
        "headline", "politely", "in the passive voice", "as if a pirate said it", "with more detail",
        "in the future tense", "from the point of view of somebody who is annoyed",
    ))  # fmt: skip
    opening = draw.pick(
        ("Rewrite this sentence {m}:", "Say the following {m}:", "Change this text so that it reads {m}:")
    )
    return f"{opening.format(m=manner)}\n\n{sentence(draw)}"


def translate(draw: Draw) -> str:
    """Translate one or two sentences."""
    language = draw.pick(LANGUAGES)
    text = " ".join(sentence(draw) for _ in range(draw.number(1, 2)))
    extra = draw.pick(
        ("", "Then translate it back word by word.", "Explain one difficult word.", "Use a friendly tone.")
    )
    opening = draw.pick(("Translate into", "Put this into", "How do you say this in"))
    return f"{opening} {language}: {text} {extra}".strip()


def dialogue(draw: Draw) -> str:
    """A conversation between two people."""
    a, b = draw.some(NAMES, 2)
    job, other = draw.some(JOBS, 2)
    about = draw.pick((f"a broken {draw.pick(PRODUCTS)}", draw.pick(HOBBIES), draw.pick(PROJECTS),
                       f"how to cook {draw.pick(FOODS)}",
                       f"moving to {draw.pick(TOWNS)}", f"why {draw.pick(TOPICS)} matters"))  # fmt: skip
    lines = draw.number(4, 12)
    return draw.pick((
        f"Write a dialogue of {lines} lines between {a}, {article(job)}, and {b}, {article(other)}, about "
        f"{about}.",
        f"{a} is {article(job)} and calls {b} to talk about {about}. Write their phone conversation in about "
        f"{lines} turns.",
        f"Write a funny conversation between {article(job)} and {article(other)} who disagree about {about}.",
    ))  # fmt: skip


def letter(draw: Draw) -> str:
    """A letter, an email or a short message."""
    a, b = draw.some(NAMES, 2)
    reason = draw.pick((
        f"to complain about {article(draw.pick(PRODUCTS))} that arrived "
        "damaged", f"to apply for a job as {article(draw.pick(JOBS))}",
        f"to thank {article(draw.pick(JOBS))} for help on "
        f"{draw.pick(WEEKDAYS)}", f"to ask the town of {draw.pick(TOWNS)} for {draw.pick(PROJECTS)}",
        "to invite friends to a dinner of "
        f"{draw.pick(FOODS)}", f"to apologise for missing a meeting in {draw.pick(MONTHS)}",
        "to ask for two weeks of holiday in "
        f"{draw.pick(MONTHS)}", f"to recommend {draw.pick(HOBBIES)} to a friend",
    ))  # fmt: skip
    form = draw.pick(("a short letter", "a polite email", "a formal letter", "a message of three sentences"))
    return f"Write {form} from {a} to {b} {reason}."


def story(draw: Draw) -> str:
    """A very short story or a poem with constraints."""
    animal, thing, town = draw.pick(ANIMALS), draw.pick(OBJECTS), draw.pick(TOWNS)
    return draw.pick((
        f"Write a story of about {draw.number(80, 200)} words about {article(animal)} that finds {thing} in "
        f"{town}.",
        f"Write a poem of {draw.number(2, 4)} verses about {thing} and {article(draw.pick(JOBS))}.",
        f"Continue this story with one more paragraph: \"{sentence(draw)} Nobody noticed the {animal}.\"",
        f"Invent a fable in which {article(animal)} teaches {article(draw.pick(ANIMALS))} about "
        f"{draw.pick(('patience', 'honesty', 'sharing', 'courage', 'curiosity'))}.",
        f"Describe a rainy evening in {town} through the eyes of {article(draw.pick(JOBS))} who has just "
        "lost "
        f"{thing}.",
    ))  # fmt: skip


def define(draw: Draw) -> str:
    """Definitions of one or more terms."""
    x, y, z = draw.some(TERMS, 3)
    return draw.pick((
        f"Define \"{x}\" and use it in a sentence.",
        f"What is the meaning of \"{x}\"? Give two examples from daily life.",
        f"Give a one-line definition of each: {x}, {y}, {z}.",
        f"What is the difference between \"{x}\" and \"{y}\"?",
        f"Define \"{x}\" for {draw.pick(AUDIENCES)}, then name one common misunderstanding.",
    ))  # fmt: skip


def compare(draw: Draw) -> str:
    """Compare two things."""
    pair = draw.pick(COMPARED)
    return draw.pick((
        f"Compare {pair}. Give {draw.number(2, 5)} differences.",
        f"What are the advantages and disadvantages of {pair}?",
        f"Compare {pair} for {draw.pick(AUDIENCES)}, and end with a recommendation.",
        f"Write a balanced paragraph about {pair}.",
    ))  # fmt: skip


def how_to(draw: Draw) -> str:
    """Instructions in steps."""
    return draw.pick((
        f"How do I start with {draw.pick(HOBBIES)}? Give {draw.number(3, 8)} numbered steps.",
        f"Give a recipe for {draw.pick(FOODS)} for {draw.number(2, 8)} people, with ingredients and steps.",
        f"How can I clean and look after {article(draw.pick(PRODUCTS))}? Answer step by step.",
        f"Plan a {draw.number(2, 5)}-day visit to a small town by the sea in {draw.pick(MONTHS)} for "
        f"{draw.pick(AUDIENCES)}.",
        f"What does {article(draw.pick(JOBS))} do on a normal {draw.pick(WEEKDAYS)}? Describe the day hour "
        "by hour.",
    ))  # fmt: skip
