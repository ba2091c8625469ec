"""Our attention kernel against the written-out reference in float64 and the oracle backend."""

import dataclasses

import pytest
import torch
from attention_fakes import Draw

from videokv.attention import attend as attend_segments
from videokv.attention import load_backend
from videokv.attention.adjacent import joined
from videokv.kernels import gpu
from videokv.kernels.attend import Call, Rows, _self_check, reference, to_e4m3
from videokv.kernels.attend.tiles import Tile, choose_tile
from videokv.noise import QueryMap
from videokv.protocols import Segment

pytest.importorskip("triton")
from videokv.kernels.attend import triton as kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Queries, keys, weights and values rounded by 2.6 % each; the interpreter truncates.
FP8_TOLERANCE = 6e-2 if DEVICE == "cuda" else 1e-1
# The interpreter's product of BF16 blocks is wrong: BF16 is tested on a GPU.
HALVES = [torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
SMALL = Tile(16, 32, 4, 2)


def off(got, want):
    want = want.double()
    return float((got.double() - want).norm() / want.norm())


def draw(dtype, *shape, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(DEVICE)


def make_call(
    dtype=torch.float32, *, heads=(2, 2), rows=33, past=63, current=33, size=64, value=64,
    columns=2, causal=False, batch=1,
):  # fmt: skip
    query_heads, kv_heads = heads
    kv = (batch, kv_heads)

    def part(tokens, seed):
        if not tokens:
            return None
        keys = draw(dtype, *kv, tokens, size, seed=seed)
        return Rows(keys, draw(dtype, *kv, tokens, value, seed=seed + 1))

    extra = columns and past
    return Call(
        query=draw(dtype, batch, query_heads, rows, size, seed=7),
        past=part(past, 1),
        current=part(current, 3),
        scale=size**-0.5,
        extra_query=-draw(torch.float32, batch, query_heads, rows, columns, seed=8).abs()
        if extra
        else None,
        extra_keys=draw(torch.float32, *kv, past, columns, seed=9).abs() if extra else None,
        causal=causal,
    )


def wide(call):
    """The same in float64."""

    def part(rows):
        if rows is None:
            return None
        return Rows(rows.keys.double(), rows.values.double())

    return dataclasses.replace(
        call, query=call.query.double(), past=part(call.past), current=part(call.current)
    )


def check(call, *, tile=SMALL, tolerance=None):
    got, got_lse = kernel.attend(call, tile=tile)
    want, want_lse = reference.attend(wide(call))
    tolerance = tolerance or TOLERANCE[call.query.dtype]
    assert got.dtype == call.query.dtype and got_lse.dtype == torch.float32
    assert off(got, want) < tolerance
    assert off(got_lse, want_lse) < tolerance


CASES = {
    "past and current": {},
    "past alone": {"current": 0},
    "current alone": {"past": 0},
    "causal": {"causal": True},
    "causal alone": {"causal": True, "past": 0},
    "no correction": {"columns": 0},
    "grouped heads": {"heads": (6, 2), "batch": 2},
    "odd sizes": {"size": 80, "value": 72},
    "values narrower": {"size": 64, "value": 40},
    "one query": {"rows": 1},
    "one key": {"past": 1, "current": 1},
    "whole blocks": {"past": 64, "current": 32, "rows": 32},
    "many columns": {"columns": 80, "size": 80},
}


@pytest.mark.parametrize("case", CASES)
def test_float32_against_float64(case):
    check(make_call(**CASES[case]))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("case", ["past and current", "causal", "odd sizes", "grouped heads"])
def test_half_types(case, dtype):
    check(make_call(dtype, **CASES[case]))


@pytest.mark.parametrize("tile", [Tile(32, 16, 4, 1), Tile(16, 64, 4, 2), Tile(64, 64, 4, 2)])
def test_any_tile_gives_the_same(tile):
    check(make_call(rows=70, current=70, causal=True), tile=tile)


@pytest.mark.parametrize("sign", [float("inf"), float("-inf"), float("nan")])
def test_only_blocks_of_queries_that_another_kernel_left_are_done(sign):
    """A log-sum-exp that is not finite asks for its block of 16 queries; the last one is short."""
    call = make_call(heads=(4, 2), batch=2)
    want, want_lse = kernel.attend(call, tile=SMALL)
    for rows in ([], [0], [17, 18], [32], [3, 20, 32]):
        out, lse = torch.full_like(want, 7.0), torch.full_like(want_lse, 7.0)
        lse[1, 2, rows] = sign
        got, got_lse = kernel.attend(call, tile=SMALL, into=(out, lse))
        assert got is out and got_lse is lse
        done = torch.zeros_like(lse, dtype=torch.bool)
        for row in rows:
            done[1, 2, row // 16 * 16 : row // 16 * 16 + 16] = True
        assert bool((out[~done] == 7).all()) and bool((lse[~done] == 7).all())
        # Another kernel to the compiler: its last bit may be another.
        torch.testing.assert_close(out[done], want[done], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse[done], want_lse[done], rtol=1e-5, atol=1e-6)


def test_slices_of_one_buffer_and_expanded_batches():
    call = make_call(size=64)
    fused = draw(torch.float32, 1, 96, 3, 2, 64, seed=5)  # [B, S, 3, H, D]
    query, keys, values = (fused[:, :, i].transpose(1, 2) for i in range(3))
    past = Rows(keys[:, :, :63].expand(2, -1, -1, -1), values[:, :, :63].expand(2, -1, -1, -1))
    call = dataclasses.replace(
        call,
        query=query[:, :, 63:].expand(2, -1, -1, -1),
        past=past,
        current=Rows(
            keys[:, :, 63:].expand(2, -1, -1, -1), values[:, :, 63:].expand(2, -1, -1, -1)
        ),
        extra_query=call.extra_query.expand(2, -1, -1, -1),
        extra_keys=call.extra_keys.expand(2, -1, -1, -1),
    )
    check(call)


@pytest.mark.parametrize("which", ["past", "current"])
@pytest.mark.parametrize("tokens", [63, 64])
def test_values_stored_transposed(which, tokens):
    """Of 64 tokens the copy engine could load them."""
    call = make_call(past=tokens, current=tokens)
    rows = getattr(call, which)
    turned = Rows(rows.keys, rows.values.mT.contiguous().mT)
    check(dataclasses.replace(call, **{which: turned}))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("case", ["past and current", "past alone", "grouped heads", "odd sizes"])
def test_fp8_past(case, dtype):
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs E4M3 products")
    call = make_call(dtype, **CASES[case])
    want, want_lse = reference.attend(wide(call))
    (keys, key_scale), (values, value_scale) = to_e4m3(call.past.keys), to_e4m3(call.past.values)
    call = dataclasses.replace(call, past=Rows(keys, values, key_scale, value_scale))
    got, lse = kernel.attend(call, tile=SMALL)
    assert off(got, want) < FP8_TOLERANCE and off(lse, want_lse) < 2e-2


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("turned", [False, True])
def test_fp8_values_beside_exact_keys(turned, dtype):
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs E4M3 products")
    call = make_call(dtype, past=130, heads=(4, 2))
    want, want_lse = reference.attend(wide(call))
    values, scale = to_e4m3(call.past.values)
    values = values.mT.contiguous().mT if turned else values
    call = dataclasses.replace(call, past=Rows(call.past.keys, values, None, scale))
    got, lse = kernel.attend(call, tile=SMALL)
    # The interpreter truncates: weights and values that are too small by 4 % each.
    assert off(got, want) < (4e-2 if DEVICE == "cuda" else 8e-2) and off(lse, want_lse) < 2e-3


def test_scales_come_with_e4m3_alone():
    call = make_call(torch.float16)
    keys, values = call.past.keys, call.past.values
    with pytest.raises(ValueError, match="E4M3 values, and they alone"):
        dataclasses.replace(call, past=Rows(keys, to_e4m3(values)[0]))
    with pytest.raises(ValueError, match="E4M3 keys, and they alone"):
        dataclasses.replace(call, past=Rows(keys, values, to_e4m3(keys)[1]))


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("case", ["past and current", "grouped heads", "odd sizes", "causal"])
def test_rows_loaded_either_way(case, descriptors):
    check(make_call(**CASES[case]), tile=Tile(16, 32, 4, 2, descriptors))


def segments(draw_):
    """Sink, two corrected chunks (one repaired in a basis), and the current chunk."""
    shape = (1, 2, 21, 64)
    basis = torch.linalg.qr(draw_.normal(1, 2, 64, 3).float())[0]
    return [
        draw_.segment(shape, 48),
        draw_.segment(shape, 48, draw_.term(shape, 32)),
        draw_.segment(shape, 48, draw_.term(shape, 16, basis=basis)),
        draw_.segment(shape, 48),
    ]


def usable(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr("videokv.kernels.attend.machine_refusal", lambda device: None)
    monkeypatch.setattr(gpu, "_verdicts", {})
    monkeypatch.setattr(load_backend("triton"), "_verdicts", {})


@pytest.mark.parametrize("causal", [False, True])
def test_backend_equals_the_oracle(monkeypatch, causal):
    usable(monkeypatch)
    draw_ = Draw(3)
    parts, query = segments(draw_), draw_.normal(1, 4, 21, 64)
    want, want_lse = attend_segments(
        query, parts, scale=0.2, backend="eager", causal=causal, need_lse=True
    )
    parts = [_moved(part) for part in parts]
    got, lse = attend_segments(
        query.to(DEVICE), parts, scale=0.2, backend="triton", causal=causal, need_lse=True
    )
    assert off(got.cpu(), want) < 1e-5 and off(lse.cpu(), want_lse) < 1e-5


def test_backend_serves_a_step_for_every_channel_and_refuses_exact(monkeypatch):
    usable(monkeypatch)
    draw_ = Draw(4)
    shape = (1, 2, 21, 80)
    parts = [
        _moved(draw_.segment(shape, 80, draw_.term(shape, 1))),
        _moved(draw_.segment(shape, 80)),
    ]
    query = draw_.normal(1, 2, 9, 80).to(DEVICE)
    want, _ = attend_segments(query, parts, backend="eager")
    assert off(attend_segments(query, parts, backend="triton")[0], want) < 1e-5
    exact = draw_.segment(shape, 80, draw_.term(shape, 16, exact=True))
    assert "exact" in load_backend("triton").refusal(query.cpu(), [exact])


def test_a_wrong_kernel_is_refused_with_its_error(monkeypatch):
    usable(monkeypatch)
    call = make_call()
    monkeypatch.setattr(kernel, "attend", lambda call, tile: (call.query * 0, call.query[..., 0]))
    parts = [Segment(call.past.keys, call.past.values)]
    with pytest.raises(ValueError, match="self-check failed"):
        attend_segments(call.query, parts, backend="triton")
    assert torch.isfinite(attend_segments(call.query, parts)[0]).all()


def test_small_shared_memory_gets_smaller_tiles_and_none_is_said():
    sizes = {"item_bytes": 2, "head_dim": 128, "value_dim": 128, "columns": 4, "rows": 4680}
    hopper, small = (choose_tile(limit_bytes=kib << 10, **sizes) for kib in (227, 99))
    assert hopper == Tile(128, 64, 8, 4)
    assert small is not None and small.keys * small.stages < hopper.keys * hopper.stages
    assert choose_tile(limit_bytes=4 << 10, **sizes) is None
    narrow = choose_tile(limit_bytes=227 << 10, value_bytes=1, **sizes)
    assert narrow is not None and hopper is not None and narrow.keys > hopper.keys
    wide_heads = sizes | {"head_dim": 256, "value_dim": 256}
    assert choose_tile(limit_bytes=99 << 10, **wide_heads) is not None


def test_consecutive_rows_are_joined_without_a_copy():
    buffer = torch.arange(2 * 3 * 20 * 8.0).reshape(2, 3, 20, 8)
    parts = [buffer[:, :, 2:7, :5], buffer[:, :, 7:8, :5], buffer[:, :, 8:19, :5]]
    view = joined(parts)
    assert torch.equal(view, torch.cat(parts, 2))
    assert view.data_ptr() == parts[0].data_ptr()
    assert joined([parts[0], parts[2]]).data_ptr() != parts[0].data_ptr()
    assert torch.equal(joined([parts[1], parts[0]]), torch.cat([parts[1], parts[0]], 2))


def test_calls_that_make_no_sense_are_refused():
    call = make_call()
    with pytest.raises(ValueError, match="past or current"):
        dataclasses.replace(call, past=None, current=None)
    with pytest.raises(ValueError, match="come in pairs"):
        dataclasses.replace(call, extra_query=None)
    with pytest.raises(ValueError, match="power of two"):
        Tile(48, 32, 4, 2)


def _moved(part):
    terms = []
    for term in part.noise:
        basis = term.query_map.basis
        query_map = QueryMap(
            term.query_map.group_size, basis=None if basis is None else basis.to(DEVICE)
        )
        terms.append(type(term)(term.weights.to(DEVICE), query_map, term.exact))
    return Segment(part.keys.to(DEVICE), part.values.to(DEVICE), tuple(terms))


@pytest.mark.parametrize("columns", [0, 2, 16])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_the_self_check_passes_on_a_corner_of_many_rows_and_heads(layout, columns):
    call = make_call(batch=3, heads=(10, 5), rows=20, past=40, current=20, columns=columns)
    if columns and layout == "columns":  # as a transposed product leaves them
        turned = {
            name: getattr(call, name).mT.contiguous().mT for name in ("extra_query", "extra_keys")
        }
        call = dataclasses.replace(call, **turned)
    assert _self_check(call) is None


def test_scales_of_e4m3_rows_may_be_views():
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs E4M3 products")
    call = make_call(torch.float16, batch=1, heads=(2, 2), rows=16, past=20, current=0, columns=0)
    (keys, key_scale), (values, value_scale) = to_e4m3(call.past.keys), to_e4m3(call.past.values)
    views = [torch.stack([s, s * 0], -1)[..., 0] for s in (key_scale, value_scale)]
    assert not views[0].is_contiguous()
    got = [
        kernel.attend(dataclasses.replace(call, past=Rows(keys, values, *scales)), tile=SMALL)
        for scales in ((key_scale, value_scale), views)
    ]
    assert torch.equal(got[0][0], got[1][0]) and torch.equal(got[0][1], got[1][1])
