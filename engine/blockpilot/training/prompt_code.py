"""Prompt families about code, numbers and logic."""

from __future__ import annotations

from blockpilot.training.prompt_words import (
    ANIMALS,
    COLOURS,
    CONTAINERS,
    MONTHS,
    NAMES,
    THINGS,
    TOWNS,
    WEEKDAYS,
)
from blockpilot.training.randomness import Draw, article

_FUNCTIONS = (
    ("count_vowels(text)", "counts the vowels in a string"),
    ("running_total(values)", "returns the list of partial sums"),
    ("is_leap_year(year)", "tells whether a year is a leap year"),
    ("merge_dicts(a, b)", "merges two dictionaries and adds the values of shared keys"),
    ("flatten(items)", "flattens a list of lists by one level"),
    ("caesar(text, shift)", "shifts every letter of a text through the alphabet"),
    ("second_largest(values)", "returns the second largest distinct number"),
    ("word_lengths(sentence)", "maps each word to its length"),
    ("chunked(items, size)", "splits a list into pieces of the given size"),
    ("is_anagram(a, b)", "checks whether two words use the same letters"),
    ("celsius_to_fahrenheit(value)", "converts a temperature"),
    ("read_ints(path)", "reads one integer per line from a file and skips blank lines"),
    ("transpose(matrix)", "swaps the rows and columns of a matrix"),
    ("digit_sum(n)", "adds the decimal digits of a whole number"),
    ("unique_in_order(items)", "drops repeated items and keeps the first of each"),
    ("binary_search(items, target)", "finds the index of a value in a sorted list"),
    ("to_roman(n)", "writes a number below 4000 in Roman numerals"),
    ("parse_pairs(line)", "parses text such as 'a=1;b=2' into a dictionary"),
    ("moving_average(values, n)", "computes the average of every n neighbouring values"),
    ("rotate(items, k)", "moves the last k items of a list to the front"),
    ("title_case(text)", "capitalises the first letter of every word"),
    ("gcd(a, b)", "returns the greatest common divisor"),
    ("most_common(words)", "returns the word that occurs most often"),
    ("fibonacci(n)", "returns the first n Fibonacci numbers"),
    ("matrix_product(a, b)", "multiplies two matrices given as nested lists"),
    ("longest_run(items)", "returns the length of the longest run of equal items"),
    ("validate_password(text)", "checks length, a digit and an upper-case letter"),
    ("seconds_to_clock(n)", "formats a number of seconds as hours, minutes and seconds"),
)
_CODE_EXTRAS = (
    "Add a docstring and type hints.",
    "Show two example calls with their results.",
    "Do not import anything.",
    "Raise ValueError when the argument makes no sense.",
    "Explain the code in one sentence afterwards.",
    "Write three assert statements that test it.",
    "Keep it under ten lines.",
    "Give its running time in big-O notation.",
)
_BUGS = (
    ("def total(values):\n    result = 0\n    for v in values:\n        result = v\n    return result",
     "add up the prices of some {t}"),
    ("def last(items):\n    return items[len(items)]", "return the last of the {t}"),
    ("def count(items, wanted):\n    n = 0\n    for item in items:\n        if item = wanted:\n"
     "            n += 1\n    return n",
     "count the {t} that match"),
    ("def average(values):\n    return sum(values) / len(values) - 1", "return the mean price of some {t}"),
    ("def add(item, basket=[]):\n    basket.append(item)\n    return basket",
     "start a new basket of {t} on every call"),
    ("def evens(n):\n    return [i for i in range(n) if i % 2 == 1]", "number the even {t}"),
    ("def label(name, n):\n    return name + \": \" + n", "print the name and the number of {t}"),
    ("def biggest(values):\n    best = 0\n    for v in values:\n        if v > best:\n"
     "            best = v\n    return best",
     "find the largest change in the stock of {t}, which may be negative"),
)  # fmt: skip


def word_problem(draw: Draw) -> str:
    """A short arithmetic story."""
    a, b = draw.some(NAMES, 2)
    thing, box, town = draw.pick(THINGS), draw.pick(CONTAINERS), draw.pick(TOWNS)
    n, m, k, p = draw.number(3, 24), draw.number(4, 30), draw.number(2, 9), draw.number(2, 12)
    story = draw.pick((
        f"{a} packs {n * k} {thing} into {k} {box} with the same number in each. {b} then takes "
        f"{min(n - 1, p)} {thing} "
        f"out of one of the {box}. How many {thing} are left in that one?",
        f"A shop in {town} sells {thing} for ${p} each. {a} buys {n} of them and pays with a ${n * p + m} "
        "voucher. "
        f"How much of the voucher is left, and how many more {thing} could it buy?",
        f"{a} walks {k} km to {town} at {p} km per hour, rests for {m} minutes and walks back at the same "
        "speed. "
        f"How long is {a} away altogether?",
        f"{a} has {m} {thing}. {b} has {k} times as many. Together they give {p} {thing} to each of {k} "
        "friends. "
        f"How many {thing} do they keep?",
        f"A train leaves {town} with {n * k} passengers. At each of {k} stops {p} people get off and {m} "
        "get on. "
        "How many passengers are on the train after the last stop?",
        f"{a} saves ${p} every week and already has ${m}. {b} has ${m + n * k} and spends ${k} every week. "
        "After how many weeks does the first one have more money than the second?",
        f"A rectangle of {thing} has {n} rows with {k} in each row. {a} removes "
        f"{draw.pick(('one row', 'one column'))}. "
        f"How many {thing} remain?",
    ))  # fmt: skip
    ending = draw.pick(("Show your work.", "Explain each step.", "Give the answer in a full sentence.", ""))
    return f"{story} {ending}".strip()


