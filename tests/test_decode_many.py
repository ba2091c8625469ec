"""Many chunks in one launch: the bits of chunk by chunk, for every format."""

import dataclasses
import gc
import weakref

import pytest
import torch
from test_reconstruct_triton import DEVICE, F16, FORMATS, draw, encoded, moved
from test_unbiased_triton import encoded as encoded_unbiased

import videokv
from videokv.cache import cache as cache_module
from videokv.kernels import gpu
from videokv.kernels import reconstruct as package
from videokv.kernels.reconstruct.decoding import KEYS, VALUES, Decoding, Source
from videokv.protocols import EncodeContext, Segment
from videokv.quantizers.centroid_residual import CentroidResidual, Clustering
from videokv.quantizers.groupwise import Groupwise
from videokv.quantizers.rotated import Rotated
from videokv.quantizers.subspace import Subspace
from videokv.quantizers.unbiased import Unbiased
from videokv.rotation import Rotation
from videokv.tensors import E4M3, GroupFormat

pytest.importorskip("triton")
from videokv.kernels.reconstruct import plan as plans  # noqa: E402
from videokv.kernels.reconstruct import triton as kernel  # noqa: E402
from videokv.kernels.reconstruct import triton_unbiased  # noqa: E402

LENGTHS = (63, 17, 130)
CLUSTERING = Clustering(centroids=4)


@pytest.fixture
def launches(monkeypatch):
    """As on a GPU: kernels are asked first. A list of the batches that were launched."""
    monkeypatch.setattr(gpu, "_verdicts", {})
    for name in ("reconstruct.decoding", "reconstruct"):
        monkeypatch.setattr(f"videokv.kernels.{name}.wants_kernels", lambda device: True)
    monkeypatch.setattr(package, "machine_refusal", lambda device: None)
    found = []
    launch = plans.Batch.launch

    def counted(batch, *arguments):
        found.append(batch)
        launch(batch, *arguments)

    monkeypatch.setattr(plans.Batch, "launch", counted)
    return found


def one_by_one(sources, outputs, factor=None):
    for chunk, side, row in sources:
        rows = outputs[side][:, :, row : row + chunk.shape[2]]
        kernel.reconstruct(chunk.parts(), rows, factor=factor if side == VALUES else None)


def buffers(chunks, dtype, *, spare=16):
    """Keys whose rows are longer than their channels, values that fill theirs; NaN."""
    batch, heads, _, size = chunks[0].shape
    tokens = sum(chunk.shape[2] for chunk in chunks) + 5
    return [
        torch.full((batch, heads, tokens, size + more), torch.nan, device=DEVICE).to(dtype)[
            ..., :size
        ]
        for more in (spare, 0)
    ]


def queued(keys, values):
    """Chunks one after the other from row 3."""
    sources = []
    for side, chunks in ((KEYS, keys), (VALUES, values)):
        row = 3
        for chunk in chunks:
            sources.append(Source(chunk, side, row))
            row += chunk.shape[2]
    return sources


def bits(x):
    return x.contiguous().view(torch.uint8)


def check(keys, values, dtype, launches, *, count=None):
    sources = queued(keys, values)
    want, got = buffers(keys, dtype), buffers(keys, dtype)
    one_by_one(sources, want)
    decoding = Decoding(sources)
    for _ in range(2):  # kernels are checked in the first
        launches.clear()
        decoding.write(*got)
    assert count is None or len(launches) == count
    for a, b in zip(got, want, strict=True):
        assert torch.equal(bits(a), bits(b))  # NaN before, between and behind included


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name, launches):
    keys, values = (
        [encoded(name, tokens=n) for n in lengths] for lengths in (LENGTHS[:2], LENGTHS[1::-1])
    )
    check(keys, values, F16, launches)


