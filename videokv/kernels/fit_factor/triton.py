"""The Triton kernel: scores live in registers only, every pass looks at four factors at once.

    h(lambda) = mean over rows of lse_far(s_hat - lambda b), minus the same of the true scores

is convex and falling, so that every tangent crosses zero at or before the root, and a chord over
the root behind it. A pass takes h and its slope at four factors spread over the interval that is
left; the highest crossing of a tangent and the lowest of a chord are the next interval. Its width
falls like that of Newton's steps, from 1/3 of it: three passes leave less than float32 can tell. A
head whose interval is narrow already (2^-12: columns are rounded to 2^-8) sits out the passes that
are left; on Gaussian keys that is all but the first.

Queries and true keys of 16 bits are multiplied exactly; a decoded key in float32 is taken as the
sum of two numbers of 16 bits, good to 2^-16 of it.

A program takes some rows of a KV head and a span of its tokens. What it finds is written apart for
each span; the programs of the next pass put the spans together themselves, all in one order, so
that results do not depend on which ran first.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.blocks import row_alignment
from videokv.kernels.fit_factor.range import FACTOR_RANGE, SMALLEST_SLOPE
from videokv.kernels.gpu import on_device, products

PASSES = 3
BLOCK_ROWS = 64
BLOCK_TOKENS = 32
WARPS, STAGES = 4, 2
MOST_SPANS = 16
PROGRAMS = 264  # of a pass, two for each multiprocessor of a large GPU
LONGEST_OUTER = 16  # features up to here are multiplied out, more by a matrix product
NARROW = 2.0**-12  # an interval that is not looked into any more
UNROLLED = 4  # features that are multiplied out at once
_STATS = 9  # of a row and span: four log-sum-exps, four slopes, the true log-sum-exp
_COUNTS = [
    "t_b", "t_h", "n_b", "n_h", "w_b", "w_h", "heads", "queries", "rows", "tokens", "span", "spans",
]  # fmt: skip


def fit_factor(
    queries: Tensor, true: Tensor, noisy: Tensor, phi: Tensor, weights: Tensor, *, scale: float
) -> Tensor:
    """See the package."""
    true, noisy = (x if x.stride(3) == 1 else x.contiguous() for x in (true, noisy))
    queries, phi = queries.contiguous(), phi.contiguous()  # rows of a KV head's query heads lie
    # behind each other
    batch, heads, tokens, size = true.shape
    sampled = queries.shape[2]
    rows, lines = queries.shape[1] // heads * sampled, batch * heads
    blocks = triton.cdiv(rows, BLOCK_ROWS)
    # Whatever the batch: a row's sums are added in the order in which they would be alone.
    spans = min(MOST_SPANS, triton.cdiv(tokens, BLOCK_TOKENS), max(1, PROGRAMS // (heads * blocks)))
    span = triton.cdiv(triton.cdiv(tokens, spans), BLOCK_TOKENS) * BLOCK_TOKENS
    spans = triton.cdiv(tokens, span)
    # Of every pass: the interval, and what rows found (true log-sum-exps: pass 0 alone).
    ends = true.new_empty(PASSES, lines, 2, dtype=torch.float32)
    found = true.new_empty(PASSES, lines, spans, _STATS, rows, dtype=torch.float32)
    factors = true.new_empty(batch, heads, dtype=torch.float32)
    shared = (
        queries, true, *true.stride()[:3], noisy, *noisy.stride()[:3],
        phi, weights, *_steps(weights, (batch, heads, tokens, phi.shape[3])),
        ends, found, heads, sampled, rows, tokens, span, spans, scale,
    )  # fmt: skip
    with on_device(true.device):
        for number in range(PASSES):
            _look[(spans, blocks, lines)](
                *shared,
                PASS=number,
                D=size,
                BD=max(16, triton.next_power_of_2(size)),
                F=phi.shape[3],
                BF=max(32, triton.next_power_of_2(phi.shape[3])),
                OUTER=phi.shape[3] <= LONGEST_OUTER,
                BM=BLOCK_ROWS,
                BT=BLOCK_TOKENS,
                BS=MOST_SPANS,
                ALIGN=math.gcd(row_alignment(true), row_alignment(noisy)),
                TWO=noisy.dtype != true.dtype,
                EXACT=products(true.dtype, true.device),
                SPLIT=products(torch.float32, true.device),
                LOW=FACTOR_RANGE[0],
                HIGH=FACTOR_RANGE[1],
                SMALLEST=SMALLEST_SLOPE,
                NARROW=NARROW,
                UNROLL=UNROLLED,
                num_warps=WARPS,
                num_stages=STAGES,
            )
        _answer[(lines,)](
            ends, found, factors, rows, spans,
            LAST=PASSES - 1, BM=BLOCK_ROWS, BS=MOST_SPANS, LOW=FACTOR_RANGE[0],
            HIGH=FACTOR_RANGE[1], SMALLEST=SMALLEST_SLOPE, NARROW=NARROW, num_warps=4,
        )  # fmt: skip
    return factors


def _steps(weights: Tensor, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, 0 where one number serves all."""
    pairs = zip(weights.shape, weights.stride(), wanted, strict=True)
    return tuple(0 if held == 1 and asked > 1 else step for held, step, asked in pairs)


