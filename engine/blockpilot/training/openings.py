"""Openings of user turns, which the target itself continues to whole prompts. Written for this project.

Prompts that the target makes up follow the distribution it was tuned on, so a drafter trained on its answers to
them meets what users ask (arXiv 2406.08464 samples prompts from nothing; an opening chooses the kind).
"""

from __future__ import annotations

from blockpilot.training.prompt_words import CONTAINERS, JOBS, NAMES, PRODUCTS, THINGS, TOPICS, TOWNS
from blockpilot.training.randomness import Draw

# fmt: off
OPENINGS: dict[str, tuple[str, ...]] = {
    "free": ("", "", "", "I", "Can you", "What", "How", "Why", "Please", "Give me", "Is", "My"),
    "word_problem": (
        "{name} has", "{name} buys", "A shop sells {things} for", "{name} and {name} share", "In {town},",
        "There are", "A {job} earns", "{name} reads", "A train", "A tank holds", "Each of the {containers}",
        "{name} is twice as old as", "A recipe needs", "{name} saves", "The price of", "If {name} walks",
        "A class of", "{name} packs {things} into {containers}.", "A farmer", "On Monday, {name}",
        "A rectangular garden", "Half of the {things}", "{name} works", "The ratio of", "After spending",
    ),
    "mathematics": (
        "Solve for x:", "What is the value of", "Find the", "Compute", "Simplify", "Let f(x) =", "How many",
        "The sum of", "What is the probability that", "Find all", "A triangle has", "Evaluate", "If $x",
        "Determine", "Prove that", "The area of",
    ),
    "python_function": (
        "Write a Python function to", "Write a Python function that", "Implement a Python function called",
        "Write a function to find", "Write a function to check whether", "Write a function to count",
        "Write a function to remove", "Write a function to sort", "Write a function to convert",
        "Write a function that takes a list of", "Write a function that takes a string and",
        "In Python, how do I", "Create a Python function", "Given a list of integers, write Python code that",
    ),
    "python_completion": (
        "Complete the following Python function:\n\n```python\ndef ",
        "Finish this code so that its docstring is true:\n\n```python\nfrom typing import List\n\n\ndef ",
        "Here is a function without a body. Write it.\n\ndef ",
        "Implement the body:\n\n```python\ndef {thing}_",
        "Write a Python function that passes this test:\n\nassert ",
    ),
    "code": (
        "Fix the bug in this code:\n\n```python\n", "Explain what this code does:\n\n```python\n",
        "Write a SQL query that", "Write a JavaScript function that", "Write a class in Python for",
        "Write a shell script that", "Write unit tests for", "What is the time complexity of",
    ),
    "explain": (
        "Explain", "Explain the difference between", "What is", "What are the main causes of", "How does",
        "Describe how", "Why do", "What happens when", "Tell me about {topic}", "Can you explain {topic}",
        "What is the role of", "Summarise what is known about",
    ),
    "writing": (
        "Write a short story about", "Write a poem about", "Write a blog post about", "Compose an email to",
        "Write a letter to", "Draft a speech", "Write a product description for {product}",
        "Write a dialogue between", "Imagine you are", "Describe a", "Write a review of", "Write an essay on",
        "Create a slogan for", "Write the opening paragraph of", "Write a persuasive",
    ),
    "roleplay": (
        "Pretend to be", "You are a {job}.", "Act as", "Pretend that you are", "Take the role of a {job}",
        "Embrace the role of", "You are an expert in", "As a {job}, how would you",
    ),
    "rewriting": (
        "Rewrite the following sentence", "Paraphrase:", "Make this more formal:", "Edit the following paragraph",
        "Correct the grammar:", "Rewrite this in the passive voice:", "Shorten this text:",
        "Improve the following email:", "Translate the following sentence into",
    ),
    "extraction": (
        "Given the following text, extract", "Identify the", "Classify each of the following",
        "Which of the following", "From the text below, list", "Read the passage and answer:",
        "Determine the sentiment of", "Extract the names", "Sort the following", "Fill in the blank:",
        "Is the following statement true or false?", "Convert the following into JSON:",
    ),
    "lists": (
        "Generate a list of", "List five", "Give me ten ideas for", "Suggest", "Recommend", "Name three",
        "Create a table of", "Brainstorm", "What are some", "Plan a", "Make a shopping list for",
        "Create a schedule for", "Give three examples of", "Propose",
    ),
    "summaries": ("Summarize the following article:\n\n", "Summarize:", "Give a one-sentence summary of:",
                  "What is the main idea of this text?\n\n", "TL;DR:"),
    "reasoning": (
        "If all", "Suppose that", "Three friends", "Think step by step:", "Which is larger,", "What comes next:",
        "A logic puzzle:", "Assume that", "Compare", "Discuss", "What would happen if", "Do you agree that",
    ),
    "advice": ("How can I", "What should I", "I want to", "I am planning", "What is the best way to",
               "Help me", "How do I", "I need"),
}
ENDINGS: dict[str, tuple[str, ...]] = {
    "word_problem": ("", "", "\nShow each step.", " Think it through, then put the result in \\boxed{}.",
                     "\nExplain your steps and end with the answer in \\boxed{}."),
    "mathematics": ("", "", "\nShow your steps.", " Give the result as \\boxed{}.",
                    "\nWork it out step by step and write the result in \\boxed{}."),
}
# fmt: on
FAMILIES = tuple(OPENINGS)


def opening(draw: Draw, family: str) -> str:
    """The first words of a user turn of a family."""
    text = draw.pick(OPENINGS[family])
    words = {
        "things": THINGS, "containers": CONTAINERS, "town": TOWNS, "job": JOBS, "topic": TOPICS,
        "product": PRODUCTS,
    }  # fmt: skip
    for key, values in words.items():
        text = text.replace(f"{{{key}}}", draw.pick(values))
    while "{name}" in text:
        text = text.replace("{name}", draw.pick(NAMES), 1)
    return text.replace("{thing}", draw.pick(THINGS)[:-1])


def ending(draw: Draw, family: str) -> str:
    """Words that follow what the target made of an opening."""
    return draw.pick(ENDINGS.get(family, ("",)))
