"""Where "auto" takes our kernel for Hopper before stock ones, and where it does not."""

import pytest
import torch

from videokv.attention import attend, choose, explain_choice, sdpa, triton
from videokv.attention.choose import own_first
from videokv.kernels.attend import _corner
from videokv.protocols import Segment

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = torch.device("cuda")


def _call(rows: int = 200, *, packed: bool = True, device: str = "cpu"):
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: int) -> torch.Tensor:
        drawn = torch.randn(1, 2, tokens, 128, generator=generator)
        return drawn.to(device, torch.bfloat16)

    past = Segment(draw(300), draw(300), packed=packed)
    return draw(rows), [past, Segment(draw(rows), draw(rows))]


@pytest.fixture
def hopper(monkeypatch):
    """As on a Hopper GPU whose own kernel serves the call."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton.BACKEND, "kernel", lambda query, segments: "gluon")


def _elsewhere(query: torch.Tensor) -> torch.Tensor:
    return query.as_subclass(Elsewhere)


def test_taken_where_it_is_the_fastest(hopper) -> None:
    query, segments = _call()
    assert "faster than stock" in str(own_first(_elsewhere(query), segments))


@pytest.mark.parametrize("other", ["few rows", "dense", "ampere", "triton", "refused"])
def test_not_taken_elsewhere(hopper, monkeypatch, other: str) -> None:
    query, segments = _call(100 if other == "few rows" else 200, packed=other != "dense")
    if other == "ampere":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    if other == "triton":
        monkeypatch.setattr(triton.BACKEND, "kernel", lambda query, segments: "triton")
    if other == "refused":
        monkeypatch.setattr(triton.BACKEND, "kernel", lambda query, segments: "it cannot")
    assert own_first(_elsewhere(query), segments) is None


def test_not_taken_for_causal_calls(hopper, monkeypatch) -> None:
    """They are not what that kernel serves."""
    query, (past, _) = _call()
    current = Segment(*(torch.randn(1, 2, 200, 128, dtype=torch.bfloat16) for _ in range(2)))
    want, _ = attend(query, [past, current], causal=True, backend="sdpa")
    monkeypatch.setattr(choose, "own_first", lambda query, filled: "it is faster")
    got, _ = attend(query, [past, current], causal=True)
    assert torch.equal(got, want)
    assert explain_choice(query, [past, current]).backend == "triton"


def test_causal_calls_stay_with_stock_kernels(hopper, monkeypatch) -> None:
    monkeypatch.setattr(sdpa.BACKEND, "refusal", lambda query, segments: None)
    monkeypatch.setattr(sdpa.BACKEND, "kernels", lambda query, segments: "cudnn")
    query, segments = _call()
    query = _elsewhere(query)
    assert explain_choice(query, segments).backend == "triton"
    assert explain_choice(query, segments, causal=True).backend == "sdpa"


def test_its_check_sees_as_many_keys_as_that_of_a_whole_call() -> None:
    """The base of all weights is the first block's: one block of keys checks nothing of it."""
    query = torch.randn(1, 2, 200, 128)
    segments = [Segment(*(torch.randn(1, 2, tokens, 128) for _ in "kv")) for tokens in (4680, 200)]
    calls = (
        triton.BACKEND._call(query, of, scale=1.0, causal=False)
        for of in (segments, triton._first_rows(segments))
    )
    whole, first = (_corner(call) for call in calls)
    assert first.past.keys.shape == whole.past.keys.shape == (1, 2, 333, 128)
    assert first.current.keys.shape == whole.current.keys.shape


def test_never_on_a_cpu() -> None:
    query, segments = _call()
    assert own_first(query, segments) is None
    assert explain_choice(query, segments).backend == "sdpa"


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_the_same_result_on_hopper() -> None:
    query, segments = _call(device="cuda")
    choice = explain_choice(query, segments)
    assert choice.backend == "triton" and "Hopper" in choice.why
    out, lse = attend(query, segments, need_lse=True)
    want, want_lse = attend(query, segments, need_lse=True, backend="eager")
    assert float((out.double() - want.double()).norm() / want.double().norm()) < 1e-2
    torch.testing.assert_close(lse, want_lse.to(lse.dtype), atol=1e-2, rtol=1e-2)
