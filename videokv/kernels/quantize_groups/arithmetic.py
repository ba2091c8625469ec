"""What the kernels of groupwise codes compute alike, rounded as the reference rounds it.

NATIVE: compiled for a GPU. The interpreter has no fused multiply-add and folds slowly with
functions other than its own; there the plain forms stand, which give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from videokv.kernels.numbers import round_bf16


@triton.jit
def largest_bits(peaks):
    """The largest of numbers that are not negative, as its bits: ordered alike, NaN last."""
    return tl.max(tl.max(as_int(peaks) & 0x7FFFFFFF, 1), 0)


@triton.jit
def two_bits(
    values, divisor, zero, scale, ZERO: tl.constexpr, AWAY: tl.constexpr, LATE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Codes of two bits without a division, the same as by one."""
    low, high = two_bit_signs(values, divisor, zero, scale, ZERO, AWAY, LATE, NATIVE)
    return ((low >> 31) & 1) | ((high >> 30) & 2)


@triton.jit
def two_bit_signs(
    values, divisor, zero, scale, ZERO: tl.constexpr, AWAY: tl.constexpr, LATE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """The low and the high bit of each code, as signs of int32.

    Steps of E4M3 have 4 significant bits, so their halves are exact in float32, and no quotient of
    a number on one side of such a bound rounds to the other side of it.
    """
    half = divisor * 0.5
    # Signs of differences, not comparisons: those would fill the predicate registers.
    if ZERO == 0:
        if AWAY:
            below, over = as_int(values - half), as_int(-half - values)
            low_bit, high_bit = below & over, ~below
        else:
            high_bit = as_int(half - values)
            low_bit = ~(high_bit | as_int(values + half))
    else:
        if LATE and NATIVE:
            above = tl.fma(values, tl.zeros_like(values) + scale, tl.zeros_like(values) - zero)
        elif LATE:
            above = values * scale - zero
        else:
            above = values - zero
        high_bit = ~as_int(above - half * 3.0)
        low_bit = as_int(half - above) ^ high_bit ^ as_int(half * 5.0 - above)
    return low_bit, high_bit


@triton.jit
def _lower(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _higher(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def extremes(values, AXIS: tl.constexpr, NATIVE: tl.constexpr):
    """Smallest and largest along an axis; NaN where there is one."""
    if NATIVE:
        low, high = tl.reduce(values, AXIS, _lower), tl.reduce(values, AXIS, _higher)
    else:  # the interpreter folds its own reductions only at once
        lost = tl.max((values != values).to(tl.int32), AXIS) > 0
        low = tl.where(lost, float("nan"), tl.min(values, AXIS))
        high = tl.where(lost, float("nan"), tl.max(values, AXIS))
    return low, high


@triton.jit
def divided(x, LEVELS: tl.constexpr, INVERSE: tl.constexpr, FUSED: tl.constexpr):
    """x / LEVELS rounded to nearest.

    FUSED: by the reciprocal and one step of Markstein's, which is as exact for these divisors in
    float32's normal range (checked for every mantissa); below it all E4M3 steps are 0.
    """
    if LEVELS == 1:
        return x
    if not FUSED:
        return tl.div_rn(x, tl.full(x.shape, LEVELS, tl.float32))
    inverse = tl.full(x.shape, INVERSE, tl.float32)
    near = x * inverse
    rest = tl.fma(near, tl.full(x.shape, -LEVELS, tl.float32), x)
    return tl.fma(rest, inverse, near)


@triton.jit
def e4m3(x):
    """E4M3 bytes of 0 <= x <= 448, nearest even, and what they stand for."""
    bits = x.to(tl.int32, bitcast=True)
    bits = bits + 0x7FFFF + ((bits >> 20) & 1)
    small = x + 24576.0  # whose last bit is 2^-9, the unit of E4M3 below 2^-6
    tiny = x < 0.015625
    byte = tl.where(tiny, small.to(tl.int32, bitcast=True) & 15, (bits >> 20) - 960)
    step = tl.where(tiny, small - 24576.0, (bits & -1048576).to(tl.float32, bitcast=True))
    return byte.to(tl.uint8), step


@triton.jit
def as_int(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def rounded(x, zeros, BF16: tl.constexpr):
    """Float32 rounded to what ``zeros`` holds."""
    return round_bf16(x) if BF16 else x.to(zeros.dtype.element_ty).to(tl.float32)
