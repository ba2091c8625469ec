"""The oracle backend against float64 numpy, and what every call must satisfy."""

import pytest
import torch
from attention_fakes import Draw, Orthogonal, oracle, relative_error

from videokv.attention import attend, eager, explain_choice
from videokv.noise import QueryMap, ScoreNoise
from videokv.protocols import Segment


def mixed_segments(draw, *, head_dim, value_dim, tokens, exact=False):
    """Sink, plain, rotated, projected and two-term chunks, and a current one."""
    shape = lambda t: (2, 2, t, head_dim)  # noqa: E731
    basis = torch.linalg.qr(Draw(7).normal(2, 2, head_dim, 4))[0]
    turn, g = Orthogonal(head_dim, 2), head_dim // 4
    one, two, three, four = (shape(t) for t in tokens)
    return [
        draw.segment(shape(3), value_dim),
        draw.segment(one, value_dim, draw.term(one, g, exact=exact)),
        draw.segment(two, value_dim, draw.term(two, g, transform=turn, exact=exact)),
        draw.segment(
            three,
            value_dim,
            draw.term(three, g, transform=turn, basis=basis, exact=exact),
            draw.term(three, g, transform=turn, exact=exact),
        ),
        draw.segment(four, value_dim, draw.term(four, head_dim, columns=1, exact=exact)),
        draw.segment(shape(21), value_dim),
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (80, 40), (72, 96)])
def test_against_numpy(head_dim, value_dim, exact, causal):
    for dtype, tolerance in ((torch.float64, 1e-6 if exact else 1e-7), (torch.float32, 1e-5)):
        draw = Draw(0, dtype)
        segments = mixed_segments(
            draw, head_dim=head_dim, value_dim=value_dim, tokens=(1, 63, 127, 40), exact=exact
        )
        query = draw.normal(2, 6, 21, head_dim) * 2
        out, lse = attend(query, segments, scale=0.2, backend="eager", causal=causal, need_lse=True)
        want, want_lse = oracle(query, segments, scale=0.2, causal=causal)
        assert out.dtype == dtype
        assert relative_error(out, want) < tolerance
        assert relative_error(lse, want_lse) < tolerance


