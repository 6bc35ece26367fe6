"""accept_commit against a slow model: every event at every offset, dead columns poisoned, nothing else
written."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blockpilot_kernels import accept_commit, dispatch
from blockpilot_kernels.accept_commit import FINISH_ERROR, FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from tests.kernels.backends import Backend
from tests.kernels.conftest import device_of, missing

UNWRITTEN = -77
STOP = 1000


@dataclass
class Slots:
    """The op's arguments, in its order."""

    block: Tensor
    choice: Tensor
    finite: Tensor
    width: Tensor
    stop_ids: Tensor
    limit: Tensor
    tokens: Tensor
    length: Tensor
    done: Tensor
    finish: Tensor
    accepted: Tensor
    count: Tensor

    def tensors(self) -> list[Tensor]:
        return [getattr(self, f.name) for f in fields(self)]

    def clone(self) -> Slots:
        return Slots(*[t.clone() for t in self.tensors()])


@dataclass(frozen=True)
class Case:
    """One slot. `agree` drafts equal the target's choice; -1 stands for "never" in the offsets."""

    width: int
    agree: int
    stop_at: int = -1
    error_at: int = -1
    room: int = 99
    done: bool = False
    length: int = 5


def build(cases: list[Case], widest: int, capacity: int = 48) -> Slots:
    """One slot a case; columns at and beyond its width hold what would be accepted if it were looked at."""
    r = len(cases)

    def full(*shape: int, value: int = UNWRITTEN) -> Tensor:
        return torch.full(shape, value, dtype=torch.int64)

    slots = Slots(
        full(r, widest), full(r, widest), torch.ones(r, widest, dtype=torch.bool), full(r),
        full(r, 3, value=-1), full(r), full(r, capacity), full(r), torch.zeros(r, dtype=torch.bool),
        full(r, value=0), full(r), full(r),
    )  # fmt: skip
    for i, case in enumerate(cases):
        fill(slots, i, case, widest, capacity)
    return slots


def fill(slots: Slots, i: int, case: Case, widest: int, capacity: int) -> None:
    choice = [100 + j for j in range(widest)]
    if case.stop_at >= 0:
        choice[case.stop_at] = STOP + case.stop_at
        slots.stop_ids[i, 1] = STOP + case.stop_at
    draft = [choice[j - 1] if j - 1 != case.agree else 7 for j in range(1, widest)]
    slots.block[i] = torch.tensor([9, *draft])
    slots.choice[i] = torch.tensor(choice)
    if case.error_at >= 0:
        slots.finite[i, case.error_at] = False
        slots.choice[i, case.error_at] = 0
    slots.finite[i, case.width :] = False
    slots.width[i], slots.length[i] = case.width, case.length
    slots.limit[i] = min(case.length + case.room, capacity)
    slots.done[i] = case.done
    slots.finish[i] = FINISH_LENGTH if case.done else FINISH_NONE


def model(slots: Slots) -> None:
    """The contract, a token at a time."""
    for r in range(len(slots.width)):
        slots.accepted[r] = slots.count[r] = 0
        if slots.done[r]:
            continue
        block, choice, finite = (t[r].tolist() for t in (slots.block, slots.choice, slots.finite))
        width, limit = int(slots.width[r]), min(int(slots.limit[r]), slots.tokens.shape[1])
        prefix = 0
        while prefix < width - 1 and finite[prefix] and block[prefix + 1] == choice[prefix]:
            prefix += 1
        length, finish, count = int(slots.length[r]), FINISH_NONE, 0
        if length >= limit:
            finish = FINISH_LENGTH
        for j in range(min(prefix + 1, width) if finish == FINISH_NONE else 0):
            if not finite[j]:
                finish = FINISH_ERROR
                break
            slots.tokens[r, length + j] = choice[j]
            count += 1
            if choice[j] in slots.stop_ids[r].tolist():
                finish = FINISH_STOP
            elif length + count == limit:
                finish = FINISH_LENGTH
            if finish != FINISH_NONE:
                break
        slots.count[r], slots.accepted[r] = count, min(prefix, count)
        slots.length[r] += count
        slots.finish[r] = finish
        slots.done[r] = finish != FINISH_NONE


