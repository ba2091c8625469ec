"""Layers that are packed together hold, bit for bit, what each would hold packed alone."""

import dataclasses
import gc
import weakref

import pytest
import torch
from cache_fakes import FakeRecipe, fill, rows

import videokv
from videokv.cache import KVCache, stacking
from videokv.cache.chunks import DenseChunk, PackedChunk
from videokv.kernels.gpu import say_once
from videokv.recipes import recipes
from videokv.tensors import held_bytes, walk_tensors

LAYERS = 3
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NAMES = [name for name in recipes() if "+" not in name and name != "bf16"]


@pytest.fixture
def together(monkeypatch):
    """A switch; when on, all layers of a kind are packed together. ``runs`` counts the stacks."""

    class Switch:
        runs = 0

        def turn(self, on, *, most=LAYERS):
            monkeypatch.setattr(stacking, "_most", lambda *_: most if on else 1)

    switch = Switch()
    packed = stacking._packed

    def counted(*arguments, **options):
        found = packed(*arguments, **options)
        switch.runs += 1
        return found

    monkeypatch.setattr(stacking, "_packed", counted)
    return switch


def unlike(one, other, path="state"):
    """Where two holders differ: tensors in any bit, other fields by ==."""
    if type(one) is not type(other):
        return [f"{path}: {type(one).__name__}, {type(other).__name__}"]
    if isinstance(one, torch.Tensor):
        like = (one.shape, one.dtype) == (other.shape, other.dtype)
        if path.endswith(".factors") and one.is_cuda and like:
            # Features of queries come from library kernels, chosen by the number of rows.
            return [] if torch.allclose(one, other, rtol=2e-3, atol=1e-4) else [path]
        raw = [t.contiguous().view(-1).view(torch.uint8) for t in (one, other)]
        return [] if like and torch.equal(*raw) else [path]
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        pairs = [(name, getattr(one, name), getattr(other, name)) for name in names]
    elif isinstance(one, (tuple, list)):
        pairs = [(len(one), len(one), len(other)), *zip(range(len(one)), one, other, strict=False)]
    else:
        return [] if one == other else [f"{path}: {one!r}, {other!r}"]
    return [found for name, a, b in pairs for found in unlike(a, b, f"{path}.{name}")]


def filled(
    recipe, chunks, *, device="cpu", layers=LAYERS, spoil=None, start=0, cache=None, **shape
):
    cache = cache or KVCache(recipe)
    for number, tokens in enumerate(chunks):
        for layer in range(layers):
            found = rows(tokens, seed=1000 * start + 10 * number + layer, **shape)
            q, k, v = (x.to(device) for x in found)
            if spoil is not None:
                spoil(layer, number, q, k)
            cache.write(layer, start, k, v, q)
        start += tokens
        cache.commit(start)
    return cache