def test_blocks_of_rows_change_nothing(monkeypatch):
    draw = Draw(3)
    segments = mixed_segments(draw, head_dim=64, value_dim=64, tokens=(5, 6, 7, 8), exact=True)
    query = draw.normal(2, 6, 21, 64)
    want, want_lse = attend(query, segments, backend="eager", causal=True, need_lse=True)
    monkeypatch.setattr(eager, "SCORE_BLOCK_ELEMENTS", 5000)
    out, lse = attend(query, segments, backend="eager", causal=True, need_lse=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize(("rows", "keys"), [(2, 5), (1, 16), (64, 192)])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_causal_is_anchored_at_the_bottom_right(backend, rows, keys):
    """Chunked prefill equals the full prompt: row i sees the keys up to past + i."""
    draw = Draw(4)
    q, k, v = draw.normal(1, 4, keys, 64), draw.normal(1, 2, keys, 64), draw.normal(1, 2, keys, 64)
    full, _ = attend(q, [Segment(k, v)], causal=True, backend=backend)
    past = keys - rows
    parts = [Segment(k[:, :, :past], v[:, :, :past]), Segment(k[:, :, past:], v[:, :, past:])]
    out, _ = attend(q[:, :, past:], parts, causal=True, backend=backend)
    torch.testing.assert_close(out, full[:, :, past:], rtol=1e-5, atol=1e-6)


def test_block_causal_chunks_see_all_of_their_chunk():
    draw = Draw(5)
    past, current = draw.segment((1, 2, 50, 64), 64), draw.segment((1, 2, 12, 64), 64)
    query = draw.normal(1, 2, 12, 64)
    want, _ = oracle(query, [past, current], scale=0.125)
    assert relative_error(attend(query, [past, current])[0], want) < 1e-5


def test_exact_noise_goes_to_eager_and_says_so():
    draw = Draw(6)
    segments = [draw.segment((1, 1, 9, 64), 64, draw.term((1, 1, 9, 64), 32, exact=True))]
    query = draw.normal(1, 1, 3, 64)
    choice = explain_choice(query, segments)
    assert choice.backend == "eager" and "exact" in choice.why
    with pytest.warns(UserWarning, match="eager.*exact"):
        attend(query, segments)
    with pytest.raises(ValueError, match="'sdpa' cannot serve.*exact"):
        attend(query, segments, backend="sdpa")


def test_two_terms_add_up():
    """R21: the log-sum-exp shifts with a bias that is the same for all keys, the output not."""
    draw = Draw(8)
    query = draw.normal(1, 2, 5, 64)
    plain = draw.segment((1, 2, 30, 64), 64)
    half = ScoreNoise(torch.full((1, 1, 1, 1), 3.0), QueryMap(64))
    shifted = Segment(plain.keys, plain.values, (half, half))
    for backend in ("eager", "sdpa"):
        out, lse = attend(query, [plain], need_lse=True, backend=backend)
        got, got_lse = attend(query, [shifted], need_lse=True, backend=backend)
        shift = query.square().sum(-1) / 64 / 24 * 6
        torch.testing.assert_close(got, out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got_lse, lse - shift, rtol=1e-5, atol=1e-5)


def good_call():
    draw = Draw(9)
    return draw.normal(2, 6, 5, 64), draw.segment((2, 2, 7, 64), 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, s: (q[:, :5], [s], {}), "Hq must be a multiple of Hkv"),
        (lambda q, s: (q[..., :60], [s], {}), "key head size"),
        (lambda q, s: (q[:1], [s], {}), "batch must be"),
        (lambda q, s: (q[0], [s], {}), r"query must be \[B, Hq, M, D\]"),
        (lambda q, s: (q.bfloat16(), [s], {}), "keys are torch.float32 but the query"),
        (lambda q, s: (q.int(), [s], {}), "query must be one of"),
        (lambda q, s: (q, [Segment(s.keys.to("meta"), s.values)], {}), "keys are on meta"),
        (lambda q, s: (q, [Segment(s.keys, s.values[:, :, :6])], {}), "agree in B, Hkv and T"),
        (lambda q, s: (q, [Segment(s.keys[0], s.values[0])], {}), r"\[B, Hkv, T, D\]"),
        (lambda q, s: (q, [s, Segment(s.keys, s.keys)], {}), "same value head size"),
        (lambda q, s: (q, [], {}), "at least one segment"),
        (lambda q, s: (q, [s], {"scale": 0.0}), "positive finite"),
        (lambda q, s: (q, [s], {"backend": "magic"}), "unknown backend 'magic'"),
        (lambda q, s: (q, [s], {"causal": True}), "queries' own 5 tokens, got 7"),
        (lambda q, s: (q, [noisy(s, (2, 2, 7, 2), 24)], {}), "do not divide head size 64"),
        (lambda q, s: (q, [noisy(s, (2, 2, 7, 3), 32)], {}), "must broadcast to"),
        (lambda q, s: (q[:, :, :1].expand(2, 6, 7, 64), [noisy(s, (2, 2, 7, 2), 32)],
                       {"causal": True}), "no correction may touch"),
    ],
)  # fmt: skip
def test_bad_calls_are_refused(change, message):
    query, segments, options = change(*good_call())
    with pytest.raises(ValueError, match=message):
        attend(query, segments, **options)


def noisy(segment, shape, group_size):
    noise = ScoreNoise(torch.ones(shape), QueryMap(group_size))
    return Segment(segment.keys, segment.values, (noise,))


def test_exact_noise_of_fourth_powers_is_refused():
    query, segment = good_call()
    term = ScoreNoise(torch.ones(2, 2, 7, 2), QueryMap(32, power=4), exact=True)
    with pytest.raises(ValueError, match="power 2"):
        attend(query, [Segment(segment.keys, segment.values, (term,))])
