"""compress() on tiny random models of diffusers, run by the loops of their own pipelines."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers", minversion="0.42", reason="needs diffusers 0.42")
pytest.importorskip("transformers", reason="the pipelines of diffusers need transformers")

import diffusers_models as tiny  # noqa: E402
import watching  # noqa: E402

import videokv  # noqa: E402
from videokv.adapters import anyflow_far, skyreels_v2, verify  # noqa: E402
from videokv.adapters.diffusers_models import OurProcessor  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:attention runs on backend 'eager'"),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-2}


def error(found, expected) -> float:
    return float((found - expected).double().norm() / expected.double().norm())


class AnyFlow:
    """blocks of a model, one video by the pipeline, and tokens held after it."""

    make, pipeline, video = tiny.anyflow, tiny.anyflow_pipeline, tiny.anyflow_video
    held = 1 * 4 + 2 * 16 + 1 * 16  # frames x tokens: one chunk compressed, two full

    @staticmethod
    def blocks(model):
        return model.blocks


class Sana:
    make, pipeline, video = tiny.sana, tiny.sana_pipeline, tiny.sana_video
    held = 6 * 16  # five frames kept for the last block, and its own one

    @staticmethod
    def blocks(model):
        return model.transformer_blocks


PIPELINES = pytest.mark.parametrize("kind", [AnyFlow, Sana])


@pytest.fixture(scope="module")
def expected():
    """What the pipelines give without us, each computed once."""
    return {kind: kind.video(kind.pipeline(kind.make())) for kind in (AnyFlow, Sana)}


@PIPELINES
def test_bf16_recipe_equals_the_pipeline_alone(kind, expected):
    model = kind.make()
    with videokv.compress(kind.pipeline(model), "bf16") as kv:  # found by its transformer
        found = kind.video(kind.pipeline(model))
    assert error(found, expected[kind]) < TOLERANCE[torch.float32]
    assert kv.caches[0].visible_tokens == kind.held
    assert torch.equal(kind.video(kind.pipeline(model)), expected[kind])


@PIPELINES
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_bf16_recipe_in_other_dtypes(kind, dtype):
    if (kind, dtype) == (Sana, torch.float64):
        pytest.skip("the refiner turns keys in float32")
    pipeline = kind.pipeline(kind.make(dtype))
    plain = kind.video(pipeline)
    with videokv.compress(pipeline, "bf16"):
        assert error(kind.video(pipeline), plain) < TOLERANCE[dtype]


@PIPELINES
def test_eight_bits_are_near_and_error_falls_with_bits(kind, expected):
    pipeline = kind.pipeline(kind.make())
    errors = []
    for bits in (2, 4, 8):
        with videokv.compress(pipeline, f"rtn-{bits}bit") as kv:
            errors.append(error(kind.video(pipeline), expected[kind]))
        assert kv.memory().bits_per_element < bits + 1.01
    assert errors[0] > 2 * errors[1] > 4 * errors[2] > 0
    assert errors[2] < 0.01


@PIPELINES
@pytest.mark.parametrize("recipe", ["kivi-2bit+taylor", "quarot-2bit+calibrated", "rtn-2bit+exact"])
def test_corrections_touch_cached_keys_only(kind, recipe, monkeypatch):
    """The last segment, current rows (with the sink or the padding), carries no noise."""
    seen = []
    attend = videokv.Recipe.attend

    def spy(self, query, segments, **options):
        seen.append([bool(segment.noise) for segment in segments])
        return attend(self, query, segments, **options)

    monkeypatch.setattr(videokv.Recipe, "attend", spy)
    pipeline = kind.pipeline(kind.make())
    with videokv.compress(pipeline, recipe, sink_chunks=1, recent_chunks=0):
        kind.video(pipeline)
    assert all(not noisy[-1] for noisy in seen)
    longest = max(seen, key=len)
    if kind is AnyFlow:  # the first chunk is a sink: dense
        assert longest == [False, True, True, False]
    else:
        assert longest[-2:] == [True, False]


@PIPELINES
def test_chunks_are_encoded_once_and_their_rows_freed(kind):
    """AnyFlow once a rebuild of its history, the refiner once a block; not once a step."""
    pipeline = kind.pipeline(kind.make())
    with watching.written_rows() as rows, videokv.compress(pipeline, "rtn-2bit") as kv:
        kind.video(pipeline)
        assert len(rows) > 4 and rows.alive() == 0
    # keys and values of two layers; three rebuilds of 1, 2 and 3 chunks, or four blocks
    assert kv.encode_calls == 2 * 2 * (1 + 2 + 3 if kind is AnyFlow else len(rows) // 2)


@PIPELINES
def test_a_new_video_mid_run(kind, expected):
    pipeline = kind.pipeline(kind.make())
    with videokv.compress(pipeline, "bf16"):
        with pytest.raises(KeyboardInterrupt), watching.broken_off(after=3):
            kind.video(pipeline)
        assert error(kind.video(pipeline), expected[kind]) < TOLERANCE[torch.float32]


def test_refiner_memory_is_flat_over_forty_blocks():
    pipeline, held = tiny.sana_pipeline(tiny.sana()), {}
    for frames in (2 + 3 * 20, 2 + 3 * 40):
        with videokv.compress(pipeline, "rtn-2bit") as kv:
            tiny.sana_video(pipeline, frames=frames)
            held[frames] = kv.memory().held_bytes
    assert len(set(held.values())) == 1


def test_skyreels_blocks_are_encoded_once_and_corrected_alone(monkeypatch):
    model, seen, attend = tiny.skyreels(), [], videokv.Recipe.attend

    def spy(self, query, segments, **options):
        seen.append([bool(segment.noise) for segment in segments])
        return attend(self, query, segments, **options)

    monkeypatch.setattr(videokv.Recipe, "attend", spy)
    noise = torch.randn(1, 4, 8, 8, 8, generator=tiny.seeded())
    text = torch.randn(1, 5, 16, generator=tiny.seeded(1))
    scheduler = tiny.diffusers.FlowMatchEulerDiscreteScheduler()
    with (
        watching.written_rows() as rows,
        videokv.compress(model, "rtn-2bit+taylor", sink_chunks=1) as kv,
    ):
        skyreels_v2.sample(model, noise, text, scheduler=scheduler, steps=3)
        assert len(rows) == 2 * 3 and rows.alive() <= 2  # the sink of two layers
    assert kv.encode_calls == 2 * 2 * 2  # three of four blocks are read again, one is the sink
    assert max(seen, key=len) == [False, True, True, False]


@PIPELINES
def test_a_correction_puts_attention_mass_back(kind):
    pipeline = kind.pipeline(kind.make())
    mass = {}
    for name in ("bf16", "rtn-2bit", "rtn-2bit+calibrated"):
        with videokv.compress(pipeline, name, record_mass=True) as kv:
            kind.video(pipeline)
        mass[name] = kv.mass().mean
    assert mass["rtn-2bit"] > mass["bf16"]
    assert abs(mass["rtn-2bit+calibrated"] - mass["bf16"]) < 0.5 * (mass["rtn-2bit"] - mass["bf16"])


@PIPELINES
def test_the_model_is_restored_after_an_exception(kind, expected):
    model = kind.make()
    own = [block.attn1.processor for block in kind.blocks(model)]
    with pytest.raises(ZeroDivisionError), videokv.compress(model, "rtn-2bit"):
        assert all(isinstance(b.attn1.processor, OurProcessor) for b in kind.blocks(model))
        hook = model.proj_out.register_forward_pre_hook(lambda *_: 1 / 0)
        kind.video(kind.pipeline(model))
    hook.remove()
    assert [block.attn1.processor for block in kind.blocks(model)] == own
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert torch.equal(kind.video(kind.pipeline(model)), expected[kind])


@PIPELINES
def test_each_rollout_has_a_cache_of_its_own(kind):
    pipeline = kind.pipeline(kind.make())
    with videokv.compress(pipeline, "rtn-2bit") as kv:
        first = kind.video(pipeline)
        (cache,) = kv.caches
        assert torch.equal(kind.video(pipeline), first)
        assert kv.caches != (cache,)


@PIPELINES
def test_a_model_is_compressed_once(kind):
    model = kind.make()
    with (
        videokv.compress(model, "rtn-2bit"),
        pytest.raises(ValueError, match="another videokv.compress context"),
        videokv.compress(model, "bf16"),
    ):
        pass
    assert not isinstance(kind.blocks(model)[0].attn1.processor, OurProcessor)


@pytest.mark.parametrize(
    "make", [tiny.anyflow, tiny.sana, tiny.skyreels], ids=lambda make: make.__name__
)
def test_what_does_not_fit_is_refused_at_compress(make):
    model = make()
    match = "layer 0: group_size 48 does not divide head_dim 32"
    with (
        pytest.raises(ValueError, match=match),
        videokv.compress(model, "rtn-2bit", group_size=48),
    ):
        pass
    with (
        pytest.raises(ValueError, match="weights are torch.float64"),
        videokv.compress(model.double(), "rtn-2bit"),
    ):
        pass


@PIPELINES
def test_verify_names_the_layer_that_stands_out(kind):
    model = kind.make(num_layers=3)
    pipeline = kind.pipeline(model)
    with videokv.compress(pipeline, "rtn-4bit", record_dense=True) as kv:
        kind.video(pipeline)
        assert [check.layer for check in kv.verify()] == [0, 1, 2]
        assert verify.bad_layers(kv.verify()) == []
        with pytest.warns(UserWarning, match="in 3 of 3 layers"):
            assert verify.bad_layers(kv.verify(1e-9)) == [0, 1, 2]
    with torch.no_grad():  # R09: one channel of the keys of a layer is far off
        kind.blocks(model)[1].attn1.norm_k.weight[5::32] *= 300
        kind.blocks(model)[1].attn1.norm_q.weight[5::32] *= 0
    with videokv.compress(pipeline, "rtn-4bit", record_dense=True) as kv:
        kind.video(pipeline)
        with pytest.warns(UserWarning, match="in 1 of 3 layers.*layer 1: error .*BAD"):
            assert verify.bad_layers(kv.verify()) == [1]


# -- AnyFlow-FAR -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"batch": 2}, {"guidance": 4.0}], ids=["batch", "guidance"])
def test_anyflow_batches_and_guidance(options):
    pipeline = tiny.anyflow_pipeline(tiny.anyflow())
    plain = tiny.anyflow_video(pipeline, **options)
    with videokv.compress(pipeline, "bf16"):
        found = tiny.anyflow_video(pipeline, **options)
    assert error(found, plain) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("limit", [2, 3, 4])
def test_anyflow_full_and_compressed_chunks(limit):
    config = tiny.anyflow(full_chunk_limit=limit).config
    tokens = anyflow_far.history_tokens([1, 3, 2, 2], (8, 12), config)
    assert tokens == tuple(
        frames * (24 if number >= 4 - (limit - 1) else 6)
        for number, frames in enumerate([1, 3, 2, 2])
    )


def test_anyflow_dense_tensors_are_let_go():
    """The pipeline's tensors would be as large as the cache that we spare."""
    model = tiny.anyflow()
    entry = {"full_cache": torch.zeros(2, 1, 3, 96, 32), "compressed_cache": torch.zeros(1)}
    kv_cache = {layer: dict(entry) for layer in range(2)}
    flag = {"num_cached_chunks": 0, "is_cache_step": True}
    times = torch.zeros(1, 2)
    call = {
        "hidden_states": torch.randn(1, 2, 4, 8, 8, generator=tiny.seeded()),
        "timestep": times,
        "r_timestep": times,
        "encoder_hidden_states": torch.zeros(1, 5, 16),
        "chunk_partition": [2],
        "kv_cache": kv_cache,
        "kv_cache_flag": flag,
    }
    with videokv.compress(model, "rtn-2bit") as kv, torch.no_grad():
        model(**call)
        assert [list(entry) for entry in kv_cache.values()] == [["videokv"]] * 2
        assert kv.caches[0].length == 32
        call["kv_cache_flag"] = {"num_cached_chunks": 3, "is_cache_step": False}
        with pytest.raises(ValueError, match="reads a history of"):
            model(**{**call, "chunk_partition": [2, 2, 2, 2]})
        with pytest.raises(ValueError, match="3 chunks that were encoded outside"):
            model(**{**call, "kv_cache": {layer: dict(entry) for layer in range(2)}})


