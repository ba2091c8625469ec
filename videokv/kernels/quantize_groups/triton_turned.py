"""Two-bit codes above an offset, of rotated tokens: a lane owns whole groups of the product.

An accumulator of tensor cores gives lane l of four the columns 8 j + 2 l and 8 j + 2 l + 1 of a
row. The rotation's rows are taken in such an order that, with four groups, these are the channels
of group l: extremes, steps and packed codes are found inside lanes. (Any other number of groups is
right too, and exchanges a little.) Steps and zeros are those of the other kernel; values are scaled
inside the subtraction of the offset, which may move a rare tie.
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
    two_bits,
)

ROWS = 64
WARPS = 4
STAGES = 2
LONGEST = 8  # blocks that a program walks over
_COUNTS = ["x_b", "x_h", "heads", "tokens", "stretch", "blocks"]


@triton.jit(do_not_specialize=_COUNTS)
def turned(
    x, x_b, x_h, x_t, heads, tokens, stretch, blocks, packed, steps, zeros, facts, matrix, scale,
    ALIGN: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, LEVELS: tl.constexpr,
    INVERSE: tl.constexpr, GROUP: tl.constexpr, ZERO_BF16: tl.constexpr, LIMIT: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """packed: int32 words of 16 codes; D a power of two."""
    groups: tl.constexpr = D // GROUP
    head = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, D)
    base = tl.multiple_of((head // heads) * x_b + (head % heads) * x_h, ALIGN)
    pair = channel // 2
    source = (pair % groups) * GROUP + (pair // groups) * 2 + channel % 2
    turn = tl.load(matrix + source[None, :] * D + channel[:, None])
    group = tl.arange(0, groups)
    word = tl.arange(0, GROUP // 16)
    place = tl.arange(0, 8)[None, None, :, None, None] * 2 + tl.arange(0, 2)
    shift = 8 * (place // 4) + 6 - 2 * (place % 4)
    seen = tl.zeros([BT, groups], tl.float32)
    peak = tl.zeros([BT, groups], tl.float32)
    offset_peak = tl.zeros([BT, groups], tl.float32)
    begin = tl.program_id(0) * stretch
    for number in range(begin, tl.minimum(begin + stretch, blocks)):
        token = number * BT + tl.arange(0, BT)
        live = token < tokens
        row = head * tokens + token
        start = x + base + token[:, None].to(tl.int64) * x_t + channel[None, :]
        raw = tl.load(start, mask=live[:, None], other=0.0)
        values = tl.reshape(tl.dot(raw, turn), [BT, GROUP // 2, groups, 2])
        # Rounding is monotonous: extremes may be scaled after they are found.
        low, high = _both(values, NATIVE)
        low, high = low * scale, high * scale
        extreme = tl.maximum(tl.abs(low), tl.abs(high), propagate_nan=tl.PropagateNan.ALL)
        seen = tl.maximum(seen, extreme, propagate_nan=tl.PropagateNan.ALL)
        ideal = divided(high - low, LEVELS, INVERSE, NATIVE)
        peak = tl.maximum(peak, ideal)  # dead rows are 0
        stored, step = e4m3(tl.minimum(ideal, LIMIT))
        line = row[:, None] * groups + group[None, :]
        tl.store(steps + line, stored, mask=live[:, None])
        some = step > 0
        divisor = tl.where(some, step, float("inf"))
        zero = tl.where(some, low, low + (high - low) * 0.5)
        zero = rounded(zero, zeros, ZERO_BF16)
        offset_peak = tl.maximum(offset_peak, tl.abs(zero))
        tl.store(zeros + line, zero.to(zeros.dtype.element_ty), mask=live[:, None])

        divisor, zero = divisor[:, None, :, None], zero[:, None, :, None]
        codes = two_bits(values, divisor, zero, scale, 1, False, True, NATIVE)
        codes = tl.reshape(codes, [BT, GROUP // 16, 8, groups, 2]) << shift
        words = tl.sum(tl.sum(codes, 4), 2)
        target = packed + row[:, None, None] * (D // 16) + word[None, :, None]
        target += group[None, None, :] * (GROUP // 16)
        tl.store(target, words, mask=live[:, None, None])

    tl.atomic_max(facts + head * 4 + 0, largest_bits(peak))
    tl.atomic_max(facts + head * 4 + 1, largest_bits(seen))
    tl.atomic_max(facts + head * 4 + 2, largest_bits(offset_peak))


@triton.jit
def _both(values, NATIVE: tl.constexpr):
    """Extremes over the pairs of a group [rows, pairs, groups, 2], inside lanes."""
    low, _ = extremes(values, 3, NATIVE)
    _, high = extremes(values, 3, NATIVE)
    low, _ = extremes(low, 1, NATIVE)
    _, high = extremes(high, 1, NATIVE)
    return low, high
