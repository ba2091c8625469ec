"""The dict-of-buffers contract, on a clean-room fake of Self-Forcing."""

import gc
import weakref

import pytest
import torch
from fakes import self_forcing as fake
from fakes.common import seeded

import videokv
from videokv.adapters.proxy import Buffer
from videokv.adapters.verify import bad_layers

WINDOWS = {"whole": (72, 0), "rolling": (36, 0), "sink": (48, 3), "odd": (43, 3)}


def model_of(sink=0, **sizes):
    return seeded(fake.CausalWanModel(sink_size=sink, **sizes))


def run(model, rows, noise, recipe=None, **how):
    cache = model.new_cache(rows, noise.shape[0], noise.dtype)
    if recipe is None:
        return fake.rollout(model, cache, noise, **how)
    with videokv.compress(model, recipe, **how.pop("options", {})) as kv:
        return fake.rollout(model, cache, noise, **how), kv


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(3, 3), (6, 2)], ids=["mha", "gqa"])
def test_bf16_is_bit_equal(window, dtype, heads):
    rows, sink = WINDOWS[window]
    model = model_of(sink, heads=heads[0], kv_heads=heads[1]).to(dtype)
    noise = fake.noise(batch=2).to(dtype)
    expected = run(model, rows, noise)
    ours, kv = run(model, rows, noise, "bf16")
    assert torch.equal(ours, expected) and expected.float().std() > 0.1
    assert kv.encode_calls == 0


@pytest.mark.parametrize("window", WINDOWS)
def test_error_falls_with_bits(window):
    rows, sink = WINDOWS[window]
    model = model_of(sink)
    noise = fake.noise()
    expected = run(model, rows, noise)
    errors = []
    for bits in (2, 4, 8):
        ours, _ = run(model, rows, noise, f"rtn-{bits}bit", options={"group_size": 16})
        errors.append(float((ours - expected).norm() / expected.norm()))
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.01


@pytest.mark.parametrize("name", ["quarot-2bit+taylor", "rtn-2bit+calibrated", "kivi-2bit"])
def test_other_recipes_run(name):
    ours, kv = run(model_of(3, size=32), 48, fake.noise(), name)
    assert bool(torch.isfinite(ours).all()) and kv.memory().ratio > 1


def test_each_chunk_is_encoded_once():
    noise = fake.noise(chunks=6)
    _, kv = run(model_of(), 72, noise, "rtn-2bit", options={"group_size": 16})
    assert kv.encode_calls == 2 * 2 * 5  # keys and values, two layers; the newest is in progress
    _, kv = run(model_of(3), 48, noise, "rtn-2bit", options={"group_size": 16})
    assert kv.encode_calls == 2 * 2 * 4  # and the sink stays dense


def test_corrections_touch_packed_keys_only():
    model, seen = model_of(3), []
    with videokv.compress(model, "rtn-2bit+taylor", group_size=16) as kv:
        cache = model.new_cache(48)
        fake.rollout(
            model, cache, fake.noise(), on_chunk=lambda *_: seen.append(kv.caches[0].view(1))
        )
        tail = kv.caches[0].view(1, tail=True)
    sink, *packed = seen[-1]
    assert sink.noise == () and len(packed) >= 2 and all(part.noise for part in packed)
    assert tail[-1].noise == () and tail[0].keys.equal(sink.keys)


def test_guidance_branches_have_a_cache_each():
    model, noise = model_of(), fake.noise()
    expected = [run(model, 36, noise), run(model, 36, 2 * noise)]
    caches = [model.new_cache(36), model.new_cache(36)]
    with videokv.compress(model, "bf16") as kv:
        for first in range(0, 18, 3):  # one chunk of each branch in turn
            for number, cache in enumerate(caches):
                chunk = (1 + number) * noise[:, :, first : first + 3]
                for t in (0.7, 0.3, 0.0):
                    out = model(chunk, t=t, kv_cache=cache, current_start=4 * first)
                    if t:
                        chunk = torch.tanh(out) + 0.1 * t * chunk
                assert torch.equal(out, expected[number][:, :, first : first + 3])
        assert len(kv.caches) == 2


def test_a_new_video_in_the_same_buffers_starts_from_nothing():
    model, noise = model_of(), fake.noise()
    pipeline = fake.Pipeline(model, 36)
    fresh = {}
    for name in ("bf16", "quantwm-2bit"):
        sizes = {} if name == "bf16" else {"group_size": 16}
        with videokv.compress(pipeline, name, **sizes):
            fresh[name] = pipeline(noise)
        pipeline.kv_cache1 = None
        with videokv.compress(pipeline, name, **sizes):
            pipeline(2 * noise[:, :, :9])  # stops mid-run
            again = pipeline(noise)
        assert torch.equal(again, fresh[name])
        pipeline.kv_cache1 = None


def test_a_pipeline_allocates_no_dense_rows():
    pipeline = fake.Pipeline(model_of(), 36)
    with videokv.compress(pipeline, "bf16"):
        pipeline._initialize_kv_cache(1, torch.float32, "cpu")
        assert pipeline.kv_cache1[0]["k"].is_meta
        assert not pipeline.kv_cache1[0]["local_end_index"].is_meta
        ours = pipeline(fake.noise())
    assert torch.equal(ours, run(pipeline.generator, 36, fake.noise()))


