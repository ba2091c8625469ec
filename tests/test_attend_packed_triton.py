"""Few queries on packed chunks: the kernel against reconstruct-then-attend."""

import dataclasses

import pytest
import torch

import videokv
import videokv.kernels.attend_packed as package
from videokv.kernels.attend_packed import Current, PackedCall, _self_check, reference, splits
from videokv.protocols import EncodeContext
from videokv.quantizers.centroid_residual import CentroidResidual, Clustering
from videokv.quantizers.groupwise import Groupwise
from videokv.quantizers.query_aware import QueryAware
from videokv.quantizers.rotated import Rotated
from videokv.tensors import GroupFormat, map_tensors

pytest.importorskip("triton")
from videokv.kernels.attend_packed import triton as kernel  # noqa: E402
from videokv.kernels.attend_packed import triton_words  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RTN = Groupwise(GroupFormat(2, 32))
CLUSTERING = Clustering(centroids=4)
SIDES = {
    "rtn": (RTN, RTN, 64),
    "kivi": (Groupwise(GroupFormat(2, 32, axis="channel")), RTN, 64),
    "quarot": (Rotated(RTN), Rotated(RTN), 64),
    "qvg": (CentroidResidual(clustering=CLUSTERING),) * 2 + (64,),
    "two-level": (QueryAware(32, clustering=CLUSTERING),) * 2 + (64,),
    "symmetric": (Groupwise(GroupFormat(2, 16, symmetric=True)),) * 2 + (64,),
    "eighty": (Groupwise(GroupFormat(2, 16)), Groupwise(GroupFormat(2, 8)), 80),
    "odd64": (Groupwise(GroupFormat(4, 32)), Groupwise(GroupFormat(3, 16)), 64),
    "odd": (Groupwise(GroupFormat(4, 40)), Groupwise(GroupFormat(3, 16)), 80),
}


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_call(
    name, *, dtype=torch.float32, heads=(4, 2), queries=3, tokens=150, columns=2,
    batch=2,
):  # fmt: skip
    key_quantizer, value_quantizer, size = SIDES[name]
    chunks = []
    for role, quantizer, seed in (("key", key_quantizer, 1), ("value", value_quantizer, 2)):
        x = draw(batch, heads[1], tokens, size, seed=seed)
        chunk = quantizer.encode(x, EncodeContext(0, role))
        chunks.append(map_tensors(chunk.parts(), lambda t: t.to(DEVICE)))
    columns_q = (
        -draw(batch, heads[0], queries, columns, seed=4).abs().to(DEVICE) if columns else None
    )
    columns_k = draw(batch, heads[1], tokens, columns, seed=5).abs().to(DEVICE) if columns else None
    query = draw(batch, heads[0], queries, size, seed=3).to(DEVICE, dtype)
    return PackedCall(query, *chunks, size**-0.5, columns_q, columns_k)


