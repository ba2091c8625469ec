"""The kernel of ``triton_words`` in Gluon: codes become operands where they are loaded.

A program is one warp. Blocks of tokens are copied to shared memory, several ahead, and every thread
loads the words whose codes the matrix units want from it, so nothing moves between threads: a query
is read in the order of channels that this gives, and so is an output written.

A code of 2 bits in the mantissa of an FP16 number whose other bits are 0 is the subnormal number
code 2^(p - 24), p its lowest bit: one instruction makes two of them, a second multiplies them with
their steps, exactly. 2^p is taken back by the query's channel (of keys) or by the output's (of
values). Zeros, and the correction by steps, are products of their own:

    s = sum_w (sum q) zero_w - (sum q^2) factor scale/24 Delta_w^2 + q . (Delta c),  w: 32 channels

Queries are scaled by a power of two to less than 2^15, so that 16 bits hold them; sums are taken in
two BF16 numbers each. Weights are FP16 (two BF16 numbers beside zeros). The highest score that
weights refer to moves only where one is higher by more than 8 (in log2).

Gluon is experimental, and cannot be interpreted: where it cannot be had, or is wrong in a check on
first use, ``triton_words`` serves, and says so.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

# These were renamed after Triton 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
copy_ahead = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

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
# E4M3 bytes without sign: shifted they are FP16 2^-8 or BF16 2^-120 of what they say. Of the four
# steps of a token that of the thread's group is taken twice, by a selector of its byte.
TWIN = "prmt.b32 w, $1, $1, $2;"
PAIR = "prmt.b32 w, $1, $2, $3;"
FP16_STEP = (
    " shl.b32 w, w, 7; and.b32 w, w, 0x3F803F80; mov.b32 f, 0x78007800; mul.rn.f16x2 $0, w, f; }"
)
BF16_STEP = (
    " shl.b32 w, w, 4; and.b32 w, w, 0x07F007F0; mov.b32 f, 0x7B807B80; mov.b32 n, 0x80008000;"
    " fma.rn.bf16x2 w, w, f, n;"
)
HEAD = "{ .reg .b32 w, f, n; "
TWIN_STEPS = gl.constexpr(HEAD + TWIN + FP16_STEP)
PAIR_STEPS = gl.constexpr(HEAD + PAIR + FP16_STEP)
SQUARES = gl.constexpr(HEAD + TWIN + BF16_STEP + " fma.rn.bf16x2 $0, w, w, n; }")
# Minus a step: codes of 2 bits without zeros reach to 1.
TWIN_MINUS = gl.constexpr(HEAD + TWIN + BF16_STEP + " xor.b32 $0, w, 0x80008000; }")
PAIR_MINUS = gl.constexpr(HEAD + PAIR + BF16_STEP + " xor.b32 $0, w, 0x80008000; }")
# Of the four zeros (BF16) of a token that of the thread's group, twice, or of two tokens.
TWIN_ZEROS = gl.constexpr("{ .reg .b32 a, b; mov.b64 {a, b}, $1; prmt.b32 $0, a, b, $2; }")
PAIR_ZEROS = gl.constexpr(
    "{ .reg .b32 a, b, x, y; mov.b64 {a, b}, $1; prmt.b32 x, a, b, $3; mov.b64 {a, b}, $2;"
    " prmt.b32 y, a, b, $3; prmt.b32 $0, x, y, 0x5410; }"
)


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
def _copy(
    codes, steps, zeros, words, sizes, offsets, line, WORDS: gl.constexpr, ZERO: gl.constexpr,
    BN: gl.constexpr,
):  # fmt: skip
    """Begin to copy what belongs to the tokens from ``line`` on to shared memory."""
    each: gl.constexpr = 16 // (32 // WORDS)  # numbers of 16 bytes
    wide: gl.constexpr = gl.BlockedLayout(
        [1, each], [32 * each // WORDS, WORDS // each], [1, 1], [1, 0]
    )
    row = gl.arange(0, BN, layout=gl.SliceLayout(1, wide))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, wide))
    place = gl.multiple_of(codes + line * WORDS, 16)
    copy_ahead(words, place + (row[:, None] * WORDS + word[None, :]))
    token = gl.arange(0, BN, layout=gl.BlockedLayout([1], [32], [1], [0]))
    copy_ahead(sizes, steps + line + token)
    if ZERO:
        copy_ahead(offsets, zeros + line + token)


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
    if ROWS <= 8:
        row = row % 8
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
    K_ZERO: gl.constexpr, K_SCALED: gl.constexpr, V_ZERO: gl.constexpr, V_SCALED: gl.constexpr,
    BY_STEPS: gl.constexpr, FACTORS: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    KL: gl.constexpr = key_layout(BN)
    VL: gl.constexpr = value_layout(BN)
    R: gl.constexpr = 8 if ROWS <= 8 else 16
    gl.static_assert(ROWS <= 16)
    split = gl.program_id(0).to(gl.int64)
    head = gl.program_id(1).to(gl.int64)
    entry = table + split * 16
    number: gl.constexpr = gl.pointer_type(gl.float32)
    steps4: gl.constexpr = gl.pointer_type(gl.int32)
    zeros4: gl.constexpr = gl.pointer_type(gl.int64)
    k_codes = gl.multiple_of(gl.load(entry).to(gl.pointer_type(gl.int64)), 16)
    k_steps = gl.multiple_of(gl.load(entry + 1).to(steps4), 16)
    k_zeros = gl.multiple_of(gl.load(entry + 2).to(zeros4), 16)
    v_codes = gl.multiple_of(gl.load(entry + 4).to(gl.pointer_type(gl.int32)), 16)
    v_steps = gl.multiple_of(gl.load(entry + 5).to(steps4), 16)
    v_zeros = gl.multiple_of(gl.load(entry + 6).to(zeros4), 16)
    tokens = gl.load(entry + 9).to(gl.int32)
    line = head * tokens
    begin = gl.load(entry + 14).to(gl.int32)
    end = gl.load(entry + 15).to(gl.int32)

    last = tokens - BN  # where the last whole block begins: a chunk's end is read from there on
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_rows: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 1, [1, 0])  # copied 16 bytes at a time
    v_rows: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    kw_s = gl.allocate_shared_memory(gl.int64, [STAGES, BN, 4], k_rows)
    ks_s = gl.allocate_shared_memory(gl.int32, [STAGES, BN], flat)
    kz_s = gl.allocate_shared_memory(gl.int64, [STAGES, BN if K_ZERO else 1], flat)
    vw_s = gl.allocate_shared_memory(gl.int32, [STAGES, BN, 8], v_rows)
    vs_s = gl.allocate_shared_memory(gl.int32, [STAGES, BN], flat)
    vz_s = gl.allocate_shared_memory(gl.int64, [STAGES, BN if V_ZERO else 1], flat)
    for early in gl.static_range(STAGES - 1):
        following = line + gl.minimum(begin + early * BN, last)
        _copy(
            k_codes, k_steps, k_zeros, kw_s.index(early), ks_s.index(early), kz_s.index(early),
            following, 4, K_ZERO, BN,
        )  # fmt: skip
        _copy(
            v_codes, v_steps, v_zeros, vw_s.index(early), vs_s.index(early), vz_s.index(early),
            following, 8, V_ZERO, BN,
        )  # fmt: skip
        async_copy.commit_group()
    first_row = head * ROWS
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
    sums = _word_sums(q0 + q1 + q2 + q3 + q4 + q5 + q6 + q7)
    phi = _word_sums(q0 * q0 + q1 * q1 + q2 * q2 + q3 * q3 + q4 * q4 + q5 * q5 + q6 * q6 + q7 * q7)
    phi *= -feature_scale * k_scale
    if FACTORS:
        word = gl.arange(0, 4, layout=gl.SliceLayout(0, phi.type.layout))
        factor = gl.load(entry + 8).to(number) + head * 4 + word
        phi *= gl.load(factor)[None, :]
    if not BY_STEPS:
        phi *= 0.0
    # In what scores of codes are in.
    own = gl.convert_layout(inverse, gl.SliceLayout(1, sums.type.layout))[:, None] * 0.5
    terms = gl.permute(gl.join(_in_two(sums * own), _in_two(phi * own)), (0, 3, 1, 2))
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
    unit = 2.0 / gl.convert_layout(inverse, gl.SliceLayout(1, MMA)) * (scale * k_scale)

    shape = _upper(gl.zeros([16, BN], gl.float32, layout=MMA), R)
    SL: gl.constexpr = shape.type.layout
    # What scores are in, of the rows as they are laid out.
    unit = unit[:, None] + gl.zeros([16, BN], gl.float32, layout=MMA)
    unit = gl.max(_upper(unit, R), 1)
    token_s = gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
    top = gl.full([R], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SL))
    total = gl.zeros([R], gl.float32, layout=gl.SliceLayout(1, SL))
    zero = gl.zeros([16, R], gl.float32, layout=MMA)
    o0, o1, o2, o3, o4, o5, o6, o7, oz = zero, zero, zero, zero, zero, zero, zero, zero, zero
    # Bytes j, j + 4, ... of two words; numbers j of 16 bits.
    k_word = gl.arange(0, 4, layout=gl.SliceLayout(1, KL))[:, None]
    v_word = gl.arange(0, 8, layout=gl.SliceLayout(1, VL))[:, None] // 2
    k_byte = k_word * 0x1111
    k_pair = k_word * 0x2222 + 0x1010
    v_byte = v_word * 0x1111 + 0x4400
    v_pair = v_word * 0x2222 + 0x1010
    stage = 0
    for first in range(begin, end, BN):
        at = gl.minimum(first, last)
        async_copy.wait_group(STAGES - 2)
        barrier()
        ahead = gl.where(stage == 0, STAGES - 1, stage - 1)
        following = line + gl.minimum(first + (STAGES - 1) * BN, last)
        _copy(
            k_codes, k_steps, k_zeros, kw_s.index(ahead), ks_s.index(ahead), kz_s.index(ahead),
            following, 4, K_ZERO, BN,
        )  # fmt: skip
        _copy(
            v_codes, v_steps, v_zeros, vw_s.index(ahead), vs_s.index(ahead), vz_s.index(ahead),
            following, 8, V_ZERO, BN,
        )  # fmt: skip
        async_copy.commit_group()
        kw = kw_s.index(stage).permute((1, 0)).load(KL)
        ks = ks_s.index(stage).load(gl.SliceLayout(0, KL))[None, :]
        low = kw.to(gl.int32)
        high = (kw >> 32).to(gl.int32)
        step = gl.inline_asm_elementwise(
            TWIN_STEPS, "=r,r,r", [ks, k_byte], dtype=gl.int32, is_pure=True, pack=1
        )
        if K_ZERO:
            kz = kz_s.index(stage).load(gl.SliceLayout(0, KL))[None, :]
            offset = gl.inline_asm_elementwise(
                TWIN_ZEROS, "=r,l,r", [kz, k_pair], dtype=gl.int32, is_pure=True, pack=1
            )
        else:
            offset = gl.inline_asm_elementwise(
                TWIN_MINUS, "=r,r,r", [ks, k_byte], dtype=gl.int32, is_pure=True, pack=1
            )
        square = gl.inline_asm_elementwise(
            SQUARES, "=r,r,r", [ks, k_byte], dtype=gl.int32, is_pure=True, pack=1
        )
        blank = gl.zeros([16, BN], gl.float32, layout=MMA)
        scores = mma_v2(terms, _right(offset, square, gl.bfloat16, BN), blank)
        scores = _plus_keys(scores, a0, low, high, step, 0, BN)
        scores = _plus_keys(scores, a1, low, high, step, 1, BN)
        scores = _plus_keys(scores, a2, low, high, step, 2, BN)
        scores = _plus_keys(scores, a3, low, high, step, 3, BN)
        scores = _plus_keys(scores, a4, low, high, step, 4, BN)
        scores = _plus_keys(scores, a5, low, high, step, 5, BN)
        scores = _plus_keys(scores, a6, low, high, step, 6, BN)
        scores = _plus_keys(scores, a7, low, high, step, 7, BN)
        s = _upper(scores, R)
        if (at < first) | (first + BN > end):
            live = (at + token_s >= first) & (at + token_s < end)
            s = gl.where(live[None, :], s, float("-inf"))
        highest = gl.max(s, 1) * unit
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
        shares = gl.exp2(s * unit[:, None] - top[:, None])
        total += gl.sum(shares, 1)
        turned = gl.permute(shares, (1, 0))
        p = gl.convert_layout(turned.to(gl.float16), RIGHT, assert_trivial=True)
        vw = vw_s.index(stage).permute((1, 0)).load(VL)
        vs = vs_s.index(stage).load(gl.SliceLayout(0, VL))[None, :]
        low16 = vw.to(gl.int16)
        high16 = (vw >> 16).to(gl.int16)
        size = gl.inline_asm_elementwise(
            PAIR_STEPS, "=r,r,r,r,r", [vs, v_byte], dtype=gl.float16, is_pure=True, pack=2
        )
        if V_ZERO:
            vz = vz_s.index(stage).load(gl.SliceLayout(0, VL))[None, :]
            shift = gl.inline_asm_elementwise(
                PAIR_ZEROS, "=r,l,l,r,r", [vz, v_pair], dtype=gl.bfloat16, is_pure=True, pack=2
            )
        else:
            shift = gl.inline_asm_elementwise(
                PAIR_MINUS, "=r,r,r,r,r", [vs, v_byte], dtype=gl.bfloat16, is_pure=True, pack=2
            )
        zeros = _left(shift, shift, BN)
        wide = turned.to(gl.int32, bitcast=True) & -65536
        rest = (turned - wide.to(gl.float32, bitcast=True)).to(gl.bfloat16)
        wide = (wide >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
        oz = mma_v2(zeros, gl.convert_layout(wide, RIGHT, assert_trivial=True), oz)
        oz = mma_v2(zeros, gl.convert_layout(rest, RIGHT, assert_trivial=True), oz)
        o0 = _plus_values(o0, p, low16, high16, size, 0, BN)
        o1 = _plus_values(o1, p, low16, high16, size, 1, BN)
        o2 = _plus_values(o2, p, low16, high16, size, 2, BN)
        o3 = _plus_values(o3, p, low16, high16, size, 3, BN)
        o4 = _plus_values(o4, p, low16, high16, size, 4, BN)
        o5 = _plus_values(o5, p, low16, high16, size, 5, BN)
        o6 = _plus_values(o6, p, low16, high16, size, 6, BN)
        o7 = _plus_values(o7, p, low16, high16, size, 7, BN)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    async_copy.wait_group(0)
    place = split * gl.num_programs(1) * ROWS + first_row
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
