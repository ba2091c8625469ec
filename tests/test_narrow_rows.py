"""Cached rows in E4M3, written so by the reconstruction, for the backend ``triton-fp8``."""

import dataclasses

import pytest
import torch

import videokv
from videokv.attention import attend
from videokv.attention.triton import FP8_BACKEND
from videokv.cache import cache as cache_module
from videokv.kernels.attend import reference
from videokv.kernels.reconstruct import decode_into
from videokv.protocols import Segment
from videokv.tensors import E4M3

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = [
    "rtn-2bit+taylor",
    "quarot-2bit",
    "kivi-2bit",
    "qvg-2bit",
    "quantwm-2bit+calibrated",
    "fp8",
]
ROUNDING = 4e-2  # of E4M3, in relative norm
TOKENS = 40


def rows(heads, tokens, *, seed, dtype=torch.float32):
    """Keys or values of a head of small and one of large numbers; queries (4 heads) the reverse."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, heads, tokens, 64, generator=generator)
    sizes = torch.tensor([1.0, 300.0]).repeat_interleave(heads // 2)[:, None, None]
    return (drawn / sizes if heads == 4 else drawn * sizes).to(DEVICE, dtype)


def filled(name, *, chunks=3, dtype=torch.float32, **options):
    cache = videokv.recipe(name, sink_chunks=1, backend="triton-fp8", **options).new_cache(layers=1)
    for chunk in range(chunks):
        key, value, query = (
            rows(heads, TOKENS, seed=3 * chunk + n, dtype=dtype)
            for n, heads in enumerate((2, 2, 4))
        )
        cache.write(0, chunk * TOKENS, key, value, query)
        cache.commit((chunk + 1) * TOKENS)
    return cache


def layer_of(cache):
    return cache._layers[0]


def current(dtype=torch.float32):
    return Segment(rows(2, TOKENS, seed=50, dtype=dtype), rows(2, TOKENS, seed=51, dtype=dtype))


def off(got, want):
    want = want.double()
    return float((got.double() - want).norm() / want.norm())


def widened(segment):
    """Keys and values in float32."""
    return segment.keys.float(), segment.values.float() * segment.value_scale[..., None, None]


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_cache_within_the_rounding(name):
    cache = filled(name)
    *past, last = layer_of(cache).gathered_narrow(current())
    assert not last.narrow and last.keys.dtype == torch.float32
    want = cache.view(0)
    assert len(past) == len(want)
    for narrow, wide in zip(past, want, strict=True):
        assert narrow.keys.dtype == wide.keys.dtype and narrow.values.dtype == E4M3
        assert len(narrow.noise) == len(wide.noise)
        for got, exact in zip(widened(narrow), (wide.keys, wide.values), strict=True):
            for head in range(2):  # a head of small numbers keeps its digits beside a large one
                assert off(got[:, head], exact[:, head]) < ROUNDING


def test_one_scale_a_head_fills_the_range_and_values_are_turned():
    *past, _ = layer_of(filled("rtn-2bit")).gathered_narrow(current())
    largest = torch.cat([segment.values.float() for segment in past], 2).abs().amax((2, 3))
    assert bool((largest == 448).all())
    assert past[0].values.stride(2) == 1 and past[0].values.stride(3) % 16 == 0
    call = FP8_BACKEND._call(rows(4, TOKENS, seed=1), [*past, current()], scale=0.1, causal=False)
    assert call.past.keys.data_ptr() == past[0].keys.data_ptr()  # nothing was joined again
    assert call.past.values.data_ptr() == past[0].values.data_ptr()


@pytest.mark.parametrize("name", NAMES)
def test_attention_is_that_of_converted_rows(name):
    """The same softmax as over the dense rows, up to the rounding of keys and values."""
    cache, now = filled(name), current()
    query = rows(4, TOKENS, seed=60)
    wide = [*cache.view(0), now]
    exact, exact_lse = attend(query, wide, scale=0.1, backend="eager", need_lse=True)
    errors = []
    for segments in (wide, layer_of(cache).gathered_narrow(now)):
        call = FP8_BACKEND._call(query, segments, scale=0.1, causal=False)
        assert call.fp8
        got, lse = reference.attend(call)
        errors.append((off(got, exact), float((lse - exact_lse).abs().mean())))
    (converted, converted_lse), (direct, direct_lse) = errors
    assert direct < 1.3 * converted + 1e-3 and direct_lse < 1.3 * converted_lse + 1e-3


def test_peaks_are_found_once_a_chunk_and_go_with_it():
    cache = filled("rtn-2bit")
    held = layer_of(cache)
    held.gathered_narrow(current())
    first = held.decode_calls
    held.gathered_narrow(current())
    assert held.decode_calls - first == 4  # two packed chunks of two sides: written, not looked at
    (*_, past, _), (*_, again, _) = (held.gathered_narrow(current()) for _ in range(2))
    assert past.value_scale is again.value_scale, "kept while the rows are"
    cache.crop(2 * TOKENS)
    assert len(held._peak_of) == 2
    *_, past, _ = held.gathered_narrow(current())
    assert past.value_scale is not again.value_scale


def test_forgotten_rows_and_waiting_rows():
    cache = filled("rtn-2bit", chunk_tokens=32)
    cache.forget(70)
    *past, _ = layer_of(cache).gathered_narrow(current())
    want = cache.view(0)
    for narrow, wide in zip(past, want, strict=True):
        for got, exact in zip(widened(narrow), (wide.keys, wide.values), strict=True):
            assert off(got, exact) < ROUNDING


@pytest.mark.parametrize("value", [0.0, 1e-35, 1e30])
def test_extreme_heads(value):
    cache = videokv.recipe("bf16", backend="triton-fp8").new_cache(layers=1)
    x = torch.full((1, 2, 8, 16), value, device=DEVICE)
    cache.write(0, 0, x, x)
    cache.commit(8)
    past, _ = layer_of(cache).gathered_narrow(Segment(x, x))
    for got in widened(past):
        torch.testing.assert_close(got, x, rtol=1e-6, atol=1e-30)


def test_decode_into_saturates():
    chunk = layer_of(filled("rtn-2bit")).state.chunks[1].keys
    out = torch.empty(chunk.shape, device=DEVICE, dtype=E4M3)
    decode_into(chunk, out)
    want = chunk.decode(torch.float32).clamp(-448, 448).to(E4M3)
    assert torch.equal(out.view(torch.uint8), want.view(torch.uint8))


def test_refusals():
    *past, now = layer_of(filled("rtn-2bit")).gathered_narrow(current())
    query = rows(4, TOKENS, seed=1)
    for backend in ("auto", "eager", "sdpa"):
        with pytest.raises(ValueError, match="use 'triton-fp8'"):
            attend(query, [*past, now], backend=backend)
    wrong = dataclasses.replace(past[0], value_scale=past[0].value_scale.double())
    with pytest.raises(ValueError, match="value_scale of E4M3 rows must be float32"):
        attend(query, [wrong, now], backend="triton-fp8")
    with pytest.raises(ValueError, match="expected torch.float8_e4m3fn"):
        attend(query, [dataclasses.replace(past[0], values=past[0].values.float()), now])
    other = dataclasses.replace(past[0], value_scale=past[0].value_scale.clone())
    with pytest.raises(ValueError, match="share one key_scale"):
        FP8_BACKEND._call(query, [other, past[1], now], scale=0.1, causal=False)


@pytest.mark.parametrize("name", ["rtn-2bit+taylor", "quantwm-2bit+calibrated"])
def test_the_cache_hands_the_backend_narrow_rows(name, monkeypatch):
    """On the CPU the kernel runs through Triton's interpreter."""
    pytest.importorskip("triton")
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs E4M3 products")
    from videokv.kernels import gpu

    if DEVICE == "cpu":
        monkeypatch.setattr(cache_module, "worth_gathering", lambda device: True)
        monkeypatch.setattr("videokv.kernels.attend.machine_refusal", lambda device: None)
        monkeypatch.setattr("videokv.kernels.attend._capability", lambda device: (8, 9))
    monkeypatch.setattr(gpu, "_verdicts", {})
    monkeypatch.setattr(FP8_BACKEND, "_verdicts", {})
    # The interpreter truncates where a GPU rounds, which the kernel's check of itself would refuse.
    monkeypatch.setattr("videokv.kernels.attend._FP8_TOLERANCE", 1.5e-1)
    seen, honest = [], FP8_BACKEND.attempt

    def attempt_and_see(query, segments, **options):
        seen.extend(segments)
        return honest(query, segments, **options)

    monkeypatch.setattr(FP8_BACKEND, "attempt", attempt_and_see)
    half = torch.float16
    cache, now, query = (
        filled(name, dtype=half),
        current(half),
        rows(4, TOKENS, seed=60, dtype=half),
    )
    got = cache.attend(0, query, now.keys, now.values)
    *past, last = seen
    assert past and all(segment.narrow for segment in past) and not last.narrow
    want, _ = attend(query, [*cache.view(0), now], backend="eager")
    for head in range(4):
        assert off(got[:, head], want[:, head]) < 1.2e-1
