"""The kernel of ``triton_words`` for few query rows, in Gluon: codes become operands where they lie.

A program is one warp. Every thread loads the words whose codes the matrix units want from it, so
nothing moves between threads: a query is read in the order of channels that this gives, and so is
an output written. A code of 2 bits in the mantissa of an FP16 number whose other bits are 0 is the
subnormal number code 2^(p - 24), p its lowest bit: one instruction makes two of them, a second
multiplies them with their steps, exactly. 2^p is taken back by the query's channel (of keys) or by
the output's (of values). Zeros, and the correction by steps, are a product of their own:

    s = sum_w (sum q) zero_w - (sum q^2) factor scale/24 Delta_w^2 + q . (Delta c),  w: 32 channels

Queries are scaled by a power of two to less than 2^15, so that 16 bits hold them; sums are taken in
two BF16 numbers each. Weights are FP16 (BF16 beside zeros). The highest score that weights refer
to moves only where it is exceeded by 2^8.

Gluon is experimental: ``fast_refusal`` says where it cannot be had.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]), 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]), 2))


@gluon.constexpr_function
def key_layout(block):
    """[4 words of 64 bits, tokens]: what a thread holds of a right operand [channels, tokens]."""
    lanes = [[1, 0], [2, 0], [0, 1], [0, 2], [0, 4]]
    registers = [[0, 1 << bit] for bit in range(3, block.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [4, block])


@gluon.constexpr_function
def value_layout(block):
    """[8 words of 32 bits, tokens]: what a thread holds of a left operand [channels, tokens]."""
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    registers = [[0, 1]] + [[0, 1 << bit] for bit in range(3, block.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [8, block])


def _slot(slot: int) -> str:
    """Codes of two words, times their steps."""
    mask = 0x00030003 << (2 + 2 * (slot % 4))
    shift = "shl.b32 w, $1, 2;" if slot < 4 else "shr.u32 w, $1, 6;"
    return f"{{ .reg .b32 w; {shift} and.b32 w, w, {mask:#x}; mul.rn.f16x2 $0, w, $2; }}"


SLOTS = gl.constexpr([_slot(slot) for slot in range(8)])
# E4M3 bytes without sign: shifted they are FP16 2^-8 or BF16 2^-120 of what they say.
_FP16_STEP = "mul.rn.f16x2 $0, w, f; }"
PAIR_STEPS = gl.constexpr(
    "{ .reg .b32 w, f; shl.b32 w, $1, 7; mov.b32 f, 0x78007800; " + _FP16_STEP
)
TWIN_STEPS = gl.constexpr(
    "{ .reg .b32 w, f; mul.lo.u32 w, $1, 0x00800080; mov.b32 f, 0x78007800; " + _FP16_STEP
)
_BF16_STEP = (
    " .reg .b32 f, n; mov.b32 f, 0x7B807B80; mov.b32 n, 0x80008000; fma.rn.bf16x2 w, w, f, n;"
)
SQUARES = gl.constexpr(
    "{ .reg .b32 w; mul.lo.u32 w, $1, 0x00100010;" + _BF16_STEP + " fma.rn.bf16x2 $0, w, w, n; }"
)
TWIN_OFFSETS = gl.constexpr(
    "{ .reg .b32 w; mul.lo.u32 w, $1, 0x00100010;" + _BF16_STEP + " fma.rn.bf16x2 $0, w, $2, n; }"
)
PAIR_OFFSETS = gl.constexpr(
    "{ .reg .b32 w; shl.b32 w, $1, 4;" + _BF16_STEP + " fma.rn.bf16x2 $0, w, $2, n; }"
)


@gluon.jit
def _one(ASM: gl.constexpr, x):
    return gl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _two(ASM: gl.constexpr, x, y):
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _halves(x, TYPE: gl.constexpr):
    """Both numbers of 16 bits in words [4, tokens]: [4, tokens, 2]."""
    low = x.to(gl.int16).to(TYPE, bitcast=True)
    high = (x >> 16).to(gl.int16).to(TYPE, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def _right(x, y, TYPE: gl.constexpr, BN: gl.constexpr):
    """A right operand [16, tokens] of words [4, tokens]."""
    both = gl.join(_halves(x, TYPE), _halves(y, TYPE))
    found = gl.reshape(gl.permute(both, (3, 0, 2, 1)), [16, BN])
    return gl.convert_layout(found, RIGHT, assert_trivial=True)


@gluon.jit
def _left(x, y, BN: gl.constexpr):
    """A left operand [16, tokens] of two times [8, tokens]."""
    found = gl.reshape(gl.permute(gl.join(x, y), (2, 0, 1)), [16, BN])
    return gl.convert_layout(found, LEFT, assert_trivial=True)


@gluon.jit
def _upper(x, R: gl.constexpr):
    """The first R of 16 rows."""
    if R == 8:
        found, _ = gl.split(gl.permute(gl.reshape(x, [2, 8, x.shape[1]]), (1, 2, 0)))
    else:
        found = x
    return found


@gluon.jit
def _side(
    codes, steps, zeros, line, first, GROUP: gl.constexpr, ZERO: gl.constexpr, L: gl.constexpr,
    WORDS: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Words, steps (bytes), zeros (bits of BF16) of tokens from ``first`` on: [WORDS, BN]."""
    token = gl.arange(0, BN, layout=gl.SliceLayout(0, L))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(1, L))
    groups: gl.constexpr = 128 // GROUP
    each: gl.constexpr = GROUP * WORDS // 128
    at = line + first  # places within a block do not change: added to one address
    words = gl.load(codes + at * WORDS + (token[None, :] * WORDS + word[:, None]))
    place = token[None, :] * groups + (word // each)[:, None]
    step = gl.load(steps + at * groups + place)
    zero = step
    if ZERO:
        zero = gl.load(zeros + at * groups + place)
    return words, step, zero


@gluon.jit
def _plus_keys(scores, q, low, high, step, SLOT: gl.constexpr, BN: gl.constexpr):
    x = gl.inline_asm_elementwise(
        SLOTS[SLOT], "=r,r,r", [low, step], dtype=gl.int32, is_pure=True, pack=1
    )
    y = gl.inline_asm_elementwise(
        SLOTS[SLOT], "=r,r,r", [high, step], dtype=gl.int32, is_pure=True, pack=1
    )
    return mma_v2(q, _right(x, y, gl.float16, BN), scores)


@gluon.jit
def _plus_values(acc, p, low, high, step, SLOT: gl.constexpr, BN: gl.constexpr):
    x = gl.inline_asm_elementwise(
        SLOTS[SLOT], "=r,r,r", [low, step], dtype=gl.float16, is_pure=True, pack=2
    )
    y = gl.inline_asm_elementwise(
        SLOTS[SLOT], "=r,r,r", [high, step], dtype=gl.float16, is_pure=True, pack=2
    )
    return mma_v2(_left(x, y, BN), p, acc)


@gluon.jit
def _query_slot(q, first, ROWS: gl.constexpr, SLOT: gl.constexpr):
    """The channels that one slot of the words holds: float32 [16, 16]."""
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, LEFT))
    k = gl.arange(0, 16, layout=gl.SliceLayout(0, LEFT))
    channel = (
        32 * (k % 8 // 2) + 16 * (k // 8) + 8 * (k % 2) + (3 - SLOT if SLOT < 4 else 11 - SLOT)
    )
    place = (first + row)[:, None] * 128 + channel[None, :]
    return gl.load(q + place, mask=(row < ROWS)[:, None], other=0.0).to(gl.float32)


@gluon.jit
def _word_sums(x):
    """Sums of [16, 16] over the channels of each of the four words: [16, 4]."""
    return gl.sum(gl.sum(gl.reshape(x, [16, 2, 4, 2]), 3), 1)


@gluon.jit
def _in_two(x):
    high = x.to(gl.bfloat16)
    return gl.join(high, (x - high.to(gl.float32)).to(gl.bfloat16))


@gluon.jit
def _store_slot(
    target, acc, offsets, share, SLOT: gl.constexpr, ROWS: gl.constexpr, R: gl.constexpr
):
    word = gl.arange(0, 16, layout=gl.SliceLayout(1, MMA))
    row = gl.arange(0, R, layout=gl.SliceLayout(0, MMA))
    channel = 16 * (word % 8) + 8 * (word // 8) + (3 - SLOT if SLOT < 4 else 11 - SLOT)
    found = (acc * (2.0 ** (15 - 2 * (SLOT % 4))) + offsets) * share[None, :]
    place = row[None, :] * 128 + channel[:, None]
    gl.store(target + place, found, mask=(row < ROWS)[None, :])


@gluon.jit(do_not_specialize=["scale", "feature_scale"])
def kernel(
    table, q, parts, lses, scale, feature_scale,
    K_GROUP: gl.constexpr, K_REACH: gl.constexpr, K_ZERO: gl.constexpr, K_SCALED: gl.constexpr,
    V_GROUP: gl.constexpr, V_REACH: gl.constexpr, V_ZERO: gl.constexpr, V_SCALED: gl.constexpr,
    BY_STEPS: gl.constexpr, FACTORS: gl.constexpr, ALL_ROWS: gl.constexpr, BN: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    # Programs of the same tokens, for 16 query rows each, are neighbours: codes come from the cache.
    KL: gl.constexpr = key_layout(BN)
    VL: gl.constexpr = value_layout(BN)
    R: gl.constexpr = 8 if ALL_ROWS <= 8 else 16
    tiles: gl.constexpr = (ALL_ROWS + 15) // 16
    ROWS: gl.constexpr = ALL_ROWS // tiles
    gl.static_assert(ROWS * tiles == ALL_ROWS)
    split = (gl.program_id(0) // tiles).to(gl.int64)
    tile = gl.program_id(0) % tiles
    head = gl.program_id(1).to(gl.int64)
    entry = table + split * 16
    byte: gl.constexpr = gl.pointer_type(gl.uint8)
    bits: gl.constexpr = gl.pointer_type(gl.int16)
    number: gl.constexpr = gl.pointer_type(gl.float32)
    k_codes = gl.load(entry).to(gl.pointer_type(gl.int64))
    k_steps = gl.load(entry + 1).to(byte)
    k_zeros = gl.load(entry + 2).to(gl.pointer_type(gl.uint16))
    v_codes = gl.load(entry + 4).to(gl.pointer_type(gl.int32))
    v_steps = gl.load(entry + 5).to(byte)
    v_zeros = gl.load(entry + 6).to(bits)
    tokens = gl.load(entry + 9).to(gl.int32)
    line = head * tokens
    begin = gl.load(entry + 14).to(gl.int32)
    end = gl.load(entry + 15).to(gl.int32)

    first_row = head * ALL_ROWS + tile * ROWS
    q0 = _query_slot(q, first_row, ROWS, 0)
    q1 = _query_slot(q, first_row, ROWS, 1)
    q2 = _query_slot(q, first_row, ROWS, 2)
    q3 = _query_slot(q, first_row, ROWS, 3)
    q4 = _query_slot(q, first_row, ROWS, 4)
    q5 = _query_slot(q, first_row, ROWS, 5)
    q6 = _query_slot(q, first_row, ROWS, 6)
    q7 = _query_slot(q, first_row, ROWS, 7)
    size0 = gl.maximum(gl.maximum(gl.abs(q0), gl.abs(q1)), gl.maximum(gl.abs(q2), gl.abs(q3)))
    size1 = gl.maximum(gl.maximum(gl.abs(q4), gl.abs(q5)), gl.maximum(gl.abs(q6), gl.abs(q7)))
    peak = gl.minimum(gl.maximum(gl.max(gl.maximum(size0, size1), 1), 1e-30), 1e30)
    # 2^-e, of the row's largest 2^e x, 1 <= x < 2
    exponent = peak.to(gl.int32, bitcast=True) & 0x7F800000
    inverse = (0x7F000000 - exponent).to(gl.float32, bitcast=True)
    k_scale = 1.0
    if K_SCALED:
        k_scale = gl.load(gl.load(entry + 3).to(number) + head)
    sums = _in_two(_word_sums(q0 + q1 + q2 + q3 + q4 + q5 + q6 + q7))
    phi = _word_sums(q0 * q0 + q1 * q1 + q2 * q2 + q3 * q3 + q4 * q4 + q5 * q5 + q6 * q6 + q7 * q7)
    phi *= -feature_scale * k_scale
    if FACTORS:
        word = gl.arange(0, 4, layout=gl.SliceLayout(0, phi.type.layout))
        at = gl.load(entry + 8).to(number) + head * (128 // K_GROUP) + word // (K_GROUP // 32)
        phi *= gl.load(at)[None, :]
    if not BY_STEPS:
        phi *= 0.0
    terms = gl.permute(gl.join(sums, _in_two(phi)), (0, 3, 1, 2))
    terms = gl.convert_layout(gl.reshape(terms, [16, 16]), LEFT)
    grow = inverse * 16384.0
    a0 = (q0 * grow[:, None]).to(gl.float16)
    a1 = (q1 * (grow * 0.25)[:, None]).to(gl.float16)
    a2 = (q2 * (grow * 0.0625)[:, None]).to(gl.float16)
    a3 = (q3 * (grow * 0.015625)[:, None]).to(gl.float16)
    a4 = (q4 * grow[:, None]).to(gl.float16)
    a5 = (q5 * (grow * 0.25)[:, None]).to(gl.float16)
    a6 = (q6 * (grow * 0.0625)[:, None]).to(gl.float16)
    a7 = (q7 * (grow * 0.015625)[:, None]).to(gl.float16)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, MMA))
    unit = scale * k_scale

    shape = _upper(gl.zeros([16, BN], gl.float32, layout=MMA), R)
    SL: gl.constexpr = shape.type.layout
    # What scores are in, of the rows as they are laid out.
    back = (2.0 / inverse)[:, None] + gl.zeros([16, BN], gl.float32, layout=MMA)
    back = gl.max(_upper(back, R), 1)
    token_s = gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
    top = gl.full([R], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SL))
    total = gl.zeros([R], gl.float32, layout=gl.SliceLayout(1, SL))
    zero = gl.zeros([16, R], gl.float32, layout=MMA)
    o0, o1, o2, o3, o4, o5, o6, o7, oz = zero, zero, zero, zero, zero, zero, zero, zero, zero
    last = tokens - BN  # where the last whole block begins: a chunk's end is read from there on
    at = gl.minimum(begin, last)
    kw, ks, kz = _side(k_codes, k_steps, k_zeros, line, at, K_GROUP, K_ZERO, KL, 4, BN)
    vw, vs, vz = _side(v_codes, v_steps, v_zeros, line, at, V_GROUP, V_ZERO, VL, 8, BN)
    for first in range(begin, end, BN):
        at = gl.minimum(first, last)
        following = gl.minimum(first + BN, last)
        if AHEAD:
            kw2, ks2, kz2 = _side(
                k_codes, k_steps, k_zeros, line, following, K_GROUP, K_ZERO, KL, 4, BN
            )
            vw2, vs2, vz2 = _side(
                v_codes, v_steps, v_zeros, line, following, V_GROUP, V_ZERO, VL, 8, BN
            )
        low = kw.to(gl.int32)
        high = (kw >> 32).to(gl.int32)
        byte32 = ks.to(gl.int32)
        step = _one(TWIN_STEPS, byte32)
        if K_ZERO:
            offset = kz.to(gl.int32) * 0x00010001
        else:
            k_reach = gl.full([4, BN], REACH_BITS[K_REACH], gl.int32, layout=KL)
            offset = _two(TWIN_OFFSETS, byte32, k_reach)
        square = _one(SQUARES, byte32)
        blank = gl.zeros([16, BN], gl.float32, layout=MMA)
        extra = mma_v2(terms, _right(offset, square, gl.bfloat16, BN), blank)
        scores = _plus_keys(blank, a0, low, high, step, 0, BN)
        scores = _plus_keys(scores, a1, low, high, step, 1, BN)
        scores = _plus_keys(scores, a2, low, high, step, 2, BN)
        scores = _plus_keys(scores, a3, low, high, step, 3, BN)
        scores = _plus_keys(scores, a4, low, high, step, 4, BN)
        scores = _plus_keys(scores, a5, low, high, step, 5, BN)
        scores = _plus_keys(scores, a6, low, high, step, 6, BN)
        scores = _plus_keys(scores, a7, low, high, step, 7, BN)
        s = (_upper(scores, R) * back[:, None] + _upper(extra, R)) * unit
        live = (at + token_s >= first) & (at + token_s < end)
        s = gl.where(live[None, :], s, float("-inf"))
        highest = gl.max(s, 1)
        beyond = gl.max(highest - top, 0)
        if beyond > 8.0:
            higher = gl.maximum(top, highest)
            shrink = gl.exp2(top - higher)
            top = higher
            total *= shrink
            across = gl.convert_layout(shrink, gl.SliceLayout(0, MMA))[None, :]
            o0 *= across
            o1 *= across
            o2 *= across
            o3 *= across
            o4 *= across
            o5 *= across
            o6 *= across
            o7 *= across
            oz *= across
        shares = gl.exp2(s - top[:, None])
        total += gl.sum(shares, 1)
        turned = gl.permute(shares, (1, 0))
        p = gl.convert_layout(turned.to(gl.float16), RIGHT, assert_trivial=True)
        low16 = vw.to(gl.int16)
        high16 = (vw >> 16).to(gl.int16)
        byte16 = vs.to(gl.int16)
        size = gl.inline_asm_elementwise(
            PAIR_STEPS, "=r,r", [byte16], dtype=gl.float16, is_pure=True, pack=2
        )
        if V_ZERO:
            shift = vz.to(gl.bfloat16, bitcast=True)
        else:
            v_reach = gl.full([8, BN], 0.0 - V_REACH, gl.bfloat16, layout=VL)
            shift = gl.inline_asm_elementwise(
                PAIR_OFFSETS, "=r,r,r", [byte16, v_reach], dtype=gl.bfloat16, is_pure=True, pack=2
            )
        wide = gl.convert_layout(turned.to(gl.bfloat16), RIGHT, assert_trivial=True)
        oz = mma_v2(_left(shift, shift, BN), wide, oz)
        o0 = _plus_values(o0, p, low16, high16, size, 0, BN)
        o1 = _plus_values(o1, p, low16, high16, size, 1, BN)
        o2 = _plus_values(o2, p, low16, high16, size, 2, BN)
        o3 = _plus_values(o3, p, low16, high16, size, 3, BN)
        o4 = _plus_values(o4, p, low16, high16, size, 4, BN)
        o5 = _plus_values(o5, p, low16, high16, size, 5, BN)
        o6 = _plus_values(o6, p, low16, high16, size, 6, BN)
        o7 = _plus_values(o7, p, low16, high16, size, 7, BN)
        if AHEAD:
            kw, ks, kz, vw, vs, vz = kw2, ks2, kz2, vw2, vs2, vz2
        else:
            kw, ks, kz = _side(
                k_codes, k_steps, k_zeros, line, following, K_GROUP, K_ZERO, KL, 4, BN
            )
            vw, vs, vz = _side(
                v_codes, v_steps, v_zeros, line, following, V_GROUP, V_ZERO, VL, 8, BN
            )
    place = split * gl.num_programs(1) * ALL_ROWS + first_row
    row = gl.arange(0, R, layout=gl.SliceLayout(1, SL))
    gl.store(lses + place + row, (top + gl.log2(total)) * 0.6931471805599453, mask=row < ROWS)
    share = 1.0 / total
    if V_SCALED:
        share *= gl.load(gl.load(entry + 7).to(number) + head)
    share = gl.convert_layout(share, gl.SliceLayout(0, MMA))
    target = parts + place * 128
    _store_slot(target, o0, oz, share, 0, ROWS, R)
    _store_slot(target, o1, oz, share, 1, ROWS, R)
    _store_slot(target, o2, oz, share, 2, ROWS, R)
    _store_slot(target, o3, oz, share, 3, ROWS, R)
    _store_slot(target, o4, oz, share, 4, ROWS, R)
    _store_slot(target, o5, oz, share, 5, ROWS, R)
    _store_slot(target, o6, oz, share, 6, ROWS, R)
    _store_slot(target, o7, oz, share, 7, ROWS, R)


# Minus what is subtracted from codes, in BF16 twice; codes of 2 bits reach to 1.
REACH_BITS = gl.constexpr([0x80008000 - (1 << 32), 0xBF80BF80 - (1 << 32)])
