"""MAGI-1's contract (several chunks in flight, grouped heads) on a clean-room fake."""

import pytest
import torch
from fakes import magi as fake
from fakes.common import seeded
from watching import broken_off, written_rows

import videokv


def setting(dtype=torch.float32, **sizes):
    model = seeded(fake.Model(**sizes)).to(dtype)
    noise = torch.randn(24, 24, generator=torch.Generator().manual_seed(2)).to(dtype)
    return model, noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_range", [None, 2, 3], ids=str)
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_bf16_is_bit_equal(dtype, kv_range, in_flight):
    model, noise = setting(dtype)
    expected = fake.rollout(model, noise, in_flight=in_flight, kv_range=kv_range)
    with videokv.compress(model, "bf16") as kv:
        ours = fake.rollout(model, noise, in_flight=in_flight, kv_range=kv_range)
    assert torch.equal(ours, expected) and expected.float().std() > 0.1
    assert kv.caches[0].length == 20
    assert torch.equal(fake.rollout(model, noise, in_flight=in_flight, kv_range=kv_range), expected)


def test_error_falls_with_bits_and_each_chunk_is_encoded_once():
    model, noise = setting()
    expected, errors = fake.rollout(model, noise), []
    for bits in (2, 4, 8):
        with videokv.compress(model, f"rtn-{bits}bit", group_size=16) as kv:
            errors.append(float((fake.rollout(model, noise) - expected).norm() / expected.norm()))
        assert kv.encode_calls == 2 * 2 * 5
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.01


@pytest.mark.parametrize("name", ["rtn-2bit+calibrated", "quarot-2bit+taylor", "quantwm-2bit"])
def test_other_recipes_run(name):
    model, noise = setting(size=64)
    with videokv.compress(model, name) as kv:
        assert bool(torch.isfinite(fake.rollout(model, noise)).all())
    assert kv.encode_calls == 2 * 2 * 5


def test_a_second_video_starts_from_nothing():
    model, noise = setting()
    with videokv.compress(model, "rtn-2bit", group_size=16) as kv:
        first = fake.rollout(model, noise)
        assert torch.equal(fake.rollout(model, noise), first) and len(kv.caches) == 1


def test_what_is_not_served_is_refused():
    model, noise = setting()
    model.layers[1].engine_config.cp_strategy = "cp_ulysses"
    with pytest.raises(ValueError, match="cp_ulysses"), videokv.compress(model, "bf16"):
        pass
    model, noise = setting()
    with videokv.compress(model, "bf16"):
        params = fake.InferenceParams(24)
        params.update_kv_cache = True
        for point in (0, 1):
            model(noise[:4], params, fake.meta_of(point, point + 1, 4), 0)
        with pytest.raises(ValueError, match="went back"):
            model(noise[:4], params, fake.meta_of(0, 1, 4), 0)
        with pytest.raises(ValueError, match="layer 0: commit"):
            model(noise[:4], params, fake.meta_of(5, 6, 4), 0)


@pytest.mark.parametrize("kv_range", [None, 2], ids=str)
def test_verify_compares_with_dense_attention(kv_range):
    model, noise = setting()
    for recipe, below in [("bf16", 1e-6), ("rtn-8bit", 0.01)]:
        options = {"group_size": 16} if recipe != "bf16" else {}
        with videokv.compress(model, recipe, record_dense=True, **options) as kv:
            fake.rollout(model, noise, kv_range=kv_range)
        assert [check.layer for check in kv.verify()] == [0, 1]
        assert all(check.ok and check.error < below for check in kv.verify())


def test_what_does_not_fit_is_refused_at_compress():
    model, _ = setting()
    for options, message in [
        ({"group_size": 64}, "layer 0: group_size 64 does not divide head_dim 16; use one of"),
        ({"group_size": 16, "window_chunks": 2}, "moves its window itself"),
    ]:
        with (
            pytest.raises(ValueError, match=message),
            videokv.compress(model, "rtn-2bit", **options),
        ):
            pass
    model.layers[1].model_config.num_query_groups = 4
    with (
        pytest.raises(ValueError, match="layer 1: 6 query heads are no multiple of 4 key heads"),
        videokv.compress(model, "rtn-2bit", group_size=16),
    ):
        pass


def test_corrections_touch_final_chunks_only(monkeypatch):
    model, noise = setting()
    seen, original = [], videokv.recipes.attend

    def spy(query, segments, **options):
        seen.append([bool(segment.noise) for segment in segments])
        return original(query, segments, **options)

    monkeypatch.setattr("videokv.recipes.attend", spy)
    with videokv.compress(model, "rtn-2bit+taylor", group_size=16, sink_chunks=1):
        fake.rollout(model, noise)
    assert any(any(noisy) for noisy in seen) and not any(noisy[-1] for noisy in seen)
    longest = max(seen, key=len)
    assert longest[:2] == [False, True]  # the first chunk is a sink


def test_dense_rows_are_freed_and_a_video_can_break_off():
    model, noise = setting()
    expected = fake.rollout(model, noise)
    with videokv.compress(model, "rtn-2bit", group_size=16), written_rows() as rows:
        fake.rollout(model, noise)
        assert len(rows) > 12 and rows.alive() <= 2  # the newest chunk of two layers
    with videokv.compress(model, "bf16"):
        with pytest.raises(KeyboardInterrupt), broken_off(after=5):
            fake.rollout(model, noise)
        assert torch.equal(fake.rollout(model, noise), expected)
