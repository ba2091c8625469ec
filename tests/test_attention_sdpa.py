"""Appended columns on stock kernels against the oracle backend."""

import pytest
import torch
from attention_fakes import Draw, Orthogonal, relative_error
from test_attention_eager import mixed_segments
from torch.nn import functional

from videokv.attention import attend, explain_choice, stock_kernels
from videokv.attention.columns import balance, plan_calls, with_columns
from videokv.attention.stock_kernels import choose_kernel
from videokv.noise import QueryMap, ScoreNoise
from videokv.protocols import Segment

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"))]  # fmt: skip
# Outputs and log-sum-exps are of size 1 to 10 here; half types round inputs and outputs once.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def moved(segments, device):
    return [
        Segment(
            s.keys.to(device),
            s.values.to(device),
            tuple(
                ScoreNoise(
                    t.weights.to(device),
                    QueryMap(
                        t.query_map.group_size,
                        t.query_map.transform,
                        None if t.query_map.basis is None else t.query_map.basis.to(device),
                        t.query_map.power,
                    ),
                )
                for t in s.noise
            ),
        )
        for s in segments
    ]


def assert_close_to_eager(query, segments, *, causal=False, tolerance=None):
    tolerance = tolerance or TOLERANCE[query.dtype]
    out, lse = attend(query, segments, backend="sdpa", causal=causal, need_lse=True)
    want, want_lse = attend(query, segments, backend="eager", causal=causal, need_lse=True)
    assert out.dtype == query.dtype and lse.dtype == want_lse.dtype
    assert relative_error(out, want) < tolerance
    assert relative_error(lse, want_lse) < tolerance
    silent, none = attend(query, segments, backend="sdpa", causal=causal)
    assert none is None and relative_error(silent, want) < tolerance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(64, 64), (72, 72), (80, 40), (96, 128), (128, 128), (256, 256), (64, 160)],
)
def test_equals_eager_in_float32(head_dim, value_dim, causal, device):
    draw = Draw(0)
    segments = mixed_segments(
        draw, head_dim=head_dim, value_dim=value_dim, tokens=(1, 63, 127, 1000)
    )
    query = draw.normal(2, 6, 21, head_dim)
    assert_close_to_eager(query.to(device), moved(segments, device), causal=causal)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (80, 40), (128, 128)])
def test_equals_eager_in_half_types(head_dim, value_dim, dtype, causal, device):
    draw = Draw(1, dtype)
    segments = mixed_segments(draw, head_dim=head_dim, value_dim=value_dim, tokens=(1, 63, 127, 9))
    query = draw.normal(2, 6, 21, head_dim)
    assert_close_to_eager(query.to(device), moved(segments, device), causal=causal)