def check(together, recipe, chunks, *, runs, **options):
    """Both ways; ``runs``: how many stacks there must have been."""
    together.turn(False)
    alone = filled(recipe, chunks, **options)
    assert together.runs == 0
    together.turn(True)
    stacked = filled(recipe, chunks, **options)
    assert together.runs == runs
    states = alone.layer_states(), stacked.layer_states()
    for layer in states[0]:
        assert unlike(states[0][layer], states[1][layer]) == []
    assert stacked.encode_calls == alone.encode_calls
    assert stacked.memory().held_bytes <= alone.memory().held_bytes
    storages = [
        {(t.untyped_storage().data_ptr(), t.nbytes) for t in walk_tensors(state.chunks)}
        for state in states[1].values()
    ]
    assert not set.intersection(*storages)
    for state in states[1].values():
        chunks = [chunk for chunk in state.chunks if isinstance(chunk, PackedChunk)]
        for tensor in walk_tensors(chunks):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
    return alone, stacked


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_as_alone(together, name, device):
    dtype = torch.bfloat16 if "quarot" in name else torch.float32
    recipe = videokv.recipe(name, recent_chunks=0)
    check(
        together, recipe, [63, 40, 40], runs=3, device=device, size=64, value_size=128, batch=2,
        dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("correction", ["taylor", "exact", "measured", "calibrated"])
@pytest.mark.parametrize("name", ["quarot-2bit", "quantwm-2bit", "videokv-2bit", "kivi-2bit-psac8"])
def test_the_same_factors_as_alone(together, name, correction, device):
    recipe = videokv.recipe(f"{name}+{correction}", recent_chunks=0)
    check(together, recipe, [50, 64, 64], runs=3, device=device, size=64, groups=3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("policy", "chunks", "runs"),
    [
        ({"window_chunks": 2}, [40, 40, 40, 40], 4),
        ({"sink_chunks": 1, "recent_chunks": 1, "window_chunks": 3}, [30, 40, 50, 60], 2),
        ({"chunk_tokens": 48}, [60, 100, 20], 3),
        ({"chunk_tokens": 48, "recent_chunks": 1}, [60, 100, 20], 2),
    ],
)
@pytest.mark.parametrize("name", ["quantwm-2bit+calibrated", "videokv-2bit", "qvg-pro-2bit"])
def test_policies(together, name, policy, chunks, runs, device):
    check(together, videokv.recipe(name, **policy), chunks, runs=runs, device=device, size=64)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qvg-2bit", {"span_chunks": 2}),
        ("qvg-2bit", {"start": "previous_labels"}),
        ("qvg-2bit", {"start": "random"}),
        ("qvg-2bit", {"start": "spread", "symmetric": False}),
        ("quantwm-2bit+taylor", {"span_chunks": 3, "rank": 4}),
        ("quantwm-2bit", {"metric": "full"}),
        ("quarot-2bit", {"rotate_v": True, "zero_point": "integer"}),
        ("kivi-2bit", {"fp16_scales": True}),
    ],
)
def test_options(together, name, options):
    recipe = videokv.recipe(name, recent_chunks=0, **options)
    alone, stacked = check(together, recipe, [48] * 4, runs=4, size=64)
    for layer in range(LAYERS):
        states = [cache.layer_states()[layer] for cache in (alone, stacked)]
        assert held_bytes(states[0].chunks) >= held_bytes(states[1].chunks)


def test_chunks_of_a_span_go_on_sharing_their_codebook(together):
    together.turn(True)
    cache = filled(videokv.recipe("qvg-2bit", span_chunks=3), [48] * 4, size=64)
    assert together.runs == 4
    for state in cache.layer_states().values():
        tables = [chunk.keys.clusters[0].table for chunk in state.chunks]
        assert tables[0] is tables[1] is tables[2] and tables[3] is not tables[2]


@pytest.mark.parametrize("correction", ["", "+taylor", "+calibrated"])
def test_chunks_with_one_basis_share_it_and_rows_without_repair_are_each_layers_own(
    together, correction
):
    def spoil(layer, number, queries, keys):
        if (layer, number) == (1, 1):  # far from the basis, which is that of chunk 0's queries
            queries.copy_(30 * torch.linspace(-1, 1, 64).cos().expand_as(queries))

    recipe = videokv.recipe(f"quantwm-2bit{correction}", basis_chunks=3)
    together.turn(False)
    alone = filled(recipe, [64] * 6, size=64, spoil=spoil)
    together.turn(True)
    stacked = filled(recipe, [64] * 6, size=64, spoil=spoil)
    complete = [
        [chunk.keys.repair.complete for chunk in state.chunks[1:]]
        for state in stacked.layer_states().values()
    ]
    assert all(complete[0]) and all(complete[2]) and not all(complete[1])
    assert 0 < together.runs < 6
    shared = []
    for one, other in zip(*(c.layer_states().values() for c in (alone, stacked)), strict=True):
        assert unlike(one, other) == []
        for pair in (one, other):
            chunks = [chunk.keys for chunk in pair.chunks if chunk.keys.repair is not None]
            bases = [chunk.repair.basis for chunk in chunks]
            shared.append([a is b for a, b in zip(bases, bases[1:], strict=False)])
        assert shared[-1] == shared[-2]


@pytest.mark.parametrize(
    ("name", "factor", "options"),
    [
        ("rtn-2bit", 1e6, {}),  # a normaliser
        ("rtn-4bit", 1.0, {"zero_point": "integer"}),
    ],
)
def test_a_format_that_follows_the_numbers_is_each_layers_own(together, name, factor, options):
    def spoil(layer, number, queries, keys):
        if (layer, number) == (1, 1):
            keys.mul_(factor)
            if factor == 1.0:
                keys.add_(1e4)  # the code of zero is too large for BF16

    recipe = videokv.recipe(name, **options)
    with pytest.warns() if factor > 1 else _nothing():
        # The spoilt chunk, and the one after it, whose chunk before is unlike the others'.
        _, cache = check(together, recipe, [40] * 4, runs=2, spoil=spoil, size=32)
    kinds = [
        [(c.keys.normaliser is None, c.keys.zeros.dtype) for c in state.chunks]
        for state in cache.layer_states().values()
    ]
    assert kinds[0] == kinds[2] and kinds[0] != kinds[1]
    assert kinds[0] == [(True, torch.bfloat16)] * 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("correction", ["", "+calibrated", "+measured"])
