"""Corrections: found by name, right terms, and what each is for."""

import pytest
import torch
from attention_fakes import Draw, FakePacked, Orthogonal, relative_error, round_groups

from videokv.attention import attend
from videokv.attention.eager import score_bias
from videokv.corrections import corrections
from videokv.corrections.calibrated import far_pairs
from videokv.noise import QueryMap, ScoreNoise
from videokv.protocols import Segment

NAMES = ["calibrated", "cumulant", "exact", "measured", "taylor"]
COLUMNS = ["calibrated", "cumulant", "measured", "taylor"]
SCALE = 0.125


def chunk(tokens=127, *, batch=2, size=1.0, head_dim=64):
    draw = Draw(tokens)
    keys, queries = draw.normal(batch, 2, tokens, head_dim), draw.normal(batch, 6, 40, head_dim)
    return round_groups(keys, group_size=16), keys, queries * size


def terms_of(name, packed, keys, queries):
    correction = corrections()[name]
    return correction.noise(packed, correction.fit(packed, keys, queries, scale=SCALE))


def total_bias(terms, queries):
    return sum(score_bias(queries, t, scale=SCALE) for t in terms)


def log_partition(packed, queries, terms):
    segment = Segment(packed.decode(torch.float32), packed.decode(torch.float32), terms)
    return attend(queries, [segment], scale=SCALE, backend="eager", need_lse=True)[1]


def true_log_partition(keys, queries):
    return attend(queries, [Segment(keys, keys)], scale=SCALE, need_lse=True)[1]


def test_all_are_found_by_name():
    assert list(corrections()) == NAMES


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("tokens", [1, 63, 1000])
def test_sdpa_equals_eager(name, tokens):
    packed, keys, queries = chunk(tokens)
    segments = [
        Segment(packed.decode(torch.float32), keys, terms_of(name, packed, keys, queries)),
        Segment(keys, keys),
    ]
    out, lse = attend(queries, segments, scale=SCALE, backend="sdpa", need_lse=True)
    want, want_lse = attend(queries, segments, scale=SCALE, backend="eager", need_lse=True)
    assert relative_error(out, want) < 1e-5 and relative_error(lse, want_lse) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_chunks_without_noise_are_never_touched(name):
    keys = Draw(0).normal(1, 2, 9, 64)
    correction, packed = corrections()[name], FakePacked(keys)
    factors = correction.fit(packed, keys, Draw(1).normal(1, 2, 5, 64), scale=SCALE)
    assert factors is None and correction.noise(packed, factors) == ()


@pytest.mark.parametrize("name", ["calibrated", "cumulant"])
def test_queries_are_asked_for_by_name(name):
    packed, keys, _ = chunk()
    with pytest.raises(ValueError, match=f"'{name}'.*pass queries"):
        corrections()[name].fit(packed, keys, None, scale=SCALE)


@pytest.mark.parametrize("name", ["calibrated", "cumulant", "measured"])
def test_missing_factors_are_refused(name):
    with pytest.raises(ValueError, match=f"'{name}' needs the factors"):
        corrections()[name].noise(chunk()[0], None)


def test_series_approach_the_exact_form():
    packed, keys, queries = chunk(size=1.5)
    exact = total_bias(terms_of("exact", packed, keys, queries), queries)
    taylor = total_bias(terms_of("taylor", packed, keys, queries), queries)
    cumulant = total_bias(terms_of("cumulant", packed, keys, queries), queries)
    assert bool((taylor >= exact).all()) and bool((cumulant <= exact + 1e-6).all())
    assert relative_error(cumulant, exact) < relative_error(taylor, exact) / 5


def test_cumulant_stays_at_second_order_out_of_range():
    packed, keys, queries = chunk()
    queries = queries.clone()
    queries[0, 4, 3, 17] = 1e3  # query head 4 belongs to KV head 1
    correction = corrections()["cumulant"]
    with pytest.warns(UserWarning, match="alpha"):
        factors = correction.fit(packed, keys, queries, scale=SCALE)
    assert factors.tolist() == [[1.0, 0.0], [1.0, 1.0]]
    got = total_bias(correction.noise(packed, factors), queries)
    taylor = total_bias(packed.noise(), queries)
    assert torch.equal(got[0, 3:], taylor[0, 3:])
    assert bool((got[0, :3] < taylor[0, :3]).any()) and bool((got >= 0).all())