def check(backend: Backend, slots: Slots) -> Slots:
    """Run the op and compare every argument with the model, inputs included."""
    expected = slots.clone()
    model(expected)
    given_ = [t.to(backend.device) for t in slots.clone().tensors()]
    accept_commit(*given_)
    got = Slots(*[t.cpu() for t in given_])
    for field in fields(Slots):
        a, b = getattr(got, field.name), getattr(expected, field.name)
        assert torch.equal(a, b), f"{field.name}: {a.tolist()} instead of {b.tolist()}"
    return got


@pytest.mark.parametrize("widest", [1, 2, 8, 16])
def test_every_event_at_every_offset(backend: Backend, widest: int) -> None:
    cases = []
    for width in {1, widest // 2, widest} - {0}:
        for agree in range(width):
            cases.append(Case(width, agree))
            cases.append(Case(width, agree, done=True))
            for offset in range(agree + 1):
                cases += [
                    Case(width, agree, stop_at=offset),
                    Case(width, agree, error_at=offset),
                    Case(width, agree, room=offset + 1),
                    Case(width, agree, stop_at=offset, room=offset + 1),
                    Case(width, agree, error_at=offset, room=offset + 1),
                    Case(width, agree, error_at=offset, stop_at=max(offset - 1, 0)),
                    Case(width, agree, stop_at=agree, room=offset + 1),
                ]
    got = check(backend, build(cases, widest))
    seen = set(got.finish.tolist())
    assert seen == {FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_ERROR}
    assert set(got.accepted.tolist()) == set(range(widest))


def test_named_examples(backend: Backend) -> None:
    cases = {
        "all accepted and the bonus": (Case(4, 3), 3, 4, FINISH_NONE),
        "nothing accepted: the bonus alone": (Case(4, 0), 0, 1, FINISH_NONE),
        "plain": (Case(1, 0), 0, 1, FINISH_NONE),
        "stop inside the accepted run": (Case(4, 3, stop_at=1), 2, 2, FINISH_STOP),
        "the bonus is a stop": (Case(4, 1, stop_at=1), 1, 2, FINISH_STOP),
        "a draft stop the target rejects": (Case(4, 1, stop_at=2), 1, 2, FINISH_NONE),
        "limit before the stop": (Case(4, 3, stop_at=2, room=2), 2, 2, FINISH_LENGTH),
        "stop and limit together": (Case(4, 3, stop_at=2, room=3), 3, 3, FINISH_STOP),
        "limit on the bonus": (Case(4, 2, room=3), 2, 3, FINISH_LENGTH),
        "not finite at once": (Case(4, 3, error_at=0), 0, 0, FINISH_ERROR),
        "not finite after two": (Case(4, 3, error_at=2), 2, 2, FINISH_ERROR),
        "not finite beyond a mismatch": (Case(4, 1, error_at=2), 1, 2, FINISH_NONE),
        "stop before what is not finite": (Case(4, 3, error_at=2, stop_at=1), 2, 2, FINISH_STOP),
        "no room at all": (Case(4, 3, room=0), 0, 0, FINISH_LENGTH),
        "the last place": (Case(4, 3, length=47), 1, 1, FINISH_LENGTH),
        "width 0": (Case(0, 3), 0, 0, FINISH_NONE),
    }
    got = check(backend, build([case for case, *_ in cases.values()], 4))
    for i, (name, (_, accepted, count, finish)) in enumerate(cases.items()):
        assert (got.accepted[i], got.count[i], got.finish[i]) == (accepted, count, finish), name


def random_slots(data: st.DataObject) -> Slots:
    """Small ids so that matches and stops are frequent; everything else anywhere in its range."""
    draw = data.draw
    r, widest, capacity = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(8, 14))
    stops = draw(st.integers(0, 3))

    def table(rows: int, columns: int, values: st.SearchStrategy) -> Tensor:
        flat = draw(st.lists(values, min_size=rows * columns, max_size=rows * columns))
        return torch.tensor(flat).reshape(rows, columns)

    ids = st.integers(0, 3)
    limit = table(r, 1, st.integers(1, capacity + 2))[:, 0].long()
    return Slots(
        table(r, widest, ids).long(),
        table(r, widest, ids).long(),
        table(r, widest, st.sampled_from([True, True, True, False])).bool(),
        table(r, 1, st.integers(0, widest))[:, 0].long(),
        table(r, stops, st.integers(-1, 5)).long(),
        limit,
        torch.full((r, capacity), UNWRITTEN),
        table(r, 1, st.integers(0, 8))[:, 0].long(),
        table(r, 1, st.sampled_from([False, False, True]))[:, 0].bool(),
        table(r, 1, st.integers(0, 3))[:, 0].long(),
        torch.full((r,), UNWRITTEN),
        torch.full((r,), UNWRITTEN),
    )


