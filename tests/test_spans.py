"""What consecutive chunks share: codebooks (span_chunks) and PSAC's bases (basis_chunks)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import videokv
from videokv.attention import attend
from videokv.attention.columns import plan_calls
from videokv.protocols import EncodeContext, Segment
from videokv.quantizers.centroid_residual import (
    CentroidResidual,
    Clustering,
    build_qvg,
    build_qvg_pro,
    default_centroids,
)
from videokv.quantizers.groupwise import Groupwise
from videokv.quantizers.query_aware import QueryAware, build_quantwm
from videokv.quantizers.rotated import Rotated
from videokv.quantizers.subspace import Subspace
from videokv.tensors import GroupFormat, held_bytes

HEADS, TOKENS, SIZE = 2, 63, 64


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Tokens around 12 centres that are the same for every seed."""
    centres = torch.randn(12, shape[-1], generator=torch.Generator().manual_seed(99)) * 3
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 12, shape[:-1], generator=generator)
    return centres[labels] + torch.randn(shape, generator=generator) * 0.5


def moment(seed: int = 0, size: int = SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(1, HEADS, 300, size, generator=generator)
    queries[..., :4] *= 4
    return queries.mT @ queries / 300


def encoded(quantizer, count: int, *, length: int = TOKENS, role="key", moments: bool = True):
    """Chunks one after the other, each with queries of its own past."""
    chunks = []
    for number in range(count):
        previous = chunks[-1] if chunks else None
        seen = moment(number) if moments else None
        context = EncodeContext(0, role, 0, seen, 300, previous)
        chunks.append(quantizer.encode(tokens(1, HEADS, length, SIZE, seed=number), context))
    return chunks


def filled(recipe: videokv.Recipe, chunks: int, *, heads: int = 1, first: int = 0, cache=None):
    """A cache of one layer, batch 2, with ``chunks`` more chunks; the chunks' numbers are seeds."""
    cache = recipe.new_cache(layers=1) if cache is None else cache
    for number in range(first, first + chunks):
        k, v = (tokens(2, HEADS, TOKENS, SIZE, seed=2 * number + side) for side in (0, 1))
        generator = torch.Generator().manual_seed(number)
        q = torch.randn(2, HEADS * heads, TOKENS, SIZE, generator=generator)
        q[..., :4] *= 4
        cache.write(0, number * TOKENS, k, v, q)
        cache.commit((number + 1) * TOKENS)
    return cache


def held(cache) -> tuple:
    return cache.layer_states()[0].chunks


# Codebooks


def test_bytes_of_a_span_of_three():
    """Codes, steps and labels of each chunk, and one table whose size suits the whole span."""
    keys, _ = build_qvg(2, span_chunks=3)
    chunks = encoded(keys, 4, length=400)
    tables = [chunk.clusters[0].table for chunk in chunks]
    assert tables[0] is tables[1] is tables[2] and tables[3] is not tables[0]
    assert [chunk.place for chunk in chunks] == [0, 1, 2, 0]
    count = tables[0].shape[2]
    assert count == default_centroids(1200) == 32 > default_centroids(400)
    each = HEADS * (400 * SIZE // 4 + 400 * SIZE // 64 + 400)
    table = HEADS * count * SIZE * 2
    assert held_bytes(chunks[:3]) == 3 * each + table
    assert held_bytes(chunks[1:3]) == 2 * each + table  # the first chunk is gone, its table is not
    assert held_bytes(chunks) == 4 * each + 2 * table


@pytest.mark.parametrize("stages", [1, 3])
def test_later_chunks_match_a_float64_oracle(stages):
    """Labels: the nearest row of the first chunk's tables, stage by stage; x^ = sum mu[z] + D q."""
    quantizer = CentroidResidual(2, 16, stages=stages, clustering=Clustering(16, span_chunks=3))
    chunks = encoded(quantizer, 3)
    for number in (1, 2):
        chunk, x = chunks[number], tokens(1, HEADS, TOKENS, SIZE, seed=number).double().numpy()
        total = np.zeros_like(x)
        for stage, clusters in enumerate(chunk.clusters):
            assert clusters.table is chunks[0].clusters[stage].table
            table = clusters.table.double().numpy()
            far = ((x - total)[..., None, :] - table[:, :, None]) ** 2
            ids = clusters.ids.numpy().astype(int)
            assert (far.sum(-1).argmin(-1) == ids).mean() > 0.99  # float32 ties
            total += np.take_along_axis(table, ids[..., None], 2)
        steps = chunk.residual.steps.double().numpy()[..., None]
        groups = (x - total).reshape(*x.shape[:3], -1, 16)
        codes = np.sign(groups) * np.floor(np.abs(groups) / steps + 0.5).clip(max=1)
        expected = total + (codes * steps).reshape(x.shape)
        found = chunk.decode(torch.float64).numpy()
        assert (np.abs(found - expected) > 1e-5 * np.abs(x).max()).mean() < 1e-3  # float32 halves


def test_one_chunk_a_span_is_the_default():
    plain, spelled = (encoded(build_qvg_pro(2, **kw)[0], 3) for kw in ({}, {"span_chunks": 1}))
    for ours, theirs in zip(plain, spelled, strict=True):
        assert ours.place == theirs.place == 0
        assert torch.equal(ours.decode(torch.float32), theirs.decode(torch.float32))
        assert ours.clusters[0].table is not plain[0].clusters[0].table or ours is plain[0]


def test_query_aware_labels_are_chosen_in_the_shared_table():
    keys, values = build_quantwm(2, span_chunks=2, centroids=16)
    chunks = encoded(keys, 3)
    tables = [chunk.inner.clusters[0].table for chunk in chunks]
    assert tables[0] is tables[1] and tables[2] is not tables[1]
    plain = encoded(values, 2, role="value")
    assert plain[0].clusters[0].table is plain[1].clusters[0].table
    queries = moment(1)
    x = tokens(1, HEADS, TOKENS, SIZE, seed=1)

    def seen(chunk) -> float:
        error = chunk.decode(torch.float32) - x
        return float(((error @ queries) * error).sum())

    aware = QueryAware(clustering=Clustering(16, span_chunks=2))
    blind = QueryAware(metric="none", clustering=Clustering(16, span_chunks=2))
    assert seen(encoded(aware, 2)[1]) < seen(encoded(blind, 2)[1])


def test_a_span_begins_anew_where_the_chunk_before_does_not_fit():
    quantizer = CentroidResidual(2, 16, clustering=Clustering(8, span_chunks=5))
    others = [
        Groupwise(GroupFormat(2, 16)),
        CentroidResidual(2, 16, stages=2, clustering=Clustering(8)),
        CentroidResidual(2, 16, clustering=Clustering(16)),
    ]
    x = tokens(1, HEADS, TOKENS, SIZE)
    for other in others:
        before = encoded(other, 1)[0]
        assert quantizer.encode(x, EncodeContext(0, "key", previous=before)).place == 0
    (before,) = encoded(quantizer, 1)
    wider = tokens(1, HEADS + 1, TOKENS, SIZE)
    assert quantizer.encode(wider, EncodeContext(0, "key", previous=before)).place == 0
    short = quantizer.encode(x[:, :, :9], EncodeContext(0, "key", previous=before))
    assert short.place == 1 and short.shape[2] == 9  # lengths may differ


def test_the_window_drops_a_chunk_and_keeps_its_table():
    recipe = videokv.recipe("qvg-2bit", span_chunks=3, window_chunks=2)
    cache = filled(recipe, 3)
    first, second = held(cache)
    assert (first.keys.place, second.keys.place) == (1, 2)
    assert first.keys.clusters[0].table is second.keys.clusters[0].table
    table = first.keys.clusters[0].table.shape[2] * SIZE * 16
    bits = 2 + 8 / 64 + 8 / SIZE + table / (2 * TOKENS * SIZE)
    assert cache.memory().bits_per_element == bits
    again = filled(recipe, 1, first=3, cache=cache)
    assert [chunk.keys.place for chunk in held(again)] == [2, 0]


@pytest.mark.parametrize("name", ["qvg-2bit", "quantwm-2bit"])
def test_saved_moved_and_selected_caches_go_on_in_their_span(name, tmp_path):
    shared = {"basis_chunks": 3} if name.startswith("quantwm") else {}
    recipe = videokv.recipe(name + "+taylor", span_chunks=3, **shared)
    cache = filled(recipe, 2)
    videokv.save(cache, tmp_path / "c")
    read = videokv.load(tmp_path / "c", expected=recipe)
    assert read.memory() == cache.memory()
    picked = filled(recipe, 2)
    picked.select_batch([1, 0])
    picked.select_batch([1, 0])
    cropped = filled(recipe, 2)
    filled(recipe, 1, first=2, cache=cropped).crop(2 * TOKENS)
    for other in (cache, read, picked):
        filled(recipe, 1, first=2, cache=other)
    query, key, value = (tokens(2, HEADS, 5, SIZE, seed=s) for s in (50, 51, 52))
    want = cache.attend(0, query, key, value)
    for other in (cache, read, picked):
        sides = [chunk.keys for chunk in held(other)]
        inner = [getattr(side, "inner", side) for side in sides]
        assert inner[0].clusters[0].table is inner[2].clusters[0].table
        assert other.memory().held_bytes == cache.memory().held_bytes
        assert torch.equal(other.attend(0, query, key, value), want)
        if shared:
            assert sides[1].repair.basis is sides[2].repair.basis
    filled(recipe, 1, first=2, cache=cropped)
    assert cropped.memory().held_bytes == cache.memory().held_bytes


def test_bits_of_recipes_count_a_whole_span():
    """16 K / N a table, shared by 4; 16 r / N a basis, by 2; values have no basis."""
    at = videokv.recipe("quantwm-2bit", centroids=8, span_chunks=4, basis_chunks=2)
    once = videokv.recipe("quantwm-2bit", centroids=8)
    found, plain = (videokv.bits_per_element(r, tokens=100, head_dim=64) for r in (at, once))
    saved = 16 * 8 / 100 * 3 / 4 + 16 * 8 / 100 / 2 / 2
    assert plain - found == pytest.approx(saved, abs=1e-9)
    own = videokv.Recipe("own", Rotated(at.keys.inner), None)
    alone = videokv.bits_per_element(own, tokens=100, head_dim=64)
    each = 2 + 10 / 64 + 8 / 64 + 16 * 8 / 400 + 16 / (100 * 64)
    assert alone == pytest.approx((each + 16) / 2, abs=1e-9)


# Bases


@pytest.mark.parametrize("inner", ["rtn", "quarot", "quantwm"])
def test_chunks_share_a_basis_and_its_columns(inner):
    """Seven chunks, three a basis: G columns a basis, and G more for all rows without repair."""
    quantizer = {
        "rtn": Groupwise(GroupFormat(2, 16)),
        "quarot": Rotated(Groupwise(GroupFormat(2, 16))),
        "quantwm": QueryAware(16, clustering=Clustering(8)),
    }[inner]
    chunks = encoded(Subspace(quantizer, rank=4, basis_chunks=3), 7)
    bases = [chunk.repair.basis for chunk in chunks]
    assert [chunk.place for chunk in chunks] == [0, 1, 2, 0, 1, 2, 0]
    assert len({id(basis) for basis in bases}) == 3 and bases[0] is bases[2]
    assert chunks[0].repair.complete and chunks[3].repair.complete
    dropped = not all(chunk.repair.complete for chunk in chunks)  # the older basis may serve less
    segments = segments_of(chunks)
    assert [call.columns for call in plan_calls(segments)] == [(3 + dropped) * SIZE // 16]
    own = encoded(Subspace(quantizer, rank=4), 7)
    assert sum(call.columns for call in plan_calls(segments_of(own))) == 7 * SIZE // 16
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(1, 2 * HEADS, 9, SIZE, generator=generator)
    found = [
        attend(query, segments, scale=SIZE**-0.5, backend=backend, need_lse=True)
        for backend in ("sdpa", "eager")
    ]
    for ours, want in zip(*found, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-4)


def segments_of(chunks) -> list[Segment]:
    return [Segment(c.decode(torch.float32), c.decode(torch.float32), c.noise()) for c in chunks]


def test_a_shared_basis_repairs_the_later_chunk():
    """K^ = K^0 + s C U^T with the older U, in float64; coefficients are the chunk's own."""
    first, second = encoded(Subspace(Groupwise(GroupFormat(2, 16)), 4, basis_chunks=2), 2)
    x = tokens(1, HEADS, TOKENS, SIZE, seed=1).double()
    base, basis = second.inner.decode(torch.float64), first.repair.basis.double()
    exact = (x - base) @ basis
    scales = (exact.abs().amax(-1, keepdim=True) / 127).half().double()
    codes = (exact / scales).round()
    expected = base + (codes * scales) @ basis.mT
    assert (second.decode(torch.float64) - expected).abs().max() < 0.05 * exact.abs().max()
    left = (second.decode(torch.float64) - x) @ basis
    assert left.abs().max() < 0.05 * exact.abs().max()
    rows = 2 * HEADS * TOKENS * (SIZE // 4 + 3 * SIZE // 16 + 4 + 2)
    assert held_bytes(first, second) == rows + HEADS * SIZE * 4 * 2


def test_a_basis_is_shared_only_where_there_is_one():
    quantizer = Subspace(Groupwise(GroupFormat(2, 16)), rank=4, basis_chunks=3)
    cold = encoded(quantizer, 1, moments=False)[0]
    x = tokens(1, HEADS, TOKENS, SIZE)
    warm = quantizer.encode(x, EncodeContext(0, "key", 0, moment(), 300, cold))
    assert cold.repair is None and warm.place == 0
    other = Subspace(quantizer.inner, rank=8, basis_chunks=3)
    wider = other.encode(x, EncodeContext(0, "key", 0, moment(), 300, warm))
    assert wider.place == 0 and wider.repair.basis.shape[3] == 8


def test_a_cache_reads_shared_bases_as_eager_does():
    """Grouped queries, a window of 8 chunks with 4 groups: 32 columns become 12 with 3 a basis."""
    outputs = {}
    for backend in ("sdpa", "eager"):
        recipe = videokv.recipe(
            "rtn-2bit-psac4+calibrated", group_size=16, basis_chunks=3, backend=backend
        )
        cache = filled(recipe, 9, heads=2)
        query = torch.randn(2, 2 * HEADS, 7, SIZE, generator=torch.Generator().manual_seed(8))
        current = tokens(2, HEADS, 7, SIZE, seed=70)
        outputs[backend] = cache.attend(0, query, current, current)
    torch.testing.assert_close(outputs["sdpa"], outputs["eager"], rtol=1e-4, atol=1e-4)
    bases = {id(chunk.keys.repair.basis) for chunk in held(cache) if chunk.keys.repair}
    assert len(bases) == math.ceil(8 / 3)  # the first chunk is cold


# Options


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, None])
def test_counts_are_checked(wrong):
    with pytest.raises(ValueError, match="span_chunks must be"):
        Clustering(span_chunks=wrong)
    with pytest.raises(ValueError, match="basis_chunks must be"):
        Subspace(Groupwise(GroupFormat(2, 16)), basis_chunks=wrong)


def test_options_of_recipes():
    for name in ("qvg-4bit", "qvg-pro-2bit"):
        made = videokv.recipe(name, span_chunks=4)
        assert made.keys.clustering.span_chunks == made.values.clustering.span_chunks == 4
    both = videokv.recipe("qvg-2bit-psac4", span_chunks=2, basis_chunks=6)
    assert both.keys.basis_chunks == 6 and both.keys.inner.clustering.span_chunks == 2
    with pytest.raises(ValueError, match="rank 0 has no basis"):
        videokv.recipe("quantwm-2bit", rank=0, basis_chunks=2)
    with pytest.raises(ValueError, match="unknown option of 'rtn' 'basis_chunks'"):
        videokv.recipe("rtn-2bit", basis_chunks=2)
    with pytest.raises(ValueError, match="unknown option .*nearest: basis_chunks"):
        videokv.recipe("rtn-2bit-psac8", basis_chunk=2)
    with pytest.raises(ValueError, match="unknown option .*nearest: span_chunks"):
        videokv.recipe("qvg-2bit", span_chunk=2)
