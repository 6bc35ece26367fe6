"""The predictor: numbers, shapes, and a row that depends on nothing but itself."""

from __future__ import annotations

import math

import pytest
import torch

from blockpilot.policies import BlockPolicy
from blockpilot.policies.predictor import TOP_K, Architecture, Predictor, WidthNetwork, policy_input
from blockpilot_kernels import dispatch
from blockpilot_kernels.dispatch import forced
from tests.kernels.conftest import device_of, missing

VOCAB, HIDDEN, WINDOW = 97, 24, (1, 2, 4, 6)
KINDS = [
    ("full", "raw"),
    ("full", "probabilities"),
    ("full", "normalised"),
    ("full", "top_k"),
    ("compact", "mean_likely_embedding"),
]


def predictor(kind: str = "compact", input_kind: str = "mean_likely_embedding", seed: int = 0) -> Predictor:
    size = VOCAB if kind == "full" else HIDDEN
    made = Predictor(WidthNetwork(Architecture(kind, input_kind, size, 40, WINDOW), seed))
    made.bind(embedding())
    return made


def embedding() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))


def logits(rows: int, seed: int = 0, vocabulary: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@pytest.mark.parametrize(("kind", "input_kind"), KINDS)
def test_widths_come_from_the_window(kind, input_kind):
    policy = predictor(kind, input_kind)
    widths = policy.choose(logits(200))
    assert isinstance(policy, BlockPolicy)
    assert widths.dtype == torch.int64 and widths.shape == (200,)
    assert set(widths.tolist()) <= set(WINDOW) and len(set(widths.tolist())) > 1
    assert policy.choose(logits(0)).shape == (0,)
    assert policy.scores(policy_input(logits(0), input_kind, embedding())).shape == (0, len(WINDOW))


@pytest.mark.parametrize("input_kind", [k for _, k in KINDS])
def test_inputs_against_float64(input_kind):
    x, e = logits(5).double(), embedding().double()
    p = torch.softmax(x, -1)
    mean = torch.where(p < 2.0**-12, 0.0, p) @ e
    wanted = {
        "raw": x,
        "probabilities": p,
        "top_k": torch.where(x >= x.sort(-1, descending=True).values[:, TOP_K - 1 : TOP_K], x, 0),
        "normalised": (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True, unbiased=False),
        "mean_likely_embedding": mean / mean.square().mean(-1, keepdim=True).sqrt(),
    }[input_kind]
    got = policy_input(x.float(), input_kind, embedding())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)


def test_scores_are_the_papers_network():
    policy = predictor()
    x = policy_input(logits(7), "mean_likely_embedding", embedding())
    w = {k: v.double() for k, v in policy.network.state_dict().items()}
    first = torch.relu(x.double() @ w["first.weight"].T + w["first.bias"])
    second = first + torch.relu(first @ w["second.weight"].T + w["second.bias"])
    wanted = second @ w["head.weight"].T + w["head.bias"]
    torch.testing.assert_close(policy.scores(x).double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(policy.network(x).double(), wanted, rtol=1e-4, atol=1e-5)


def test_the_papers_sizes_and_kaiming_weights():
    network = WidthNetwork(Architecture("full", "raw", 300, 2048, (14, 15, 16, 17, 18)))
    assert [tuple(p.shape) for p in network.parameters()] == [
        (2048, 300), (2048,), (2048, 2048), (2048,), (5, 2048), (5,),
    ]  # fmt: skip
    assert network.first.weight.std().item() == pytest.approx(math.sqrt(2 / 300), rel=0.02)
    assert network.second.weight.std().item() == pytest.approx(math.sqrt(2 / 2048), rel=0.02)
    assert network.drop.p == 0.2 and not network.first.bias.any()


def test_dropout_acts_in_training_only():
    network = WidthNetwork(Architecture("compact", "mean_likely_embedding", HIDDEN, 40, WINDOW))
    x = torch.randn(4, HIDDEN)
    assert not torch.equal(network.train()(x), network(x))
    assert torch.equal(network.eval()(x), network(x))


def test_weights_follow_the_seed_and_leave_the_global_stream_alone():
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    a, b, c = predictor(seed=1), predictor(seed=1), predictor(seed=2)
    assert torch.equal(torch.rand(4), wanted)
    assert same_bits(a.network.head.weight, b.network.head.weight)
    assert not torch.equal(a.network.head.weight, c.network.head.weight)


def test_the_triton_product_reads_the_vocabulary_in_splits():
    """Near the reference, and each row by itself."""
    if reason := missing("triton"):
        pytest.skip(f"triton: {reason}")
    network = WidthNetwork(Architecture("full", "raw", 1000, 40, WINDOW), seed=0)
    rows = logits(17, vocabulary=1000)
    with forced("reference"):
        expected = Predictor(network).scores(rows)
    with forced("triton"):
        policy = Predictor(network)
        policy.bind(torch.zeros(1000, 1, device=device_of("triton")))
        rows = rows.to(device_of("triton"))
        dispatch.calls.clear()
        got, alone = policy.scores(rows), policy.scores(rows[16:])
        assert dispatch.calls["tiled_linear", "triton"] == 6
    torch.testing.assert_close(got.cpu(), expected, atol=1e-4, rtol=1e-4)
    assert same_bits(got[16], alone[0])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("kind", "input_kind"), KINDS)
