"""Groupwise rounding against a float64 oracle, its edge cases, its bytes and its noise model."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from videokv.kernels.quantize_groups import dequantize_groups, quantize_groups, real_steps
from videokv.protocols import EncodeContext, Packed
from videokv.quantizers import families
from videokv.quantizers.groupwise import GroupedChunk, Groupwise
from videokv.tensors import E4M3, GroupFormat, held_bytes

KEY = EncodeContext(layer=5, role="key")
FORMATS = [
    GroupFormat(2, 32),
    GroupFormat(3, 16),
    GroupFormat(4, 64),
    GroupFormat(8, 32),
    GroupFormat(2, 32, axis="channel"),
    GroupFormat(4, 17, axis="channel", scale_dtype=torch.float16, zero_dtype=torch.float16),
    GroupFormat(2, 64, symmetric=True),
    GroupFormat(4, 32, symmetric=True, axis="channel"),
    GroupFormat(2, 32, zero_point="integer"),
    GroupFormat(3, 20, zero_point="integer", axis="channel"),
]


def name(format: GroupFormat) -> str:
    kind = "symmetric" if format.symmetric else format.zero_point
    return f"{format.bits}bit-g{format.group_size}-{format.axis}-{kind}"


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def coded(x: Tensor, format: GroupFormat) -> GroupedChunk:
    return Groupwise(format).encode(x, KEY)


# The oracle: plain numpy, float64, one group at a time.


def round_to(value: float, dtype: torch.dtype) -> float:
    """Nearest number of a small float format, ties to even, saturated."""
    mantissa, lowest, largest = {
        E4M3: (3, -6, 448.0),
        torch.bfloat16: (7, -126, 3.3895313892515355e38),
        torch.float16: (10, -14, 65504.0),
        torch.float32: (23, -126, 3.4028234663852886e38),
    }[dtype]
    if value == 0:
        return 0.0
    exponent = max(math.frexp(abs(value))[1] - 1, lowest)
    ulp = 2.0 ** (exponent - mantissa)
    return math.copysign(min(float(np.rint(abs(value) / ulp)) * ulp, largest), value)


def oracle_group(x: np.ndarray, format: GroupFormat) -> tuple[float, float, np.ndarray, np.ndarray]:
    """Step, zero, codes and reconstruction of one group, without normaliser."""
    top = 2**format.bits - 1
    if format.symmetric:
        bound = 2 ** (format.bits - 1) - 1
        step = round_to(np.abs(x).max() / bound, format.scale_dtype)
        codes = np.clip(np.rint(x / step), -bound, bound) if step else np.zeros_like(x)
        return step, 0.0, codes + bound, codes * step
    step = round_to((x.max() - x.min()) / top, format.scale_dtype)
    if step == 0:
        zero = round_to((x.max() + x.min()) / 2, format.zero_dtype)
        return 0.0, zero, np.zeros_like(x), np.full_like(x, zero)
    if format.zero_point == "offset":
        zero = round_to(x.min(), format.zero_dtype)
        codes = np.clip(np.rint((x - zero) / step), 0, top)
        return step, zero, codes, codes * step + zero
    zero = float(np.rint(-x.min() / step))
    codes = np.clip(np.rint(x / step) + zero, 0, top)
    return step, zero, codes, (codes - zero) * step


def oracle(x: Tensor, format: GroupFormat) -> dict[str, np.ndarray]:
    """All groups of ``[B, H, T, D]``: every result at every element."""
    data = x.double().numpy()
    results = {key: np.zeros_like(data) for key in ("step", "zero", "code", "value")}
    batch, heads, tokens, channels = data.shape
    length = channels if format.axis == "token" else tokens
    for b, h in np.ndindex(batch, heads):
        for other in range(tokens if format.axis == "token" else channels):
            for start in range(0, length, format.group_size):
                run = slice(start, min(start + format.group_size, length))
                at = (b, h, other, run) if format.axis == "token" else (b, h, run, other)
                for key, value in zip(results, oracle_group(data[at], format), strict=True):
                    results[key][at] = value
    return results


def at_elements(numbers: Tensor, format: GroupFormat, shape: torch.Size) -> np.ndarray:
    axis, length = (3, shape[3]) if format.axis == "token" else (2, shape[2])
    spread = numbers.double().repeat_interleave(format.group_size, axis)
    return spread.narrow(axis, 0, length).numpy()


@pytest.mark.parametrize("format", FORMATS, ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_oracle(format: GroupFormat, dtype: torch.dtype):
    head_dim = 80 if format.axis == "channel" or 80 % format.group_size == 0 else 64
    x = (randn(2, 2, 63, head_dim) * 3 + randn(head_dim, seed=1) * 5).to(dtype)
    chunk, expected = coded(x, format), oracle(x, format)
    assert chunk.steps.dtype == format.scale_dtype
    assert np.array_equal(at_elements(chunk.steps, format, x.shape), expected["step"])
    if chunk.zeros is not None:
        assert np.array_equal(at_elements(chunk.zeros, format, x.shape), expected["zero"])
    wrong = chunk.codes().numpy() != expected["code"]
    assert wrong.mean() < 1e-4  # a float32 quotient may fall on the other side of a half
    values = chunk.decode(torch.float32).double().numpy()
    error = np.abs(values - expected["value"])
    assert error[~wrong].max() < 2e-6 * np.abs(expected["value"]).max()


@pytest.mark.parametrize("format", FORMATS, ids=name)
def test_error_stays_within_half_a_step_inside_the_grid(format: GroupFormat):
    x = randn(1, 2, 100, 320 if format.group_size == 20 else 128)
    chunk = coded(x, format)
    step = torch.from_numpy(at_elements(chunk.steps, format, x.shape))
    inside = (chunk.codes() > 0) & (chunk.codes() < 2**format.bits - 1)
    error = (chunk.decode(torch.float32) - x).abs().double()
    assert (error <= step / 2 * (1 + 1e-5) + 1e-6)[inside].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_decode_rounds_the_float32_result(dtype: torch.dtype):
    chunk = coded(randn(1, 2, 33, 64), GroupFormat(2, 32))
    assert torch.equal(chunk.decode(dtype), chunk.decode(torch.float32).to(dtype))


# Degenerate groups.

CONSTANTS = [9.0, -9.0, 0.0, 0.001, 1e-30, 5.0, 3e5, -1234.567]


@pytest.mark.parametrize("format", FORMATS, ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_constant_groups_come_back(format: GroupFormat, dtype: torch.dtype):
    """Within one unit in the last place of what is stored: the zero point, or the step."""
    head_dim = 320 if format.group_size in (17, 20) else 128
    for constant in CONSTANTS:
        x = torch.tensor(constant).to(dtype).expand(1, 2, 40, head_dim)
        if not bool(torch.isfinite(x).all()):
            continue
        if constant == 3e5 and format.zero_dtype == torch.float16:
            with pytest.raises(ValueError, match="zero_dtype"):
                coded(x, format)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            back = coded(x, format).decode(torch.float32)
        exact = x.float()
        stored = format.scale_dtype if format.symmetric else format.zero_dtype
        limits = torch.finfo(stored)
        # Subnormals have a coarser unit, but a normaliser lifts steps out of them.
        floor = 0.0 if format.symmetric else limits.smallest_normal * limits.eps
        assert ((back - exact).abs() <= exact.abs() * limits.eps + floor).all(), constant


@pytest.mark.parametrize("zero_point", ["offset", "integer"])
def test_constant_rows_beside_ordinary_ones(zero_point: str):
    x = randn(1, 1, 8, 128)
    for row, constant in enumerate((9.0, -9.0, 0.0, 5.0)):
        x[0, 0, row] = constant
    chunk = coded(x, GroupFormat(2, 32, zero_point=zero_point))
    back = chunk.decode(torch.float32)
    assert torch.equal(back[0, 0, :4], x[0, 0, :4])
    assert (chunk.noise()[0].weights[0, 0, :4] == 0).all()
    assert (chunk.noise()[0].weights[0, 0, 4:] > 0).all()


def test_ranges_under_the_smallest_step_decode_to_the_middle():
    x = randn(1, 1, 4, 64)
    x[0, 0, 0, :32] = torch.linspace(1.0, 1.0 + 2**-10, 32)  # D0 = 2^-10 / 3
    chunk = coded(x, GroupFormat(2, 32))
    assert chunk.steps[0, 0, 0, 0] == 0 and chunk.normaliser is None
    middle = torch.tensor(1.0 + 2**-11).to(torch.bfloat16)
    assert (chunk.decode(torch.bfloat16)[0, 0, 0, :32] == middle).all()
    assert chunk.noise()[0].weights[0, 0, 0, 0] == 0


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 100.0, 3e5, 1e30])
@pytest.mark.parametrize("symmetric", [False, True])
def test_quality_does_not_depend_on_magnitude(scale: float, symmetric: bool):
    """Whole heads outside E4M3's normal numbers get a normaliser."""
    x = randn(1, 2, 65, 128)
    format = GroupFormat(2, 32, symmetric=symmetric)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chunk = coded(x * scale, format)
    error = chunk.decode(torch.float32) / scale - x
    reference = coded(x, format).decode(torch.float32) - x
    assert error.square().sum() < 1.05 * reference.square().sum()
    assert (chunk.normaliser is not None) == (scale not in (1.0, 100.0))


