"""BlockPilot: exact block-diffusion speculative decoding with a width chosen per request.

    from blockpilot import LLM, SamplingParams

Names resolve on first use, so that `import blockpilot` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "LLM": "blockpilot.llm",
    "Adapt": "blockpilot.adapt",
    "Handle": "blockpilot.request",
    "SamplingParams": "blockpilot.params",
    "Output": "blockpilot.output",
    "Stats": "blockpilot.output",
    "TokenLogprob": "blockpilot.output",
    "BlockPilotError": "blockpilot.errors",
    "NonFiniteLogitsError": "blockpilot.errors",
    "QueueFullError": "blockpilot.errors",
    "Fixed": "blockpilot.policies",
    "BlockPolicy": "blockpilot.policies",
    "Drafter": "blockpilot.drafters",
    "Proposal": "blockpilot.drafters",
}

if TYPE_CHECKING:
    from blockpilot.adapt import Adapt
    from blockpilot.drafters import Drafter, Proposal
    from blockpilot.errors import BlockPilotError, NonFiniteLogitsError, QueueFullError
    from blockpilot.llm import LLM
    from blockpilot.output import Output, Stats, TokenLogprob
    from blockpilot.params import SamplingParams
    from blockpilot.policies import BlockPolicy, Fixed
    from blockpilot.request import Handle

__all__ = [
    "LLM",
    "Adapt",
    "BlockPilotError",
    "BlockPolicy",
    "Drafter",
    "Fixed",
    "Handle",
    "NonFiniteLogitsError",
    "Output",
    "Proposal",
    "QueueFullError",
    "SamplingParams",
    "Stats",
    "TokenLogprob",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'blockpilot' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