def test_a_row_depends_on_nothing_beside_it(kind, input_kind, threads):
    policy, row = predictor(kind, input_kind), logits(1, seed=9)[0]
    alone = policy_input(row[None], input_kind, embedding())
    scores = policy.scores(alone)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (2, 7, 16, 17, 33):
            for at in {0, rows // 2, rows - 1}:
                batch = logits(rows, seed=rows)
                if rows % 2:
                    batch.fill_(math.nan)
                batch[at] = row
                inputs = policy_input(batch, input_kind, embedding())
                assert same_bits(inputs[at], alone[0])
                assert same_bits(policy.scores(inputs)[at], scores[0])
                assert policy.choose(batch)[at] == policy.choose(row[None])[0]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("vocabulary", "hidden"), [(33, 7), (5000, 33), (8200, 64)])
def test_the_mean_row_is_row_independent_at_any_size(vocabulary, hidden):
    table = torch.randn(vocabulary, hidden)
    row = logits(1, 1, vocabulary)
    alone = policy_input(row, "mean_likely_embedding", table)[0]
    for at in (0, 3, 6, 11, 15):
        batch = logits(16, 2 + at, vocabulary)
        batch[at] = row[0]
        assert same_bits(policy_input(batch, "mean_likely_embedding", table)[at], alone)


def test_a_row_with_nan_takes_the_lowest_width_and_spoils_no_neighbour():
    policy, batch = predictor(), logits(40)
    clean = policy.choose(batch)
    assert (clean != WINDOW[0]).any()
    for bad, value in ((3, math.nan), (17, math.inf), (39, -math.inf)):
        batch[bad, 5] = value
    widths = policy.choose(batch)
    spoilt = torch.tensor([3, 17, 39])
    others = torch.ones(40, dtype=torch.bool).index_fill(0, spoilt, False)
    assert widths[spoilt].tolist() == [WINDOW[0]] * 3
    assert torch.equal(widths[others], clean[others])


def test_the_lowest_width_wins_a_tie():
    policy = predictor()
    for p in policy.network.parameters():
        p.zero_()
    policy.network.head.bias.copy_(torch.tensor([0.0, 1.0, 1.0, 0.5]))
    policy.bind(embedding())
    assert policy.choose(logits(3)).tolist() == [2, 2, 2]


def test_inputs_of_the_caller_are_left_alone_and_dtypes_and_strides_do_not_matter():
    policy, batch = predictor(), logits(20)
    copy = batch.clone()
    widths = policy.choose(batch)
    assert torch.equal(batch, copy)
    strided = torch.empty(VOCAB, 20).T
    strided.copy_(batch)
    assert torch.equal(policy.choose(strided), widths)
    rounded = batch.bfloat16()
    assert torch.equal(policy.choose(rounded), policy.choose(rounded.float()))
    with torch.inference_mode():
        assert torch.equal(policy.choose(batch), widths)


def test_a_bfloat16_table_is_read_in_float32():
    table = embedding().bfloat16()
    got = policy_input(logits(3), "mean_likely_embedding", table)
    assert same_bits(got, policy_input(logits(3), "mean_likely_embedding", table.float()))


def test_wrong_tables_and_shapes_are_refused():
    unbound = Predictor(WidthNetwork(Architecture("compact", "mean_likely_embedding", HIDDEN, 40, WINDOW)))
    with pytest.raises(ValueError, match="call bind"):
        unbound.choose(logits(1))
    with pytest.raises(ValueError, match=f"H = {HIDDEN}"):
        unbound.bind(torch.zeros(VOCAB, HIDDEN + 1))
    with pytest.raises(ValueError, match=f"V = {VOCAB}"):
        predictor("full", "raw").bind(torch.zeros(VOCAB + 1, HIDDEN))
    with pytest.raises(ValueError, match=f"{VOCAB + 1} rows, got {VOCAB} rows"):
        predictor().choose(logits(1, vocabulary=VOCAB + 1))
    with pytest.raises(ValueError, match=r"expected \[R, V\]"):
        predictor().choose(logits(1)[0])
    with pytest.raises(ValueError, match=r"expected \[R, 24\]"):
        predictor().scores(torch.zeros(2, 25))
    with pytest.raises(ValueError, match="input_kind: expected one of"):
        policy_input(logits(1), "top_n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "huge"}, "kind: expected one of"),
        ({"input_kind": "raw"}, "input_kind: expected one of"),
        ({"input_size": 0}, "input_size: expected an int >= 1"),
        ({"hidden": True}, "hidden: expected an int >= 1"),
        ({"window": (3, 2)}, "ascending widths"),
        ({"window": ()}, "1 to 64"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_impossible_architectures_are_refused(change, message):
    values = {
        "kind": "compact",
        "input_kind": "mean_likely_embedding",
        "input_size": 8,
        "hidden": 8,
        "window": (1, 2),
    }
    with pytest.raises(ValueError, match=message):
        Architecture(**{**values, **change})