def test_large_steps_warn_and_are_counted():
    x = randn(2, 3, 40, 64)
    small = coded(x, GroupFormat(2, 32))
    x[1, 2] *= 3000
    with pytest.warns(UserWarning, match="normaliser"):
        chunk = coded(x, GroupFormat(2, 32))
    assert chunk.normaliser is not None and chunk.normaliser.shape == (2, 3, 1, 1)
    assert held_bytes(chunk) == held_bytes(small) + 2 * 3 * 4
    others = torch.tensor([0, 1, 2, 3, 4])
    alone = small.decode(torch.float32).flatten(0, 1)[others]
    assert torch.equal(chunk.decode(torch.float32).flatten(0, 1)[others], alone)
    assert torch.isfinite(chunk.noise()[0].weights).all()


def test_steps_saturate_before_the_cast():
    for magnitude in (3000.0, 0.0027, 448 * 3 * 1.04, 448 * 3 * 1.2):
        x = torch.tensor([0.0, magnitude]).repeat(32)[None, None, None]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chunk = coded(x, GroupFormat(2, 32))
        assert torch.isfinite(chunk.steps.float()).all()
        assert torch.allclose(chunk.decode(torch.float32), x, rtol=0.07)


def test_float16_results_saturate():
    x = torch.linspace(-65504, 65504, 64).to(torch.float16)[None, None, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for symmetric in (False, True):
            chunk = coded(x, GroupFormat(4, 32, symmetric=symmetric))
            assert torch.isfinite(chunk.decode(torch.float16)).all()


def test_outlier_channel_is_confined_along_tokens():
    """One channel + 300: groups along channels lose their neighbours, along tokens nobody."""
    clean = randn(1, 1, 256, 128)
    x = clean.clone()
    x[..., 7] += 300
    others = [channel for channel in range(128) if channel != 7]
    errors = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for axis in ("token", "channel"):
            back = coded(x, GroupFormat(2, 128, axis=axis)).decode(torch.float32)
            errors[axis] = (back - x)[..., others].square().mean().sqrt().item()
    assert errors["token"] > 0.9  # every other channel of the group falls into one cell
    assert errors["channel"] == pytest.approx(0.48, abs=0.05)


def test_large_integer_zero_points_are_kept_exactly():
    """BF16 holds integers to 256; further ones are stored in float32, and counted."""
    format = GroupFormat(2, 32, zero_point="integer")
    near = coded(randn(1, 1, 16, 64), format)
    far = coded(randn(1, 1, 16, 64) + 1000, format)
    assert near.zeros is not None and near.zeros.dtype == torch.bfloat16
    assert far.zeros is not None and far.zeros.dtype == torch.float32
    assert far.zeros.abs().max() > 256
    assert held_bytes(far) == held_bytes(near) + 2 * far.zeros.numel()
    error = far.decode(torch.float32) - (randn(1, 1, 16, 64) + 1000)
    assert error.square().mean() < 0.3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("format", FORMATS, ids=name)
def test_non_finite_input_is_refused(format: GroupFormat, bad: float):
    x = randn(1, 2, 40, 320)
    x[0, 1, 17, 33] = bad
    with pytest.raises(ValueError, match="keys of layer 5 hold NaN or infinity"):
        coded(x, format)


def test_other_refusals():
    with pytest.raises(ValueError, match="group_size 64 does not divide head_dim 80"):
        Groupwise(GroupFormat(2, 64)).check(80)
    with pytest.raises(ValueError, match="group_size 64 does not divide head_dim 96"):
        coded(randn(1, 1, 4, 96), GroupFormat(2, 64))
    with pytest.raises(ValueError, match=r"\[B, H, T, D\]"):
        coded(randn(1, 4, 64), GroupFormat(2, 32))
    with pytest.raises(ValueError, match="non-empty"):
        coded(randn(1, 1, 0, 64), GroupFormat(2, 32))
    with pytest.raises(ValueError, match="float64"):
        coded(randn(1, 1, 4, 64).double(), GroupFormat(2, 32))
    with pytest.raises(ValueError, match="beyond 1e"):
        coded(randn(1, 1, 4, 64).sign() * 1e38, GroupFormat(2, 32))
    with pytest.raises(ValueError, match="symmetric codes have no zero point"):
        Groupwise(GroupFormat(2, 32, symmetric=True, zero_point="integer"))
    with pytest.raises(ValueError, match="zero_dtype"):
        Groupwise(GroupFormat(2, 32, zero_dtype=torch.int8))
    Groupwise(GroupFormat(2, 64, axis="channel")).check(80)


def test_gradients_are_not_kept():
    x = randn(1, 1, 8, 64).requires_grad_()
    chunk = coded(x, GroupFormat(2, 32))
    assert not chunk.decode(torch.float32).requires_grad
    assert not any(t.requires_grad for t in (chunk.steps, chunk.zeros) if t is not None)


# Bytes.


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128])
def test_bits_to_the_byte(bits: int, group_size: int):
    x = randn(2, 2, 96, 128, dtype=torch.bfloat16)
    counted = held_bytes(coded(x, GroupFormat(bits, group_size))) * 8 / x.numel()
    assert counted == bits + (32 if bits == 8 else 24) / group_size
    symmetric = held_bytes(coded(x, GroupFormat(bits, group_size, symmetric=True)))
    assert symmetric * 8 / x.numel() == bits + (16 if bits == 8 else 8) / group_size


