"""Labelling with a stand-in for the engine."""

from __future__ import annotations

from blockpilot.training.labels import label_prompts
from tests.training.fakes import (
    FakeLLM,
    prompts,
)

WINDOW = (1, 2, 4)


class Factory:
    """Makes FakeLLMs with given options and remembers them."""

    def __init__(self, **options):
        self.options, self.made = options, []

    def __call__(self, policy):
        self.made.append(FakeLLM(policy, **self.options))
        return self.made[-1]

    @property
    def calls(self):
        return [c for llm in self.made for c in llm.calls]


def run(path, count=10, factory=None, items=None, **options):
    options = {
        "window": WINDOW,
        "max_new_tokens": 12,
        "batch": 4,
        "replay": False,
        "progress": False,
        **options,
    }
    return label_prompts(factory or Factory(), items or prompts(count), output=path, **options)
