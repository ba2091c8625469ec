"""Kernels in Gluon: their arithmetic on the CPU, themselves on a GPU."""

import dataclasses

import pytest
import torch
from test_attend_packed_triton import DEVICE, by_steps, draw, off

from videokv.kernels.attend_packed import PackedCall, reference
from videokv.protocols import EncodeContext
from videokv.quantizers.groupwise import Groupwise
from videokv.quantizers.rotated import Rotated
from videokv.tensors import GroupFormat, map_tensors

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")
from gluon_on_cpu import Kernel  # noqa: E402

from videokv.kernels.attend_packed import (  # noqa: E402
    gluon_words,
    triton,
    triton_words,
)

RTN = Groupwise(GroupFormat(2, 32))
SIDES = {
    "rtn": (RTN, RTN),
    "symmetric": (Groupwise(GroupFormat(2, 32, symmetric=True)),) * 2,
    "quarot": (Rotated(RTN), Rotated(RTN)),
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
    """Launches run on the CPU where there is no GPU."""
    monkeypatch.setattr(triton_words.Fast, "programs", 4)
    monkeypatch.setattr(triton_words.Fast, "programs_of_more", 8)
    if DEVICE == "cpu":
        kernel = Kernel((gluon_words,), gluon_words.kernel)
        monkeypatch.setattr(gluon_words, "kernel", kernel)


def merged(call):
    parts, lses = triton_words.split_attention([call], fast=True)
    return triton.merge(parts, lses, call.query, rotation=call.values.rotation)


@pytest.mark.parametrize(
    ("name", "queries", "factors"),
    [("rtn", 1, None), ("rtn", 1, True), ("rtn", 8, False), ("symmetric", 1, True),
     ("quarot", 5, False)],
)  # fmt: skip
def test_against_the_reference(name, queries, factors, gluon):
    call = call_of(name, queries=queries)
    if factors is not None:
        call = by_steps(call, factors=factors)
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
def test_they_are_chosen(name):
    call = by_steps(call_of(name, queries=1), factors=False)
    assert triton_words._is_fast([call])
    call = by_steps(call_of(name, queries=10), factors=False)
    assert not triton_words._is_fast([call])