def test_bits_of_the_family_and_of_short_groups():
    keys, values = families()["rtn"].build(2)
    x = randn(1, 2, 64, 128)
    assert held_bytes(keys.encode(x, KEY)) * 8 == 2.75 * x.numel()
    assert held_bytes(values.encode(x, KEY)) * 8 == 2.75 * x.numel()
    tail = randn(1, 1, 33, 64)
    chunk = coded(tail, GroupFormat(2, 32, axis="channel"))
    assert held_bytes(chunk) == 33 * 64 // 4 + 2 * 64 * 3


def test_family_options_reach_the_format():
    options = {"group_size": 16, "zero_point": "integer", "scale_dtype": torch.float16}
    keys, _ = families()["rtn"].build(4, axis="channel", **options)
    assert keys == Groupwise(GroupFormat(4, axis="channel", **options))


# Noise.


def test_short_group_along_tokens_has_its_own_steps():
    x = randn(1, 1, 70, 64)
    x[:, :, 64:] *= 10
    chunk = coded(x, GroupFormat(2, 32, axis="channel"))
    term = chunk.noise()[0]
    assert term.weights.shape == (1, 1, 70, 64) and term.query_map.group_size == 1
    steps = real_steps(chunk.steps, chunk.normaliser)
    assert torch.equal(term.weights[:, :, 64:], steps[:, :, 2:].square().expand(-1, -1, 6, -1))
    whole = coded(x[:, :, :64], GroupFormat(2, 32, axis="channel"))
    assert torch.equal(chunk.decode(torch.float32)[:, :, :64], whole.decode(torch.float32))