@pytest.mark.parametrize("name", ["rtn2", "kivi-keys"])
def test_equal_formats_share_a_launch(name, launches):
    chunks = [encoded(name, batch=2, tokens=n) for n in LENGTHS]
    check(chunks, chunks, F16, launches, count=1)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages(stages, launches):
    quantizer = CentroidResidual(group_size=16, stages=stages, clustering=CLUSTERING)
    chunks = [
        moved(quantizer.encode(draw(1, 2, n, 80, seed=n), EncodeContext(0, "key"))) for n in (9, 33)
    ]
    # A chunk whose steps leave E4M3's range has a normaliser: another format.
    check(chunks, chunks, F16, launches)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_unbiased(width, launches):
    keys = [encoded_unbiased(width, 128, n, label_bits=2) for n in LENGTHS]
    check(keys, keys, F16, launches, count=1)
    odd = [encoded_unbiased(width, 80, n, batch=2, label_bits=3) for n in (9, 33)]
    check(odd, odd, torch.float32, launches, count=1)


def test_unbiased_keys_and_values_of_other_widths(launches):
    keys = [encoded_unbiased(3, 64, n, label_bits=2) for n in (9, 33)]
    values = [encoded_unbiased(2, 64, n, label_bits=2) for n in (9, 33)]
    check(keys, values, F16, launches, count=2)


def test_unbiased_with_a_repair(launches):
    query = draw(1, 2, 200, 64, seed=9)
    context = EncodeContext(0, "key", query_moment=query.mT @ query / 200, query_count=200)
    chunks = [
        moved(Subspace(Unbiased(2), 5).encode(draw(1, 2, n, 64, seed=n), context)) for n in (40, 9)
    ]
    check(chunks, chunks, F16, launches)


def test_each_chunk_has_a_rotation_of_its_own(launches):
    chunks = []
    for seed in range(3):
        chunk = Rotated(Groupwise(GroupFormat(2, 32))).encode(
            draw(1, 2, 20, 64, seed=seed), EncodeContext(0, "key", seed=seed)
        )
        chunks.append(moved(chunk))
    check(chunks, chunks[::-1], F16, launches, count=1)
    parts = chunks[0].parts()
    other = dataclasses.replace(parts, rotation=Rotation(64, 77))
    held = [Held(parts), Held(other)]
    check(held, held, F16, launches, count=1)


class Held:
    """A chunk of given parts."""

    def __init__(self, parts):
        self._parts, self.shape = parts, parts.shape

    def parts(self):
        return self._parts


def sparse(chunk):
    """Only every third row has a repair."""
    places = torch.arange(0, chunk.shape[2] - 1, 3, dtype=torch.int16, device=DEVICE)
    rows, repair = places.long(), chunk.repair
    few = dataclasses.replace(
        repair,
        codes=repair.codes[:, :, rows].contiguous(),
        scales=repair.scales[:, :, rows].contiguous(),
        places=places.expand(1, 2, -1).contiguous(),
        complete=False,
    )
    return dataclasses.replace(chunk, repair=few)


def test_sparse_repairs_beside_whole_ones(launches):
    chunks = [encoded("quantwm", tokens=n) for n in LENGTHS]
    chunks[1] = sparse(chunks[1])
    check(chunks, chunks, F16, launches, count=1)


def test_formats_are_mixed(launches):
    keys = [encoded("psac-rotated"), encoded("rotated"), encoded("centroids", tokens=9)]
    values = [encoded("ternary"), encoded("rotated"), encoded("quantwm", tokens=9)]
    check(keys, values, F16, launches, count=5)


def test_programs_walk_over_stretches(launches, monkeypatch):
    monkeypatch.setattr(kernel, "PROGRAMS", 3)
    monkeypatch.setattr(triton_unbiased, "PROGRAMS", 3)
    chunks = [encoded("rotated", tokens=n) for n in (400, 63)]
    check(chunks, chunks, F16, launches, count=1)
    chunks = [encoded_unbiased(2, 64, n, label_bits=2) for n in (400, 63)]
    check(chunks, chunks, F16, launches, count=1)