def far_log_partition(keys, queries, terms=()):
    """Log-sum-exp of each query over its far keys, the mean of each KV head."""
    repeats = queries.shape[1] // keys.shape[1]
    scores = queries @ keys.repeat_interleave(repeats, 1).mT * SCALE
    scores = scores - sum(score_bias(queries, t, scale=SCALE) for t in terms)
    far = far_pairs(queries.shape[2], keys.shape[2])
    lse = scores.masked_fill(~far, -torch.inf).logsumexp(-1)
    return lse.unflatten(1, (keys.shape[1], repeats)).mean((2, 3))


def test_far_pairs():
    far = far_pairs(128, 324)
    assert far.shape == (128, 324) and bool(far.any(-1).all())
    assert not bool(far[0, :109].any()) and bool(far[0, 109:].all())  # row 0 sits at token 1
    assert far_pairs(1, 1).tolist() == [[True]]
    assert far_pairs(2, 2).tolist() == [[False, True], [True, False]]
    for tokens in (1, 2, 3, 5, 63):
        assert bool(far_pairs(min(128, tokens), tokens).any(-1).all())


@pytest.mark.parametrize("size", [1.0, 3.0])
def test_calibrated_puts_the_partition_sum_back(size):
    packed, keys, queries = chunk(300, size=size)
    factors = corrections()["calibrated"].fit(packed, keys, queries, scale=SCALE)
    assert factors.shape == (2, 2) and factors.dtype == torch.float32
    terms = corrections()["calibrated"].noise(packed, factors)
    want = far_log_partition(keys, queries)
    got = far_log_partition(packed.decode(torch.float32), queries, terms)
    raw = far_log_partition(packed.decode(torch.float32), queries)
    inside = (factors > -1) & (factors < 2)
    assert bool(inside.all())
    assert float((got - want).abs().max()) < 1e-4
    assert float((raw - want).abs().min()) > 10 * float((got - want).abs().max())


def test_calibrated_is_not_misled_by_peaks():
    """Errors that only shrink what a query has nearby call for no correction from afar."""
    draw = Draw(7)
    keys = draw.normal(1, 1, 120, 64)
    queries = keys * 2  # each query's own key is its peak
    error = draw.normal(1, 1, 120, 64) * 0.3
    noisy = (
        keys
        + error
        - (error * keys).sum(-1, keepdim=True) * keys / keys.square().sum(-1, keepdim=True)
    )  # right about the direction of the key, which is shrunk next
    term = ScoreNoise(torch.full((1, 1, 120, 1), 12 * 0.09), QueryMap(64))
    correction = corrections()["calibrated"]
    plain, shrunk = (
        float(correction.fit(FakePacked(k, (term,)), keys, queries, scale=SCALE))
        for k in (noisy, noisy * 0.99)
    )
    assert 0.5 < plain < 1.5 and abs(shrunk - plain) < 0.3


def test_calibrated_finds_a_known_factor():
    """If the noisy scores are the true ones plus 0.7 b, lambda is 0.7."""
    draw = Draw(3)
    keys, queries = draw.normal(1, 1, 50, 64), draw.normal(1, 2, 30, 64)
    queries = queries / queries.norm(dim=-1, keepdim=True) * 8  # b is one number for all
    term = ScoreNoise(torch.full((1, 1, 50, 1), 2.0), QueryMap(64))
    target = far_log_partition(keys, queries).mean()
    b = score_bias(queries, term, scale=SCALE).mean()
    factors = corrections()["calibrated"].fit(
        FakePacked(keys * 1.3, (term,)), keys, queries, scale=SCALE
    )
    noisy = far_log_partition(keys * 1.3, queries).mean()
    assert float(factors) == pytest.approx(float(((noisy - target) / b).clamp(-1, 2)), rel=1e-3)


def test_calibrated_is_clamped_and_survives_vanishing_noise():
    _, keys, queries = chunk()
    for weight, factor in ((1e-12, 2.0), (0.0, 2.0)):
        term = ScoreNoise(torch.full((2, 2, 127, 4), weight), QueryMap(16))
        packed = FakePacked(keys * 1.5, (term,))
        got = corrections()["calibrated"].fit(packed, keys, queries, scale=SCALE)
        assert bool((got == factor).all())
    term = ScoreNoise(torch.full((2, 2, 127, 4), 1e-12), QueryMap(16))
    shrunk = FakePacked(keys * 0.5, (term,))
    got = corrections()["calibrated"].fit(shrunk, keys, queries, scale=SCALE)
    assert bool((got == -1.0).all())