@pytest.mark.parametrize("format", FORMATS[:6], ids=name)
def test_predicted_score_variance(format: GroupFormat):
    """(1 / 24 d) sum Delta^2 nu is half the variance of the score error (g = 16: rho 0.88)."""
    head_dim = 128 if format.group_size != 17 else 68
    keys, queries = randn(1, 1, 2048, head_dim), randn(1, 1, 8, head_dim, seed=2)
    chunk = coded(keys, format)
    scale = head_dim**-0.5
    term = chunk.noise()[0]
    predicted = (term.query_map.features(queries, scale=scale) @ term.weights.mT).mean(-1)
    error = (chunk.decode(torch.float32) - keys).double()
    measured = (queries.double() @ error.mT * scale).var(-1) / 2
    assert torch.allclose(predicted.double(), measured, rtol=0.2)


RHO = {  # E4M3 steps, Gauss and Laplace at g = 16, 32, 64, 128
    "2bit": ([0.890, 0.950, 0.977, 0.991], [0.884, 0.942, 0.985, 1.027]),
    "3bit": ([0.904, 0.953, 0.976, 0.988], [0.902, 0.952, 0.976, 0.988]),
    "4bit": ([0.978, 0.994, 0.997, 0.997], [0.975, 0.988, 0.995, 0.998]),
    "ternary": ([0.903, 0.909, 0.892, 0.865], [0.602, 0.570, 0.524, 0.473]),
    "integer": ([1.015, 1.013, 1.008, 1.001], [0.881, 0.839, 0.795, 0.747]),
}
ETA = {
    "2bit": ([1.13, 1.12, 1.09, 1.07], [1.03, 1.04, 1.07, 1.13]),
    "3bit": ([1.07, 1.08, 1.07, 1.05], [1.00, 1.03, 1.03, 1.02]),
    "4bit": ([-0.35, 0.20, 0.61, 0.85], [-0.29, 0.36, 0.66, 0.82]),
    "ternary": ([0.79, 0.65, 0.49, 0.35], [0.27, 0.16, 0.07, -0.01]),
    "integer": ([0.97, 0.96, 0.94, 0.92], [0.59, 0.55, 0.46, 0.36]),
}
ROW = {
    "2bit": {"bits": 2},
    "3bit": {"bits": 3},
    "4bit": {"bits": 4},
    "ternary": {"bits": 2, "symmetric": True},
    "integer": {"bits": 2, "zero_point": "integer"},
}