def test_tensors_that_do_not_begin_at_sixteen_bytes(launches):
    def shifted(x):
        held = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        held[1:] = x.flatten()
        return held[1:].view(x.shape)

    chunks = [encoded("rtn2", tokens=n) for n in LENGTHS]
    chunks[1] = dataclasses.replace(chunks[1], packed=shifted(chunks[1].packed))
    check(chunks, chunks, F16, launches, count=2)


@pytest.mark.parametrize("name", ["rtn2", "rotated", "unbiased"])
def test_values_in_e4m3_that_are_turned(name, launches):
    make = encoded_unbiased if name == "unbiased" else encoded
    chunks = [
        make(2, 128, n, label_bits=2) if name == "unbiased" else make(name, tokens=n)
        for n in LENGTHS
    ]
    batch, heads, _, size = chunks[0].shape
    sources = queued(chunks, chunks)
    factor = torch.tensor([0.1, 30.0], device=DEVICE).reshape(1, 2, 1, 1)
    outputs = []
    for _ in range(2):
        keys, _ = buffers(chunks, F16)
        values = torch.zeros(batch, heads, size, 224, device=DEVICE).to(E4M3).mT
        outputs.append((keys, values))
    one_by_one(sources, outputs[0], factor)
    launches.clear()
    Decoding(sources).write(*outputs[1], value_factor=factor)
    assert len(launches) >= 2
    for a, b in zip(*outputs, strict=True):
        assert torch.equal(bits(a), bits(b))


def test_a_batch_that_disagrees_is_not_used(launches, monkeypatch):
    chunks = [encoded("rtn2", tokens=n) for n in (9, 5)]
    monkeypatch.setattr(plans.Batch, "launch", lambda batch, a, b, factor: a.zero_())
    got = buffers(chunks, F16)
    with pytest.warns(UserWarning, match="one by one: self-check failed"):
        Decoding(queued(chunks, chunks)).write(*got)
    want = buffers(chunks, F16)
    one_by_one(queued(chunks, chunks), want)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


def test_nothing_is_copied_to_the_device_twice_or_in_a_capture(launches, monkeypatch):
    uploads = []
    honest = plans._uploaded
    monkeypatch.setattr(plans, "_uploaded", lambda *a: uploads.append(1) or honest(*a))
    chunks = [encoded("rtn2", tokens=n) for n in (9, 5)]
    decoding = Decoding(queued(chunks, chunks))
    for _ in range(3):
        decoding.write(*buffers(chunks, F16))
    assert len(uploads) == 2  # the check's, and its own
    decoding.write(*buffers(chunks, torch.float32))
    assert len(uploads) == 4


def test_chunks_that_stay_are_not_looked_at_again(launches, monkeypatch):
    made, uploads = [], []
    honest, upload = kernel.planned, plans._uploaded
    monkeypatch.setattr(kernel, "planned", lambda *a: made.append(1) or honest(*a))
    monkeypatch.setattr(plans, "_uploaded", lambda *a: uploads.append(1) or upload(*a))
    old = [encoded("quantwm", tokens=n) for n in LENGTHS]
    old[1] = sparse(old[1])
    values = [encoded("ternary", tokens=n) for n in LENGTHS]
    Decoding(queued(old, values)).write(*buffers(old, F16))
    made.clear(), uploads.clear()
    new = [*old[1:], encoded("quantwm", tokens=9)]
    sources = queued(new, values[1:])
    want, got = buffers(new, F16), buffers(new, F16)
    one_by_one(sources, want)
    launches.clear()
    Decoding(sources).write(*got)
    assert len(made) == 1 and len(uploads) == 1 and len(launches) == 2
    assert all(batch.table.storage_offset() % 2 == 0 for batch in launches)  # 16 bytes
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


def test_outputs_that_chunks_do_not_fit_into_are_refused(launches):
    keys, wide = ([encoded(name, tokens=n) for n in (9, 5)] for name in ("quantwm", "rtn2"))
    with pytest.raises(ValueError, match=r"values need an output \[1, 2, >= 17, 128\]"):
        Decoding(queued(keys, wide)).write(*buffers(keys, F16))
    decoding = Decoding(queued(keys, keys))
    for cut in (lambda x: x[:, :, :16], lambda x: x[:, :1], lambda x: x[:0]):
        with pytest.raises(ValueError, match=r"keys need an output \[1, 2, >= 17, 64\]"):
            decoding.write(*map(cut, buffers(keys, F16)))
    with pytest.raises(ValueError, match="must agree in batch rows"):
        Decoding(queued([*keys, *wide], keys))
    assert not launches


