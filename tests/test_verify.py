"""The comparison of a step on the packed history with the dense one, and the cache that records."""

import pytest
import torch

import videokv
from videokv.adapters.verify import RecordingCache, bad_layers


def rows(tokens, *, seed, heads=2, queries=4, size=32, value_size=48, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def made(count, width):
        return torch.randn(2, count, tokens, width, generator=generator).to(dtype)

    return made(queries, size), made(heads, size), made(heads, value_size)


def filled(name, *, chunks=3, tokens=63, layers=2, dtype=torch.float32, **options):
    recipe = videokv.recipe(name, group_size=16) if name != "bf16" else videokv.recipe(name)
    cache = RecordingCache(recipe, layers=layers, **options)
    for number in range(chunks):
        for layer in range(layers):
            query, key, value = rows(tokens, seed=10 * number + layer, dtype=dtype)
            cache.write(layer, number * tokens, key, value, query)
            cache.attend(layer, query, key, value, causal=number == 1)
        cache.commit((number + 1) * tokens)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_falls_with_bits(dtype):
    errors = [
        filled(name, dtype=dtype).check()[0].error
        for name in ("rtn-2bit", "rtn-4bit", "rtn-8bit", "bf16")
    ]
    assert errors[0] > 2 * errors[1]
    assert errors[-1] < (1e-6 if dtype == torch.float32 else 1e-2)
    assert errors[1] > errors[2]


def test_verify_is_the_plain_formula():
    """Against softmax written out in float64."""
    cache = filled("rtn-4bit", chunks=2, layers=1)
    query, key, value = (t.double() for t in rows(63, seed=10))
    history = [rows(63, seed=0)[1:], rows(63, seed=10)[1:]]
    keys = torch.cat([pair[0] for pair in history], 2)
    values = torch.cat([pair[1] for pair in history], 2)

    def attention(past_keys, past_values):
        k = torch.cat([past_keys.double(), key], 2).repeat_interleave(2, 1)
        v = torch.cat([past_values.double(), value], 2).repeat_interleave(2, 1)
        return (query @ k.transpose(-1, -2) * 0.2).softmax(-1) @ v

    segments = cache.view(0)
    found = attention(
        torch.cat([s.keys for s in segments], 2), torch.cat([s.values for s in segments], 2)
    )
    true = attention(keys, values)
    cache.attend(0, *rows(63, seed=10), 0.2)
    (check,) = cache.check(0.5)
    assert check.error == pytest.approx(float((found - true).norm() / true.norm()), rel=1e-4)
    assert check.ok and check.tokens == 126 and "ok" in str(check)


def step(cache, tokens=63, seed=0):
    layers = range(len(cache.layer_states()))
    for layer in layers:
        query, key, value = rows(tokens, seed=seed + layer)
        cache.attend(layer, query, key, value)


def test_a_bad_layer_is_named():
    cache = filled("rtn-4bit", layers=5)
    state = cache.layer_states()[3]
    state.chunks[1].keys.packed.zero_()
    step(cache)
    assert bad_layers(cache.check()) == [3]
    state.chunks[1].keys.steps.view(torch.uint8).fill_(0x7F)  # NaN
    step(cache)
    assert cache.check()[3].error == float("inf")


def test_the_record_follows_crop_forget_and_rows():
    cache = filled("bf16")
    cache.forget(40)
    cache.crop(150)
    step(cache)
    assert [check.tokens for check in cache.check()] == [110, 110]
    assert max(check.error for check in cache.check()) < 1e-6
    cache.select_batch([1, 0])
    step(cache, 5, seed=3)
    assert max(check.error for check in cache.check()) < 1e-6
    cache.reset()
    assert cache.check() == ()


def test_bad_arguments():
    cache = filled("rtn-4bit")
    with pytest.raises(ValueError, match="tolerance must be positive"):
        cache.check(0.0)
    with pytest.raises(ValueError, match="starts empty"):
        cache.restore({}, length=3)
