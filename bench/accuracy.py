"""What a weight format costs in accuracy: logits and perplexity against float32 weights, on English text.

The text is Python's own language reference as `pydoc` carries it, so that anyone can repeat it offline.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from blockpilot import LLM
from blockpilot.cli.console import say, table
from blockpilot.targets.cpp_target import CppTarget

WINDOW = 256  # tokens per independent piece of text
PIECES = 80
FORMATS = (
    ("stored", "float32"),
    ("stored", "bfloat16"),
    ("stored-int16", "float32"),
    ("stored-int8", "float32"),
    ("dense", "bfloat16"),
)


def text_pieces(llm: LLM, count: int) -> list[list[int]]:
    """`count` pieces of WINDOW tokens."""
    from pydoc_data.topics import topics

    ids = llm.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))
    return [ids[i : i + WINDOW] for i in range(0, count * WINDOW, WINDOW)]


def logits_of(llm: LLM, piece: list[int]) -> Tensor:
    """[WINDOW, V] logits of every position, through the pass a step uses."""
    from blockpilot.rows import kv_bound, make_rows

    target = llm.target
    rows = make_rows((0,), (len(piece),), target.cache.dump, target.device, target.row_tile)
    exists = rows.slot != target.cache.dump
    extent = torch.full((target.cache.dump + 1,), len(piece))
    with torch.inference_mode():
        found, _ = target.verify(rows, torch.tensor(piece), rows.column, exists, extent, kv_bound(len(piece)))
    return found[: len(piece)]


class Tally:
    """Sums over positions of one format against the reference."""

    def __init__(self) -> None:
        self.squares = self.scale = self.kl = self.nll = 0.0
        self.agree = self.count = 0

    def add(self, logits: Tensor, reference: Tensor, piece: list[int]) -> None:
        """Count one piece; the last position predicts nothing that is known."""
        p, q = (x[:-1].log_softmax(-1) for x in (reference, logits))
        self.squares += float((logits - reference).square().sum())
        self.scale += float(reference.square().sum())
        self.kl += float((p.exp() * (p - q)).sum())
        self.nll -= float(q.gather(1, torch.tensor(piece[1:])[:, None]).sum())
        self.agree += int((p.argmax(-1) == q.argmax(-1)).sum())
        self.count += len(p)

    def figures(self) -> dict[str, float]:
        """Relative L2 error of logits, mean KL in nats, top-1 agreement, perplexity."""
        return {
            "logit_error": math.sqrt(self.squares / self.scale),
            "kl": self.kl / self.count,
            "top1": self.agree / self.count,
            "perplexity": math.exp(self.nll / self.count),
        }


def run(quick: bool) -> dict[str, Any]:
    """Every format over the same text; `ok` when stored blocks give float32's choices with float and 16-bit inputs."""
    reference = LLM("smollm2", weights="dense", max_requests=1, max_length=WINDOW)
    pieces = text_pieces(reference, 4 if quick else PIECES)
    tallies = {"dense float32": Tally(), **{f"{w} {d}": Tally() for w, d in FORMATS}}
    models = {
        f"{w} {d}": LLM("smollm2", weights=w, dtype=d, max_requests=1, max_length=WINDOW) for w, d in FORMATS
    }
    for piece in pieces:
        exact = logits_of(reference, piece)
        tallies["dense float32"].add(exact, exact, piece)
        for name, llm in models.items():
            tallies[name].add(logits_of(llm, piece), exact, piece)
    sizes = {name: megabytes(llm) for name, llm in {"dense float32": reference, **models}.items()}
    rows = [{"format": n, "megabytes": sizes[n], **t.figures()} for n, t in tallies.items()]
    agree = min(tallies[f"{w} float32"].figures()["top1"] for w in ("stored", "stored-int16"))
    return {"ok": agree > 0.999, "tokens": tallies["dense float32"].count, "formats": rows}


def megabytes(llm: LLM) -> float:
    """Packed weights that a step reads."""
    if not isinstance(llm.target, CppTarget):
        raise ValueError("accuracy: expected the C++ decoder; build the extension (BLOCKPILOT_REQUIRE_EXT=1)")
    return sum(llm.target.formats.values()) / 1e6


def show(report: dict[str, Any]) -> None:
    """A table."""
    rows = [
        [
            r["format"],
            *(f"{r[k]:{f}}" for k, f in zip(KEYS, (".0f", ".2e", ".2e", ".4f", ".4f"), strict=True)),
        ]
        for r in report["formats"]
    ]
    table(
        f"{report['tokens']} tokens",
        rows,
        left=("weights, inputs", "MB", "logit error", "KL", "top-1", "perplexity"),
    )
    say("ok" if report["ok"] else "stored blocks disagree with float32")


HEADINGS = ("weights, inputs", "MB", "logit error", "KL", "top-1", "perplexity")
KEYS = ("megabytes", "logit_error", "kl", "top1", "perplexity")
