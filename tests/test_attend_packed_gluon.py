"""Kernels in Gluon: their arithmetic on the CPU, themselves on a GPU."""

import dataclasses

import pytest
import torch
from test_attend_packed_triton import DEVICE, by_steps, draw, off

from videokv.kernels.attend_packed import PackedCall, reference
from videokv.protocols import EncodeContext
from videokv.quantizers.groupwise import Groupwise
from videokv.quantizers.rotated import Rotated
from videokv.quantizers.unbiased import Unbiased
from videokv.tensors import GroupFormat, map_tensors

pytest.importorskip("triton")
# Not in every release of Triton that has Gluon.
pytest.importorskip("triton.experimental.gluon.language.nvidia.ampere")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from gluon_on_cpu import Kernel  # noqa: E402

from videokv.kernels.attend_packed import (  # noqa: E402
    gluon_unbiased,
    gluon_unbiased_wide,
    gluon_words,
    gluon_words_wide,
    triton,
    triton_unbiased,
    triton_words,
)
from videokv.kernels.attend_packed.splits import is_hopper  # noqa: E402

RTN = Groupwise(GroupFormat(2, 32))
SIDES = {
    "rtn": (RTN, RTN),
    "symmetric": (Groupwise(GroupFormat(2, 32, symmetric=True)),) * 2,
    "quarot": (Rotated(RTN), Rotated(RTN)),
    "unbiased": (Unbiased(3, label_bits=2, iterations=1), Unbiased(2, label_bits=2, iterations=1)),
    "small": (Unbiased(2, label_bits=3, iterations=1),) * 2,
    "labels": (Unbiased(3, label_bits=4, iterations=1), Unbiased(2, label_bits=4, iterations=1)),
}


def call_of(name, *, queries, tokens=75, dtype=torch.float16):
    sides = []
    for role, quantizer, seed in zip(("key", "value"), SIDES[name], (1, 2), strict=True):
        # An offset, so that zeros and centroids count, and channels of other sizes.
        rows = draw(1, 2, tokens, 128, seed=seed) * torch.linspace(0.2, 3, 128) + 0.5
        chunk = quantizer.encode(rows.bfloat16(), EncodeContext(0, role))
        sides.append(map_tensors(chunk.parts(), lambda t: t.to(DEVICE)))
    query = draw(1, 4, queries, 128, seed=3).to(DEVICE, dtype) * 3
    return PackedCall(query, *sides, 128**-0.5)


@pytest.fixture
def gluon(monkeypatch):
    """Launches of both kernels run on the CPU where there is no GPU."""
    for fast in (triton_words.Fast, triton_unbiased.Fast):
        for name in ("fewest", "few", "many"):
            monkeypatch.setattr(fast, name, (4, *getattr(fast, name)[1:]))
    if DEVICE == "cpu":
        modules = (gluon_words, gluon_words_wide, gluon_unbiased, gluon_unbiased_wide)
        for module in modules:
            monkeypatch.setattr(module, "kernel", Kernel(modules, module.kernel))


def merged(call):
    if triton_unbiased.serves(call):
        parts, lses, masses = triton_unbiased.split_attention(call, fast=True)
        labels = masses, call.values.centres
    else:
        parts, lses = triton_words.split_attention([call], fast=True)
        labels = None
    return triton.merge(parts, lses, call.query, rotation=call.values.rotation, labels=labels)


@pytest.mark.parametrize(
    ("name", "queries", "factors"),
    [("rtn", 1, None), ("rtn", 1, True), ("rtn", 8, False), ("rtn", 12, True),
     ("rtn", 32, None), ("symmetric", 1, True), ("symmetric", 9, True),
     ("quarot", 5, False), ("unbiased", 1, None), ("unbiased", 7, True),
     ("unbiased", 10, True), ("unbiased", 32, None), ("small", 1, True), ("small", 12, True),
     ("labels", 1, True), ("labels", 7, None), ("labels", 11, True)],
)  # fmt: skip
def test_against_the_reference(name, queries, factors, gluon):
    call = call_of(name, queries=queries)
    if factors is not None:
        call = by_steps(call, factors=factors)
    got, lse = merged(call)
    want, want_lse = reference.attend_packed(call)
    assert off(lse, want_lse) < 1e-3
    assert off(got, want) < 2e-3


@pytest.mark.parametrize("queries", [2, 12])
def test_chunks_of_different_lengths_in_one_launch(queries, gluon):
    calls = [call_of("rtn", queries=queries, tokens=tokens) for tokens in (75, 150)]
    parts, lses = triton_words.split_attention(calls, fast=True)
    got, lse = triton.merge(parts, lses, calls[0].query)
    first = reference.attend_packed(calls[0])
    want, want_lse = reference.attend_all(calls[1:], first)
    assert off(lse, want_lse) < 1e-3
    assert off(got, want) < 2e-3


@pytest.mark.skipif(DEVICE == "cpu", reason="how tensor cores add is seen on a GPU only")
@pytest.mark.parametrize("queries", [1, 8, 32])
@pytest.mark.parametrize("name", SIDES)
def test_means_of_many_values(name, queries):
    """They nearly vanish, so that what sums lose shows. By as many programs as calls get: matrix
    units cut sums off at 24 bits, and one program for 10,000 tokens is off by 2e-4 of a value."""
    sides = []
    for role, quantizer, seed in zip(("key", "value"), SIDES[name], (1, 2), strict=True):
        chunk = quantizer.encode(draw(1, 2, 20000, 128, seed=seed), EncodeContext(0, role))
        sides.append(map_tensors(chunk.parts(), lambda t: t.to(DEVICE)))
    query = draw(1, 4, queries, 128, seed=3).to(DEVICE, torch.bfloat16)
    call = by_steps(PackedCall(query, *sides, 128**-0.5), factors=False)
    got, lse = merged(call)
    want, want_lse = reference.attend_packed(call)
    assert off(lse, want_lse) < 1e-3
    assert off(got, want) < 2e-3


@pytest.mark.parametrize("size", [1e-4, 300.0])
def test_queries_of_any_size(size, gluon):
    call = by_steps(call_of("rtn", queries=1, dtype=torch.bfloat16), factors=False)
    call = dataclasses.replace(call, query=call.query * size, scale=call.scale / size)
    got, lse = merged(call)
    want, want_lse = reference.attend_packed(call)
    assert off(got, want) < 1e-2 and off(lse, want_lse) < 1e-2


@pytest.mark.skipif(DEVICE == "cpu", reason="a choice that is made on a GPU only")
@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("queries", [1, 8, 20, 32])
def test_they_are_chosen(name, queries):
    if queries > 8 and not is_hopper(torch.device(DEVICE)):
        pytest.skip("more than 16 query rows of a KV head are for Hopper")
    call = by_steps(call_of(name, queries=queries), factors=False)
    if triton_unbiased.serves(call):
        assert triton_unbiased._is_fast(call)
    else:
        assert triton_words._is_fast([call])
