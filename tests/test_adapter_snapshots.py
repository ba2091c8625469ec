"""Models that re-encode their history for every chunk, on clean-room fakes."""

import gc
import weakref

import pytest
import torch
import watching
from fakes import hy_worldplay, hy_worldplay_wan, longcat
from fakes.common import seeded

import videokv
from videokv.adapters.history import Handle

LAYERS, SIZE = 2, 16


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def longcat_of(dtype=torch.float32, size=SIZE):
    model = seeded(longcat.LongCatVideoTransformer3DModel(size=size)).to(dtype)
    pipeline = longcat.Pipeline(model)
    clean, noise = randn(1, 12, 24).to(dtype), randn(1, 4, 24, seed=1).to(dtype)
    return pipeline, lambda: pipeline(clean, noise), 3


def worldplay_of(fake, dtype=torch.float32, size=SIZE):
    model = seeded(fake.Transformer(size=size)).to(dtype)
    pipeline = fake.Pipeline(model)
    prompt, noise = randn(1, 5, 24).to(dtype), randn(1, 12, 24, seed=1).to(dtype)
    return pipeline, lambda: pipeline(prompt, noise), 2


FAKES = {
    "longcat": longcat_of,
    "worldplay": lambda *a, **k: worldplay_of(hy_worldplay, *a, **k),
    "worldplay-wan": lambda *a, **k: worldplay_of(hy_worldplay_wan, *a, **k),
}
BRANCHES = {"longcat": 1, "worldplay": 2, "worldplay-wan": 1}