@triton.jit(do_not_specialize=_COUNTS)
def _look(
    q, true, t_b, t_h, t_t, noisy, n_b, n_h, n_t, phi, weights, w_b, w_h, w_t, w_f,
    ends, found, heads, queries, rows, tokens, span, spans, scale,
    PASS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, F: tl.constexpr, BF: tl.constexpr,
    OUTER: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
    ALIGN: tl.constexpr, TWO: tl.constexpr, EXACT: tl.constexpr, SPLIT: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, SMALLEST: tl.constexpr, NARROW: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(2).to(tl.int64)
    lines = tl.num_programs(2).to(tl.int64)
    batch, head = line // heads, line % heads
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    live = row < rows
    channel = tl.arange(0, BD)
    used = channel < D
    first = tl.program_id(0) * span
    last = tl.minimum(first + span, tokens)
    query = row % queries
    place = (2 * query + 1) * tokens // (2 * queries)
    # A chunk of one token has no far key: its query is asked about it.
    lonely = 3 * tl.maximum(place, tokens - 1 - place) < tokens
    inside = live[:, None] & used[None, :]
    q_row = q + line * rows * D + (row * D)[:, None]
    asked = tl.load(q_row + channel[None, :], mask=inside, other=0.0)
    scale_2 = scale * 1.4426950408889634

    low, high = LOW, HIGH
    if PASS > 0:
        low, high = _interval(
            ends, found, line, lines, rows, spans, PASS - 1, BM, BS, LOW, HIGH, SMALLEST, NARROW
        )
        last = tl.where(high - low > NARROW, last, first)  # nothing to look at
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(ends + (PASS * lines + line) * 2, low)
        tl.store(ends + (PASS * lines + line) * 2 + 1, high)
    width = (high - low) / 3
    f_0 = low * 1.4426950408889634
    f_1 = (low + width) * 1.4426950408889634
    f_2 = (high - width) * 1.4426950408889634
    f_3 = high * 1.4426950408889634

    nothing = tl.zeros([BM], tl.float32)
    m_0, a_0, t_0 = nothing + _LOWEST, nothing, nothing
    m_1, a_1, t_1 = nothing + _LOWEST, nothing, nothing
    m_2, a_2, t_2 = nothing + _LOWEST, nothing, nothing
    m_3, a_3, t_3 = nothing + _LOWEST, nothing, nothing
    phi_row = phi + line * rows * F + row * F
    omega = weights + batch * w_b + head * w_h
    feature = tl.arange(0, BF)
    features = nothing[:, None]
    if not OUTER:
        some = live[:, None] & (feature < F)[None, :]
        features = tl.load(phi_row[:, None] + feature[None, :], mask=some, other=0.0)
    offset = tl.arange(0, BT)
    noisy += tl.multiple_of(batch * n_b + head * n_h, ALIGN) + first.to(tl.int64) * n_t
    true += tl.multiple_of(batch * t_b + head * t_h, ALIGN) + first.to(tl.int64) * t_t
    omega += first.to(tl.int64) * w_t
    for start in range(first, last, BT):
        token = start + offset
        held = token < last
        seen = held[:, None] & used[None, :]
        keys = tl.load(noisy + (offset * n_t)[:, None] + channel[None, :], mask=seen, other=0.0)
        noisy += BT * n_t.to(tl.int64)
        upper = keys.to(asked.dtype)
        s = tl.dot(asked, tl.trans(upper), input_precision=EXACT)
        if TWO:  # what 16 bits leave of a key, in 16 bits
            lower = (keys - upper.to(tl.float32)).to(asked.dtype)
            s = tl.dot(asked, tl.trans(lower), s, input_precision=EXACT)
        s *= scale_2
        far = (3 * tl.abs(place[:, None] - token[None, :]) >= tokens) | lonely[:, None]
        far = far & held[None, :]
        if OUTER:
            b = tl.zeros([BM, BT], tl.float32)
            for f in tl.range(0, F, loop_unroll_factor=UNROLL):
                p = tl.load(phi_row + f, mask=live, other=0.0)
                w = tl.load(omega + offset * w_t + f * w_f, mask=held, other=0.0)
                b += p[:, None] * w[None, :].to(tl.float32)
        else:
            columns = held[:, None] & (feature < F)[None, :]
            w = tl.load(
                omega + (offset * w_t)[:, None] + feature[None, :] * w_f, mask=columns, other=0.0
            )
            b = tl.dot(features, tl.trans(w.to(tl.float32)), input_precision=SPLIT)
        omega += BT * w_t
        m_0, a_0, t_0 = _online(s - f_0 * b, b, far, m_0, a_0, t_0)
        m_1, a_1, t_1 = _online(s - f_1 * b, b, far, m_1, a_1, t_1)
        m_2, a_2, t_2 = _online(s - f_2 * b, b, far, m_2, a_2, t_2)
        m_3, a_3, t_3 = _online(s - f_3 * b, b, far, m_3, a_3, t_3)
    target = found + ((PASS * lines + line) * spans + tl.program_id(0)) * 9 * rows + row
    if PASS == 0:
        m, a = nothing + _LOWEST, nothing
        for start in range(first, last, BT):
            token = start + offset
            held = token < last
            seen = held[:, None] & used[None, :]
            keys = tl.load(true + (offset * t_t)[:, None] + channel[None, :], mask=seen, other=0.0)
            true += BT * t_t.to(tl.int64)
            s = tl.dot(asked, tl.trans(keys), input_precision=EXACT) * scale_2
            far = (3 * tl.abs(place[:, None] - token[None, :]) >= tokens) | lonely[:, None]
            m, a, _ = _online(s, s, far & held[None, :], m, a, a)
        tl.store(target + 8 * rows, _log(m, a), mask=live)
    _write(target, rows, 0, m_0, a_0, t_0, live)
    _write(target, rows, 1, m_1, a_1, t_1, live)
    _write(target, rows, 2, m_2, a_2, t_2, live)
    _write(target, rows, 3, m_3, a_3, t_3, live)


_LOWEST = tl.constexpr(-1e30)  # of no key at all; finite, so that differences are


@triton.jit
def _online(s, b, far, m, a, t):
    """Largest score, sum of powers and sum of powers times b, with these keys added."""
    s = tl.where(far, s, _LOWEST)
    peak = tl.maximum(m, tl.max(s, 1))
    p = tl.where(far, tl.math.exp2(s - peak[:, None]), 0.0)
    shrink = tl.math.exp2(m - peak)
    return peak, a * shrink + tl.sum(p, 1), t * shrink + tl.sum(p * b, 1)


@triton.jit
def _log(m, a):
    """The natural log-sum-exp; about -7e29 of no key at all."""
    return (m + tl.math.log2(tl.where(a > 0, a, 1.0))) * 0.6931471805599453


@triton.jit
def _write(target, rows, number, m, a, t, live):
    tl.store(target + number * rows, _log(m, a), mask=live)
    tl.store(target + (4 + number) * rows, t / tl.where(a > 0, a, 1.0), mask=live)


@triton.jit
def _interval(
    ends, found, line, lines, rows, spans, PASS: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, SMALLEST: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """The ends of the interval that pass ``PASS`` leaves; as it was where the pass was sat out."""
    low = tl.load(ends + (PASS * lines + line) * 2)
    high = tl.load(ends + (PASS * lines + line) * 2 + 1)
    floor, roof = low, high
    if high - low > NARROW:
        floor, roof = _narrowed(
            low, high, found, line, lines, rows, spans, PASS, BM, BS, LOW, HIGH, SMALLEST
        )
    return floor, roof


@triton.jit
def _narrowed(
    low, high, found, line, lines, rows, spans, PASS: tl.constexpr, BM: tl.constexpr,
    BS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """The ends of the interval after a look at it: where tangents and chords cross zero."""
    width = (high - low) / 3
    mine = found + (PASS * lines + line) * spans * 9 * rows
    truth = found + line * spans * 9 * rows + 8 * rows
    g_0, s_0 = _means(mine, truth, 0, rows, spans, BM, BS)
    g_1, s_1 = _means(mine, truth, 1, rows, spans, BM, BS)
    g_2, s_2 = _means(mine, truth, 2, rows, spans, BM, BS)
    g_3, s_3 = _means(mine, truth, 3, rows, spans, BM, BS)
    x_1, x_2 = low + width, high - width
    floor = tl.maximum(
        tl.maximum(low + g_0 / tl.maximum(s_0, SMALLEST), x_1 + g_1 / tl.maximum(s_1, SMALLEST)),
        tl.maximum(x_2 + g_2 / tl.maximum(s_2, SMALLEST), high + g_3 / tl.maximum(s_3, SMALLEST)),
    )
    floor = tl.minimum(tl.maximum(floor, LOW), HIGH)
    roof = tl.where(g_3 > 0, HIGH, high)
    roof = tl.minimum(roof, _chord(x_2, g_2, high, g_3, HIGH))
    roof = tl.minimum(roof, _chord(x_1, g_1, x_2, g_2, HIGH))
    roof = tl.minimum(roof, _chord(low, g_0, x_1, g_1, HIGH))
    return floor, tl.minimum(tl.maximum(roof, floor), HIGH)


@triton.jit
def _chord(a, g_a, b, g_b, otherwise):
    """Where the chord from (a, g_a) to (b, g_b) crosses zero, if the root is between them."""
    between = (g_a > 0) & (g_b <= 0)
    return tl.where(between, a + (b - a) * g_a / tl.where(between, g_a - g_b, 1.0), otherwise)


@triton.jit
def _means(mine, truth, number, rows, spans, BM: tl.constexpr, BS: tl.constexpr):
    """h and minus its slope at one of the four factors."""
    span = tl.arange(0, BS)
    gaps = tl.zeros([BM], tl.float32)
    slopes = tl.zeros([BM], tl.float32)
    for start in range(0, rows, BM):
        row = start + tl.arange(0, BM)
        inside = (span < spans)[:, None] & (row < rows)[None, :]
        place = span[:, None] * 9 * rows + row[None, :]
        part = tl.load(mine + place + number * rows, mask=inside, other=_LOWEST)
        slope = tl.load(mine + place + (4 + number) * rows, mask=inside, other=0.0)
        true = tl.load(truth + place, mask=inside, other=_LOWEST)
        peak, true_peak = tl.max(part, 0), tl.max(true, 0)
        share = tl.exp(part - peak[None, :])
        whole = tl.sum(share, 0)
        gap = peak - true_peak
        gap += tl.log(whole) - tl.log(tl.sum(tl.exp(true - true_peak[None, :]), 0))
        gaps += tl.where(row < rows, gap, 0.0)
        slopes += tl.where(row < rows, tl.sum(share * slope, 0) / whole, 0.0)
    return tl.sum(gaps, 0) / rows, tl.sum(slopes, 0) / rows


@triton.jit(do_not_specialize=["rows", "spans"])
def _answer(
    ends, found, factors, rows, spans, LAST: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, SMALLEST: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    lines = tl.num_programs(0).to(tl.int64)
    low, _ = _interval(
        ends, found, line, lines, rows, spans, LAST, BM, BS, LOW, HIGH, SMALLEST, NARROW
    )
    tl.store(factors + line, low)
