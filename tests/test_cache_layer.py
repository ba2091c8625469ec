"""One layer: what is packed when, with what knowledge, and what is freed."""

import gc
import weakref

import pytest
import torch
from cache_fakes import FakeCorrection, FakeQuantizer, FakeRecipe, dense_recipe, fill, rows

import videokv
from videokv.cache import CachePolicy, KVCache
from videokv.cache.chunks import DenseChunk, PackedChunk


def kinds(cache, layer=0):
    chunks = cache.layer_states()[layer].chunks
    return "".join("d" if isinstance(chunk, DenseChunk) else "p" for chunk in chunks)


@pytest.mark.parametrize(
    "bad",
    [
        {"sink_chunks": -1},
        {"recent_chunks": 1.5},
        {"window_chunks": 0},
        {"window_chunks": -3},
        {"chunk_tokens": 0},
        {"sink_chunks": True},
        {"window_chunks": 1, "sink_chunks": 3},
    ],
)
def test_policy_refuses(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        CachePolicy(**bad)


@pytest.mark.parametrize(
    ("policy", "expected", "starts"),
    [
        ({}, "ppppp", [0, 3, 6, 9, 12]),
        ({"sink_chunks": 1, "recent_chunks": 2}, "dppdd", [0, 3, 6, 9, 12]),
        ({"window_chunks": 3}, "ppp", [6, 9, 12]),
        ({"window_chunks": 3, "sink_chunks": 1, "recent_chunks": 1}, "dpd", [0, 9, 12]),
        ({"window_chunks": 1}, "p", [12]),
        ({"window_chunks": 3, "sink_chunks": 3}, "ddd", [0, 3, 6]),
        ({"window_chunks": 2, "recent_chunks": 5}, "dd", [9, 12]),
    ],
)
def test_policy_decides_what_is_dense(policy, expected, starts):
    cache = KVCache(FakeRecipe(policy=CachePolicy(**policy)))
    fill(cache, [3] * 5)
    assert kinds(cache) == expected
    assert [chunk.start for chunk in cache.layer_states()[0].chunks] == starts
    assert cache.length == 15
    assert cache.visible_tokens == 3 * len(expected)


def test_codes_are_never_moved_by_eviction_or_ageing():
    policy = CachePolicy(window_chunks=3, recent_chunks=1)
    cache = KVCache(FakeRecipe(policy=policy))
    seen = {}
    for number in range(6):
        fill(cache, [3], start=3 * number)
        for chunk in cache.layer_states()[0].chunks:
            if isinstance(chunk, PackedChunk):
                assert seen.setdefault(chunk.ordinal, chunk) is chunk
    assert cache.encode_calls == 2 * 2 * 5  # layers, sides, chunks that aged out


def test_sink_and_recent_are_bit_exact():
    cache = KVCache(FakeRecipe(policy=CachePolicy(sink_chunks=1, recent_chunks=1)))
    written = fill(cache, [5, 6, 7], layers=1)
    parts = cache.view(0)
    assert torch.equal(parts[0].keys, written[0][1])
    assert torch.equal(parts[2].values, written[2][2])
    assert not torch.equal(parts[1].keys, written[1][1])
    torch.testing.assert_close(parts[1].keys, written[1][1], atol=0.03, rtol=0)


def test_rows_are_written_again_until_the_commit():
    cache = KVCache(FakeRecipe())
    for step in range(4):
        q, k, v = rows(8, seed=step)
        cache.write(0, 0, k, v, q)
    cache.commit(8)
    torch.testing.assert_close(cache.view(0)[0].keys, k, atol=0.03, rtol=0)
    assert cache.encode_calls == 2


@pytest.mark.parametrize("other", ["heads", "dtype"])
def test_rows_are_written_again_with_queries_of_another_kind(other):
    cache = videokv.recipe("quantwm-2bit", recent_chunks=0).new_cache(layers=1)
    q, k, v = rows(8, size=64)
    cache.write(0, 0, k, v, q)
    _, k, v = rows(8, size=64, seed=1)
    q = torch.cat([q, q], 1) if other == "heads" else q.bfloat16()
    cache.write(0, 0, k, v, q)
    tail = cache.layer_states()[0].tail
    assert torch.equal(tail.keys, k) and torch.equal(tail.values, v)
    assert tail.queries.dtype == q.dtype and torch.equal(tail.queries, q)


def test_write_copies_and_overlays():
    cache = KVCache(dense_recipe())
    _, k, v = rows(6)
    cache.write(0, 0, k, v)
    kept = k.clone()
    k.zero_()
    _, k2, v2 = rows(4, seed=1)
    cache.write(0, 6, k2, v2)
    _, k3, v3 = rows(2, seed=2)
    cache.write(0, 3, k3, v3)
    expected = torch.cat([kept[:, :, :3], k3, kept[:, :, 5:], k2], 2)
    assert torch.equal(cache.view(0, tail=True)[0].keys, expected)
    assert cache.view(0) == []
    cache.commit(7)
    assert torch.equal(cache.view(0)[0].keys, expected[:, :, :7])
    assert torch.equal(cache.view(0, tail=True)[1].keys, expected[:, :, 7:])


def test_gap_overlap_and_missing_rows_are_refused():
    cache = KVCache(FakeRecipe())
    fill(cache, [4])
    q, k, v = rows(4)
    with pytest.raises(ValueError, match="layer 0.*leave a gap"):
        cache.write(0, 5, k, v, q)
    with pytest.raises(ValueError, match="layer 0.*overlap committed"):
        cache.write(0, 3, k, v, q)
    cache.write(0, 4, k, v, q)
    with pytest.raises(ValueError, match="layer 1: commit"):
        cache.commit(8)
    with pytest.raises(ValueError, match="before the 4 tokens"):
        cache.commit(2)
    assert cache.length == 4 and kinds(cache) == "p"


def test_zero_tokens_are_a_no_op():
    cache = KVCache(FakeRecipe())
    fill(cache, [4])
    q, k, v = rows(0)
    cache.write(0, 4, k, v, q)
    cache.commit(4)
    assert cache.length == 4 and cache.encode_calls == 4


@pytest.mark.parametrize("part", [0, 1, 2])
def test_not_finite_is_refused_naming_the_layer(part):
    cache = KVCache(FakeRecipe())
    fill(cache, [4])
    for layer in range(2):
        tensors = rows(4, seed=layer)
        if layer == 1:
            tensors[part][0, 0, 2, 1] = float("nan")
        q, k, v = tensors
        cache.write(layer, 4, k, v, q)
    what = ["queries", "keys", "values"][part]
    with pytest.raises(ValueError, match=f"{what} of layer 1"):
        cache.commit(8)
    assert cache.length == 4
    q, k, v = rows(4, seed=1)
    cache.write(1, 4, k, v, q)
    cache.commit(8)


def test_failed_commit_changes_no_layer():
    cache = KVCache(FakeRecipe(keys=FakeQuantizer(fail_layer=1)))
    q, k, v = rows(4)
    for layer in range(2):
        cache.write(layer, 0, k, v, q)
    with pytest.raises(ValueError, match="layer 1 fails"):
        cache.commit(4)
    assert cache.length == 0 and kinds(cache) == ""
    assert cache.layer_states()[0].tail.tokens == 4


def test_dense_rows_are_freed_by_the_commit():
    cache = KVCache(FakeRecipe(correction=FakeCorrection()))
    q, k, v = rows(300)
    cache.write(0, 0, k, v, q)
    tail = cache.layer_states()[0].tail
    buffers = [weakref.ref(t) for t in (tail.keys, tail.values, tail.queries)]
    del tail
    cache.commit(300)
    gc.collect()
    assert [ref() for ref in buffers] == [None] * 3


def test_context_is_causal():
    quantizer = FakeQuantizer()
    cache = KVCache(FakeRecipe(keys=quantizer, values=FakeQuantizer(), seed=5))
    written = fill(cache, [4, 6, 2], layers=1)
    first, second, third = quantizer.seen
    assert first.query_moment is None and first.previous is None and first.seed == 5
    pooled = written[0][0].unflatten(1, (2, 2)).flatten(2, 3)
    torch.testing.assert_close(second.query_moment, pooled.mT @ pooled / 8)
    assert (second.query_count, third.query_count) == (8, 20)
    both = torch.cat([written[0][0], written[1][0]], 2).unflatten(1, (2, 2)).flatten(2, 3)
    torch.testing.assert_close(third.query_moment, both.mT @ both / 20)
    chunks = cache.layer_states()[0].chunks
    assert third.previous is chunks[1].keys and second.role == "key"


def test_previous_chunk_is_known_though_the_window_drops_it():
    quantizer = FakeQuantizer()
    cache = KVCache(FakeRecipe(keys=quantizer, policy=CachePolicy(window_chunks=1)))
    fill(cache, [4, 4], layers=1)
    assert quantizer.seen[1].previous is not None


@pytest.mark.parametrize("recent", [0, 2])
def test_correction_is_fitted_on_true_keys_and_own_queries(recent):
    correction = FakeCorrection()
    policy = CachePolicy(recent_chunks=recent)
    cache = KVCache(FakeRecipe(correction=correction, policy=policy), scale=0.2)
    written = fill(cache, [300, 40, 50], layers=1)
    assert len(correction.fits) == 3 - recent
    keys, queries, scale = correction.fits[0]
    assert torch.equal(keys, written[0][1]) and scale == 0.2
    assert queries.shape == (1, 4, 128, 16)
    picked = (2 * torch.arange(128) + 1) * 300 // 256
    assert torch.equal(queries, written[0][0][:, :, picked])
    dense = [c for c in cache.layer_states()[0].chunks if isinstance(c, DenseChunk)]
    assert all(chunk.queries is not None for chunk in dense) and len(dense) == recent


def test_scale_of_the_model_reaches_the_fit():
    correction = FakeCorrection()
    cache = KVCache(FakeRecipe(correction=correction))
    q, k, v = rows(8)
    cache.write(0, 0, k, v, q)
    cache.attend(0, q, k, v, scale=0.125)
    cache.commit(8)
    assert correction.fits[0][2] == 0.125


def test_one_side_may_stay_dense():
    cache = KVCache(FakeRecipe(values=None))
    written = fill(cache, [4, 4], layers=1)
    assert torch.equal(cache.view(0)[1].values, written[1][2])
    assert kinds(cache) == "pp" and cache.encode_calls == 2
    cache.attend(0, *rows(3))
    assert cache.decode_calls == 4  # a view and an attention, two chunks each, keys only


class TestStreaming:
    """chunk_tokens: rows gather until they fill a chunk."""

    @staticmethod
    def cache(**policy):
        return KVCache(FakeRecipe(policy=CachePolicy(chunk_tokens=32, **policy)))

    def test_tail_stays_bounded(self):
        cache = self.cache(recent_chunks=4)
        lengths = [10] + [1] * 300
        for number, tokens in enumerate(lengths):
            fill(cache, [tokens], layers=1, start=sum(lengths[:number]))
            state = cache.layer_states()[0]
            dense = sum(c.tokens for c in state.chunks if isinstance(c, DenseChunk))
            dense += 0 if state.open is None else state.open.tokens
            assert dense <= 128 + 32 - 1
            assert cache.visible_tokens == sum(lengths[: number + 1])
        assert cache.length == 310

    def test_first_call_is_no_exception(self):
        short = self.cache(recent_chunks=4)
        written = fill(short, [100], layers=1)
        keys = torch.cat([segment.keys for segment in short.view(0)], 2)
        assert torch.equal(keys, written[0][1]) and short.encode_calls == 0
        long = self.cache(recent_chunks=4)
        fill(long, [1000], layers=1)
        packed = [c for c in long.layer_states()[0].chunks if isinstance(c, PackedChunk)]
        assert 128 <= 1000 - sum(chunk.tokens for chunk in packed) <= 159

    def test_single_tokens_pack_like_blocks(self):
        one, whole = self.cache(), self.cache()
        q, k, v = rows(96)
        whole.write(0, 0, k, v, q)
        whole.commit(96)
        for at in range(96):
            part = slice(at, at + 1)
            one.write(0, at, k[:, :, part], v[:, :, part], q[:, :, part])
            one.commit(at + 1)
        for a, b in zip(one.view(0), whole.view(0), strict=True):
            assert torch.equal(a.keys, b.keys) and not torch.equal(a.keys, k[:, :, :32])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.bfloat16}, "bfloat16"),
        ({"batch": 2}, "batch 1"),
        ({"heads": 4, "groups": 1}, "2 key/value heads"),
        ({"size": 18}, "head sizes 16"),
    ],
)
def test_layout_is_fixed_by_the_first_write(change, message):
    cache = KVCache(FakeRecipe())
    fill(cache, [4], layers=1)
    q, k, v = rows(4, **change)
    with pytest.raises(ValueError, match=message):
        cache.write(0, 4, k, v, q)


