"""The noise of committed rows is made once: the same columns, and gone when the rows change."""

import gc
import weakref

import pytest
import torch
from attention_fakes import Draw

import videokv
from videokv.attention import attend, explain_choice
from videokv.attention import sdpa as sdpa_module
from videokv.attention.columns import plan_calls, with_columns, write_key_columns
from videokv.cache import cache as cache_module
from videokv.cache import stacking
from videokv.cache.chunks import PackedChunk
from videokv.kernels.score_columns import history_of, keep_noise, reference
from videokv.noise import QueryMap, ScoreNoise
from videokv.protocols import Segment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, GROUP, SIZE, TOKENS = 2, 2, 64, 150
NAMES = ["rtn-2bit+taylor", "quarot-2bit+calibrated", "quantwm-2bit+calibrated", "fp8+measured"]


def draw(generator, heads, dtype, batch=2, tokens=TOKENS):
    return torch.randn(batch, heads, tokens, SIZE, generator=generator).to(DEVICE, dtype)


def filled(name, *, dtype=torch.bfloat16, layers=1, chunks=5, **options):
    cache = videokv.recipe(name, sink_chunks=1, **options).new_cache(layers=layers)
    generator = torch.Generator().manual_seed(3)
    for chunk in range(chunks):
        for layer in range(layers):
            q, k, v = (draw(generator, heads, dtype) for heads in (HEADS * GROUP, HEADS, HEADS))
            cache.write(layer, cache.length, k, v, q)
        cache.commit((chunk + 1) * TOKENS)
    return cache


def current(dtype=torch.bfloat16, batch=2):
    generator = torch.Generator().manual_seed(77)
    return [draw(generator, heads, dtype, batch, 33) for heads in (HEADS * GROUP, HEADS, HEADS)]


