"""Two-bit codes along channels with E4M3 steps: every thread owns whole groups.

A group is loaded in parts of eight channels, each a tensor of its own, so that its extremes, its
step, its zero and its packed codes are found by one thread: nothing is exchanged between threads,
and what belongs to a group is computed once. The bits are those of the other kernel, the faster one
where centroids are subtracted (0.056 ms where this took 0.065: one row of them is read by a lane).
"""

from __future__ import annotations

import triton
import triton.language as tl

from videokv.kernels.quantize_groups.arithmetic import (
    divided,
    e4m3,
    extremes,
    largest_bits,
    rounded,
    two_bit_signs,
)

WARPS = 1
GROUPS = 64  # of one step of a program: one a thread
LONGEST = 8  # blocks that a program walks over
_COUNTS = ["x_b", "x_h", "heads", "tokens", "stretch", "blocks"]


@triton.jit(do_not_specialize=_COUNTS)
def owned(
    x, x_b, x_h, x_t, heads, tokens, stretch, blocks, packed, steps, zeros, facts,
    ALIGN: tl.constexpr, D: tl.constexpr, BG: tl.constexpr, BT: tl.constexpr, LEVELS: tl.constexpr,
    INVERSE: tl.constexpr, GROUP: tl.constexpr, ZERO_BF16: tl.constexpr, LIMIT: tl.constexpr,
    AWAY: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """packed: int32 words of 16 codes; zeros: None for symmetric codes."""
    groups: tl.constexpr = D // GROUP
    ZERO: tl.constexpr = 0 if zeros is None else 1
    head = tl.program_id(1).to(tl.int64)
    group = tl.arange(0, BG)
    eight = tl.arange(0, 8)[None, None, :]
    base = tl.multiple_of((head // heads) * x_b + (head % heads) * x_h, ALIGN)
    seen = tl.zeros([BT, BG], tl.float32)
    peak = tl.zeros([BT, BG], tl.float32)
    offset_peak = tl.zeros([BT, BG], tl.float32)
    begin = tl.program_id(0) * stretch
    for number in range(begin, tl.minimum(begin + stretch, blocks)):
        token = number * BT + tl.arange(0, BT)
        live = token < tokens
        row = head * tokens + token
        used = live[:, None] & (group < groups)[None, :]
        channel = (group * GROUP)[None, :, None] + eight
        place = x + base + token[:, None, None].to(tl.int64) * x_t + channel
        parts = ()
        low = tl.full([BT, BG], float("inf"), tl.float32)
        high = tl.full([BT, BG], float("-inf"), tl.float32)
        for part in tl.static_range(GROUP // 8):
            values = tl.load(place + part * 8, mask=used[:, :, None], other=0.0).to(tl.float32)
            parts = parts + (values,)  # type: ignore[assignment]
            lower, higher = extremes(values, 2, NATIVE)
            low = tl.minimum(low, lower, propagate_nan=tl.PropagateNan.ALL)
            high = tl.maximum(high, higher, propagate_nan=tl.PropagateNan.ALL)

        extreme = tl.maximum(tl.abs(low), tl.abs(high), propagate_nan=tl.PropagateNan.ALL)
        seen = tl.maximum(seen, extreme, propagate_nan=tl.PropagateNan.ALL)
        span = extreme if ZERO == 0 else high - low
        ideal = divided(span, LEVELS, INVERSE, NATIVE)
        peak = tl.maximum(peak, ideal)  # dead groups are 0
        stored, step = e4m3(tl.minimum(ideal, LIMIT))
        line = row[:, None] * groups + group[None, :]
        tl.store(steps + line, stored, mask=used)
        some = step > 0
        divisor = tl.where(some, step, float("inf"))
        zero = low
        if ZERO == 1:
            zero = tl.where(some, low, low + (high - low) * 0.5)
            zero = rounded(zero, zeros, ZERO_BF16)
            offset_peak = tl.maximum(offset_peak, tl.abs(zero))
            tl.store(zeros + line, zero.to(zeros.dtype.element_ty), mask=used)

        divisor, zero = divisor[:, :, None], zero[:, :, None]
        target = packed + row[:, None] * (D // 16) + (group * (GROUP // 16))[None, :]
        for word in tl.static_range(GROUP // 16):
            codes = tl.zeros([BT, BG], tl.uint32)
            codes = _append(codes, parts[2 * word], divisor, zero, ZERO, AWAY)
            codes = _append(codes, parts[2 * word + 1], divisor, zero, ZERO, AWAY)
            tl.store(target + word, _bytes_turned(codes), mask=used)

    tl.atomic_max(facts + head * 4 + 0, largest_bits(peak))
    tl.atomic_max(facts + head * 4 + 1, largest_bits(seen))
    if ZERO == 1:
        tl.atomic_max(facts + head * 4 + 2, largest_bits(offset_peak))


@triton.jit
def _append(word, values, divisor, zero, ZERO: tl.constexpr, AWAY: tl.constexpr):
    """A word with eight codes more at its lower end, the first of them highest."""
    low, high = two_bit_signs(values, divisor, zero, 1.0, ZERO, AWAY, False, False)
    low0, low1, low2, low3, low4, low5, low6, low7 = _apart(low)
    high0, high1, high2, high3, high4, high5, high6, high7 = _apart(high)
    word = _shifted(_shifted(word, high0, low0), high1, low1)
    word = _shifted(_shifted(word, high2, low2), high3, low3)
    word = _shifted(_shifted(word, high4, low4), high5, low5)
    return _shifted(_shifted(word, high6, low6), high7, low7)


@triton.jit
def _shifted(word, high, low):
    """The signs of two numbers pushed into a word: one funnel shift each."""
    word = (word << 1) | (high >> 31)
    return (word << 1) | (low >> 31)


@triton.jit
def _apart(signs):
    """The eight columns of int32 [a, b, 8], as uint32."""
    signs = signs.to(tl.uint32, bitcast=True)
    signs = tl.reshape(signs, [signs.shape[0], signs.shape[1], 2, 2, 2])
    even, odd = tl.split(signs)
    even, even_late = tl.split(even)
    odd, odd_late = tl.split(odd)
    zero, four = tl.split(even)
    two, six = tl.split(even_late)
    one, five = tl.split(odd)
    three, seven = tl.split(odd_late)
    return zero, one, two, three, four, five, six, seven


@triton.jit
def _bytes_turned(word):
    """The four bytes of uint32 in the opposite order, as int32."""
    turned = (word << 24) | ((word & 0xFF00) << 8) | ((word >> 8) & 0xFF00) | (word >> 24)
    return turned.to(tl.int32, bitcast=True)