@pytest.mark.parametrize("size", [1e-6, 1e-2, 1.0, 1e3, 1e5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_columns_of_any_size_survive_half_types(dtype, size):
    """Queries 1/size and keys' steps size: b is of order one, its factors are not."""
    draw = Draw(2, torch.float32)
    query = (draw.normal(1, 2, 33, 64) * size**-0.5).to(dtype)
    keys = draw.normal(1, 1, 40, 64).to(dtype)
    term = ScoreNoise(draw.weights(1, 1, 40, 2) * size * 8, QueryMap(32))
    term4 = ScoreNoise(draw.weights(1, 1, 40, 2) * size**2 * 8, QueryMap(32, power=4))
    segments = [Segment(keys, keys, (term, term4)), Segment(keys + 1, keys)]
    scale = 0.125
    call = plan_calls(segments)[0]
    q, k = with_columns(query, call, scale=scale, width=72)
    columns_q, columns_k = q[..., 64:].double(), k[..., 64:].double()
    assert bool(torch.isfinite(columns_q).all() and torch.isfinite(columns_k).all())
    got = -scale * (columns_q @ columns_k.transpose(-1, -2))[..., :40]
    want = sum(
        t.query_map.features(query.double(), scale=scale) @ t.weights.double().transpose(-1, -2)
        for t in (term, term4)
    )
    limit = {torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    parts = sum(
        (t.query_map.features(query.double(), scale=scale) @ t.weights.double().mT).abs()
        for t in (term, term4)
    )
    assert float(((got - want).abs() / parts).max()) < limit
    assert float(parts.max()) > 0.1
    assert_close_to_eager(query, segments)


def test_balance_keeps_products_and_zero_columns():
    draw = Draw(3)
    phi, omega = draw.normal(2, 6, 5, 3) * 1e6, draw.normal(2, 2, 7, 3) * 1e-6
    omega[..., 1] = 0
    up, down = balance(phi, omega)
    repeat = omega.repeat_interleave(3, 1).transpose(-1, -2)
    torch.testing.assert_close(
        up @ down.repeat_interleave(3, 1).transpose(-1, -2), phi @ repeat, rtol=1e-5, atol=1e-7
    )
    assert bool((up[..., 1] == 0).all())
    assert float(up.abs().max()) < 100 and float(down.abs().max()) < 100


def test_segments_without_noise_get_exactly_no_correction():
    draw = Draw(4)
    shape = (1, 2, 30, 64)
    segments = [draw.segment(shape, 64, draw.term(shape, 32)), draw.segment(shape, 64)]
    call = plan_calls(segments)[0]
    _, keys = with_columns(draw.normal(1, 2, 5, 64), call, scale=0.1, width=72)
    assert bool((keys[:, :, 30:, 64:] == 0).all()) and bool((keys[:, :, :30, 64:66] != 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [2, 6])
def test_without_noise_it_is_the_stock_call(heads, dtype):
    draw = Draw(5, dtype)
    query = draw.normal(2, heads, 63, 80)
    segments = [draw.segment((2, 2, t, 80), 80) for t in (1, 127, 0, 63)]
    out, lse = attend(query, segments, scale=0.3)
    k, v = (torch.cat([getattr(s, n) for s in segments], 2) for n in ("keys", "values"))
    want = functional.scaled_dot_product_attention(query, k, v, scale=0.3, enable_gqa=heads > 2)
    assert lse is None and torch.equal(out, want)
    assert explain_choice(query, segments).backend == "sdpa"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zero_weights_equal_plain_attention(dtype):
    draw = Draw(6, dtype)
    query = draw.normal(1, 2, 9, 64) * 100
    plain = draw.segment((1, 2, 50, 64), 64)
    zero = Segment(plain.keys, plain.values, (ScoreNoise(torch.zeros(1, 2, 50, 2), QueryMap(32)),))
    want, _ = attend(query, [plain])
    torch.testing.assert_close(attend(query, [zero])[0], want, rtol=1e-3, atol=1e-3)
    assert bool(torch.isfinite(attend(query, [zero])[0]).all())


def test_maps_beyond_the_budget_are_merged():
    """Seven chunks with bases of their own, 8 columns each: two kernel calls."""
    draw = Draw(7)
    shape = (1, 2, 40, 64)
    segments = [draw.segment((1, 2, 5, 64), 64)]
    for _ in range(7):
        basis = torch.linalg.qr(draw.normal(1, 2, 64, 4))[0]
        segments.append(draw.segment(shape, 64, draw.term(shape, 8, basis=basis)))
    calls = plan_calls(segments)
    assert [c.columns for c in calls] == [32, 24]
    assert_close_to_eager(draw.normal(1, 6, 33, 64), segments)


def test_chunks_that_share_a_map_share_columns():
    draw = Draw(8)
    shape = (1, 2, 40, 64)
    segments = [
        draw.segment(shape, 64, draw.term(shape, 16, transform=Orthogonal(64, 1)))
        for _ in range(30)
    ]
    (call,) = plan_calls(segments)
    assert call.columns == 4


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_one_column_per_channel(head_dim):
    draw = Draw(9)
    shape = (1, 2, 63, head_dim)
    segments = [draw.segment(shape, head_dim, draw.term(shape, 1)) for _ in range(2)]
    segments.append(draw.segment(shape, head_dim, draw.term(shape, head_dim // 2)))
    assert_close_to_eager(draw.normal(1, 2, 17, head_dim), segments)


def test_refusal_names_the_option(monkeypatch):
    monkeypatch.setattr(stock_kernels, "_CANDIDATES", {})
    stock_kernels._choose.cache_clear()
    draw = Draw(10)
    segments = [draw.segment((1, 1, 9, 64), 64, draw.term((1, 1, 9, 64), 1))]
    query = draw.normal(1, 1, 3, 64)
    try:
        with pytest.raises(ValueError, match="64 columns to head size 64.*group_size"):
            attend(query, segments, backend="sdpa")
        assert explain_choice(query, segments).backend == "eager"
    finally:
        stock_kernels._choose.cache_clear()


def strided(x, kind):
    """The same values behind other strides."""
    if kind == "fused":  # slices of [B, T, 3, H, D]
        return torch.stack([x.transpose(1, 2)] * 3, 2)[:, :, 1].transpose(1, 2)
    if kind == "channels":  # last dimension not dense
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    padded = torch.full((*x.shape[:2], x.shape[2] + 9, x.shape[3]), float("nan"), dtype=x.dtype)
    padded[:, :, : x.shape[2]] = x  # a preallocated buffer whose unfilled part is NaN (R27)
    return padded[:, :, : x.shape[2]]


@pytest.mark.parametrize("kind", ["fused", "channels", "buffer"])
@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_strides_do_not_matter(backend, noise, kind):
    draw = Draw(11)
    shape = (2, 2, 63, 64)
    terms = (draw.term(shape, 32),) if noise else ()
    segment, query = draw.segment(shape, 64, *terms), draw.normal(2, 6, 17, 64)
    other = Segment(strided(segment.keys, kind), strided(segment.values, kind), terms)
    for need_lse in (False, True):
        want, _ = attend(query, [segment], backend=backend, need_lse=need_lse)
        got, _ = attend(strided(query, kind), [other], backend=backend, need_lse=need_lse)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_expanded_batch():
    draw = Draw(12)
    shape = (1, 2, 63, 64)
    term, segment = draw.term(shape, 32), draw.segment(shape, 64)
    wide = Segment(
        segment.keys.expand(3, -1, -1, -1), segment.values.expand(3, -1, -1, -1), (term,)
    )
    assert_close_to_eager(draw.normal(3, 6, 5, 64), [wide])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stock_kernels_return_natural_logs(dtype, device):
    """Of this torch version: the kernel is found, and its lse is torch.logsumexp of the scores."""
    choice = choose_kernel(
        device=torch.device(device), dtype=dtype, head_dim=72, value_dim=64, heads_per_kv=3,
        rows=45, tokens=77,
    )  # fmt: skip
    assert not isinstance(choice, str), choice
    draw = Draw(13, dtype)
    query, segment = draw.normal(1, 6, 45, 64), draw.segment((1, 2, 77, 64), 64)
    _, lse = attend(query.to(device), moved([segment], device), need_lse=True, backend="sdpa")
    scores = query.double() @ segment.keys.double().repeat_interleave(3, 1).transpose(-1, -2) / 8
    torch.testing.assert_close(
        lse.double().cpu(), torch.logsumexp(scores, -1), rtol=1e-4, atol=1e-3
    )


def test_probe_reports_a_kernel_that_lies(monkeypatch):
    def base_two(q, k, v, scale, causal):
        out, lse = stock_kernels._cpu(q, k, v, scale, causal)
        return out, lse / 0.6931

    monkeypatch.setitem(stock_kernels.KERNELS, "cpu", base_two)
    stock_kernels._choose.cache_clear()
    try:
        reason = choose_kernel(
            device=torch.device("cpu"), dtype=torch.float32, head_dim=64, value_dim=64,
            heads_per_kv=1, rows=5, tokens=9,
        )  # fmt: skip
        assert isinstance(reason, str) and "wrong by" in reason
    finally:
        stock_kernels._choose.cache_clear()


def test_growing_and_shrinking_lengths():
    draw = Draw(14)
    query = draw.normal(1, 2, 9, 64)
    for tokens in (1, 127, 137, 1025, 320, 256, 1):
        shape = (1, 1, tokens, 64)
        assert_close_to_eager(query, [draw.segment(shape, 64, draw.term(shape, 32))])