def test_layers_with_and_without_rows_that_are_not_repaired(together, correction, device):
    recipe = videokv.recipe(f"quantwm-2bit{correction}")
    shape = {"size": 128, "heads": 6, "groups": 1, "dtype": torch.bfloat16}
    _, cache = check(together, recipe, [200] * 4, runs=4, device=device, **shape)
    repairs = [
        [chunk.keys.repair for chunk in state.chunks[1:]] for state in cache.layer_states().values()
    ]
    assert all(repair.places is None for each in repairs for repair in each)
    found = [{repair.complete for repair in each} for each in zip(*repairs, strict=True)]
    assert device == "cuda" or {True, False} in found


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


@pytest.mark.parametrize(("name", "factor"), [("rtn-2bit", 1e38), ("videokv-2bit", 1e20)])
def test_an_error_names_its_layer_and_leaves_the_cache_as_it_was(together, name, factor):
    together.turn(True)
    cache = filled(videokv.recipe(name), [40], size=32)
    before = cache.layer_states()
    for layer in range(LAYERS):
        q, k, v = rows(40, seed=layer, size=32)
        cache.write(layer, 40, k * (factor if layer == 1 else 1), v, q)
    written = cache.layer_states()
    with pytest.raises(ValueError, match="keys of layer 1"):
        cache.commit(80)
    after = cache.layer_states()
    assert cache.length == 40 and all(after[layer] is written[layer] for layer in before)
    assert all(after[layer].chunks is before[layer].chunks for layer in before)


def test_a_chunk_before_of_another_seed_is_refused_as_alone(together):
    recipe = videokv.recipe("quarot-2bit")
    states = filled(recipe, [16], size=32).layer_states()
    for on in (False, True):
        together.turn(on)
        cache = KVCache(dataclasses.replace(recipe, seed=1))
        cache.restore(states, length=16)
        with pytest.raises(ValueError, match="layer 0 .*start a new cache"):
            filled(recipe, [16], start=16, cache=cache, size=32)


def test_missing_queries_are_refused_as_alone(together):
    together.turn(True)
    cache = KVCache(videokv.recipe("rtn-2bit+calibrated"))
    for layer in range(LAYERS):
        _, k, v = rows(40, seed=layer, size=32)
        cache.write(layer, 0, k, v)
    with pytest.raises(ValueError, match="pass queries"):
        cache.commit(40)
    assert cache.length == 0 and together.runs == 0


def test_a_layer_frees_its_chunk_alone(together):
    together.turn(True)
    cache = filled(videokv.recipe("quantwm-2bit+calibrated"), [40, 40, 40], size=64)
    held = [
        [weakref.ref(t) for t in walk_tensors(state.chunks[0])]
        for state in cache.layer_states().values()
    ]
    bytes_before = cache.memory().held_bytes
    first = held_bytes(cache.layer_states()[1].chunks[0].stored())
    cache.keep(1, [(40, 120)])
    gc.collect()
    assert all(ref() is None for ref in held[1])
    assert all(ref() is not None for ref in held[0] + held[2])
    assert cache.memory().held_bytes == bytes_before - first


def test_layers_of_several_shapes(together):
    together.turn(True)
    recipe = videokv.recipe("videokv-2bit")
    cache = KVCache(recipe)
    shapes = [(2, 32), (2, 32), (1, 32), (2, 64), (2, 64)]
    for start in (0, 40):
        for layer, (heads, size) in enumerate(shapes):
            q, k, v = rows(40, seed=start + layer, heads=heads, size=size)
            cache.write(layer, start, k, v, q)
        cache.commit(start + 40)
    assert together.runs == 4
    together.turn(False)
    alone = filled(recipe, [40], layers=1, size=32)
    assert unlike(alone.layer_states()[0].chunks[0], cache.layer_states()[0].chunks[0]) == []