def test_calibrated_puts_one_factor_on_all_terms():
    packed, keys, queries = chunk()
    first = packed.noise()[0]
    second = ScoreNoise(torch.full((2, 2, 1, 1), 0.01), QueryMap(64, Orthogonal(64)))
    both = FakePacked(packed.reconstruction, (first, second))
    correction = corrections()["calibrated"]
    factors = correction.fit(both, keys, queries, scale=SCALE)
    one, two = correction.noise(both, factors)
    torch.testing.assert_close(one.weights, first.weights * factors[:, :, None, None])
    torch.testing.assert_close(two.weights, 0.01 * factors[:, :, None, None])


def test_measured_is_one_where_errors_are_independent():
    draw = Draw(4)
    keys = draw.normal(1, 2, 20_000, 8)
    steps = 0.5 + draw.weights(1, 2, 20_000, 2)
    error = (torch.rand(keys.shape, generator=draw.generator) - 0.5) * steps.repeat_interleave(
        4, -1
    )
    packed = FakePacked(keys + error, (ScoreNoise(steps.square(), QueryMap(4)),))
    eta = corrections()["measured"].fit(packed, keys, None, scale=SCALE)
    assert eta.shape == (1, 2, 2) and eta.dtype == torch.float16
    assert eta.float().flatten().tolist() == pytest.approx([1.0] * 4, abs=0.1)


@pytest.mark.parametrize("rotated", [False, True])
def test_measured_follows_its_formula(rotated):
    """Rotated keys are compared rotated, off the basis; rows of the other term are left out."""
    draw = Draw(5, torch.float64)
    keys, error = draw.normal(1, 1, 63, 16), draw.normal(1, 1, 63, 16) * 0.3
    kept = (torch.arange(63) % 3 > 0).float()[None, None, :, None]
    steps = 1 + draw.weights(1, 1, 63, 2)
    basis = torch.linalg.qr(draw.normal(1, 1, 16, 3))[0]
    turn = Orthogonal(16, 1) if rotated else None
    terms = (
        ScoreNoise(steps * kept, QueryMap(8, turn, basis)),
        ScoreNoise(steps * (1 - kept), QueryMap(8, turn)),
    )
    eta = corrections()["measured"].fit(FakePacked(keys + error, terms), keys, None, scale=1.0)
    for part, (term, rows) in enumerate(zip(terms, (kept > 0, kept == 0), strict=True)):
        rows = rows[0, 0, :, 0]
        for group in range(2):
            columns = slice(8 * group, 8 * group + 8)
            true, noisy = (
                term.query_map.mapped(x)[0, 0, rows, columns] for x in (keys, keys + error)
            )
            added = noisy.var(0, correction=0) - true.var(0, correction=0)
            want = added.sum() * rows.sum() / (8 * steps[0, 0, rows, group].sum() / 12)
            got = float(eta[0, 0, 2 * part + group])
            assert got == pytest.approx(float(want.clamp(-2, 4)), rel=2e-3)
    scaled = corrections()["measured"].noise(FakePacked(keys, terms), eta)
    torch.testing.assert_close(scaled[1].weights, terms[1].weights * eta[:, :, None, 2:].float())


def test_measured_may_be_negative_and_one_row_is_taylor():
    draw = Draw(6)
    keys = draw.normal(1, 1, 400, 8)
    term = ScoreNoise(torch.ones(1, 1, 400, 1), QueryMap(8))
    shrunk = corrections()["measured"].fit(FakePacked(keys * 0.9, (term,)), keys, None, scale=1.0)
    assert float(shrunk) < -1
    packed, keys, _ = chunk(1)
    eta = corrections()["measured"].fit(packed, keys, None, scale=SCALE)
    assert bool((eta == 1).all())


def test_corrections_undo_most_of_the_bias():
    """2-bit keys raise the partition sum; every correction takes most of it back."""
    packed, keys, queries = chunk(1000, size=2.0)
    true = true_log_partition(keys, queries)
    raw = float((log_partition(packed, queries, ()) - true).mean())
    assert raw > 0.1
    for name in NAMES:
        terms = terms_of(name, packed, keys, queries)
        left = float((log_partition(packed, queries, terms) - true).mean())
        assert abs(left) < 0.35 * raw, name