def test_anyflow_training_calls_are_the_models_own():
    model = tiny.anyflow()
    times = torch.zeros(1, 3)
    call = {
        "hidden_states": torch.randn(1, 3, 4, 8, 8, generator=tiny.seeded()),
        "timestep": times,
        "r_timestep": times,
        "encoder_hidden_states": torch.zeros(1, 5, 16),
        "chunk_partition": [1, 2],
    }
    with torch.no_grad():
        plain = model(**call).sample
        with videokv.compress(model, "rtn-2bit"):
            assert torch.equal(model(**call).sample, plain)


# -- SANA-WM refiner -------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"rope_type": "split"}, {"gated_attn": True}], ids=str)
def test_refiner_variants(options):
    pipeline = tiny.sana_pipeline(tiny.sana(**options))
    plain = tiny.sana_video(pipeline)
    with videokv.compress(pipeline, "bf16"):
        assert error(tiny.sana_video(pipeline), plain) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kept", [4, 5, 7, 100])
def test_refiner_trims_as_the_pipeline_does(kept):
    pipeline = tiny.sana_pipeline(tiny.sana())
    plain = tiny.sana_video(pipeline, kept=kept)
    with videokv.compress(pipeline, "bf16") as kv:
        assert error(tiny.sana_video(pipeline, kept=kept), plain) < TOLERANCE[torch.float32]
    held = kv.caches[0].view(0)
    assert sum(segment.keys.shape[2] for segment in held) == 16 * min(13, kept)


