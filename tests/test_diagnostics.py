"""Streamed diagnostics against everything materialised in float64, and against known cases."""

import math
import resource
import sys

import pytest
import torch

from videokv.diagnostics import Past, compare, cumulative_energy, diagnose
from videokv.noise import QueryMap, ScoreNoise
from videokv.protocols import Segment

SCALE = 0.11


def case(seed: int, *, query_heads=4, heads=2, size=24, value_size=20, exact=False, dtype):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    tokens, now = (37, 63), 29
    query = draw(2, query_heads, 31, size) * 2
    keys, values = draw(2, heads, sum(tokens), size) * 2, draw(2, heads, sum(tokens), value_size)
    held, start = [], 0
    for number, count in enumerate(tokens):
        part = slice(start, start + count)
        weights = torch.rand(2, heads, count, size // 8, generator=g)
        noise = ScoreNoise(weights, QueryMap(8), exact=exact)
        held.append(
            Segment(
                keys[:, :, part] + 0.3 * draw(2, heads, count, size),
                values[:, :, part] + 0.2 * draw(2, heads, count, value_size),
                (noise,) if number else (),
            )
        )
        start += count
    current = Segment(draw(2, heads, now, size), draw(2, heads, now, value_size))
    return query, Past(keys, values, tuple(held)), current


def materialised(query, past, current):
    """The definitions, written out in float64 with all scores at hand."""
    q = query.double()
    groups = q.shape[1] // past.keys.shape[1]

    def wide(x):
        return x.double().repeat_interleave(groups, 1)

    cached = past.tokens
    true = q @ wide(torch.cat([past.keys, current.keys], 2)).mT * SCALE
    held_keys = torch.cat([*(s.keys for s in past.held), current.keys], 2)
    held = q @ wide(held_keys).mT * SCALE
    start = 0
    for segment in past.held:
        count = segment.keys.shape[2]
        for term in segment.noise:
            weights = wide(term.weights)
            if term.exact:
                steps = weights.sqrt().repeat_interleave(8, -1)
                a = q[:, :, :, None, :] * steps[:, :, None] * SCALE / 2
                bias = torch.log(torch.sinh(a) / a).sum(-1)
            else:
                bias = term.query_map.features(q, scale=SCALE) @ weights.mT
            held[..., start : start + count] -= bias
        start += count
    p, h = true.softmax(-1), held.softmax(-1)
    m = (p + h) / 2

    def entropy(x):
        return -(x * x.log()).sum(-1)

    values = wide(torch.cat([past.values, current.values], 2))
    held_values = wide(torch.cat([*(s.values for s in past.held), current.values], 2))
    out = p @ values
    z = true[..., :cached]
    return {
        "mass": p[..., :cached].sum(-1),
        "held_mass": h[..., :cached].sum(-1),
        "jsd_nats": entropy(m) - (entropy(p) + entropy(h)) / 2,
        "token_shift": (z.argmax(-1) != held[..., :cached].argmax(-1)).double(),
        "any_token_shift": (true.argmax(-1) != held.argmax(-1)).double(),
        "log_partition_error_nats": held[..., :cached].logsumexp(-1) - z.logsumexp(-1),
        "effective_tokens": z.exp().sum(-1) ** 2 / (2 * z).exp().sum(-1),
        "output_mse": (h @ held_values - out).square().mean(-1),
        "keys_only_mse": (h @ values - out).square().mean(-1),
        "values_only_mse": (p @ held_values - out).square().mean(-1),
        "output_power": out.square().mean(-1),
    }


@pytest.mark.parametrize("exact", [False, True], ids=["columns", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("block", [7, 1 << 22])
def test_streaming_equals_the_materialised_computation(monkeypatch, dtype, block, exact) -> None:
    monkeypatch.setattr(compare, "BLOCK_ELEMENTS", block * 2 * 2 * 62)
    monkeypatch.setattr(compare, "ROWS_AT_ONCE", 13)
    query, past, current = case(0, dtype=dtype, exact=exact)
    found = diagnose(query, past, current, scale=SCALE)
    for name, expected in materialised(query, past, current).items():
        error = (getattr(found, name).double() - expected).abs() / expected.abs().clamp(min=1)
        assert float(error.max()) < (1e-5 if dtype == torch.float32 else 1e-11), name


def test_an_exact_cache_shows_nothing() -> None:
    query, past, current = case(1, dtype=torch.float32)
    same = Past(past.keys, past.values, (Segment(past.keys, past.values),))
    found = diagnose(query, same, current, scale=SCALE).means()
    for name in ("mass_shift", "jsd_nats", "token_shift", "output_mse", "output_mse_relative"):
        assert found[name] == pytest.approx(0, abs=1e-9), name


def test_a_models_autocast_changes_nothing() -> None:
    query, past, current = case(3, dtype=torch.float32)
    plain = diagnose(query, past, current, scale=SCALE).means()
    with torch.autocast("cpu", torch.bfloat16):
        assert diagnose(query, past, current, scale=SCALE).means() == plain


def test_uniform_scores_have_known_figures() -> None:
    zeros = torch.zeros(1, 1, 10, 4)
    past = Past(zeros, zeros, (Segment(zeros, zeros),))
    query = torch.zeros(1, 1, 3, 4)
    found = diagnose(query, past, Segment(zeros[:, :, :5], zeros[:, :, :5]), scale=1.0)
    assert found.mass.tolist() == [[pytest.approx([2 / 3] * 3)]]
    assert found.effective_tokens.tolist() == [[pytest.approx([10] * 3)]]


def test_disjoint_attention_diverges_by_log_two() -> None:
    keys = torch.tensor([[[[60.0], [-60.0]]]])
    held = Segment(-keys, torch.zeros(1, 1, 2, 1))
    past = Past(keys, torch.zeros(1, 1, 2, 1), (held,))
    low = Segment(torch.full((1, 1, 1, 1), -60.0), torch.zeros(1, 1, 1, 1))
    found = diagnose(torch.ones(1, 1, 1, 1), past, low, scale=1.0)
    assert float(found.jsd_nats) == pytest.approx(math.log(2)) and float(found.token_shift) == 1


def test_bad_calls_are_refused() -> None:
    query, past, current = case(2, dtype=torch.float32)
    with pytest.raises(ValueError, match="multiple of 2"):
        diagnose(query[:, :3], past, current, scale=SCALE)
    with pytest.raises(ValueError, match="noise"):
        noisy = Segment(current.keys, current.values, past.held[1].noise)
        diagnose(query, past, noisy, scale=SCALE)
    with pytest.raises(ValueError, match="cover"):
        Past(past.keys, past.values, past.held[:1])


def test_unequal_shapes_are_refused_in_words() -> None:
    query, past, now = case(3, dtype=torch.float32)
    short = Segment(now.keys, now.values[:, :, 1:])
    for wrong in (Segment(now.keys[..., 1:], now.values), short, Segment(now.keys[:1], now.values)):
        with pytest.raises(ValueError, match="current keys and values must be"):
            diagnose(query, past, wrong, scale=SCALE)
    held = tuple(Segment(s.keys[..., 1:], s.values) for s in past.held)
    with pytest.raises(ValueError, match="held keys and values must be"):
        diagnose(query, Past(past.keys, past.values, held), now, scale=SCALE)
    with pytest.raises(ValueError, match="floating point"):
        diagnose(query.int(), past, now, scale=SCALE)


def test_what_is_not_finite_is_refused() -> None:
    query, past, now = case(4, dtype=torch.float32)
    broken = past.held[0].keys.clone()
    broken[0, 0, 0, 0] = math.nan
    held = (Segment(broken, past.held[0].values), *past.held[1:])
    with pytest.raises(ValueError, match="held_mass.*must be finite"):
        diagnose(query, Past(past.keys, past.values, held), now, scale=SCALE)
    with pytest.raises(ValueError, match="must be finite"):
        diagnose(query, past, now, scale=math.inf)


def test_energy_of_known_spectra() -> None:
    assert cumulative_energy(torch.diag(torch.tensor([1.0, 6.0, 3.0]))).tolist() == pytest.approx(
        [0.6, 0.9, 1.0]
    )
    with pytest.raises(ValueError, match="no energy"):
        cumulative_energy(torch.zeros(2, 3, 3))


@pytest.mark.slow
def test_a_head_of_a_real_video_model_stays_below_two_gigabytes() -> None:
    g = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1, 28080, 128, generator=g)
    held = Segment(keys + 0.3, keys, (ScoreNoise(torch.rand(1, 1, 28080, 4), QueryMap(32)),))
    query = torch.randn(1, 1, 4680, 128, generator=g)
    current = Segment(torch.randn(1, 1, 4680, 128, generator=g), keys[:, :, :4680])
    found = diagnose(query, Past(keys, keys, (held,)), current, scale=128**-0.5)
    assert float(found.mass.mean()) == pytest.approx(28080 / 32760, abs=0.02)
    unit = 1 if sys.platform == "darwin" else 1024
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit < 2e9