def test_quantizers_that_do_not_say_so_are_never_stacked(monkeypatch):
    monkeypatch.setattr(stacking, "STACKED_ON", ("cpu",))
    recipe = FakeRecipe()
    fill(KVCache(recipe), [6, 6, 6], layers=LAYERS)
    assert sorted({context.layer for context in recipe.keys.seen}) == [0, 1, 2]


def test_groups_are_no_larger_than_a_read_or_the_budget(together, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(stacking, "STACKED_ON", ("cpu",))
    seen = []
    packed = stacking._packed

    def counted(coding, jobs, **options):
        seen.append(len(jobs))
        return packed(coding, jobs, **options)

    monkeypatch.setattr(stacking, "_packed", counted)
    recipe = videokv.recipe("rtn-2bit")
    cache = filled(recipe, [40] * 3, layers=6, size=32)
    token_bytes = 2 * 2 * 32 * 4  # keys and values, heads, channels, float32
    # Keys and values are copied and packed in turn (to 2.9 of 32 bits). With its queries and output
    # a read of one chunk is worth two layers (how much it packs to is not known yet), of two five
    # (of six layers: twice three), of three all six.
    assert seen == [2, 2, 2, 3, 3, 6]
    packed_bytes = held_bytes([c.keys for c in cache.layer_states()[0].chunks]) // 3
    assert cache.memory().workspace_peak_bytes == 6 * (40 * token_bytes // 2 + packed_bytes)
    seen.clear()
    budget = 2 * 40 * token_bytes
    cache = KVCache(recipe, workspace_bytes=budget)
    filled(recipe, [40] * 5, layers=6, size=32, cache=cache)
    assert seen == [2, 2, 2, *[3] * 8] and cache.memory().workspace_peak_bytes <= budget


@pytest.mark.parametrize(
    "name", ["rtn-4bit", "quarot-2bit+calibrated", "quantwm-2bit+calibrated", "videokv-2bit+taylor"]
)
def test_what_is_packed_of_a_group_is_counted_and_bound(monkeypatch, name):
    monkeypatch.setattr(stacking, "STACKED_ON", ("cpu",))
    found = []
    packed = stacking._packed

    def watched(coding, jobs, **options):
        done = packed(coding, jobs, **options)
        rows_bytes = sum(job.chunk.keys.nbytes for job in jobs)
        found.append((rows_bytes + held_bytes([c.keys for c in done.chunks]), done.stack_bytes))
        return done

    monkeypatch.setattr(stacking, "_packed", watched)
    tokens, size = 400, 128
    cache = filled(videokv.recipe(name), [tokens] * 5, layers=8, size=size, dtype=torch.bfloat16)
    width = 2 * size + (16 if "+" in name else 0)  # keys, their columns, values
    read_bytes = 6 * tokens * 2 * width * 2  # heads, bytes of bfloat16; the rows, queries, outputs
    assert all(alive <= counted <= read_bytes for alive, counted in found)
    assert max(counted for _, counted in found) == cache.memory().workspace_peak_bytes
    assert len(found) >= 4


def test_queries_that_nobody_looks_at_are_not_held():
    for name, kept in [("quarot-2bit", False), ("videokv-2bit+measured", False),
                       ("videokv-2bit+calibrated", True), ("quantwm-2bit", True)]:  # fmt: skip
        cache = KVCache(videokv.recipe(name, recent_chunks=1))
        q, k, v = rows(40, size=64)
        cache.write(0, 0, k, v, q)
        assert (cache.layer_states()[0].tail.queries is not None) == kept
        cache.commit(40)
        (chunk,) = cache.layer_states()[0].chunks
        assert isinstance(chunk, DenseChunk)
        assert (chunk.queries is not None) == (name.endswith("calibrated"))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("none left"), "memory is short"),
        (ValueError("too wide"), "together they are refused"),
        (stacking._Unlike(), "formats depend on their numbers or differ"),
    ],
)
def test_why_layers_are_packed_alone_is_said(together, error, reason, monkeypatch):
    def fail(*arguments, **options):
        raise error

    recipe = videokv.recipe("rtn-2bit")
    want = filled(recipe, [40], size=64)
    together.turn(True)
    monkeypatch.setattr(stacking, "_packed", fail)
    say_once.cache_clear()
    with pytest.warns(UserWarning, match=f"layers are packed one by one: .*{reason}"):
        got = filled(recipe, [40], size=64)
    for layer, state in want.layer_states().items():
        assert unlike(state, got.layer_states()[layer]) == []