def test_refiner_history_from_outside_is_refused():
    model = tiny.sana()
    cache = tiny.diffusers.models.transformers.transformer_sana_wm_refiner.SanaWMRefinerKVCache(2)
    cache.get(0).store_history(torch.zeros(1, 16, 64), torch.zeros(1, 16, 64))
    angles = model.build_rotary_emb_for_absolute_positions(1, [0], 4, 4, torch.device("cpu"), 16.0)
    with videokv.compress(model, "rtn-2bit"), pytest.raises(ValueError, match="dense history"):
        model(
            torch.zeros(1, 16, 8),
            torch.zeros(1, 6, 16),
            torch.zeros(1, 16),
            angles,
            kv_cache=cache,
            kv_cache_mode="inject",
        )


# -- SkyReels-V2 -----------------------------------------------------------------------------


def sky_inputs(dtype=torch.float32, *, frames: int = 6, batch: int = 2):
    latents = torch.randn(batch, 4, frames, 8, 8, generator=tiny.seeded(), dtype=dtype)
    return latents, torch.randn(batch, 5, 16, generator=tiny.seeded(1), dtype=dtype)


@torch.no_grad()
def sky_window(model, latents, text, *, timestep: float):
    """The last two frames by the whole window, the earlier ones clean (diffusion forcing)."""
    times = torch.zeros(latents.shape[0], latents.shape[2])
    times[:, -2:] = timestep
    out = model(latents, times, text, enable_diffusion_forcing=True, return_dict=False)[0]
    return out[:, :, -2:]


