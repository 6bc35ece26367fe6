"""The best tree under a budget: against every tree there is, on every backend, with ties and gaps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from math import exp, inf, nan

import pytest
import torch
from torch import Tensor

from blockpilot_kernels.draft_tree import draft_tree, largest, reference, worthwhile
from tests.kernels.backends import Backend
from tests.no_host_sync import NoHostSync

Prefix = tuple[int, ...]


@pytest.fixture
def op(backend: Backend):
    def call(*given: Tensor | int) -> tuple[Tensor, ...]:
        moved = [backend.put(x) if isinstance(x, Tensor) else x for x in given]
        return tuple(t.cpu() for t in draft_tree(*moved))

    return call


def scores(seed: int, slots: int, depths: int, width: int) -> Tensor:
    """Log-probabilities that fall along their candidates and leave some mass to others."""
    drawn = torch.randn(slots, depths, width + 1, generator=torch.Generator().manual_seed(seed)) * 2
    return drawn.log_softmax(-1)[..., :width].sort(-1, descending=True).values.contiguous()


def prefixes(found: tuple[Tensor, ...], slot: int) -> list[Prefix]:
    """The tree of a slot as candidates along each path, in the order of its nodes; shapes and padding checked."""
    candidate, parent, depth = (t[slot].tolist() for t in found[:3])
    count = int(found[3][slot])
    paths: list[Prefix] = []
    for n, (c, p, d) in enumerate(zip(candidate, parent, depth, strict=True)):
        if n >= max(count - 1, 0):
            assert (c, p, d) == (0, -1, 0)
            continue
        assert p < n
        paths.append((*paths[p], c) if p >= 0 else (c,))
        assert len(paths[-1]) == d
    assert len(set(paths)) == len(paths)
    return paths


def worth(tree: list[Prefix] | tuple[Prefix, ...], score: Tensor) -> float:
    return sum(exp(sum(float(score[d, c]) for d, c in enumerate(path))) for path in tree)


def every_tree(depths: int, width: int, nodes: int) -> Iterator[tuple[Prefix, ...]]:
    """All sets of `nodes` prefixes that hold the prefixes of each."""
    ranks = [p for d in range(1, depths + 1) for p in product(range(width), repeat=d)]
    for chosen in combinations(ranks, nodes):
        kept = set(chosen)
        if all(len(p) == 1 or p[:-1] in kept for p in chosen):
            yield chosen


@pytest.mark.parametrize(("depths", "width", "most"), [(1, 4, 5), (2, 3, 6), (3, 2, 6), (4, 1, 5)])
def test_no_tree_is_worth_more(op, depths, width, most):
    score = scores(depths, 6, depths, width)
    for budget in range(1, most + 1):
        found = op(score, torch.full((6,), depths), torch.full((6,), budget), most)
        best = [max(worth(t, s) for t in every_tree(depths, width, budget - 1)) for s in score]
        for slot in range(6):
            tree = prefixes(found, slot)
            assert len(tree) == budget - 1
            assert worth(tree, score[slot]) == pytest.approx(best[slot], rel=1e-6)


def test_budgets_depths_and_gaps_of_each_slot(op):
    """Ragged slots; what is −inf or NaN is never taken, nor what would follow it."""
    score = scores(3, 7, 4, 5)
    score[4, 1] = -inf
    score[5, 0] = nan
    score[6, 0, 1:] = -inf
    score[6, 1:, :] = -inf
    deepest, budget = torch.tensor([4, 0, 2, 9, 4, 4, 4]), torch.tensor([9, 9, 1, 99, 9, 9, 9])
    found = op(score, deepest, budget, 10)
    assert found[3].tolist() == [9, 1, 1, 10, 6, 1, 2]
    assert [len(p) for p in prefixes(found, 4)] == [1] * 5
    assert prefixes(found, 6) == [(0,)]
    assert op(score, deepest, torch.zeros(7, dtype=torch.long), 10)[3].tolist() == [0] * 7
    more = op(score, deepest, budget, 10)
    assert all(map(torch.equal, found, more))
    for slot in range(7):
        alone = op(score[slot : slot + 1], deepest[slot : slot + 1], budget[slot : slot + 1], 10)
        assert all(torch.equal(a[0], b[slot]) for a, b in zip(alone, found, strict=True))


def fastest(tree: list[Prefix], score: Tensor, cost: Tensor) -> int:
    """Nodes, the anchor included, of the prefix of a best-first tree with the most expected tokens per second."""
    pace = [(1 + worth(tree[:n], score)) / float(cost[n]) for n in range(len(tree) + 1)]
    return pace.index(max(pace)) + 1


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_is_cut_where_it_is_fastest(op, seed):
    """Whatever costs: rising along a line or in jumps, in a dip behind a hill, or falling."""
    gen = torch.Generator().manual_seed(seed)
    score = scores(seed, 8, 4, 5) * torch.rand(8, 1, 1, generator=gen)
    deepest, budget = torch.tensor([4, 4, 4, 4, 2, 0, 4, 4]), torch.tensor([12, 12, 12, 7, 12, 12, 1, 0])
    whole = op(score, deepest, budget, 12)
    line = torch.arange(12.0)
    counts = set()
    for cost in (
        4 + line,
        4 + line // 4 * 3,
        1 + (line - 3).abs(),
        20 - line,
        torch.rand(12, generator=gen) + 1,
    ):
        found = op(score, deepest, budget, 12, cost)
        for slot in range(7):
            tree, grown = prefixes(found, slot), prefixes(whole, slot)
            assert tree == grown[: len(tree)]
            assert len(tree) + 1 == fastest(grown, score[slot], cost)
        assert found[3][7] == 0
        counts |= set(found[3].tolist())
    assert len(counts) > 4 and max(counts) == 12


def test_of_equal_paces_the_fewest_nodes():
    total = torch.zeros(3, 3)  # every node is certain
    cost = torch.tensor([1.0, 2.0, 3.0, 3.0])
    assert worthwhile(total, torch.tensor([4, 3, 0]), cost).tolist() == [4, 1, 0]


def test_of_equals_the_child_of_the_earlier_node(op):
    """All candidates are certain: the first path goes down, then every node's next child in turn."""
    found = op(torch.zeros(1, 3, 2), torch.tensor([3]), torch.tensor([8]), 8)
    first = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0)]
    assert prefixes(found, 0) == first


