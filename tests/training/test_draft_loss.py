"""The drafter's loss against its definition."""

from __future__ import annotations

import pytest
import torch

from blockpilot.training.draft_loss import Labels, Vocabulary, draft_loss, position_weights

V, H, M, K = 40, 6, 12, 3


def labels(seed: int = 0) -> Labels:
    gen = torch.Generator().manual_seed(seed)
    p = torch.rand(M, V, generator=gen).softmax(-1)
    top = p.topk(K)
    return Labels(
        torch.randint(V, (M,), generator=gen), torch.rand(M, generator=gen), top.indices, top.values
    )


def parts(seed: int = 0):
    gen = torch.Generator().manual_seed(seed + 10)
    return torch.randn(M, H, generator=gen, requires_grad=True), torch.randn(V, H, generator=gen)


@pytest.mark.parametrize("distil", [0.0, 0.3, 1.0])
def test_the_loss_over_the_whole_vocabulary(distil):
    hidden, head = parts()
    wanted = labels()
    ids, extra = Vocabulary(torch.arange(V).float(), V).choose(wanted, torch.Generator())
    assert ids.tolist() == list(range(V)) and not extra.any()
    loss, right = draft_loss(hidden, head[ids], wanted, ids, extra, distil)
    logp = (hidden @ head.T).log_softmax(-1)
    choice = -logp.gather(1, wanted.ids[:, None])[:, 0]
    teacher = -(wanted.teacher_p * logp.gather(1, wanted.teacher_ids)).sum(-1)
    expected = ((1 - distil) * choice + distil * teacher) * wanted.weight
    torch.testing.assert_close(loss, expected.sum() / wanted.weight.sum())
    assert torch.equal(right, (hidden @ head.T).argmax(-1) == wanted.ids)


def test_a_sampled_vocabulary_holds_what_is_needed_and_estimates_the_softmax():
    hidden, head = parts(1)
    wanted = labels(1)
    counts = torch.arange(V).float()
    vocabulary = Vocabulary(counts, 30)
    generator = torch.Generator().manual_seed(0)
    exact = (hidden @ head.T).double().exp().sum(-1)
    sums = []
    for _ in range(3000):
        ids, extra = vocabulary.choose(wanted, generator)
        assert set(wanted.ids.tolist()) | set(wanted.teacher_ids.flatten().tolist()) <= set(ids.tolist())
        assert set(range(V - 15, V)) <= set(ids.tolist())
        assert ids.tolist() == sorted(set(ids.tolist()))
        sums.append((hidden @ head[ids].T + extra).detach().double().exp().sum(-1))
    estimate = torch.stack(sums)
    error = estimate.std(0) / len(sums) ** 0.5
    assert ((estimate.mean(0) - exact).abs() < 5 * error + 1e-9).all()
    assert (error > 0).any()


def test_no_label_is_no_loss_and_no_gradient():
    """As when none of a step's answers has an id that the drafter's own head knows."""
    hidden = torch.randn(0, 8, requires_grad=True)
    rows = torch.randn(5, 8, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    labels = Labels(none, torch.zeros(0), none[:, None], torch.zeros(0, 1))
    loss, right = draft_loss(hidden, rows, labels, torch.arange(5), torch.zeros(5), 0.5)
    loss.backward()
    assert float(loss.detach()) == 0 and len(right) == 0
    assert torch.equal(rows.grad, torch.zeros(5, 8))


def test_weights_fall_with_the_column():
    assert position_weights(3, 4.0).tolist() == pytest.approx([1.0, 0.7788, 0.6065], abs=1e-4)