def python_function(draw: Draw) -> str:
    """A request for one small function."""
    signature, does = draw.pick(_FUNCTIONS)
    opening = draw.pick((
        f"Write a Python function `{signature}` that {does}.",
        f"In Python, implement `{signature}`, which {does}.",
        f"I need a function that {does}. Call it `{signature}` and write it in Python.",
    ))  # fmt: skip
    return f"{opening} {' '.join(draw.some(_CODE_EXTRAS, draw.number(1, 2)))}"


def fix_code(draw: Draw) -> str:
    """A small function with one bug."""
    code, wish = draw.pick(_BUGS)
    request = draw.pick((
        "Find the mistake and give the corrected function.",
        "What is wrong here? Explain it briefly, then show working code.",
        "Fix it and add one example call.",
        "List every problem you see, then rewrite it.",
    ))  # fmt: skip
    return (
        f"This Python code should {wish.format(t=draw.pick(THINGS))}:\n\n```python\n{code}\n```\n\n{request}"
    )


def arithmetic_chain(draw: Draw) -> str:
    """A chain of operations worked out step by step."""
    value, parts = draw.number(2, 60), []
    for _ in range(draw.number(3, 6)):
        op = draw.pick(("add", "subtract", "multiply by", "double it", "halve it"))
        parts.append(op if op.endswith("it") else f"{op} {draw.number(2, 9 if op == 'multiply by' else 80)}")
    chain = ", then ".join(parts)
    return draw.pick((
        f"Start with {value}. {chain[0].upper()}{chain[1:]}. Write the result after every step.",
        f"Take the number {value} and {chain}. What do you get? Show all intermediate values.",
        f"Work out step by step: begin at {value}, {chain}.",
    ))  # fmt: skip


def reasoning(draw: Draw) -> str:
    """An ordering, seating or if-then puzzle with a unique answer."""
    a, b, c, d = draw.some(NAMES, 4)
    x, y, z = draw.some(COLOURS, 3)
    feature = draw.pick(("taller", "older", "faster", "richer", "stronger"))
    first, second, third = draw.some(ANIMALS, 3)
    day = draw.number(0, 6)
    return draw.pick((
        f"{a} is {feature} than {b}. {c} is {feature} than {a}. {b} is {feature} than {d}. "
        "Order all four and explain how you know.",
        f"Three boxes are {x}, {y} and {z}. The {x} box is left of the {y} box. The {z} box is not at "
        "either end. "
        "Which box is in the middle, and which is on the right?",
        f"If it rains, {a} takes the bus. If {a} takes the bus, {b} drives alone. {b} did not drive alone "
        "today. "
        "Did it rain? Give your reasoning.",
        f"Every {first} in the park is {x}. No {x} animal in the park can swim. Some kinds of {second} can "
        "swim. "
        f"Can {article(first)} swim? Can {article(second)} be {x}? What can be said about {article(third)}?",
        f"Today is {WEEKDAYS[day]}. {a} visits {b} every {draw.number(3, 11)} days and was there today. "
        f"On which weekdays do the next three visits fall?",
        f"{a}, {b} and {c} each own one pet: {article(first)}, {article(second)} or {article(third)}. {a} "
        "does not own the "
        f"{first}. "
        f"{b} owns the {second}. Who owns which pet? Explain step by step.",
    ))  # fmt: skip


def convert(draw: Draw) -> str:
    """Units, dates, number formats."""
    n = draw.number(2, 480)
    day, month, year = draw.number(1, 28), draw.number(0, 11), draw.number(1950, 2035)
    return draw.pick((
        f"Convert {n} "
        f"{draw.pick(('miles to kilometres', 'pounds to kilograms', 'feet to metres'))} "
        "and show the formula you used.",
        f"Write the date {day} {MONTHS[month]} {year} in four different formats, one per line.",
        f"How many seconds are there in {draw.number(2, 30)} days and {draw.number(1, 23)} hours? Show the "
        "calculation.",
        f"Write {n} as a binary number and as a hexadecimal number, and explain the method.",
        f"A recipe for {draw.number(2, 5)} people needs {n} g of flour, {draw.number(1, 9)} eggs and "
        f"{draw.number(50, 300)} ml of milk. "
        f"Rewrite it for {draw.number(6, 14)} people.",
        f"Convert {draw.number(-20, 45)} degrees Celsius to Fahrenheit and then to kelvin.",
    ))  # fmt: skip
