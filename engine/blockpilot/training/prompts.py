"""Training prompts made by code, and the check that they share no text with evaluation files.

Every family has its own seeded stream: the first n prompts of a family do not depend on how many are made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from blockpilot.policies.atomic import replacing
from blockpilot.training import prompt_code, prompt_data, prompt_text
from blockpilot.training.randomness import Draw

T = TypeVar("T", bound=Mapping[str, Any])

_GENERATORS: tuple[Callable[[Draw], str], ...] = (
    prompt_code.word_problem,
    prompt_code.python_function,
    prompt_text.explain,
    prompt_text.rewrite,
    prompt_data.extract_json,
    prompt_data.list_items,
    prompt_text.dialogue,
    prompt_text.translate,
    prompt_data.summarise,
    prompt_data.table,
    prompt_text.letter,
    prompt_code.reasoning,
    prompt_code.arithmetic_chain,
    prompt_text.define,
    prompt_text.story,
    prompt_data.classify,
    prompt_code.fix_code,
    prompt_text.compare,
    prompt_code.convert,
    prompt_text.how_to,
    prompt_data.grammar,
)
FAMILIES = tuple(g.__name__ for g in _GENERATORS)
_MAX_MISSES = 1000
_MIN_GRAM = 5


@dataclass(frozen=True)
class Overlap:
    """A run of words that a training prompt shares with an evaluation record."""

    prompt_id: str
    file: str
    evaluation_id: str
    gram: str


def generate_prompts(count: int = 720, seed: int = 0) -> list[dict[str, str]]:
    """`count` distinct prompts {"id", "family", "prompt"}, families in turn; the same for a seed."""
    if count < 1:
        raise ValueError(f"count: expected at least 1, got {count}")
    streams = [_distinct(g, seed) for g in _GENERATORS]
    prompts = []
    for i in range(count):
        number, which = divmod(i, len(streams))
        family = FAMILIES[which]
        prompts.append({"id": f"{family}/{number:04d}", "family": family, "prompt": next(streams[which])})
    return prompts


def _distinct(generator: Callable[[Draw], str], seed: int) -> Iterator[str]:
    draw, seen, misses = Draw(f"{seed}:{generator.__name__}"), set[str](), 0
    while misses < _MAX_MISSES:
        text = generator(draw)
        key = " ".join(words(text))
        misses = misses + 1 if key in seen else 0
        if key not in seen:
            seen.add(key)
            yield text
    raise ValueError(
        f"count: family {generator.__name__!r} has no more than about {len(seen)} distinct prompts; "
        f"ask for fewer than {len(seen) * len(_GENERATORS)}"
    )


def words(text: str) -> list[str]:
    """Lower-case words of a text, split at white space, punctuation at their ends removed."""
    stripped = (w.strip(".,;:!?\"'`()[]{}<>*#-").lower() for w in text.split())
    return [w for w in stripped if w]


def write_prompts(prompts: Sequence[dict[str, str]], path: str | Path) -> None:
    """One JSON object a line; the file appears whole or not at all."""
    with replacing(Path(path)) as temporary:
        temporary.write_text(
            "".join(json.dumps(p, ensure_ascii=False) + "\n" for p in prompts), encoding="utf-8"
        )


def read_prompts(*paths: str | Path) -> list[dict[str, str]]:
    """Prompts of JSONL files; every line needs the strings id, family and prompt, and a fresh id.

    A line may name its "dataset", and then needs no family.
    """
    seen: set[str] = set()
    return [prompt for path in paths for prompt in _file_prompts(path, seen)]


def _file_prompts(path: str | Path, seen: set[str]) -> list[dict[str, str]]:
    """Those of one file, whose ids join `seen`."""
    prompts: list[dict[str, str]] = []
    for number, record in _records(Path(path)):
        named = {"dataset": record["dataset"]} if isinstance(record.get("dataset"), str) else {}
        record = {"family": named.get("dataset"), **record}
        missing = [
            k for k in ("id", "family", "prompt") if not isinstance(record.get(k), str) or not record[k]
        ]
        if missing:
            raise ValueError(
                f"{path}, line {number}: expected non-empty strings id, family, prompt; missing {missing}"
            )
        if record["id"] in seen:
            raise ValueError(f"{path}, line {number}: expected a fresh id, got {record['id']!r} again")
        if any(0xD800 <= ord(c) <= 0xDFFF for c in record["prompt"]):
            raise ValueError(
                f"{path}, line {number}: expected valid Unicode text, got {record['prompt'][:60]!r}"
            )
        seen.add(record["id"])
        prompts.append({k: record[k] for k in ("id", "family", "prompt")} | named)
    if not prompts:
        raise ValueError(f"{path}: expected one JSON object a line, got an empty file")
    return prompts


def _records(path: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON strings may hold other separators
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a readable UTF-8 JSONL file, got {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {type(record).__name__}")
        yield number, record


class EvaluationTexts:
    """Runs of n words of evaluation records, indexed once for any number of texts to compare.

    An evaluation text of 5 to n−1 words counts when the whole of it occurs; shorter ones carry no evidence.

    Args:
        files: JSONL; every string of a record counts.

    Raises:
        ValueError: n below 5, or a file that is no JSONL.
    """

    def __init__(self, files: Sequence[str | Path], n: int = 13) -> None:
        if n < _MIN_GRAM:
            raise ValueError(f"n: expected at least {_MIN_GRAM} words, got {n}")
        self._grams: dict[tuple[str, ...], tuple[str, str]] = {}
        for file in files:
            for number, record in _records(Path(file)):
                where = (Path(file).name, str(record.get("id", f"line {number}")))
                for text in _strings(record):
                    w = words(text)
                    if len(w) >= _MIN_GRAM:
                        for gram in _runs(w, min(n, len(w))):
                            self._grams.setdefault(gram, where)
        self._sizes = sorted({len(g) for g in self._grams})

    def shares(self, text: str) -> bool:
        """Whether a text has a run of words in common with any record."""
        return next(self._found(text), None) is not None

    def overlaps(self, prompt: Mapping[str, str]) -> Iterator[Overlap]:
        """One overlap of a prompt ("id", "prompt") per evaluation record."""
        seen = set[tuple[str, str]]()
        for gram, where in self._found(prompt["prompt"]):
            if where not in seen:
                seen.add(where)
                yield Overlap(prompt["id"], *where, " ".join(gram))

    def _found(self, text: str) -> Iterator[tuple[tuple[str, ...], tuple[str, str]]]:
        w = words(text) if self._grams else []
        for size in self._sizes:
            for gram in _runs(w, size):
                if gram in self._grams:
                    yield gram, self._grams[gram]


def contamination(
    prompts: Sequence[dict[str, str]], evaluation_files: Sequence[str | Path], n: int = 13
) -> list[Overlap]:
    """Runs of n words shared with any string of the evaluation records; one overlap per pair of texts."""
    texts = EvaluationTexts(evaluation_files, n)
    return [o for p in prompts for o in texts.overlaps(p)]


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _runs(w: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(w[i : i + size]) for i in range(len(w) - size + 1))


def split(
    items: Sequence[T], held_out: float = 0.25, seed: int = 0, by: str = "random"
) -> tuple[list[T], list[T]]:
    """(train, held out) in the order given; by "family" (a key of every item), whole families."""
    rest, taken = split_rows([str(item["family"]) for item in items], held_out, seed, by)
    return [items[i] for i in rest], [items[i] for i in taken]


def split_rows(families: Sequence[str], share: float, seed: int, by: str) -> tuple[list[int], list[int]]:
    """Row numbers (rest, taken): `share` of them at "random", or whole families until it is reached."""
    if not 0 < share < 1:
        raise ValueError(f"held_out: expected a share between 0 and 1, got {share}")
    if by not in ("random", "family"):
        raise ValueError(f"by: expected 'random' or 'family', got {by!r}")
    draw, wanted = Draw(f"split:{seed}"), max(1, round(share * len(families)))
    taken: set[int] = set()
    if by == "random":
        taken.update(draw.shuffled(range(len(families)))[:wanted])
    else:
        for family in draw.shuffled(sorted(set(families))):
            if len(taken) < wanted:
                taken.update(i for i, f in enumerate(families) if f == family)
    if len(taken) == len(families):
        raise ValueError(
            f"held_out: nothing is left to train on ({len(families)} items by {by}, share {share})"
        )
    return [i for i in range(len(families)) if i not in taken], sorted(taken)