def columns_of(cache, rows, *, keep):
    """Wide queries and keys of every call, and the history if there is one."""
    query, key, value = rows
    segments = cache._layers[0].gathered(Segment(key, value), keep=keep)
    history = history_of([(s.keys.shape[2], s.noise) for s in segments])
    calls = plan_calls(segments)
    assert all((call.kept is not None) == keep for call in calls)
    wide = [
        with_columns(query, call, scale=0.2, width=-(-(SIZE + call.columns) // 8) * 8)
        for call in calls
    ]
    return wide, history


def assert_kept_is_fresh(cache, *, dtype=torch.bfloat16, batch=2):
    rows = current(dtype, batch)
    want, none = columns_of(cache, rows, keep=False)
    got, history = columns_of(cache, rows, keep=True)
    again, same = columns_of(cache, rows, keep=True)
    assert none is None and history is not None and same is history
    assert len(got) == len(want) == len(again)
    for one, two, three in zip(got, again, want, strict=True):
        for a, b, c in zip(one, two, three, strict=True):
            assert torch.equal(a, b) and torch.equal(a, c)
    return weakref.ref(history)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_kept_columns_are_fresh_ones(name, dtype):
    assert_kept_is_fresh(filled(name, dtype=dtype), dtype=dtype)


CHANGES = {
    "commit": lambda cache: commit_one(cache),
    "crop": lambda cache: cache.crop(3 * TOKENS),
    "crop inside": lambda cache: cache.crop(3 * TOKENS + 20, decode_partial=True),
    "forget": lambda cache: cache.forget(TOKENS),
    "forget inside": lambda cache: cache.forget(2 * TOKENS + 41),
    "keep": lambda cache: cache.keep(0, [(0, 10), (3 * TOKENS, 4 * TOKENS)]),
    "select_batch": lambda cache: cache.select_batch([1, 1, 0]),
    "to": lambda cache: cache.to(DEVICE),
}


def commit_one(cache):
    query, key, value = current()
    cache.write(0, cache.length, key, value, query)
    cache.commit(cache.length + key.shape[2])


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["quarot-2bit+calibrated", "quantwm-2bit+calibrated"])
def test_they_are_dropped_with_the_rows(name, change):
    cache = filled(name, chunks=6, window_chunks=4) if change == "commit" else filled(name)
    old = assert_kept_is_fresh(cache)
    cache.write(0, cache.length, *current()[1:], current()[0])
    assert cache._layers[0].noise_bytes > 0, "rows that are not committed are not in it"
    layer = cache._layers[0]
    columns = {id(c): weakref.ref(c) for c in layer._columns.values()}
    CHANGES[change](cache)
    gc.collect()
    assert old() is None and layer._kept_noise is None
    alive = {number for number, ref in columns.items() if ref() is not None}
    assert alive == {id(c) for c in layer._columns.values()}
    assert len(alive) == sum(chunk in layer._columns for chunk in layer.state.chunks)
    if change in ("select_batch", "to"):
        assert not alive
    assert layer.noise_bytes == sum(c.nbytes for c in layer._columns.values())
    batch = 3 if change == "select_batch" else 2
    assert_kept_is_fresh(cache, batch=batch)


@pytest.mark.parametrize("name", ["quarot-2bit+calibrated", "quantwm-2bit+calibrated"])
def test_a_commit_makes_the_columns_of_its_chunks_alone(name, monkeypatch):
    cache = filled(name, chunks=6, window_chunks=4)
    assert_kept_is_fresh(cache)
    layer = cache._layers[0]
    asked, honest = [], layer._noise
    monkeypatch.setattr(
        layer, "_noise", lambda part, gone: asked.append(part) or honest(part, gone)
    )
    rows = current()
    columns_of(cache, rows, keep=True)
    assert not asked
    commit_one(cache)
    columns_of(cache, rows, keep=True)
    (made,) = asked
    assert made is [chunk for chunk in layer.state.chunks if isinstance(chunk, PackedChunk)][-1]
    cache.forget(cache._layers[0].state.chunks[2].start + 7)
    columns_of(cache, rows, keep=True)
    assert len(asked) == 1, "rows of a chunk that were forgotten change nothing in the others"


@pytest.mark.parametrize("name", [*NAMES, "kivi-2bit-psac8+calibrated", "videokv-2bit+calibrated"])
def test_a_commit_of_several_layers_makes_them_for_all(name, monkeypatch):
    """As long as reads use them; the same ones as a read makes, and each layer's own."""
    monkeypatch.setattr(stacking, "_most", lambda *_: 3)
    cache = filled(name, layers=3, chunks=4, window_chunks=4)
    layers = cache._layers.values()
    assert not any(layer._columns for layer in layers), "nobody read"
    rows = current()
    for layer in layers:
        layer.gathered(Segment(*rows[1:]), keep=True)
    kept = all(layer.keeps_columns for layer in layers)
    assert kept != name.startswith("kivi"), "a column a channel is not kept"
    for number, layer in enumerate(layers):
        generator = torch.Generator().manual_seed(number)
        q, k, v = (draw(generator, heads, rows[0].dtype) for heads in (4, 2, 2))
        cache.write(layer.index, cache.length, k, v, q)
    cache.commit(cache.length + TOKENS)
    chunks = [layer.state.chunks[-1] for layer in layers]
    # A layer whose keys were all repaired, among others, waits for its read.
    waiting = [getattr(chunk.keys, "repair", None) is not None and chunk.keys.repair.complete
               for chunk in chunks]  # fmt: skip
    assert not all(waiting)
    for layer, chunk, waits in zip(layers, chunks, waiting, strict=True):
        made = layer._columns.pop(chunk, None)
        assert (made is not None) == (kept and not waits)
        if made is None:
            continue
        fresh = layer._columns_of(chunk, layer.state.layout)
        assert torch.equal(made.weights, fresh.weights) and len(made.maps) == len(fresh.maps)
        assert all(a.same_as(b) for a, b in zip(made.maps, fresh.maps, strict=True))
        assert made.weights.untyped_storage().nbytes() == made.weights.nbytes
    for index in range(3):
        if kept:
            cache._layers[0], first = cache._layers[index], cache._layers[0]
            assert_kept_is_fresh(cache)
            cache._layers[0] = first


def test_nothing_waits_for_the_garbage_collector():
    cache = filled(NAMES[1])
    old = assert_kept_is_fresh(cache)
    columns = weakref.ref(next(iter(cache._layers[0]._columns.values())))
    gc.collect()
    gc.disable()
    try:
        cache.keep(0, [(4 * TOKENS, 5 * TOKENS)])
        assert old() is None and columns() is None
    finally:
        gc.enable()


def test_what_a_read_knows_is_kept_while_it_holds_nothing_of_its_own():
    cache = filled(NAMES[1])
    layer, rows = cache._layers[0], current()
    columns_of(cache, rows, keep=False)
    assert layer._kept_past is None, "this noise is made for one read"
    columns_of(cache, rows, keep=True)
    past = layer._kept_past
    columns_of(cache, rows, keep=True)
    assert past is not None and layer._kept_past is past
    cache.write(0, cache.length, *rows[1:], rows[0])
    assert layer._kept_past is past, "rows that are not committed are not in it"
    cache.forget(2 * TOKENS)
    columns_of(cache, rows, keep=True)
    assert layer._kept_past is not None and layer._kept_past is not past
    cache.forget(2 * TOKENS + 9)
    columns_of(cache, rows, keep=True)
    assert layer._kept_past is None, "rows of a cut chunk are decoded for one read"


def test_a_reset_drops_them():
    cache = filled(NAMES[1])
    old = assert_kept_is_fresh(cache)
    cache.reset()
    gc.collect()
    assert old() is None


def test_a_failed_commit_keeps_the_rows_and_their_columns():
    cache = filled(NAMES[1])
    assert_kept_is_fresh(cache)
    query, key, value = current()
    cache.write(0, cache.length, key * float("nan"), value, query)
    with pytest.raises(ValueError, match="layer 0"):
        cache.commit(cache.length + key.shape[2])
    assert_kept_is_fresh(cache)


@pytest.mark.parametrize("name", ["quarot-2bit+calibrated", "quantwm-2bit+taylor"])
def test_the_cache_reads_with_them_and_counts_them(name, monkeypatch):
    monkeypatch.setattr(cache_module, "worth_gathering", lambda device: True)
    cache = filled(name, dtype=torch.float32, layers=2)
    query, key, value = current(torch.float32)
    segments = [*cache.view(0), Segment(key, value)]
    want, _ = attend(query, segments, backend="eager")
    torch.testing.assert_close(cache.attend(0, query, key, value), want, rtol=1e-3, atol=1e-3)
    history = cache._layers[0]._kept_noise[0]
    cache.attend(0, query, key, value)
    assert cache._layers[0]._kept_noise[0] is history and history.nbytes > 0
    before = cache._workspace.peak_bytes
    cache.attend(1, query, key, value)
    assert cache._workspace.peak_bytes == before + history.nbytes
    cache.forget(TOKENS)
    assert not cache._workspace._noise_bytes


def test_what_is_not_kept():
    term = ScoreNoise(torch.ones(1, 1, 9, 8), QueryMap(8))
    shape, bf16 = (1, 1, 64), torch.bfloat16
    assert keep_noise([(9, (term,))], shape=shape, dtype=bf16) is not None
    exact = ScoreNoise(term.weights, term.query_map, True)
    assert keep_noise([(9, (exact,))], shape=shape, dtype=bf16) is None
    assert keep_noise([(9, (term,))], shape=shape, dtype=torch.float16) is None  # float32 weights
    channels = ScoreNoise(torch.ones(1, 1, 9, 64), QueryMap(1))
    assert keep_noise([(9, (channels,))], shape=shape, dtype=bf16) is None
    assert keep_noise([(9, ())], shape=shape, dtype=bf16) is None


def kept_segments(*, budget_maps, dtype=torch.float32):
    """Segments with a basis each, 8 columns a map, one of them with two terms of one map."""
    drawn = Draw(5)
    shape = (1, 2, 140, 64)
    rows = [(17, ())]
    for number in range(budget_maps):
        basis = torch.linalg.qr(drawn.normal(1, 2, 64, 3 + number % 2))[0]
        term = drawn.term(shape, 8, basis=basis)
        same = ScoreNoise(torch.full((1, 1, 1, 1), 0.5), term.query_map)
        rows.append((140, (term, same) if number == 1 else (term,)))
    rows.append((3, ()))
    keys = [drawn.normal(1, 2, tokens, 64) for tokens, _ in rows]
    plain = [Segment(k, k, noise) for k, (_, noise) in zip(keys, rows, strict=True)]
    _, kept = keep_noise(rows, shape=(1, 2, 64), dtype=dtype)
    return plain, [Segment(k, k, noise) for k, noise in zip(keys, kept, strict=True)]


@pytest.mark.parametrize("maps", [1, 3, 7])
def test_calls_and_columns_are_those_of_the_segments(maps):
    plain, kept = kept_segments(budget_maps=maps)
    drawn = Draw(6)
    later = drawn.segment((1, 2, 20, 64), 64)
    query = drawn.normal(1, 4, 30, 64)
    for want, got in zip(plan_calls([*plain, later]), plan_calls([*kept, later]), strict=True):
        assert got.kept is not None and want.columns == got.columns
        a, b = (with_columns(query, c, scale=0.1, width=64 + want.columns) for c in (want, got))
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    want, _ = attend(query, [*plain, later], backend="eager")
    got, _ = attend(query, [*kept, later], backend="sdpa")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_other_segments_are_no_history():
    _, kept = kept_segments(budget_maps=2)
    noise = [(s.keys.shape[2], s.noise) for s in kept]
    assert history_of(noise) is not None and history_of([*noise, (5, ())]) is not None
    assert history_of(noise[:-1]) is None and history_of(noise[1:]) is None
    assert history_of([noise[0], noise[2], noise[1], noise[3]]) is None
    assert history_of([*noise, noise[1]]) is None
    assert history_of([(s.keys.shape[2], ()) for s in kept]) is None


def test_nothing_is_made_during_a_capture(monkeypatch):
    plain, kept = kept_segments(budget_maps=2)
    history = kept[1].noise[0].history
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(type(history), "is_cuda", True)
    assert history.calls(budget=32) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("later", [0, 1, 130])
def test_the_kernel_places_as_the_reference_does(later, dtype):
    pytest.importorskip("triton")
    from videokv.kernels.score_columns import triton as kernel

    _, kept = kept_segments(budget_maps=3, dtype=dtype)
    kept = [Segment(s.keys.to(DEVICE, dtype), s.values.to(DEVICE, dtype), s.noise) for s in kept]
    history = kept[1].noise[0].history
    (call,) = history.calls(budget=32)
    if DEVICE == "cuda":
        pytest.skip("the same on a GPU: test_kept_columns_are_fresh_ones")
    tokens = call.placement.tokens + later
    got, want = (torch.full((1, 2, tokens, 104), torch.nan, dtype=dtype) for _ in range(2))
    kernel.place_key_columns(got[..., 64:], call.placement)
    reference.place_key_columns(want[..., 64:], call.placement)
    assert torch.equal(got[..., 64:], want[..., 64:]) and bool(got[..., :64].isnan().all())


def test_packed_rows_get_the_best_stock_kernel_and_dense_rows_the_models_call(monkeypatch):
    cache = filled("rtn-2bit", dtype=torch.float32)
    query, key, value = current(torch.float32)
    packed = [*cache.view(0), Segment(key, value)]
    assert [s.packed for s in packed] == [False, True, True, True, True, False]
    gathered = cache._layers[0].gathered(Segment(key, value))
    assert [s.packed for s in gathered] == [s.packed for s in packed]
    calls = []
    honest = sdpa_module._plain
    monkeypatch.setattr(sdpa_module, "_plain", lambda *a, **k: calls.append(1) or honest(*a, **k))
    got, _ = attend(query, packed, backend="sdpa")
    assert not calls and "stock kernel" in explain_choice(query, packed).why
    dense = [Segment(s.keys, s.values) for s in packed]
    want, _ = attend(query, dense, backend="sdpa")
    assert calls and "as the model calls it" in explain_choice(query, dense).why
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_write_key_columns_fills_everything():
    _, kept = kept_segments(budget_maps=1)
    (call,) = plan_calls(kept)
    out = torch.full((1, 2, sum(s.keys.shape[2] for s in kept), 16), torch.nan)
    write_key_columns(out, call)
    assert bool(out.isfinite().all()) and not out[:, :, :17].any() and not out[..., 8:].any()