@pytest.mark.parametrize("name", FAKES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bf16_is_bit_equal_and_the_model_is_restored(name, dtype):
    model, run, _ = FAKES[name](dtype)
    expected = run()
    with videokv.compress(model, "bf16") as kv:
        ours = run()
    assert torch.equal(ours, expected) and expected.float().std() > 0.1
    assert len(kv.caches) == BRANCHES[name] and kv.encode_calls == 0
    assert torch.equal(run(), expected)


@pytest.mark.parametrize("name", FAKES)
def test_a_new_video_mid_run(name):
    model, run, _ = FAKES[name]()
    expected = run()
    with videokv.compress(model, "bf16"):
        with pytest.raises(KeyboardInterrupt), watching.broken_off(after=LAYERS + 1):
            run()
        assert torch.equal(run(), expected) and torch.equal(run(), expected)


@pytest.mark.parametrize("name", FAKES)
def test_rows_of_each_rebuild_are_freed(name):
    model, run, rebuilds = FAKES[name]()
    with watching.written_rows() as rows, videokv.compress(model, "rtn-2bit", group_size=16):
        run()
        assert len(rows) == LAYERS * rebuilds * BRANCHES[name] and rows.alive() == 0


@pytest.mark.parametrize("name", FAKES)
def test_error_falls_with_bits(name):
    model, run, _ = FAKES[name]()
    expected, errors = run(), []
    for bits in (2, 4, 8):
        with videokv.compress(model, f"rtn-{bits}bit", group_size=16):
            errors.append(float((run() - expected).norm() / expected.norm()))
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.01


@pytest.mark.parametrize("name", FAKES)
@pytest.mark.parametrize("recipe", ["quarot-2bit+taylor", "rtn-2bit+calibrated", "rtn-2bit-psac8"])
def test_corrected_recipes_are_exact_in_every_basis(name, recipe):
    """Rotated and projected bases too: what is packed are the keys that attention reads."""
    model, run, _ = FAKES[name](size=32)
    with videokv.compress(model, recipe) as kv:
        assert bool(torch.isfinite(run()).all())
    assert kv.memory().ratio > 1


@pytest.mark.parametrize("name", FAKES)
def test_each_rebuild_is_encoded_once_and_statistics_stay(name):
    model, run, rebuilds = FAKES[name]()
    with videokv.compress(model, "rtn-2bit-psac8+calibrated", group_size=16) as kv:
        run()
        assert kv.encode_calls == 2 * LAYERS * rebuilds * BRANCHES[name]
        for cache in kv.caches:
            for state in cache.layer_states().values():
                assert state.moment.count > state.length * (rebuilds > 1)


@pytest.mark.parametrize("name", FAKES)
def test_corrections_touch_the_history_only(name):
    model, run, _ = FAKES[name]()
    seen, original = [], videokv.recipes.attend

    def spy(query, segments, **options):
        seen.append([bool(segment.noise) for segment in segments])
        return original(query, segments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("videokv.recipes.attend", spy)
        with videokv.compress(model, "rtn-2bit+taylor", group_size=16):
            run()
    assert seen and all(noisy == [True, False] for noisy in seen)


def test_dense_rows_are_freed_and_handles_serve_inside_only():
    pipeline, run, _ = longcat_of()
    dead = []
    original = longcat.Attention.forward

    def watched(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        if isinstance(out, tuple):
            dead.extend(weakref.ref(t) for t in out[1])
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(longcat.Attention, "forward", watched)
        with videokv.compress(pipeline, "rtn-2bit", group_size=16):
            run()
            gc.collect()
            assert dead and all(ref() is None for ref in dead)
    handle = pipeline.kv[0][0]
    assert isinstance(handle, Handle) and handle.shape == (1, 3, 12, 16)
    with pytest.raises(ValueError, match="serves inside it only"):
        torch.cat([handle, handle])
    with pytest.raises(AttributeError, match="no 'repeat'"):
        handle.repeat(2, 1, 1, 1)


def test_what_longcat_cannot_have_is_refused():
    pipeline, run, _ = longcat_of()
    with videokv.compress(pipeline, "bf16"):
        with pytest.raises(ValueError, match="offloading"):
            pipeline.dit(randn(1, 12, 24), return_kv=True, offload_kv_cache=True)
        pipeline.dit.blocks[1].attn.enable_bsa = True
        with pytest.raises(ValueError, match="layer 1: block-sparse"):
            run()
    pipeline, run, _ = longcat_of()
    with (
        videokv.compress(pipeline, "rtn-2bit", record_mass=True, group_size=16),
        pytest.raises(ValueError, match="record_mass"),
    ):
        run()


def test_sequence_parallelism_is_refused(monkeypatch):
    model, run, _ = FAKES["worldplay"]()
    state = type("State", (), {"sp_enabled": True})
    monkeypatch.setattr(hy_worldplay, "get_parallel_state", state)
    with videokv.compress(model, "bf16"), pytest.raises(ValueError, match="sequence parallelism"):
        run()


def test_a_workspace_decodes_each_rebuild_once():
    model, run, rebuilds = FAKES["worldplay"]()
    with videokv.compress(model, "rtn-2bit", group_size=16, workspace_bytes=10**6) as kv:
        run()
    assert sum(cache.decode_calls for cache in kv.caches) == 2 * LAYERS * 2
    with videokv.compress(model, "rtn-2bit", group_size=16, record_mass=True) as kv:
        run()
    assert 0 < kv.mass().mean < 1


def test_memory_is_that_of_the_last_rebuild():
    pipeline = longcat.Pipeline(seeded(longcat.LongCatVideoTransformer3DModel(size=32)))
    held = []
    with videokv.compress(pipeline, "rtn-2bit") as kv:
        for _ in range(40):
            pipeline(randn(1, 12, 24), randn(1, 4, 24, seed=1), segments=1, steps=1)
            held.append(kv.memory().held_bytes)
    assert len(set(held)) == 1


@pytest.mark.parametrize("name", FAKES)
def test_verify_compares_with_dense_attention(name):
    model, run, _ = FAKES[name]()
    for recipe, below in [("bf16", 1e-6), ("rtn-8bit", 0.01)]:
        options = {"group_size": 16} if recipe != "bf16" else {}
        with videokv.compress(model, recipe, record_dense=True, **options) as kv:
            run()
        checks = kv.verify()
        layers = [(branch, layer) for branch in range(BRANCHES[name]) for layer in range(LAYERS)]
        assert [(check.branch, check.layer) for check in checks] == layers
        assert all(check.ok and check.error < below for check in checks)


@pytest.mark.parametrize("name", FAKES)
def test_what_does_not_fit_is_refused_at_compress(name):
    model, run, _ = FAKES[name]()
    expected = run()
    for recipe, options, message in [
        ("rtn-2bit", {"group_size": 64}, "layer 0: group_size 64 does not divide head_dim 16; use"),
        ("rtn-2bit", {"window_chunks": 2, "group_size": 16}, "moves its window itself"),
    ]:
        with pytest.raises(ValueError, match=message), videokv.compress(model, recipe, **options):
            pass
    assert torch.equal(run(), expected)