@pytest.mark.parametrize("name", dispatch.BACKENDS)
@given(data=st.data())
def test_equals_the_model(name: str, data: st.DataObject) -> None:
    reason = missing(name)
    if reason:
        pytest.skip(f"{name}: {reason}")
    with dispatch.forced(name):
        check(Backend(name, device_of(name)), random_slots(data))


def test_strided_state(backend: Backend) -> None:
    """State tensors may be views: they are updated in place, and what lies between stays."""
    slots = build([Case(4, 2), Case(4, 3, stop_at=1), Case(3, 0, done=True)], 4)
    expected = slots.clone()
    model(expected)

    def spread(tensor: Tensor) -> Tensor:
        memory = torch.zeros([2 * n for n in tensor.shape], dtype=tensor.dtype, device=backend.device)
        view = memory[tuple(slice(None, None, 2) for _ in tensor.shape)]
        return view.copy_(tensor)

    views = [spread(t) for t in slots.tensors()]
    accept_commit(*views)
    for got, want in zip(views, expected.tensors(), strict=True):
        assert torch.equal(got.cpu(), want)
        assert got._base is not None
        assert got._base.sum() == got.sum()


def test_pointers_stay(backend: Backend) -> None:
    tensors = [t.to(backend.device) for t in build([Case(4, 2), Case(4, 3)], 4).tensors()]
    before = [t.data_ptr() for t in tensors]
    accept_commit(*tensors)
    assert [t.data_ptr() for t in tensors] == before


def test_no_slots(backend: Backend) -> None:
    accept_commit(*[t.to(backend.device) for t in build([], 4).tensors()])


def test_mistakes_are_named() -> None:
    slots = build([Case(4, 2), Case(4, 3)], 4)
    accept_commit(*slots.clone().tensors())
    for change, message in [
        ({"block": slots.block.int()}, r"block: expected int64 \[2, 4\].*got int32"),
        ({"choice": slots.choice[:, :3]}, r"choice: expected int64 \[2, 4\].*got int64 \[2, 3\]"),
        ({"finite": slots.finite.long()}, r"finite: expected bool"),
        ({"length": slots.length[:1]}, r"length: expected int64 \[2\].*got int64 \[1\]"),
        ({"tokens": slots.tokens[0]}, r"tokens: expected 2 dimensions"),
        ({"done": slots.done.long()}, r"done: expected bool"),
        ({"block": slots.block[:, :0], "choice": slots.choice[:, :0]}, r"block: expected at least 1 column"),
    ]:
        with pytest.raises(ValueError, match=message):
            accept_commit(*replace(slots.clone(), **change).tensors())


@pytest.mark.parametrize(
    "fault", ["commits one beyond a stop", "writes beyond the count", "leaves done unset"]
)
def test_comparison_sees_planted_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that errs in one field of one slot fails `check`."""
    from blockpilot_kernels.accept_commit import reference

    right = reference.accept_commit

    def wrong(*args: Tensor) -> None:
        right(*args)
        slots = Slots(*args)
        if fault == "commits one beyond a stop":
            slots.count[0] += 1
            slots.length[0] += 1
        elif fault == "writes beyond the count":
            slots.tokens[0, slots.length[0]] = 3
        else:
            slots.done[0] = False

    slots = build([Case(4, 3, stop_at=1)], 4)
    reference_backend = Backend("reference", torch.device("cpu"))
    with dispatch.forced("reference"):
        check(reference_backend, slots)
        monkeypatch.setattr(reference, "accept_commit", wrong)
        with pytest.raises(AssertionError):
            check(reference_backend, slots)