def samples(law: str) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    if law == "gauss":
        return torch.randn(1, 1, 16384, 128, generator=generator)
    exponential = -torch.log1p(-torch.rand(1, 1, 16384, 128, generator=generator))
    return exponential * (torch.rand(1, 1, 16384, 128, generator=generator) < 0.5).float().mul(
        2
    ).sub(1)


@pytest.mark.parametrize("law", ["gauss", "laplace"])
@pytest.mark.parametrize("row", ROW)
def test_how_good_the_uniform_noise_model_is(row: str, law: str):
    """rho = e^2 / (Delta^2 / 12) and eta = (Var x^ - Var x) / (Delta^2 / 12), 2M samples."""
    x = samples(law)
    for column, group_size in enumerate((16, 32, 64, 128)):
        format = GroupFormat(group_size=group_size, **ROW[row])
        grouped = quantize_groups(x, format=format)
        back = dequantize_groups(grouped, format=format, dtype=torch.float32).double()
        model = real_steps(grouped.steps, grouped.normaliser).double().square().mean() / 12
        rho = ((back - x).square().mean() / model).item()
        eta = ((back.var() - x.double().var()) / model).item()
        at = ("gauss", "laplace").index(law)
        assert rho == pytest.approx(RHO[row][at][column], abs=0.03), group_size
        assert eta == pytest.approx(ETA[row][at][column], abs=0.03), group_size


def test_chunks_are_packed():
    chunk = coded(randn(1, 1, 3, 64), GroupFormat(2, 32))
    assert isinstance(chunk, Packed) and chunk.shape == (1, 1, 3, 64)