def test_dense_rows_are_freed():
    model = model_of()
    cache = model.new_cache(36)
    dead = [weakref.ref(layer[name]) for layer in cache for name in "kv"]
    with videokv.compress(model, "rtn-2bit", group_size=16) as kv:
        fake.rollout(model, cache, fake.noise(chunks=2))
        assert all(ref() is None for ref in dead)
        packed = weakref.ref(kv.caches[0])
        del cache
        cache = model.new_cache(36)
        fake.rollout(model, cache, fake.noise(chunks=2))
        assert packed() is None


def test_memory_is_flat_once_the_window_is_full():
    model, held = model_of(3), []
    cache = model.new_cache(60)
    with videokv.compress(model, "rtn-2bit", group_size=16) as kv:
        fake.rollout(
            model,
            cache,
            fake.noise(chunks=40),
            steps=(),
            on_chunk=lambda *_: held.append(kv.memory().held_bytes),
        )
    assert len(held) == 40 and len(set(held[6:])) == 1 and held[6] < 60 * 2 * 3 * 16 * 4 * 2


def test_restored_on_exit_and_after_an_exception():
    model, noise = model_of(), fake.noise()
    attention, forward = fake.attention, model.forward
    cache = model.new_cache(36)
    with pytest.raises(RuntimeError), videokv.compress(model, "bf16"):
        fake.rollout(model, cache, noise[:, :, :9])
        raise RuntimeError
    assert fake.attention is attention and model.forward == forward
    assert "forward" not in vars(model)
    assert not any(isinstance(layer[name], Buffer) for layer in cache for name in "kv")
    reference = model.new_cache(36)
    fake.rollout(model, reference, noise[:, :, :9])
    for ours, theirs in zip(cache, reference, strict=True):
        assert torch.equal(ours["k"], theirs["k"]) and torch.equal(ours["v"], theirs["v"])


def test_rows_beyond_the_buffer_are_refused():
    model = model_of()
    cache = model.new_cache(36)
    with videokv.compress(model, "bf16"):
        fake.rollout(model, cache, fake.noise(chunks=1))
        with pytest.raises(ValueError, match="12 rows were assigned to 6.*buffer is too small"):
            cache[0]["k"][:, 30:42] = torch.zeros(1, 12, 3, 16)


def test_what_is_not_served_is_refused():
    model = model_of()
    with (
        pytest.raises(ValueError, match="moves its window itself"),
        videokv.compress(model, "rtn-2bit", window_chunks=2),
    ):
        pass
    cache = model.new_cache(36)
    with videokv.compress(model, "bf16"):
        fake.rollout(model, cache, fake.noise(chunks=1))
        keys, values = cache[0]["k"], cache[0]["v"]
        with pytest.raises(ValueError, match="torch.add.*not supported"):
            torch.add(keys, 1)
        with pytest.raises(ValueError, match="index"):
            keys[0]
        with pytest.raises(AttributeError, match="no 'mean'"):
            keys.mean()
        with pytest.raises(ValueError, match="never written"):
            fake.attention(torch.zeros(1, 2, 3, 16), keys[:, :20], values[:, :20])
        with pytest.raises(ValueError, match="causal = True"):
            fake.attention(torch.zeros(1, 2, 3, 16), keys[:, :4], values[:, :4], causal=True)


def test_a_recipe_that_does_not_fit_leaves_the_model_as_it_was():
    model = model_of()
    cache = model.new_cache(36)
    with (
        pytest.raises(ValueError, match="group_size"),
        videokv.compress(model, "rtn-2bit", group_size=64),
    ):
        fake.rollout(model, cache, fake.noise())
    assert all(type(layer[name]) is torch.Tensor for layer in cache for name in "kv")
    assert torch.equal(fake.rollout(model, cache, fake.noise()), run(model, 36, fake.noise()))


def test_not_finite_keys_name_the_layer():
    model = model_of()
    model.blocks[1].self_attn.k.weight.data[0, 0] = float("nan")
    with (
        videokv.compress(model, "rtn-2bit", group_size=16),
        pytest.raises(ValueError, match="keys of layer 1 hold NaN"),
    ):
        run(model, 36, fake.noise())


def test_verify_names_a_bad_layer():
    model = model_of(3, layers=3, size=32)
    with videokv.compress(model, "rtn-8bit", record_dense=True) as kv:
        with pytest.raises(ValueError, match="run the model"):
            kv.verify()
        fake.rollout(model, model.new_cache(48), fake.noise())
        checks = kv.verify()
        assert [check.layer for check in checks] == [0, 1, 2] and bad_layers(checks) == []
        assert max(check.error for check in checks) < 0.01
    for part in (model.blocks[1].self_attn.k, model.blocks[1].self_attn.q):
        part.weight.data[5] *= 300 if part is model.blocks[1].self_attn.k else 0
    with videokv.compress(model, "rtn-4bit", record_dense=True) as kv:
        fake.rollout(model, model.new_cache(48), fake.noise())
        with pytest.warns(UserWarning, match=r"in 1 of 3 layers.*layer 1: error .* BAD|layer 1"):
            assert bad_layers(kv.verify()) == [1]
    with videokv.compress(model, "rtn-4bit") as kv:
        fake.rollout(model, model.new_cache(48), fake.noise())
        with pytest.raises(ValueError, match="record_dense=True"):
            kv.verify()
    gc.collect()
