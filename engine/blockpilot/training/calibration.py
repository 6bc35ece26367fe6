"""What a step costs on one machine with one pair, as a JSON file that policies and reports can read.

Keys: calibration (the format, 1), pair {target, drafter}, dtype, weights, device, backend, threads, hardware, versions,
rows, trees and fit. A row is one measured cell: requests, context, width, sum_width, steps, and ms with median, p10
and p90 of every phase and of the total; one of `trees`, which may be missing, has `nodes` too. `fit` is derived from
the rows and is not read back.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from blockpilot.policies.atomic import replacing
from blockpilot.policies.contract import Pair
from blockpilot.training.calibration_rows import DIGITS, StepCost, parse_rows

FORMAT = 1
KEYS = (
    "pair",
    "dtype",
    "weights",
    "device",
    "backend",
    "threads",
    "hardware",
    "versions",
    "rows",
    "trees",
    "fit",
)
REMEDY = "measure again with `blockpilot calibrate`"


@dataclass(frozen=True)
class Fit:
    """Least squares of c0(requests) + c1 · Σ width over the drafting widths at one context, in milliseconds.

    Attributes:
        c0: by number of requests. c1: per row of Σ width. residual: root mean square of what is left.
        plain: measured cost of width 1 by number of requests; it runs no drafter and is not on the line.
    """

    context: int
    c0: dict[int, float]
    c1: float
    residual: float
    plain: dict[int, float]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        by_requests = {
            name: {str(n): ms for n, ms in getattr(self, name).items()} for name in ("c0", "plain")
        }
        return {**asdict(self), **by_requests}


@dataclass(frozen=True)
class Calibration:
    """Measured step costs of a pair.

    Attributes:
        pair: fingerprints of target and drafter, drafter "none" for a target alone.
        dtype, weights, device, backend, threads: what the engine ran with. hardware, versions: JSON-ready.
        rows: a cell for every combination of the requests, contexts and widths that occur; width 1 is one.
        trees: cells of trees, for every combination of the same requests and contexts and of their widths and nodes.

    Raises:
        ValueError: no rows, a cell twice, a cell missing, or nothing measured at width 1.
    """

    pair: Pair
    dtype: str
    weights: str
    device: str
    backend: str
    threads: int
    hardware: dict[str, Any]
    versions: dict[str, str | None]
    rows: tuple[StepCost, ...]
    trees: tuple[StepCost, ...] = ()

    def __post_init__(self) -> None:
        for name in ("dtype", "weights", "device", "backend"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name}: expected text, got {value!r}")
        if isinstance(self.threads, bool) or not isinstance(self.threads, int) or self.threads < 1:
            raise ValueError(f"threads: expected an int >= 1, got {self.threads!r}")
        for name in ("hardware", "versions"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(f"{name}: expected an object, got {getattr(self, name)!r}")
        self._check_cells()

    @property
    def requests(self) -> tuple[int, ...]:
        """Measured numbers of requests, ascending."""
        return tuple(sorted({r.requests for r in self.rows}))

    @property
    def contexts(self) -> tuple[int, ...]:
        """Measured contexts, ascending."""
        return tuple(sorted({r.context for r in self.rows}))

    @property
    def widths(self) -> tuple[int, ...]:
        """Measured widths, ascending."""
        return tuple(sorted({r.width for r in self.rows}))

    def _check_cells(self) -> None:
        cells = [(r.requests, r.context, r.width) for r in self.rows]
        expected = {(r, c, w) for r in self.requests for c in self.contexts for w in self.widths}
        if not cells or 1 not in self.widths:
            raise ValueError(f"rows: expected plain decoding, width 1, among them, got widths {self.widths}")
        if len(cells) > len(set(cells)):
            twice = next(cell for i, cell in enumerate(cells) if cell in cells[:i])
            raise ValueError(f"rows: expected every cell once, got requests, context, width {twice} again")
        if missing := sorted(expected - set(cells)):
            raise ValueError(f"rows: expected every requests, context, width, missing {missing[:3]}")
        grown = {(t.requests, t.context, t.width, t.nodes) for t in self.trees}
        shapes = {shape[2:] for shape in grown}
        wanted = {(r, c, *shape) for r in self.requests for c in self.contexts for shape in shapes}
        if grown != wanted or len(grown) < len(self.trees):
            raise ValueError(
                "trees: expected every requests and context of the rows once for each width and nodes"
            )

    def cost(self, width: int, context: float, requests: int = 1) -> float:
        """Median milliseconds of a step of `requests` requests, each of `width` and with `context` cached tokens.

        Linear between measured contexts and between measured widths; outside them it is clamped: the cost at
        the nearest measured one. Width 1 runs no drafter, so nothing is interpolated between it and the others.

        Raises:
            ValueError: arguments that make no sense, a number of requests that was not measured, or a width
                above 1 where only plain decoding was measured.
        """
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ValueError(f"width: expected an int >= 1, got {width!r}")
        if isinstance(context, bool) or not isinstance(context, (int, float)) or not context >= 0:
            raise ValueError(f"context: expected a number >= 0, got {context!r}")
        if requests not in self.requests:
            raise ValueError(
                f"requests: expected one of {self.requests}, got {requests!r}; "
                f"measure it with `blockpilot calibrate --requests`"
            )
        widths = [w for w in self.widths if (w > 1) == (width > 1)]
        if not widths:
            raise ValueError(f"width: expected 1, the only one measured, got {width}; {REMEDY} and a drafter")
        total = {(r.context, r.width): r.total for r in self.rows if r.requests == requests}
        by_context = [(c, _between([(w, total[c, w]) for w in widths], width)) for c in self.contexts]
        return _between(by_context, context)

    def node_cost(self, width: int, nodes: int) -> tuple[float, ...]:
        """Milliseconds of a step whose trees of blocks of `width` have 1 … `nodes` nodes, at the smallest context and
        number of requests: lines between points that never fall, the nearest such to those measured.

        Raises:
            ValueError: no such trees, or none as large, were measured.
        """
        place = (self.requests[0], self.contexts[0], width)
        points = sorted((t.nodes, t.total) for t in self.trees if (t.requests, t.context, t.width) == place)
        if not points or points[-1][0] < nodes:
            raise ValueError(
                f"trees: expected measured ones of width {width} with up to {nodes} nodes, got "
                f"{points[-1][0] if points else 'none'}; measure with `blockpilot calibrate --trees {width}/{nodes}`"
            )
        rising = _rising(points)
        return tuple(_between(rising, n) for n in range(1, nodes + 1))

    def fits(self) -> tuple[Fit, ...]:
        """The cost model's constants at every context; empty unless two widths above 1 were measured."""
        if len(self.widths) < 3:
            return ()
        return tuple(_fit(c, [r for r in self.rows if r.context == c]) for c in self.contexts)

    def check_pair(self, target: str, drafter: str) -> None:
        """Refuse a pair other than the measured one, given as fingerprints, drafter "none" for none.

        Raises:
            ValueError: naming both pairs.
        """
        wanted = Pair(target, drafter)
        if wanted != self.pair:
            raise ValueError(
                f"calibration: expected one made for {wanted}, got one made for {self.pair}; {REMEDY}"
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form: what `save` writes."""
        named = {key: getattr(self, key) for key in KEYS[1:-3]}
        rows = [row.to_dict() for row in self.rows]
        trees = [row.to_dict() for row in self.trees]
        fits = [fit.to_dict() for fit in self.fits()]
        return {
            "calibration": FORMAT,
            "pair": asdict(self.pair),
            **named,
            "rows": rows,
            "trees": trees,
            "fit": fits,
        }

    def save(self, path: str | Path) -> None:
        """Write the file; it appears whole or not at all."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        with replacing(Path(path)) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read and check a file.

        Raises:
            ValueError: it cannot be read or is not what `save` writes; the message names file and place.
        """
        path = Path(path)
        try:
            found = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"{path}: expected a readable calibration, got {reason}; {REMEDY}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected the JSON of a calibration, got {error}; {REMEDY}") from error
        try:
            return cls._parse(found)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; {REMEDY}") from error

    @classmethod
    def _parse(cls, found: Any) -> Calibration:
        if not isinstance(found, dict) or "calibration" not in found:
            raise ValueError("expected an object with the key 'calibration'; this is no calibration")
        if found["calibration"] is True or found["calibration"] != FORMAT:
            raise ValueError(f"calibration: expected format {FORMAT}, got {found['calibration']!r}")
        values = {"trees": [], **found}
        del values["calibration"]
        if set(values) != set(KEYS):
            missing, unknown = sorted(set(KEYS) - set(values)), sorted(set(values) - set(KEYS))
            raise ValueError(f"expected keys {list(KEYS)}, missing {missing}, unknown {unknown}")
        pair, rows = values.pop("pair"), parse_rows(values.pop("rows"))
        trees = parse_rows(values.pop("trees"), "trees", frozenset({"nodes"}))
        if not isinstance(pair, dict) or set(pair) != {"target", "drafter"}:
            raise ValueError(f"pair: expected target and drafter, got {pair!r}")
        del values["fit"]
        return cls(Pair(**pair), rows=rows, trees=trees, **values)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant}, which is no JSON number")


def _between(points: Sequence[tuple[int, float]], at: float) -> float:
    """The line through ascending `points` at `at`, clamped to the first and the last."""
    i = bisect_left([x for x, _ in points], at)
    if i == 0 or i == len(points):
        return points[min(i, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def _rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Of all sequences over the same places that never fall, the one of least squares (adjacent violators pooled)."""
    pools: list[tuple[float, int]] = []
    for _, mean in points:
        count = 1
        while pools and pools[-1][0] > mean:
            before, more = pools.pop()
            mean = (before * more + mean * count) / (more + count)
            count += more
        pools.append((mean, count))
    means = [mean for mean, count in pools for _ in range(count)]
    return [(x, mean) for (x, _), mean in zip(points, means, strict=True)]


def _fit(context: int, rows: Sequence[StepCost]) -> Fit:
    """One slope for all numbers of requests, an intercept for each."""
    plain = {r.requests: r.total for r in rows if r.width == 1}
    groups = {n: [(r.sum_width, r.total) for r in rows if r.requests == n and r.width > 1] for n in plain}
    means = {n: (fmean(x for x, _ in g), fmean(y for _, y in g)) for n, g in groups.items()}
    centred = [(x - means[n][0], y - means[n][1]) for n, g in groups.items() for x, y in g]
    slope = sum(x * y for x, y in centred) / sum(x * x for x, _ in centred)
    residual = fmean((y - slope * x) ** 2 for x, y in centred) ** 0.5
    c0 = {n: round(y - slope * x, DIGITS) for n, (x, y) in means.items()}
    return Fit(context, c0, round(slope, DIGITS), round(residual, DIGITS), plain)
