"""The cache of all layers: attention, counting, cutting, selecting, the workspace."""

import gc

import pytest
import torch
from cache_fakes import (
    FakeCorrection,
    FakePacked,
    FakeQuantizer,
    FakeRecipe,
    dense_recipe,
    fake_attend,
    fill,
    rows,
)
from torch.nn import functional as F

import videokv
from videokv.cache import CachePolicy, KVCache
from videokv.cache.chunks import DenseChunk
from videokv.cache.select import selected
from videokv.cache.workspace import segment_bytes
from videokv.protocols import EncodeContext, Segment


def live_bytes():
    """Bytes of the distinct storages of all live tensors."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)  # the compiler's stand-ins own no memory
    tensors = [t for t in gc.get_objects() if type(t) in kinds]
    storages = [t.untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def forget(recipe):
    """Fakes remember what they were given."""
    if isinstance(recipe, FakeRecipe):
        recipe.keys.seen.clear()
        recipe.values.seen.clear()
        recipe.correction.fits.clear()


def test_attend_reads_past_and_current_once():
    cache = KVCache(FakeRecipe(correction=FakeCorrection(), policy=CachePolicy(sink_chunks=1)))
    fill(cache, [5, 7])
    q, k, v = rows(4, seed=9)
    expected, _ = fake_attend(q, [*cache.view(1), Segment(k, v)], scale=16**-0.5)
    assert torch.equal(cache.attend(1, q, k, v), expected)
    cache.write(1, 12, k, v, q)
    assert torch.equal(cache.attend(1, q, k, v), expected)  # not counted twice
    assert [bool(s.noise) for s in cache.view(1)] == [False, True]


def test_attend_before_any_commit_and_causal():
    cache = KVCache(dense_recipe())
    q, k, v = rows(6)
    wanted = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    torch.testing.assert_close(cache.attend(0, q, k, v), wanted)
    causal = F.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True
    )
    torch.testing.assert_close(cache.attend(0, q, k, v, causal=True), causal)
    assert cache.length == 0


def test_chunked_causal_prefill_equals_the_whole():
    cache = KVCache(dense_recipe())
    q, k, v = rows(60)
    outs = []
    for a, b in [(0, 25), (25, 26), (26, 60)]:
        part = [t[:, :, a:b] for t in (q, k, v)]
        cache.write(0, a, part[1], part[2], part[0])
        outs.append(cache.attend(0, *part, causal=True))
        cache.commit(b)
    whole, _ = fake_attend(q, [Segment(k, v)], scale=0.25, causal=True)
    torch.testing.assert_close(torch.cat(outs, 2), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [80, 128])
def test_dense_recipe_is_stock_attention_bit_for_bit(dtype, size):
    cache = videokv.recipe("bf16").new_cache()
    shape = {"size": size, "groups": 1, "batch": 2, "dtype": dtype}
    written = fill(cache, [63, 100, 1], layers=1, **shape)
    q, k, v = rows(33, seed=4, **shape)
    keys = torch.cat([k_ for _, k_, _ in written] + [k], 2)
    values = torch.cat([v_ for _, _, v_ in written] + [v], 2)
    assert torch.equal(cache.attend(0, q, k, v), F.scaled_dot_product_attention(q, keys, values))
    assert cache.memory().ratio == 1.0


def test_softmax_scale():
    q, k, v = rows(4)
    default = KVCache(dense_recipe()).attend(0, q, k, v)
    fixed = KVCache(dense_recipe(), scale=0.5)
    assert not torch.equal(fixed.attend(0, q, k, v), default)
    torch.testing.assert_close(fixed.attend(0, q, k, v, scale=0.25), default)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 0.0, "1", True])
def test_a_refused_scale_leaves_no_trace(bad):
    cache = KVCache(FakeRecipe(correction=(correction := FakeCorrection())))
    q, k, v = rows(4)
    cache.attend(0, q, k, v, scale=0.5)
    with pytest.raises(ValueError, match="scale must be"):
        cache.attend(0, q, k, v, scale=bad)
    with pytest.raises(ValueError, match="layer must be"):
        cache.attend(-1, q, k, v, scale=0.125)
    assert cache.options()["scale"] == 0.5
    cache.write(0, 0, k, v, q)
    cache.commit(4)
    assert [scale for *_, scale in correction.fits] == [0.5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_dtypes_that_cannot_be_packed_are_refused_when_written(dtype):
    cache = videokv.recipe("rtn-2bit").new_cache()
    _, k, v = (each.to(dtype) for each in rows(4, size=32))
    with pytest.raises(ValueError, match=r"layer 3: .*packed must be one of .*bfloat16.*float"):
        cache.write(3, 0, k, v)
    q, k, v = rows(4, size=32)
    cache.write(0, 0, k, v, q)
    cache.commit(4)  # the refused layer does not count
    assert list(cache.layer_states()) == [0]


def test_dense_caches_take_float64():
    cache = videokv.recipe("bf16").new_cache()
    q, k, v = (each.double() for each in rows(4, size=32))
    cache.write(0, 0, k, v, q)
    cache.commit(4)
    assert cache.attend(0, q, k, v).dtype == torch.float64


@pytest.mark.parametrize("name", ["bf16", "rtn-2bit"])
@pytest.mark.parametrize("shape", [(1, 2, 4, 0), (1, 0, 4, 32), (0, 2, 4, 32)])
def test_empty_heads_are_refused_when_written(name, shape):
    empty = torch.zeros(shape)
    with pytest.raises(ValueError, match="layer 0: batch, heads and head sizes"):
        videokv.recipe(name).new_cache().write(0, 0, empty, empty)


def test_dtypes_are_carried_and_not_mixed():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        cache = KVCache(FakeRecipe())
        fill(cache, [20], layers=1, dtype=dtype)
        q, k, v = rows(8, dtype=dtype)
        assert cache.attend(0, q, k, v).dtype == dtype
        other = torch.float32 if dtype != torch.float32 else torch.bfloat16
        with pytest.raises(ValueError, match="one dtype"):
            cache.attend(0, *(t.to(other) for t in (q, k, v)))


def test_autocast_does_not_reach_the_codecs():
    recipe = videokv.recipe("quarot-2bit+calibrated")
    caches = []
    for enabled in (False, True):
        cache = recipe.new_cache()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            fill(cache, [40, 40], layers=1, size=64)
            out = cache.attend(0, *rows(5, size=64))
        caches.append((cache, out))
    (plain, a), (cast, b) = caches
    assert torch.equal(a, b)
    assert torch.equal(plain.view(0)[1].keys, cast.view(0)[1].keys)


def test_layers_are_known_or_grow():
    cache = KVCache(FakeRecipe(), layers=3)
    q, k, v = rows(4)
    with pytest.raises(ValueError, match="below 3"):
        cache.write(3, 0, k, v, q)
    cache.write(0, 0, k, v, q)
    with pytest.raises(ValueError, match="layer 1: commit"):
        cache.commit(4)
    grown = KVCache(FakeRecipe())
    fill(grown, [4], layers=2)
    with pytest.raises(ValueError, match="layer 2 appears after 4"):
        grown.write(2, 4, k, v, q)
    with pytest.raises(ValueError, match="nothing was written"):
        KVCache(FakeRecipe()).commit(4)


@pytest.mark.parametrize(
    "bad",
    [
        {"layers": 0},
        {"layers": 1.5},
        {"layers": True},
        {"scale": -1.0},
        {"scale": float("nan")},
        {"scale": "1"},
        {"workspace_bytes": 0},
        {"workspace_bytes": "1"},
        {"workspace_bytes": 1e6},
    ],
)
def test_arguments_are_checked(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        KVCache(FakeRecipe(), **bad)
    with pytest.raises(ValueError, match="videokv.recipe"):
        KVCache("rtn-2bit")


@pytest.mark.parametrize("recent", [0, 1])
@pytest.mark.parametrize("name", ["fake", "quarot-2bit+calibrated", "rtn-3bit+measured"])
def test_memory_is_that_of_the_live_tensors(name, recent):
    policy = CachePolicy(sink_chunks=1, recent_chunks=recent)
    if name == "fake":
        recipe = FakeRecipe(policy=policy, correction=FakeCorrection())
    else:
        recipe = videokv.recipe(name, policy=policy)
    fill(KVCache(recipe), [70, 71, 72], size=64)  # makes the tables that all caches share
    forget(recipe)
    before = live_bytes()
    cache = KVCache(recipe)
    fill(cache, [70, 71, 72], size=64, value_size=32)
    forget(recipe)
    memory = cache.memory()
    assert memory.held_bytes + memory.state_bytes == live_bytes() - before
    assert memory.dense_bytes == 2 * (70 + 71 + 72) * 2 * (64 + 32) * 4
    assert memory.ratio == memory.dense_bytes / memory.held_bytes
    assert "bits per element" in str(memory)


def test_bits_are_of_packed_chunks_alone():
    cache = KVCache(FakeRecipe(policy=CachePolicy(sink_chunks=1)))
    assert cache.memory().bits_per_element == 16
    fill(cache, [8, 8, 8], size=64, value_size=32)
    assert cache.memory().bits_per_element == pytest.approx((8 + 32 / 64 + 8 + 32 / 32) / 2)


def test_two_bit_rows_leave_a_quarter():
    cache = videokv.recipe("rtn-2bit").new_cache()
    fill(cache, [512] * 4, layers=1, batch=2, size=128, dtype=torch.bfloat16)
    memory = cache.memory()
    assert memory.bits_per_element == 2.75
    assert memory.held_bytes < memory.dense_bytes / 4
    before = [segment.keys[0].clone() for segment in cache.view(0)]
    changed = videokv.recipe("rtn-2bit").new_cache()
    for number in range(4):
        q, k, v = rows(512, seed=10 * number, batch=2, size=128, dtype=torch.bfloat16)
        changed.write(0, 512 * number, torch.cat([k[:1], 40 * k[1:]]), v, q)
        changed.commit(512 * (number + 1))
    for row, segment in zip(before, changed.view(0), strict=True):
        assert torch.equal(row, segment.keys[0])  # a row's codes do not depend on other rows


class TestWorkspace:
    CHUNKS = 6
    STEPS = 4

    def run(self, workspace_bytes):
        cache = KVCache(FakeRecipe(correction=FakeCorrection()), workspace_bytes=workspace_bytes)
        outs = []
        for number in range(self.CHUNKS):
            for step in range(self.STEPS):
                for layer in range(2):
                    outs.append(cache.attend(layer, *rows(8, seed=100 * step + layer)))
            fill(cache, [8], start=8 * number)
        return cache, outs

    def decoded_bytes(self, cache):
        return sum(segment_bytes(segment) for segment in cache.view(0))

    def test_default_holds_one_layer(self):
        cache, _ = self.run(None)
        assert cache.encode_calls == 2 * 2 * self.CHUNKS
        assert cache.decode_calls == 2 * 2 * self.STEPS * sum(range(self.CHUNKS))
        one = self.decoded_bytes(cache) * (self.CHUNKS - 1) // self.CHUNKS
        assert cache.memory().workspace_peak_bytes in (one, self.decoded_bytes(cache))

    def test_ample_budget_decodes_each_chunk_once(self):
        plain, expected = self.run(None)
        cache, outs = self.run(1 << 20)
        assert cache.decode_calls == 2 * 2 * (self.CHUNKS - 1)
        assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
        wanted = 2 * self.decoded_bytes(plain) * (self.CHUNKS - 1) // self.CHUNKS
        assert cache.memory().workspace_peak_bytes == wanted

    @pytest.mark.parametrize("chunks", [1, 2.5, 4, 7])
    def test_small_budget_is_kept_to(self, chunks):
        plain, expected = self.run(None)
        budget = int(self.decoded_bytes(plain) / self.CHUNKS * chunks)
        cache, outs = self.run(budget)
        assert 0 < cache.memory().workspace_peak_bytes <= budget
        for a, b in zip(outs, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)

    def test_less_than_a_chunk_is_refused(self):
        with pytest.raises(ValueError, match="cannot hold one decoded chunk of layer 0"):
            self.run(100)

    def test_window_forgets_dropped_chunks(self):
        recipe = FakeRecipe(policy=CachePolicy(window_chunks=2))
        cache = KVCache(recipe, workspace_bytes=1 << 20)
        for number in range(4):
            fill(cache, [8], start=8 * number)
            cache.attend(0, *rows(3))
        assert len(cache._workspace.kept) == 2


class TestMass:
    def test_is_the_softmax_mass_of_cached_keys(self):
        cache = KVCache(FakeRecipe(correction=FakeCorrection()), record_mass=True)
        plain = KVCache(FakeRecipe(correction=FakeCorrection()))
        for each in (cache, plain):
            fill(each, [5, 6], batch=2)
        q, k, v = rows(4, seed=3, batch=2)
        assert torch.equal(cache.attend(0, q, k, v), plain.attend(0, q, k, v))
        _, total = fake_attend(q, [*cache.view(0), Segment(k, v)], scale=0.25, need_lse=True)
        _, current = fake_attend(q, [Segment(k, v)], scale=0.25, need_lse=True)
        expected = (1 - (current - total).exp()).mean((1, 2))
        torch.testing.assert_close(cache.masses()[0][2], expected)
        assert cache.masses()[0][:2] == (11, 0)
        cache.attend(1, q, 3 * k, v)
        cache.write(0, 11, k, v, q)
        cache.attend(0, q, k, v)
        mass = cache.mass()
        assert list(mass.layers) == [0, 1] and len(mass.steps) == 2
        assert mass.layers[0] == pytest.approx(expected.mean().item())
        assert len(cache.masses()) == 2
        assert cache.mass(written=True).mean == pytest.approx(expected.mean().item())

    def test_nothing_recorded_is_an_error(self):
        cache = KVCache(FakeRecipe(), record_mass=True)
        cache.attend(0, *rows(4))
        with pytest.raises(ValueError, match="record_mass"):
            cache.mass()
        with pytest.raises(ValueError, match="record_mass"):
            KVCache(FakeRecipe()).masses()


class TestView:
    def test_ranges_cut_across_chunks(self):
        policy = CachePolicy(recent_chunks=1)
        cache = KVCache(FakeRecipe(correction=FakeCorrection(), policy=policy))
        fill(cache, [5, 6, 7])
        whole = torch.cat([segment.keys for segment in cache.view(0)], 2)
        parts = cache.view(0, [(12, 16), (2, 9)])
        expected = torch.cat([whole[:, :, 12:16], whole[:, :, 2:9]], 2)
        assert torch.equal(torch.cat([p.keys for p in parts], 2), expected)
        for part in parts:
            for term in part.noise:
                assert term.weights.shape[2] == part.keys.shape[2]
        calls = cache.decode_calls
        cache.view(0, [(0, 2)])
        assert cache.decode_calls == calls + 2

    def test_dropped_or_unwritten_tokens_are_refused(self):
        cache = KVCache(FakeRecipe(policy=CachePolicy(window_chunks=1)))
        fill(cache, [5, 6])
        for span in [(4, 8), (5, 12)]:
            with pytest.raises(ValueError, match="dropped or never written"):
                cache.view(0, [span])
        assert cache.view(7) == []
        with pytest.raises(ValueError, match="layer 7 is empty"):
            cache.view(7, [(0, 1)])


def everything(cache):
    return [
        torch.cat([getattr(s, side) for s in cache.view(layer, tail=True)], 2)
        for layer in cache.layer_states()
        for side in ("keys", "values")
    ]


RECIPES = ["fake", "rtn-2bit+calibrated", "rtn-8bit", "quarot-3bit+measured", "bf16"]


def three_rows(name):
    policy = CachePolicy(sink_chunks=1, recent_chunks=1)
    if name == "fake":
        cache = KVCache(FakeRecipe(policy=policy, correction=FakeCorrection()))
    else:
        cache = videokv.recipe(name, policy=policy).new_cache()
    fill(cache, [9, 8, 7, 6, 5], batch=3, size=32)
    _, k, v = rows(3, batch=3, size=32)
    for layer in range(2):
        cache.write(layer, 35, k, v)
    return cache


class TestSelect:
    @pytest.mark.parametrize("name", RECIPES)
    @pytest.mark.parametrize("index", [[2, 0, 1], [0, 0, 1, 1, 2, 2], [0, 2]])
    def test_equals_selecting_the_decoded_cache(self, name, index):
        cache = three_rows(name)
        before = everything(cache)
        cache.select_batch(index)
        for old, new in zip(before, everything(cache), strict=True):
            assert torch.equal(new, old[index])
        q, k, v = rows(4, batch=len(index), size=32)
        assert cache.attend(0, q, k, v).shape == q.shape
        for layer in range(2):
            cache.write(layer, 35, k[:, :, :3], v[:, :, :3], q[:, :, :3])
        cache.commit(38)
        assert cache.length == 38

    def test_fifty_reorders_do_not_drift(self):
        cache = three_rows("rtn-2bit+calibrated")
        before, calls = everything(cache), cache.encode_calls
        for _ in range(51):
            cache.select_batch([2, 0, 1])
        for old, new in zip(before, everything(cache), strict=True):
            assert torch.equal(old, new)
        assert cache.encode_calls == calls

    def test_bad_rows_are_refused(self):
        cache = three_rows("fake")
        for bad, message in [([3], "0..2"), ([-1], "0..2"), ([], "non-empty"), ([0.5], "rows")]:
            with pytest.raises(ValueError, match=message):
                cache.select_batch(bad)
        with pytest.raises(ValueError, match="mask"):
            cache.select_batch(torch.tensor([True, False, True]))

    def test_a_packed_chunk_laid_out_otherwise_is_refused(self):
        _, keys, _ = rows(4, batch=3, heads=3)
        good = FakeQuantizer().encode(keys, EncodeContext(0, "key"))
        turned = HeadsFirst(good.codes.transpose(0, 1), good.steps.transpose(0, 1))
        index = torch.tensor([2, 0])
        with pytest.raises(ValueError, match="HeadsFirst.*select_batch"):
            selected(turned, index, batch=3)
        own = OwnSelection(turned.codes, turned.steps)
        expected = good.decode(torch.float32)[index]
        assert torch.equal(selected(own, index, batch=3).decode(torch.float32), expected)


class HeadsFirst(FakePacked):
    def decode(self, dtype):
        return super().decode(dtype).transpose(0, 1)


class OwnSelection(HeadsFirst):
    def select_batch(self, index):
        return OwnSelection(self.codes[:, index], self.steps[:, index])


class TestCrop:
    @pytest.mark.parametrize("name", RECIPES)
    def test_at_chunk_boundaries_and_inside_dense_chunks(self, name):
        cache = three_rows(name)
        before = everything(cache)
        for length in (35, 33, 30, 24, 9, 4):
            cache.crop(length)
            assert cache.length == cache.visible_tokens == length
            for old, new in zip(before, everything(cache), strict=True):
                assert torch.equal(new, old[:, :, :length])
        fill(cache, [10], start=4, batch=3, size=32)
        assert cache.length == 14

    def test_inside_a_packed_chunk(self):
        cache = three_rows("fake")
        before = everything(cache)
        with pytest.raises(ValueError, match=r"crop\(20\) cuts.*crop to 17 or 24"):
            cache.crop(20)
        assert cache.length == 35
        cache.crop(20, decode_partial=True)
        for old, new in zip(before, everything(cache), strict=True):
            assert torch.equal(new, old[:, :, :20])
        fill(cache, [5, 5, 5], start=20, batch=3, size=32)
        for old, new in zip(before, everything(cache), strict=True):
            assert torch.equal(new[:, :, :20], old[:, :, :20])

    def test_negative_lengths_count_from_the_end_and_stop_at_empty(self):
        for cut, left in [(0, 0), (-3, 0), (-5, 0), (-1, 2), (7, 3)]:
            cache = KVCache(dense_recipe())
            fill(cache, [3])
            cache.crop(cut)
            assert cache.length == cache.visible_tokens == left
            assert cache.attend(0, *rows(2)).shape[2] == 2
            fill(cache, [2], start=left)
            assert cache.length == left + 2

    def test_streaming_cut_inside_a_group(self):
        recipe = FakeRecipe(policy=CachePolicy(chunk_tokens=32), correction=FakeCorrection())
        cache = KVCache(recipe)
        fill(cache, [70])
        cache.crop(40, decode_partial=True)
        fill(cache, [10], start=40)
        assert cache.length == cache.visible_tokens == 50
        for segment in cache.view(0):
            assert all(t.weights.shape[2] in (1, segment.keys.shape[2]) for t in segment.noise)

    def test_second_question_on_one_context(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            cache = KVCache(FakeRecipe())
            lengths = []
            fill(cache, [200], dtype=dtype)
            lengths.append(cache.length)
            fill(cache, [8], start=200, dtype=dtype)
            lengths.append(cache.length)
            cache.crop(200)
            lengths.append(cache.length)
            fill(cache, [9], start=200, dtype=dtype)
            assert [*lengths, cache.length] == [200, 208, 200, 209]


def test_reset_empties_everything():
    cache = KVCache(FakeRecipe(), record_mass=True, workspace_bytes=1 << 20)
    fill(cache, [4, 4])
    cache.attend(0, *rows(4))
    moment = cache.layer_states()[0].moment
    cache.reset(keep_statistics=True)
    assert cache.length == 0 and cache.layer_states()[0].moment is moment
    cache.reset()
    memory = cache.memory()
    assert (memory.held_bytes, memory.state_bytes, memory.workspace_peak_bytes) == (0, 0, 0)
    assert (cache.encode_calls, cache.decode_calls, cache.visible_tokens) == (0, 0, 0)
    fill(cache, [3], size=8)
    assert cache.length == 3


def test_to_moves_and_keeps():
    cache = three_rows("rtn-2bit+calibrated")
    before = everything(cache)
    assert cache.to("cpu") is cache
    for old, new in zip(before, everything(cache), strict=True):
        assert torch.equal(old, new)
    moved = three_rows("rtn-2bit+calibrated").to("meta")
    assert moved.layer_states()[0].chunks[1].keys.packed.device.type == "meta"


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("sink", [0, 1, 3])
def test_any_shapes_of_a_model(window, sink):
    if sink > window:
        pytest.skip("refused by the policy")
    recipe = FakeRecipe(policy=CachePolicy(window_chunks=window, sink_chunks=sink))
    cache = KVCache(recipe)
    shape = {"batch": 2, "heads": 5, "size": 40, "groups": 1}
    written = fill(cache, [12, 77, 12, 12, 12], **shape)
    if sink:
        assert torch.equal(cache.view(0)[0].keys, written[0][1])
    q, k, v = rows(12, **shape)
    assert cache.attend(1, q, k, v).shape == q.shape


def test_global_random_state_is_untouched():
    before = torch.get_rng_state()
    three_rows("quarot-3bit+measured")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("budget", [None, 3000, 10**9], ids=["once", "blocks", "kept"])
@pytest.mark.parametrize("chunk_tokens", [None, 9])
def test_forget_reads_the_rest_and_frees_whole_chunks(budget, chunk_tokens):
    """Models that trim their history anywhere: what is left reads as if it were all there is."""
    recipe = FakeRecipe(policy=CachePolicy(sink_chunks=1, chunk_tokens=chunk_tokens))
    cache, whole = KVCache(recipe, workspace_bytes=budget), KVCache(recipe)
    lengths = [7, 8, 9, 7]
    fill(cache, lengths)
    fill(whole, lengths)
    q, k, v = rows(5, seed=77)
    for before in (0, 3, 7, 12, 24, 28, 30):
        for layer in (1, 1, 0):
            cache.forget(before)
            segments = [*whole.view(layer, [(before, 31)]), Segment(k, v)]
            expected, _ = recipe.attend(q, segments, scale=0.25, need_lse=False)
            torch.testing.assert_close(cache.attend(layer, q, k, v), expected, rtol=1e-5, atol=1e-6)
        assert cache.visible_tokens == 31 - before and cache.length == 31
        chunks = cache.layer_states()[0].chunks
        assert all(chunk.end > before for chunk in chunks)
    with pytest.raises(ValueError, match="dropped or never written"):
        cache.view(0, [(0, 31)])


def test_forget_goes_no_way_back_and_no_further_than_the_end():
    cache = KVCache(FakeRecipe())
    fill(cache, [7, 8])
    cache.forget(10)
    cache.forget(3)
    assert cache.visible_tokens == 5
    cache.crop(8, decode_partial=True)
    assert (cache.length, cache.visible_tokens) == (8, 0)
    q, k, v = rows(4, seed=5)
    for layer in range(2):
        cache.write(layer, 8, k, v, q)
    cache.commit(12)
    assert cache.visible_tokens == 4  # a crop lets new tokens in again
    cache.forget(99)
    assert cache.visible_tokens == 0 and not cache.layer_states()[0].chunks
    torch.testing.assert_close(
        cache.attend(0, q, k, v), fake_attend(q, [Segment(k, v)], scale=0.25)[0]
    )
    with pytest.raises(ValueError, match="at least 0"):
        cache.forget(-1)


def ordinals(cache):
    return [chunk.ordinal for chunk in cache.layer_states()[0].chunks]


@pytest.mark.parametrize("drop", ["forget", "keep"])
def test_no_new_chunk_becomes_the_sink_after_all_were_dropped(drop):
    cache = KVCache(FakeRecipe(policy=CachePolicy(sink_chunks=1)))
    fill(cache, [7, 8])
    if drop == "forget":
        cache.forget(15)
    else:
        for layer in range(2):
            cache.keep(layer, [])
    assert ordinals(cache) == []
    again = KVCache(FakeRecipe(policy=CachePolicy(sink_chunks=1)))
    again.restore(cache.layer_states(), length=cache.length)
    for each in (cache, again):
        fill(each, [6, 5], start=15)
        assert ordinals(each) == [2, 3]
        assert not any(isinstance(c, DenseChunk) for c in each.layer_states()[0].chunks)


def test_ordinals_after_a_crop():
    cache = KVCache(FakeRecipe(policy=CachePolicy(sink_chunks=1)))
    fill(cache, [7, 8, 6])
    cache.crop(15)
    fill(cache, [4], start=15)
    assert ordinals(cache) == [0, 1, 2]
    cache.crop(17, decode_partial=True)
    fill(cache, [4], start=17)
    assert ordinals(cache) == [0, 1, 2, 3]
    cache.crop(0)
    fill(cache, [4])
    assert ordinals(cache) == [0]  # an empty sequence begins anew, with its sink


def test_forgotten_tokens_stay_forgotten_in_a_saved_state():
    cache, other = KVCache(FakeRecipe()), KVCache(FakeRecipe())
    fill(cache, [7, 8])
    cache.forget(4)
    other.restore(cache.layer_states(), length=cache.length)
    assert other.visible_tokens == 11