def test_bad_shapes_are_refused():
    cache = KVCache(FakeRecipe())
    q, k, v = rows(4)
    for args in [(k[0], v[0]), (k, v[:, :, :3]), (k, v.double()), (k.int(), v.int())]:
        with pytest.raises(ValueError, match="layer 0"):
            cache.write(0, 0, *args)
    for queries in [q[:, :3], q[:, :, :2], q[..., :8]]:
        with pytest.raises(ValueError, match="queries must be"):
            cache.write(0, 0, k, v, queries)
    _, odd, value = rows(4, size=15)
    with pytest.raises(ValueError, match="head_dim 15"):
        cache.write(0, 0, odd, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("what", ["keys", "values", "queries"])
def test_what_is_not_finite_is_named(what, bad, dtype):
    cache = KVCache(FakeRecipe())
    for layer in (0, 1):
        held = {name: torch.ones(1, 2, 5, 8, dtype=dtype) for name in ("keys", "values", "queries")}
        if layer == 1:
            held[what][0, 1, 3, 7] = bad
        cache.write(layer, 0, held["keys"], held["values"], held["queries"])
    cache.commit(3)  # the rows before are finite
    with pytest.raises(ValueError, match=f"{what} of layer 1"):
        cache.commit(5)
    assert cache.length == 3