def off(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("name", SIDES)
def test_against_the_reference(name):
    call = make_call(name)
    got, lse = kernel.attend_packed(call)
    want, want_lse = reference.attend_packed(call)
    assert off(got, want) < 1e-5 and off(lse, want_lse) < 1e-5


@pytest.mark.parametrize("tokens", [1, 64, 129])
def test_token_counts_splits_and_no_columns(tokens, monkeypatch):
    monkeypatch.setattr(splits, "PROGRAMS", 12)
    call = make_call("rtn", tokens=tokens, columns=0, heads=(2, 2), queries=1)
    got, lse = kernel.attend_packed(call)
    want, want_lse = reference.attend_packed(call)
    assert off(got, want) < 1e-5 and off(lse, want_lse) < 1e-5


def test_half_precision():
    call = make_call("quarot", dtype=torch.float16)
    got, lse = kernel.attend_packed(call)
    want, want_lse = reference.attend_packed(call)
    assert off(got, want) < 3e-3 and off(lse, want_lse) < 3e-3


@pytest.mark.parametrize("columns", [0, 2, 16])
@pytest.mark.parametrize("name", SIDES)
def test_the_self_check_passes_on_a_corner_of_many_rows_and_heads(name, columns):
    call = make_call(name, batch=3, heads=(10, 5), tokens=70, columns=columns)
    assert _self_check(call) is None


def test_calls_that_make_no_sense_are_refused():
    call = make_call("rtn")
    with pytest.raises(ValueError, match="come in pairs"):
        dataclasses.replace(call, extra_keys=None)
    with pytest.raises(ValueError, match="other tokens"):
        dataclasses.replace(call, keys=make_call("rtn", tokens=7).keys)


def by_steps(call, *, factors=True):
    """The same with the correction of its keys' own steps."""
    batch, heads = call.keys.shape[:2]
    found = None
    if factors:
        found = draw(batch, heads, call.keys.steps.shape[3], seed=6).abs().to(DEVICE)
    return dataclasses.replace(
        call, extra_query=None, extra_keys=None, by_steps=True, factors=found
    )


@pytest.mark.parametrize(
    ("name", "factors"),
    [("rtn", False), ("quarot", True), ("symmetric", True), ("eighty", False), ("qvg", True),
     ("two-level", False)],
)  # fmt: skip
def test_a_correction_of_the_steps(name, factors):
    call = by_steps(make_call(name), factors=factors)
    got, lse = kernel.attend_packed(call)
    want, want_lse = reference.attend_packed(call)
    assert off(got, want) < 1e-5 and off(lse, want_lse) < 1e-5
    plain = dataclasses.replace(call, by_steps=False, factors=None)
    assert off(kernel.attend_packed(plain)[1], lse) > 1e-4


@pytest.mark.parametrize("name", ["rtn", "symmetric", "quarot"])
def test_the_kernel_of_words_serves_two_bits(name):
    call = by_steps(make_call(name, dtype=torch.float16))
    assert triton_words.serves(call)
    got, lse = kernel.attend_packed(call)
    want, want_lse = reference.attend_packed(call)
    assert off(got, want) < 3e-3 and off(lse, want_lse) < 3e-3


@pytest.mark.parametrize("names", [("rtn", "rtn"), ("rtn", "kivi", "rtn", "odd64")])
def test_several_chunks_and_what_was_found_before(names, monkeypatch):
    monkeypatch.setattr(triton_words.Tuning, "few", (24, 32, 1, 3))
    calls = [
        make_call(name, tokens=tokens, columns=2 if name == "kivi" else 0)
        for name, tokens in zip(names, (150, 1, 64, 40), strict=False)
    ]
    other = reference.attend_packed(make_call("rtn", tokens=9, columns=0))
    other = other[0].transpose(1, 2).contiguous().transpose(1, 2), other[1]
    got, lse = kernel.attend_all(calls, other)
    want, want_lse = reference.attend_all(calls, other)
    assert off(got, want) < 1e-5 and off(lse, want_lse) < 1e-5


def test_a_table_is_kept_for_the_same_chunks_only():
    calls = [make_call("rtn", tokens=40, columns=0) for _ in range(2)]
    tables = [
        triton_words._table(some, programs=12, block=32) for some in (calls, calls, calls[1:])
    ]
    assert tables[0] is tables[1] and tables[2].shape[0] < tables[0].shape[0]


def test_calls_may_be_captured_once_their_tables_are_there():
    calls = [make_call(name, tokens=40, columns=0) for name in ("rtn", "kivi", "rtn", "symmetric")]
    assert not package.capturable(calls) and package.capturable(calls[1:2])
    other = reference.attend_packed(make_call("rtn", tokens=9, columns=0))
    kernel.attend_all(calls, other)
    assert package.capturable(calls)
    assert not package.capturable([calls[0], *calls[3:]])


@pytest.mark.skipif(DEVICE == "cuda", reason="hands CPU tensors to kernels")
def test_a_capture_of_few_queries_keeps_nothing_and_follows_no_new_table(monkeypatch):
    from videokv.cache import few

    monkeypatch.setattr(few, "kernel_refusal", lambda call: None)
    cache = videokv.recipe("rtn-2bit+calibrated").new_cache(layers=1)
    for start in (0, 40):
        rows = (draw(1, 2, 40, 64, seed=start + n) for n in range(3))
        cache.write(0, start, *rows)
        cache.commit(start + 40)
    held, query = cache._layers[0], draw(1, 2, 1, 64)
    options = {"first": 0, "scale": 0.125}
    asked = (query, held.state.chunks, held.coding.correction)
    monkeypatch.setattr(few, "_capturing", lambda device: True)
    with pytest.warns(UserWarning, match="read once before capturing"):
        assert few.packed_calls(*asked, **options) is None
    assert not any(chunk in few._readings for chunk in held.state.chunks)
    monkeypatch.setattr(few, "_capturing", lambda device: False)
    calls = few.packed_calls(*asked, **options)
    few.attend_all(calls, (query.new_zeros(1, 2, 1, 64), query.new_zeros(1, 2, 1)))
    monkeypatch.setattr(few, "_capturing", lambda device: True)
    assert few.packed_calls(*asked, **options) is not None


@pytest.mark.parametrize("name", ["rtn", "eighty"])
def test_more_rows_than_one_tile(name):
    call = by_steps(make_call(name, queries=9, tokens=70))
    got, lse = kernel.attend_packed(call)
    want, want_lse = reference.attend_packed(call)
    assert call.rows > triton_words.Tuning.few_rows
    assert off(got, want) < 1e-5 and off(lse, want_lse) < 1e-5


@pytest.mark.parametrize("queries", [1, 9])
def test_features_beyond_half_precision_stay_numbers(queries):
    call = by_steps(make_call("rtn", dtype=torch.float16, queries=queries, tokens=40))
    call = dataclasses.replace(call, query=call.query * 2000)
    got, lse = kernel.attend_packed(call)
    assert got.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("names", [("rtn",), ("quarot", "odd64"), ("eighty",)])
def test_current_rows_in_the_merge(names, causal):
    calls = [make_call(name, columns=0, queries=19) for name in names]
    size = calls[0].query.shape[3]
    rows = (draw(2, 19, 2, size, seed=n).to(DEVICE).transpose(1, 2) for n in (8, 9))
    current = Current(*rows, size**-0.5, causal)
    got, lse = kernel.attend_all(calls, current)
    want, want_lse = reference.attend_all(calls, current)
    assert off(got, want) < 1e-5 and off(lse, want_lse) < 1e-5
    assert package._check_current(calls[0], current) is None