@pytest.mark.parametrize("seed", range(5))
def test_every_backend_says_the_same(op, seed):
    """Scores on a coarse grid, so that many are equal."""
    score = (scores(seed, 9, 5, 15) * 2).round() / 2
    gen = torch.Generator().manual_seed(seed)
    deepest, budget = (torch.randint(0, high, (9,), generator=gen) for high in (7, 18))
    found, expected = (f(score, deepest, budget, 16) for f in (op, reference.draft_tree))
    assert all(map(torch.equal, found, expected))


def test_the_largest_with_the_lower_column_first(quick_backend):
    gen = torch.Generator().manual_seed(0)
    scores = (torch.randn(7, 40, generator=gen) * 3).round()
    scores[2, 5], scores[3, :38], scores[4] = -inf, -inf, 0.0
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    for count in (1, 6, 40):
        assert torch.equal(largest(scores, count), order[:, :count])
    for bad in ((scores[0], 1), (scores.double(), 1), (scores, 0), (scores, 41)):
        with pytest.raises(ValueError, match="expected"):
            largest(*bad)


def test_the_reference_reads_nothing_on_the_host():
    given = (scores(0, 3, 4, 5), torch.tensor([4, 2, 0]), torch.tensor([8, 0, 3]))
    with NoHostSync():
        reference.draft_tree(*given, 8, torch.arange(1.0, 9.0))
        reference.largest(given[0][0], 3)
    shapes = reference.draft_tree(*(t.to("meta") for t in given), 8)
    assert [tuple(s.shape) for s in shapes] == [(3, 7), (3, 7), (3, 7), (3,)]


def test_what_is_refused(op):
    score, whole = torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.long)
    for bad in (
        (score[0], whole, whole, 4),
        (score.double(), whole, whole, 4),
        (score, whole[:1], whole, 4),
        (score, whole, whole.int(), 4),
        (score, whole, whole, 0),
        (score, whole, whole, 1025),
        (score, whole, whole, 1 << 40),
        (score, whole, whole, 4, torch.ones(3)),
        (score, whole, whole, 4, torch.ones(4).double()),
    ):
        with pytest.raises(ValueError, match="expected"):
            op(*bad)
