"""Rotary embedding while a chunk is reconstructed: float64 oracle, reference and kernel."""

import pytest
import torch
from test_reconstruct_triton import DEVICE, F16, FORMATS, TOLERANCE, body, encoded, off

from videokv.kernels.reconstruct import Rope, decode_into, reconstruct, reference
from videokv.tensors import E4M3

pytest.importorskip("triton")
from videokv.kernels.reconstruct import triton as kernel  # noqa: E402

TOKENS = 63


def tables(pairs, *, tokens=TOKENS, batch=None, seed=3):
    """Angles like those of three axes of a video: fast and slow, of both signs."""
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, pairs) if batch is None else (batch, tokens, pairs)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) - 0.3) * 50


def rope_of(angles, *, interleaved):
    cos, sin = (x.float().to(DEVICE) for x in (angles.cos(), angles.sin()))
    return Rope(cos, sin, interleaved)


def oracle(keys, angles, *, interleaved):
    """Channel by channel, in float64."""
    keys, pairs = keys.double(), angles.shape[-1]
    out = keys.clone()
    cos, sin = angles.cos().unsqueeze(-3), angles.sin().unsqueeze(-3)
    for pair in range(pairs):
        one, two = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + pairs)
        a, b, c, s = keys[..., one], keys[..., two], cos[..., pair], sin[..., pair]
        out[..., one], out[..., two] = a * c - b * s, b * c + a * s
    return out


def by_kernel(chunk, dtype, rope, *, factor=None):
    out = torch.full(chunk.shape, torch.nan, device=DEVICE).to(dtype)
    kernel.reconstruct(chunk.parts(), out, factor=factor, rope=rope)
    return out


@pytest.mark.parametrize("interleaved", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize("pairs", [1, 20, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_turning_matches_float64(dtype, pairs, interleaved):
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 3, TOKENS, 80, generator=generator).to(dtype)
    angles = tables(pairs, batch=2)
    got = rope_of(angles, interleaved=interleaved).turn(keys.to(DEVICE))
    assert got.dtype == dtype
    assert off(got, oracle(keys, angles, interleaved=interleaved)) < {torch.bfloat16: 4e-3}.get(
        dtype, 2e-7
    )


@pytest.mark.parametrize("interleaved", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_turned_as_it_is_reconstructed(name, interleaved):
    chunk = encoded(name)
    angles = tables(chunk.shape[3] // 2)
    rope = rope_of(angles, interleaved=interleaved)
    want = oracle(body(chunk, torch.float32), angles, interleaved=interleaved)
    plain = torch.empty(chunk.shape, device=DEVICE)
    reference.reconstruct(chunk.parts(), plain, factor=None, rope=rope)
    assert off(plain, want) < 1e-6
    for dtype in (torch.float32, F16):
        assert off(by_kernel(chunk, dtype, rope), want) < TOLERANCE[dtype]


@pytest.mark.parametrize("interleaved", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize("name, pairs", [("rtn2-odd", 13), ("kivi-keys", 16), ("quantwm", 24)])
def test_partial_rotation_of_batch_rows_with_their_own_positions(name, pairs, interleaved):
    chunk = encoded(name, batch=2, heads=3, tokens=37)
    angles = tables(pairs, tokens=37, batch=2)
    rope = rope_of(angles, interleaved=interleaved)
    want = oracle(body(chunk, torch.float32), angles, interleaved=interleaved)
    assert off(by_kernel(chunk, torch.float32, rope), want) < 1e-6


@pytest.mark.parametrize("interleaved", [True, False], ids=["pairs", "halves"])
def test_without_products_it_has_the_bits_of_the_reference(interleaved):
    chunk, angles = encoded("rtn2"), tables(64)
    rope = rope_of(angles, interleaved=interleaved)
    want = torch.empty(chunk.shape, device=DEVICE)
    reference.reconstruct(chunk.parts(), want, factor=None, rope=rope)
    assert torch.equal(by_kernel(chunk, torch.float32, rope), want)


def test_e4m3_rows_are_turned_before_they_are_scaled():
    chunk, angles = encoded("rtn2"), tables(64)
    factor = torch.tensor([0.5, 200.0], device=DEVICE).reshape(1, 2, 1, 1)
    got = by_kernel(chunk, E4M3, rope_of(angles, interleaved=True), factor=factor)
    want = oracle(body(chunk, torch.float32), angles, interleaved=True) * factor.cpu()
    assert off(got.float(), want.clamp(-448, 448)) < TOLERANCE[E4M3]


def test_the_call_and_decode_into_turn_keys():
    chunk, angles = encoded("psac-rotated"), tables(32)
    rope = rope_of(angles, interleaved=True)
    want = oracle(body(chunk, torch.float32), angles, interleaved=True)
    assert off(reconstruct(chunk.parts(), dtype=torch.float32, rope=rope), want) < 1e-5
    out = torch.empty(chunk.shape, device=DEVICE, dtype=torch.bfloat16)
    decode_into(chunk, out, rope=rope)
    assert off(out, want) < 6e-3
    some = torch.empty(1, 2, 20, 64, device=DEVICE)
    some.copy_(rope.rows(5, 25).turn(body(chunk, torch.float32)[:, :, 5:25].to(DEVICE)))
    assert off(some, want[:, :, 5:25]) < 1e-6


def test_refusals():
    chunk = encoded("rtn2")
    table = torch.ones(TOKENS, 64, device=DEVICE)
    for cos, sin in ((table.double(), table), (table, table[:5]), (table[0], table[0])):
        with pytest.raises(ValueError, match="float32 cos and sin of one shape"):
            Rope(cos, sin)
    for wrong in (table[:5], torch.ones(TOKENS, 65, device=DEVICE), table.expand(2, -1, -1)):
        with pytest.raises(ValueError, match="need cos and sin"):
            reconstruct(chunk.parts(), dtype=F16, rope=Rope(wrong, wrong))