@torch.no_grad()
def sky_blocks(model, latents, text, *, timestep: float):
    rollout = skyreels_v2.Rollout(model)
    *past, last = latents.split(2, 2)
    for block in past:
        rollout.denoise(block, 700.0, text)  # leaves no trace
        rollout.commit(block, text)
    return rollout.denoise(last, timestep, text)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_skyreels_blocks_equal_the_whole_window(dtype, fused):
    model = tiny.skyreels(dtype)
    inputs = sky_inputs(dtype)
    if fused:
        model.fuse_qkv_projections()
    plain = sky_window(model, *inputs, timestep=500.0)
    with videokv.compress(model, "bf16"):
        found = sky_blocks(model, *inputs, timestep=500.0)
    assert found.dtype == plain.dtype
    assert error(found, plain) < max(TOLERANCE[dtype], 1e-7)  # time embeddings are in float32


def test_skyreels_error_falls_with_bits():
    model, inputs = tiny.skyreels(), sky_inputs()
    plain = sky_window(model, *inputs, timestep=500.0)
    errors = []
    for bits in (2, 4, 8):
        with videokv.compress(model, f"rtn-{bits}bit"):
            errors.append(error(sky_blocks(model, *inputs, timestep=500.0), plain))
    assert errors[0] > 2 * errors[1] > 4 * errors[2] > 0 and errors[2] < 0.01


