"""FP8, MXFP4 and NVFP4: nearest on an enumerated grid, bytes, and how good the ulp variance is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from videokv.protocols import EncodeContext
from videokv.quantizers.float_formats import (
    FloatFormat,
    FloatQuantizer,
    build_fp8,
    build_mxfp4,
    build_nvfp4,
)
from videokv.tensors import held_bytes

BUILD = {"fp8": build_fp8, "mxfp4": build_mxfp4, "nvfp4": build_nvfp4}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def context(layer: int = 0) -> EncodeContext:
    return EncodeContext(layer, "key")


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def e4m3() -> np.ndarray:
    """All magnitudes of E4M3 from its definition: 4 bits of exponent (bias 7), 3 of mantissa."""
    tiny = [m / 8 * 2.0**-6 for m in range(8)]
    rest = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return np.array(tiny + rest)[:127]  # the last one is NaN


def nearest(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Nearest magnitude of the grid, ties to the even index, saturating."""
    size = np.minimum(np.abs(values), grid[-1])
    above = np.searchsorted(grid, size).clip(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return np.sign(values) * np.where(up, high, low)


def oracle(name: str, x: np.ndarray) -> np.ndarray:
    if name == "fp8":
        peak = np.abs(x).max(-1, keepdims=True)
        scale = torch.from_numpy((peak / 448).astype(np.float32)).bfloat16().double().numpy()
        return nearest(x / scale, e4m3()) * scale
    size = 32 if name == "mxfp4" else 16
    groups = x.reshape(*x.shape[:3], -1, size)
    peak = np.abs(groups).max(-1, keepdims=True)
    if name == "mxfp4":
        scale = 2.0 ** (np.floor(np.log2(peak)) - 2)
    else:
        head = peak.max((2, 3), keepdims=True) / (6 * 448)
        scale = nearest(peak / 6 / head, e4m3()) * head
    return (nearest(groups / scale, E2M1) * scale).reshape(x.shape)


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("shape", [(2, 3, 63, 128), (1, 1, 1000, 64)], ids=str)
def test_decode_matches_the_oracle(name, shape):
    x = tokens(*shape) * torch.logspace(-3, 2, shape[2])[:, None]
    decoded = BUILD[name]()[0].encode(x, context()).decode(torch.float64).numpy()
    expected = oracle(name, x.double().numpy())
    wrong = ~np.isclose(decoded, expected, rtol=1e-5, atol=0)
    assert wrong.mean() < 1e-3  # ties of a float32 quotient


def test_ties_go_to_even():
    x = torch.zeros(1, 1, 1, 32)
    x[..., :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[..., 8:16] = -x[..., :8]
    decoded = build_mxfp4()[0].encode(x, context()).decode(torch.float32)[0, 0, 0]
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert decoded[:8].tolist() == expected and (-decoded[8:16]).tolist() == expected


@pytest.mark.parametrize(
    ("name", "bits"), [("fp8", 8 + 16 / 128), ("mxfp4", 4.25), ("nvfp4", 4.5)], ids=str
)
def test_bytes(name, bits):
    x = tokens(1, 2, 324, 128)
    extra = 2 * 4 if name == "nvfp4" else 0  # one float32 a head
    held = held_bytes(BUILD[name]()[0].encode(x, context()))
    assert held == x.numel() * bits / 8 + extra


@pytest.mark.parametrize(
    ("name", "nmse", "ratio"),
    [("fp8", 6.6e-4, 0.91), ("mxfp4", 0.0132, 0.86), ("nvfp4", 0.0091, 0.66)],
)
def test_error_and_variance_on_gaussian_data(name, nmse, ratio):
    """Error, and true error over that of the ulp model. (FP8 without a scale of its own a token:
    7.0e-4 and 0.94; here the largest value of each token is exact.)"""
    x = tokens(1, 4, 2000, 128)
    chunk = BUILD[name]()[0].encode(x, context())
    error = (chunk.decode(torch.float32) - x).square().mean()
    assert float(error / x.square().mean()) == pytest.approx(nmse, rel=0.08)
    (term,) = chunk.noise()
    assert float(error / (term.weights.mean() / 12)) == pytest.approx(ratio, abs=0.03)


@pytest.mark.parametrize("name", BUILD)
def test_weights_are_squared_spacings(name):
    """The gap to the next element above (noise_group_size = 1), averaged by default."""
    x = tokens(1, 2, 33, 64)
    exact = BUILD[name](noise_group_size=1)[0].encode(x, context())
    (term,) = exact.noise()
    assert term.query_map.group_size == 1 and term.weights.shape == x.shape
    grid = e4m3() if name == "fp8" else E2M1
    scale = 1.0 if name == "fp8" else None
    values = exact.decode(torch.float64).numpy()
    if name == "fp8":
        scale = exact.scales.double().numpy()
    elif name == "mxfp4":
        scale = 2.0 ** (exact.scales.double().numpy() - 127)
    else:
        scale = exact.scales.double().numpy() * exact.head_scale.double().numpy()
    scale = scale.repeat(64 // scale.shape[-1], -1)
    place = np.abs(np.abs(values / scale)[..., None] - grid).argmin(-1)
    gap = np.append(np.diff(grid), grid[-1] - grid[-2])[place]
    np.testing.assert_allclose(term.weights.numpy(), (gap * scale) ** 2, rtol=1e-5)
    (mean,) = BUILD[name]()[0].encode(x, context()).noise()
    size = {"fp8": 32, "mxfp4": 32, "nvfp4": 16}[name]
    assert mean.query_map.group_size == size
    torch.testing.assert_close(mean.weights, term.weights.unflatten(-1, (-1, size)).mean(-1))


@pytest.mark.parametrize("size", [72, 80, 96, 128])
def test_fp8_serves_any_head(size):
    quantizer = build_fp8()[0]
    quantizer.check(size)
    (term,) = quantizer.encode(tokens(1, 1, 5, size), context()).noise()
    assert term.weights.shape[-1] * term.query_map.group_size == size


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_degenerate_tokens(name, dtype):
    """R05, R07: constants, zeros, tiny and huge numbers. A power-of-two scale of E2M1 cuts off
    what lies between 6 and 8 times it, so there a constant may lose a quarter."""
    rtol = {"fp8": 2**-8, "mxfp4": 0.25, "nvfp4": 1e-6}[name]
    for value in (9.0, -9.0, 0.0, 0.001, 1e-30, 3e5):
        x = torch.full((1, 2, 7, 64), value).to(dtype)
        if not bool(x.isfinite().all()):
            continue
        decoded = BUILD[name]()[0].encode(x, context()).decode(torch.float32)
        torch.testing.assert_close(decoded, x.float(), rtol=rtol, atol=0)
    top = torch.full((1, 1, 3, 64), torch.finfo(torch.float16).max).half()
    assert bool(BUILD[name]()[0].encode(top, context()).decode(torch.float16).isfinite().all())


def test_refusals():
    with pytest.raises(ValueError, match="element"):
        FloatFormat("e5m2", "bf16", None)
    with pytest.raises(ValueError, match="scale"):
        FloatFormat("e4m3", "fp16", None)
    with pytest.raises(ValueError, match="noise_group_size"):
        FloatFormat("e4m3", "bf16", None, 0)
    with pytest.raises(ValueError, match="fixed width of 4 bits, got bits=2"):
        build_mxfp4(2)
    with pytest.raises(ValueError, match="group_size 32 does not divide head_dim 80"):
        build_mxfp4()[0].check(80)
    with pytest.raises(ValueError, match="noise_group_size 3"):
        FloatQuantizer(FloatFormat("e4m3", "bf16", None, 3)).check(64)
    x = tokens(1, 1, 4, 64)
    x[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="layer 6"):
        build_fp8()[0].encode(x, context(6))
    x[0, 0, 0, 0] = 1e38
    with pytest.raises(ValueError, match="layer 6 reach"):
        build_fp8()[0].encode(x, context(6))
