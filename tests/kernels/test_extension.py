"""The C++ extension as a PyTorch citizen, and its instruction sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blockpilot_kernels import dispatch
from tests.kernels.backends import Params, counting
from tests.kernels.packed import instruction_sets
from tests.kernels.test_accept_commit import Case, build

if dispatch.extension_error() is not None:
    pytest.skip(f"C++ extension: {dispatch.extension_error()}", allow_module_level=True)

OPS = torch.ops.blockpilot


def samples() -> list[tuple[str, Any, tuple[Any, ...]]]:
    """(name, op, arguments) of every op."""
    seed, logits = counting(3), torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    params = Params(0.8, 2, 0.9, 0.1, [1, -1]).tensors(3)
    slots = build([Case(4, 2), Case(4, 3, stop_at=1), Case(2, 0, done=True)], 4)
    return [
        ("philox", OPS.philox, (seed, seed, 9)),
        ("gumbel_noise", OPS.gumbel_noise, (seed, seed, 9)),
        ("gumbel_from_integers", OPS.gumbel_from_integers, (seed,)),
        ("choose", OPS.choose, (logits, logits, *params, True)),
        ("choose greedy", OPS.choose, (logits, None, *params[:4], None, False)),
        ("accept_commit", OPS.accept_commit, tuple(slots.tensors())),
    ]


@pytest.mark.parametrize(("name", "op", "arguments"), samples(), ids=[name for name, *_ in samples()])
def test_opcheck(name: str, op: Any, arguments: tuple[Any, ...]) -> None:
    """Schema, fake kernel against the real one, and tracing."""
    torch.library.opcheck(op.default, arguments)


def supported() -> list[str]:
    """Instruction sets this machine can run."""
    return instruction_sets()[0]


def results(isa: str, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Everything the row kernels compute, over odd sizes and every filter."""
    monkeypatch.setenv("BLOCKPILOT_ISA", isa)
    assert OPS.isa() == isa
    generator = torch.Generator().manual_seed(5)
    out: list[Tensor] = [
        OPS.gumbel_from_integers(torch.linspace(0, 2**32 - 1, 5001, dtype=torch.float64).long())
    ]
    for vocab in (1, 3, 63, 64, 65, 97, 1000, 5003):
        rows = 8
        seed, logits = counting(rows, -3), torch.randn(rows, vocab, generator=generator) * 3
        noise = OPS.gumbel_noise(seed, counting(rows), vocab)
        out += [noise, OPS.philox(seed, counting(rows), vocab)]
        for params in (
            Params(0.0),
            Params(0.7),
            Params(0.7, top_k=5, top_p=0.9),
            Params(3.0, top_p=0.99),
            Params(1.3, min_p=0.1),
            Params(0.7, banned=[0, 2]),
        ):
            out += OPS.choose(logits, noise, *params.tensors(rows), True)
    return out


def test_instruction_sets_agree_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = supported()
    assert "default" in sets
    first = results("default", monkeypatch)
    for isa in sets[1:]:
        for a, b in zip(first, results(isa, monkeypatch), strict=True):
            assert torch.equal(a, b), isa


def test_the_best_instruction_set_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    best = supported()[-1]
    for value in (None, ""):
        monkeypatch.delenv("BLOCKPILOT_ISA", raising=False)
        if value is not None:
            monkeypatch.setenv("BLOCKPILOT_ISA", value)
        assert OPS.isa() == best


def test_a_name_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKPILOT_ISA", "sse9")
    with pytest.raises(ValueError, match=r"BLOCKPILOT_ISA: expected one of .*default, got 'sse9'"):
        OPS.gumbel_noise(counting(1), counting(1), 4)


def test_an_instruction_set_this_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = {"amx", "vnni", "avx512", "avx2"} - set(supported())
    if not lacking:
        pytest.skip("this machine runs every instruction set there is")
    monkeypatch.setenv("BLOCKPILOT_ISA", lacking.pop())
    with pytest.raises((RuntimeError, ValueError), match=r"lacks these instructions|expected one of"):
        OPS.isa()


def test_memory_is_safe_whoever_calls() -> None:
    """The ops check shapes and dtypes themselves, and an id outside the row never reaches memory."""
    logits, params = torch.zeros(2, 5), Params(1.0).tensors(2)
    with pytest.raises(ValueError, match="noise: expected shape"):
        OPS.choose(logits, logits[:, :4], *params, True)
    with pytest.raises(ValueError, match="temperature: expected Float"):
        OPS.choose(logits, None, params[0].double(), *params[1:], True)
    with pytest.raises(ValueError, match="position: expected shape"):
        OPS.gumbel_noise(counting(2), counting(3), 4)
    far = torch.tensor([[2**62, -(2**62)]] * 2)
    assert OPS.choose(logits, None, *params[:4], far, False)[0].tolist() == [0, 0]


def test_a_negative_length_is_refused() -> None:
    slots = build([Case(4, 2)], 4)
    slots.length[0] = -1
    with pytest.raises(ValueError, match="length: expected 0 or more"):
        OPS.accept_commit(*slots.tensors())