@torch.no_grad()
def sky_loop(model, noise, text, negative, *, steps: int, guidance: float):
    """``sample`` without a cache: the whole window at every step."""
    done = noise[:, :, :0]
    for block in noise.split(2, 2):
        scheduler = tiny.diffusers.FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(steps)
        for time in scheduler.timesteps:
            window = torch.cat([done, block], 2)
            low, high = (
                sky_window(model, window, each, timestep=float(time)) for each in (negative, text)
            )
            block = scheduler.step(low + guidance * (high - low), time, block)[0]
        done = torch.cat([done, block], 2)
    return done


def test_skyreels_sample_equals_the_loop_over_windows():
    model, (noise, text) = tiny.skyreels(), sky_inputs()
    plain = sky_loop(model, noise, text, -text, steps=3, guidance=3.0)
    with videokv.compress(model, "bf16", record_mass=True) as kv:
        found = skyreels_v2.sample(
            model,
            noise,
            text,
            scheduler=tiny.diffusers.FlowMatchEulerDiscreteScheduler(),
            steps=3,
            negative_prompt=-text,
            guidance_scale=3.0,
        )
    assert error(found, plain) < 1e-5
    assert kv.caches[0].length == 4 * 16 and 0 < kv.mass().mean < 1


def test_skyreels_refusals():
    model, (noise, text) = tiny.skyreels(rope_max_seq_len=4), sky_inputs()
    scheduler = tiny.diffusers.FlowMatchEulerDiscreteScheduler()
    with pytest.raises(ValueError, match="inside videokv.compress"):
        skyreels_v2.Rollout(model)
    with pytest.raises(ValueError, match="takes a diffusers SkyReelsV2"):
        skyreels_v2.Rollout(tiny.sana())
    with videokv.compress(model, "rtn-2bit"):
        with pytest.raises(ValueError, match="no cache of its own"):
            sky_window(model, noise[:, :, :4].contiguous(), text, timestep=500.0)
        with pytest.raises(ValueError, match=r"one block \[B, C, 2, H, W\]"):
            skyreels_v2.Rollout(model).denoise(noise, 500.0, text)
        with pytest.raises(ValueError, match="positions for 4 frames.*ends at 6"):
            sky_blocks(model, noise, text, timestep=500.0)
        with pytest.raises(ValueError, match="multiple of 2"):
            skyreels_v2.sample(model, noise[:, :, :3], text, scheduler=scheduler, steps=1)
        with pytest.raises(ValueError, match="needs negative_prompt"):
            skyreels_v2.sample(model, noise, text, scheduler=scheduler, steps=1, guidance_scale=2.0)
    bidirectional = tiny.skyreels(num_frame_per_block=1)
    with (
        pytest.raises(ValueError, match="without a block-causal mask"),
        videokv.compress(bidirectional, "rtn-2bit"),
    ):
        pass
    assert not isinstance(bidirectional.blocks[0].attn1.processor, OurProcessor)
    plain = sky_window(model, noise[:, :, :4].contiguous(), text, timestep=500.0)
    assert plain.shape == (2, 4, 2, 8, 8)  # restored
