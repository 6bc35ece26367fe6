"""Writing a request into its slot."""

from __future__ import annotations

import torch

from blockpilot.request import Handle
from blockpilot.state import State
from blockpilot_kernels.accept_commit import FINISH_NONE


def load_slot(state: State, slot: int, handle: Handle, eos: tuple[int, ...]) -> None:
    """Fill a slot with a request's prompt, limits, stops and sampling settings, at width 1."""
    p, n = handle.params, len(handle.prompt)
    device = state.tokens.device
    budget = state.capacity if p.max_new_tokens is None else n + p.max_new_tokens
    stops = sorted({*(() if p.ignore_eos else eos), *p.stop_token_ids})
    state.tokens[slot, :n] = torch.tensor(handle.prompt, device=device)
    state.stop_ids[slot] = -1
    if stops:
        state.stop_ids[slot, : len(stops)] = torch.tensor(stops, device=device)
    values = {
        "length": n,
        "limit": min(budget, state.capacity),
        "free_from": n + p.min_new_tokens,
        "width": 1,
        "effective": 0,
        "seed": handle.seed - 2**64 if handle.seed >= 2**63 else handle.seed,
        "temperature": p.temperature,
        "top_k": p.top_k,
        "top_p": p.top_p,
        "min_p": p.min_p,
        "done": False,
        "finish": FINISH_NONE,
    }
    for name, value in values.items():
        getattr(state, name)[slot] = value
