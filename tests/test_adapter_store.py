"""Rows of a model's buffer: moved, written over, taken back; and what the cache lets go for it."""

import pytest
import torch
from cache_fakes import fill, rows
from fakes import self_forcing as fake
from fakes.common import seeded

import videokv
from videokv.adapters.rows import Piece, cut, joined, laid_over, length, paired, ranges


def test_pieces_are_joined_cut_and_laid_over():
    pieces = joined([Piece(4, 0), Piece(4, 4), Piece(0), Piece(2), Piece(3), Piece(4, 20)])
    assert [(p.count, p.token) for p in pieces] == [(8, 0), (5, None), (4, 20)]
    assert ranges(cut(pieces, 6, 15)) == [(6, 8), (20, 22)]
    moved = laid_over(pieces, 2, cut(pieces, 13, 17))
    assert length(moved) == 17 and ranges(moved) == [(0, 2), (20, 24), (6, 8), (20, 24)]
    x = torch.arange(12.0).reshape(1, 6, 1, 2)
    pairs = paired((Piece(6, dense=x),), (Piece(2, 0), Piece(4, 9)))
    assert [(k.count, v.token) for k, v in pairs] == [(2, 0), (4, 9)]
    assert pairs[1][0].dense.equal(x[:, 2:])


def test_a_cache_keeps_the_chunks_that_are_seen():
    cache = videokv.recipe("rtn-4bit", group_size=16).new_cache(layers=2)
    fill(cache, [6, 6, 6])
    before = cache.view(0, [(6, 18)])
    cache.keep(0, [(7, 8), (12, 18)])
    assert cache.held_tokens(0) == 12 and cache.held_tokens(1) == 18 and cache.length == 18
    for ours, theirs in zip(cache.view(0, [(6, 18)]), before, strict=True):
        assert ours.keys.equal(theirs.keys)
    with pytest.raises(ValueError, match="holds 0 of the tokens 0..6"):
        cache.view(0, [(0, 6)])
    cache.keep(1, [])
    assert cache.held_tokens(1) == 0 and cache.held_tokens(1) == 0
    q, k, v = rows(6, seed=9)
    cache.write(0, 18, k, v, q)
    cache.write(1, 18, k, v, q)
    cache.commit(24)
    assert cache.held_tokens(0) == 18 and cache.held_tokens(1) == 6


def step(model, cache, noise, chunk, t=0.0):
    return model(
        noise[:, :, 3 * chunk : 3 * chunk + 3], t=t, kv_cache=cache, current_start=12 * chunk
    )


def back_to(cache, chunk):
    for layer in cache:
        layer["global_end_index"].fill_(12 * chunk)
        layer["local_end_index"].fill_(12 * chunk)


@pytest.mark.parametrize("recipe", ["bf16", "rtn-8bit"])
def test_going_back_to_an_earlier_chunk(recipe):
    """A prompt changes: the model writes the last chunks anew over rows that were final."""
    model, noise = seeded(fake.CausalWanModel(size=32)), fake.noise()
    cache = model.new_cache(72)
    outputs = {}
    for inside in (False, True):
        cache = model.new_cache(72)
        context = videokv.compress(model, recipe) if inside else torch.no_grad()
        with context as kv:
            for chunk in range(4):
                step(model, cache, noise, chunk)
            back_to(cache, 2)
            outputs[inside] = [step(model, cache, -0.5 * noise, chunk) for chunk in (2, 3, 4)]
            if inside:
                assert kv.caches[0].length == 48
    for ours, theirs in zip(outputs[True], outputs[False], strict=True):
        if recipe == "bf16":
            assert torch.equal(ours, theirs)
        assert float((ours - theirs).norm() / theirs.norm()) < 0.01


def test_going_back_into_a_packed_chunk_is_refused():
    model, noise = seeded(fake.CausalWanModel(size=32)), fake.noise()
    cache = model.new_cache(72)
    with videokv.compress(model, "rtn-8bit"):
        for chunk in range(3):
            step(model, cache, noise, chunk)
        for layer in cache:
            layer["global_end_index"].fill_(4)
            layer["local_end_index"].fill_(4)
        with pytest.raises(ValueError, match="cuts the packed chunk"):
            model(noise[:, :, 1:4], t=0.0, kv_cache=cache, current_start=4)


def test_batch_rows_of_guidance_in_one_cache():
    """Both branches in one batch: one cache, rows independent of each other."""
    model = seeded(fake.CausalWanModel(size=32))
    noise = fake.noise()
    with videokv.compress(model, "rtn-2bit+calibrated") as kv:
        both = fake.rollout(model, model.new_cache(36, 2), torch.cat([noise, -noise]))
        alone = fake.rollout(model, model.new_cache(36), noise)
    assert torch.allclose(both[:1], alone, atol=1e-5) and len(kv.caches) == 1


def test_recorded_mass():
    model = seeded(fake.CausalWanModel(size=32))
    with videokv.compress(model, "rtn-2bit", record_mass=True) as kv:
        fake.rollout(model, model.new_cache(36), fake.noise())
    assert 0 < kv.mass().mean < 1 and set(kv.mass().layers) == {0, 1}


def test_a_cache_that_is_quantized_already_is_refused():
    model = seeded(fake.CausalWanModel())
    cache = model.new_cache(36)
    cache[0]["k"] = ["blocks"]
    with (
        videokv.compress(model, "bf16"),
        pytest.raises(ValueError, match="layer 0: expected a cache tensor.*quantized already"),
    ):
        step(model, cache, fake.noise(), 0)