def cache_of(name, **options):
    options = {"sink_chunks": 1} | options
    return videokv.recipe(name, **options).new_cache(layers=1)


def feed(cache, chunks, *, first=0, tokens=24):
    for n in range(first, first + chunks):
        q, k, v = (draw(1, heads, tokens, 64, seed=7 * n + heads).to(DEVICE) for heads in (4, 2, 2))
        cache.write(0, n * tokens, k, v, q)
        cache.commit((n + 1) * tokens)


def same_rows(cache):
    """What is gathered is what the cache's view says."""
    layer = cache._layers[0]
    now = Segment(draw(1, 2, 5, 64).to(DEVICE), draw(1, 2, 5, 64, seed=1).to(DEVICE))
    *past, last = layer.gathered(now)
    assert torch.equal(last.keys, now.keys) and torch.equal(last.values, now.values)
    want = cache.view(0)
    assert len(past) == len(want)
    for a, b in zip(past, want, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a.values, b.values, rtol=1e-5, atol=1e-5)
    return layer


@pytest.mark.parametrize("name", ["quarot-2bit", "kivi-2bit", "quantwm-2bit+calibrated"])
def test_chunks_come_and_go(name, launches, monkeypatch):
    monkeypatch.setattr(cache_module, "worth_gathering", lambda device: True)
    cache = cache_of(name)
    feed(cache, 4)
    first = same_rows(cache)._decoding
    assert same_rows(cache)._decoding is first
    cache.write(0, 96, *(draw(1, h, 5, 64, seed=h).to(DEVICE) for h in (2, 2)))
    assert cache._layers[0]._decoding is first  # rows that are not committed change nothing
    feed(cache, 1, first=4)
    assert cache._layers[0]._decoding is None
    assert same_rows(cache)._decoding is not first
    cache.forget(30)  # the first chunk, and six rows of the second
    same_rows(cache)
    cache.crop(72)
    same_rows(cache)
    cache.crop(60, decode_partial=True)
    same_rows(cache)
    cache.to(torch.device(DEVICE))
    same_rows(cache)


def test_what_was_dropped_is_not_kept_alive(launches):
    cache = cache_of("quantwm-2bit")
    feed(cache, 4)
    layer = same_rows(cache)
    gone = [weakref.ref(chunk.keys) for chunk in layer.state.chunks[1:]]
    codes = weakref.ref(package.inner_parts(layer.state.chunks[1].keys).codes)
    cache.reset()
    launches.clear()
    del layer
    gc.collect()
    assert not any(ref() for ref in gone) and codes() is None


def test_selected_batch_rows(launches):
    cache = cache_of("rtn-2bit")
    x = draw(2, 2, 24, 64).to(DEVICE)
    for n in range(3):
        cache.write(0, 24 * n, x, x, x)
        cache.commit(24 * n + 24)
    layer = cache._layers[0]
    layer.gathered(Segment(x, x))
    layer.select_batch(torch.tensor([1]))
    one = x[1:]
    *past, _ = layer.gathered(Segment(one, one))
    for a, b in zip(past, cache.view(0), strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fixture hands CPU tensors to kernels")
@pytest.mark.parametrize(("name", "count"), [("rtn-2bit", 1), ("quarot-2bit", 2)])
def test_launches_of_a_read(name, count, launches):
    """Rotated keys are a launch of their own beside values as they are."""
    cache = cache_of(name, sink_chunks=0)
    feed(cache, 7)
    same_rows(cache)
    launches.clear()
    cache._layers[0].gathered(Segment(draw(1, 2, 5, 64), draw(1, 2, 5, 64)))
    assert len(launches) == count
