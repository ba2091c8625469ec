"""Query maps, their features and the exact form, against formulas and mpmath."""

import mpmath
import pytest
import torch
from attention_fakes import Draw, Orthogonal, oracle_bias, to_numpy

from videokv.attention.eager import score_bias
from videokv.attention.sinhc import log_sinhc
from videokv.noise import QueryMap, ScoreNoise


@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.parametrize("mapped", ["plain", "rotated", "basis", "basis+rotated"])
@pytest.mark.parametrize(("head_dim", "group_size"), [(64, 32), (80, 16), (96, 1)])
def test_bias_follows_the_formula(head_dim, group_size, mapped, power):
    draw = Draw(1, torch.float64)
    transform = Orthogonal(head_dim, 3) if "rotated" in mapped else None
    basis = torch.linalg.qr(draw.normal(1, 2, head_dim, 5))[0] if "basis" in mapped else None
    term = draw.term(
        (1, 2, 63, head_dim), group_size, transform=transform, basis=basis, power=power
    )
    query = draw.normal(1, 6, 7, head_dim)
    got = score_bias(query, term, scale=0.13)
    want = oracle_bias(to_numpy(query[0]), term, 2, 0.13)
    torch.testing.assert_close(got[0], torch.from_numpy(want), rtol=1e-10, atol=1e-14)


def test_basis_directions_add_no_noise():
    draw = Draw(2, torch.float64)
    basis = torch.linalg.qr(draw.normal(1, 2, 64, 8))[0]
    inside = basis.repeat_interleave(3, 1) @ draw.normal(1, 6, 8, 5)
    features = QueryMap(32, Orthogonal(64), basis).features(inside.transpose(-1, -2), scale=1.0)
    assert float(features.abs().max()) < 1e-24


def test_maps_share_only_when_they_give_the_same_features():
    basis = torch.eye(64)[None, None, :, :4]
    first = QueryMap(32, Orthogonal(64, 1), basis)
    assert first.same_as(QueryMap(32, Orthogonal(64, 1), basis))
    for other in (
        QueryMap(16, Orthogonal(64, 1), basis),
        QueryMap(32, Orthogonal(64, 2), basis),
        QueryMap(32, None, basis),
        QueryMap(32, Orthogonal(64, 1), basis.clone()),
        QueryMap(32, Orthogonal(64, 1), basis, power=4),
    ):
        assert not first.same_as(other)


def test_noise_refuses_weights_of_other_ranks():
    with pytest.raises(ValueError, match=r"\[B, Hkv, T, F\], got shape \(3, 4\)"):
        ScoreNoise(torch.ones(3, 4), QueryMap(32))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 3e-6)])
def test_log_sinhc_against_mpmath(dtype, tolerance):
    mpmath.mp.dps = 40
    sizes = [1e-6, 1e-3, 0.03, 0.3, 0.4999, 0.5, 0.5001, 0.7, 1.0, 3.0, 20.0, 90.0, 1e4]
    points = torch.tensor([*sizes, *(-s for s in sizes)], dtype=dtype)
    for point, got in zip(points.tolist(), log_sinhc(points).tolist(), strict=True):
        a = abs(mpmath.mpf(point))
        want = a + mpmath.log1p(-mpmath.exp(-2 * a)) - mpmath.log(2 * a)
        assert abs(got - want) <= tolerance * want, point
    assert float(log_sinhc(torch.zeros(1, dtype=dtype))) == 0.0


@pytest.mark.parametrize("size", [0.4, 1.5])
def test_exact_correction_keeps_the_mean_of_exp(size):
    """E[e^(delta - b)] = 1 for uniform errors, also where alpha is not small."""
    draw = Draw(5, torch.float64)
    query, scale, head_dim, group_size = draw.normal(1, 1, 1, 16), 0.25, 16, 8
    term = draw.term((1, 1, 4, head_dim), group_size, exact=True)
    term = ScoreNoise((term.weights + 0.5) * (size / 0.25), term.query_map, exact=True)
    steps = term.weights.double().sqrt().repeat_interleave(group_size, -1)[0, 0]  # [T, D]
    generator = torch.Generator().manual_seed(9)
    uniform = torch.rand(200_000, 1, head_dim, generator=generator, dtype=torch.float64) - 0.5
    delta = scale * (uniform * steps) @ query[0, 0, 0]  # [N, T]
    b = score_bias(query, term, scale=scale)[0, 0, 0]
    assert torch.exp(delta - b).mean(0) == pytest.approx([1.0] * 4, abs=0.01)
    assert float(b.max()) > 0.05  # the test would pass for nothing if noise were negligible
