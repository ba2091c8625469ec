"""The kernel of ``triton_unbiased`` in Gluon: codes become operands where they are loaded.

As in ``gluon_words``, but a token has one step: it multiplies the token's scores (of values: its
weights), so that a code of keys is an operand after one instruction for two, one of values after
two. What is subtracted from codes of keys is taken off sums. A product with each token's label
gives scores of centroids, and another one the weights by label.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from videokv.kernels.attend_packed.gluon_words import (
    LEFT,
    MMA,
    RIGHT,
    _left,
    _right,
    _upper,
    barrier,
    copy_ahead,
    key_layout,
    value_layout,
)
from videokv.kernels.attend_packed.words import _bits

# Of eight codes in a row: which of two words holds it, how far that is shifted, and its lowest bit.
# Words of 2 bits hold all eight in each half; of 3 bits the first holds codes 0 to 4, the second
# codes 3 to 7.
TWO = ((0, 0, 6), (0, 0, 4), (0, 0, 2), (0, 0, 0), (0, 8, 6), (0, 8, 4), (0, 8, 2), (0, 0, 8))
THREE = ((0, 6, 7), (0, 6, 4), (0, 0, 7), (0, 0, 4), (0, 0, 1), (1, 0, 6), (1, 0, 3), (1, 0, 0))
PLACES = {2: TWO, 3: THREE}
GROW = gl.constexpr(64.0)  # of weights times steps, so that FP16 holds small ones


def _value_slot(code: int) -> str:
    """Codes of two words around zero: nothing is to be taken off the sums of many, which are near
    zero themselves."""
    shift = "shl.b32 w, $1, 2;" if code < 4 else "shr.u32 w, $1, 6;"
    low = 8 - 2 * (code % 4)
    mask, one = 0x00030003 << low, 0x64006400
    factor = 0x00010001 * _bits(2.0**-low, half=True)
    offset = 0x00010001 * _bits(-(2.0 ** (10 - low)) - 1.5, half=True)
    return (
        f"{{ .reg .b32 w, f, o; {shift} lop3.b32 w, w, {mask:#x}, {one:#x}, 0xEA;"
        f" mov.b32 f, {factor:#x}; mov.b32 o, {offset:#x}; fma.rn.f16x2 $0, w, f, o; }}"
    )


VALUE_SLOTS = gl.constexpr([_value_slot(code) for code in range(8)])
# Bytes 0, 1 and 1, 2 of three as numbers whose first byte is the highest, for two neighbours.
_PAIRS = ("0x3401", "0x4512", "0x5623", "0x6734")
PAIRS = gl.constexpr([f"prmt.b32 $0, $1, $2, {selector};" for selector in _PAIRS])


@gluon.constexpr_function
def _in_second(bits, code):
    return PLACES[bits][code][0] == 1


@gluon.constexpr_function
def _shift(bits, code):
    return PLACES[bits][code][1]


@gluon.constexpr_function
def _mask(bits, code):
    return (0x00010001 * ((1 << bits) - 1)) << PLACES[bits][code][2]


@gluon.constexpr_function
def _power(exponent, bits, code):
    """2^(exponent - p), p the lowest bit."""
    return 2.0 ** (exponent - PLACES[bits][code][2])


@gluon.jit
def _taken(x, y, CODE: gl.constexpr, BITS: gl.constexpr):
    """One code of each half of the words."""
    word = y if _in_second(BITS, CODE) else x
    SHIFT: gl.constexpr = _shift(BITS, CODE)
    if SHIFT > 0:
        word = word >> SHIFT
    return word & _mask(BITS, CODE)


@gluon.jit
def _plus_keys(scores, q, x0, y0, x1, y1, CODE: gl.constexpr, BITS: gl.constexpr, BN: gl.constexpr):
    first, second = _taken(x0, y0, CODE, BITS), _taken(x1, y1, CODE, BITS)
    return mma_v2(q, _right(first, second, gl.float16, BN), scores)


@gluon.jit
def _plus_values(acc, p, low, high, CODE: gl.constexpr, BN: gl.constexpr):
    x = gl.inline_asm_elementwise(
        VALUE_SLOTS[CODE], "=r,r", [low], dtype=gl.float16, is_pure=True, pack=2
    )
    y = gl.inline_asm_elementwise(
        VALUE_SLOTS[CODE], "=r,r", [high], dtype=gl.float16, is_pure=True, pack=2
    )
    return mma_v2(_left(x, y, BN), p, acc)


@gluon.jit
def _query_code(q, first, ROWS: gl.constexpr, CODE: gl.constexpr):
    """The channels that one code of the words is of: float32 [16, 16]."""
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, LEFT))
    if ROWS <= 8:
        row = row % 8
    k = gl.arange(0, 16, layout=gl.SliceLayout(0, LEFT))
    channel = 32 * (k % 8 // 2) + 16 * (k // 8) + 8 * (k % 2) + CODE
    place = (first + row)[:, None] * 128 + channel[None, :]
    return gl.load(q + place, mask=(row < ROWS)[:, None], other=0.0).to(gl.float32)


@gluon.jit
def _grown(x, CODE: gl.constexpr, BITS: gl.constexpr):
    return (x * _power(14, BITS, CODE)).to(gl.float16)


@gluon.jit
def _label(ids, head, token, tokens, BITS: gl.constexpr):
    if BITS == 3:
        start = ids + head * ((tokens.to(gl.int64) + 7) // 8 * 3) + token // 8 * 3
        word = gl.load(start).to(gl.int32) << 16
        word |= gl.load(start + 1).to(gl.int32) << 8
        word |= gl.load(start + 2).to(gl.int32)
        label = (word >> (21 - 3 * (token % 8))) & 7
    elif BITS == 4:
        start = ids + head * ((tokens.to(gl.int64) + 1) // 2) + token // 2
        label = (gl.load(start).to(gl.int32) >> (4 - 4 * (token % 2))) & 15
    else:
        start = ids + head * ((tokens.to(gl.int64) + 3) // 4) + token // 4
        label = (gl.load(start).to(gl.int32) >> (6 - 2 * (token % 4))) & 3
    return label


@gluon.jit
def _facts(
    k_steps, k_ids, v_steps, v_ids, head, line, first, tokens, K_LABEL: gl.constexpr,
    V_LABEL: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Steps and labels of tokens: a token a thread."""
    token = first + gl.arange(0, BN, layout=gl.BlockedLayout([1], [32], [1], [0]))
    k_label = _label(k_ids, head, token, tokens, K_LABEL)
    v_label = _label(v_ids, head, token, tokens, V_LABEL)
    return gl.load(k_steps + line + token), k_label, gl.load(v_steps + line + token), v_label


@gluon.jit
def _marks(own, label):
    """1 in the low half of words whose label this is, or in the high half where the next is."""
    return gl.where(own == label, 0x3C00, 0) | gl.where(own == label + 1, 0x3C000000, 0)


@gluon.jit
def _step(byte):
    number = byte.to(gl.int32)
    return gl.where(number == 255, 0.0, gl.exp2(number.to(gl.float32) * -0.05))


@gluon.jit
def _copy(k_codes, v_codes, k0, k1, k2, vw, line, K_BITS: gl.constexpr, BN: gl.constexpr):
    """Begin to copy the codes of the tokens from ``line`` on to shared memory."""
    if K_BITS == 2:
        wide: gl.constexpr = gl.BlockedLayout([1, 2], [16, 2], [1, 1], [1, 0])
        row = gl.arange(0, BN, layout=gl.SliceLayout(1, wide))
        word = gl.arange(0, 4, layout=gl.SliceLayout(0, wide))
        place = gl.multiple_of(k_codes + line * 4, 16)
        copy_ahead(k0, place + (row[:, None] * 4 + word[None, :]))
    else:
        single: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, 1], [1, 0])
        row = gl.arange(0, BN, layout=gl.SliceLayout(1, single))
        word = gl.arange(0, 4, layout=gl.SliceLayout(0, single))
        place = k_codes + line * 12 + (row[:, None] * 12 + word[None, :] * 3)
        copy_ahead(k0, place)
        copy_ahead(k1, place + 1)
        copy_ahead(k2, place + 2)
    four: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [1, 1], [1, 0])
    row = gl.arange(0, BN, layout=gl.SliceLayout(1, four))
    word = gl.arange(0, 8, layout=gl.SliceLayout(0, four))
    place = gl.multiple_of(v_codes + line * 8, 16)
    copy_ahead(vw, place + (row[:, None] * 8 + word[None, :]))


@gluon.jit
def _store_code(target, acc, share, CODE: gl.constexpr, ROWS: gl.constexpr, R: gl.constexpr):
    word = gl.arange(0, 16, layout=gl.SliceLayout(1, MMA))
    row = gl.arange(0, R, layout=gl.SliceLayout(0, MMA))
    channel = 16 * (word % 8) + 8 * (word // 8) + CODE
    found = acc * share[None, :]
    place = row[None, :] * 128 + channel[:, None]
    gl.store(target + place, found, mask=(row < ROWS)[None, :])


@gluon.jit(do_not_specialize=["every", "scale", "tokens", "stretch"])
def kernel(
    q, m, numbers, every,
    k_codes, k_steps, k_scale, k_ids, v_codes, v_steps, v_scale, v_ids,
    sums, masses, lses, scale, tokens, stretch,
    K_BITS: gl.constexpr, K_LABEL: gl.constexpr, V_LABEL: gl.constexpr, BY_STEPS: gl.constexpr,
    ROWS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    KL: gl.constexpr = key_layout(BN)
    VL: gl.constexpr = value_layout(BN)
    R: gl.constexpr = 8 if ROWS <= 8 else 16
    gl.static_assert(ROWS <= 16)
    split = gl.program_id(0).to(gl.int64)
    head = gl.program_id(1).to(gl.int64)
    first_row = head * ROWS
    line = head * tokens
    begin = (split * stretch).to(gl.int32)
    end = gl.minimum(begin + stretch, tokens)

    q0 = _query_code(q, first_row, ROWS, 0)
    q1 = _query_code(q, first_row, ROWS, 1)
    q2 = _query_code(q, first_row, ROWS, 2)
    q3 = _query_code(q, first_row, ROWS, 3)
    q4 = _query_code(q, first_row, ROWS, 4)
    q5 = _query_code(q, first_row, ROWS, 5)
    q6 = _query_code(q, first_row, ROWS, 6)
    q7 = _query_code(q, first_row, ROWS, 7)
    less = gl.sum(q0 + q1 + q2 + q3 + q4 + q5 + q6 + q7, 1)
    a0 = _grown(q0, 0, K_BITS)
    a1 = _grown(q1, 1, K_BITS)
    a2 = _grown(q2, 2, K_BITS)
    a3 = _grown(q3, 3, K_BITS)
    a4 = _grown(q4, 4, K_BITS)
    a5 = _grown(q5, 5, K_BITS)
    a6 = _grown(q6, 6, K_BITS)
    a7 = _grown(q7, 7, K_BITS)
    # Scores with the centroids of labels 0 to 7, then what their 16 bits lose; of 16 labels apart.
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, LEFT))
    k = gl.arange(0, 16, layout=gl.SliceLayout(0, LEFT))
    place = (first_row + row)[:, None] * 32
    lost = place
    if K_LABEL == 4:
        lost += (k + 16)[None, :]
        place += k[None, :]
    else:
        place += (k % 8 + k // 8 * 16)[None, :]
    means = gl.load(m + place, mask=(row < ROWS)[:, None], other=0.0)
    rest = means
    if K_LABEL == 4:
        rest = gl.load(m + lost, mask=(row < ROWS)[:, None], other=0.0)

    SL: gl.constexpr = _upper(gl.zeros([16, BN], gl.float32, layout=MMA), R).type.layout
    less = gl.convert_layout(less, gl.SliceLayout(1, MMA))
    spread = less[:, None] + gl.zeros([16, BN], gl.float32, layout=MMA)
    less = gl.max(_upper(spread, R), 1)
    row = gl.arange(0, R, layout=gl.SliceLayout(1, SL))
    asked = row < ROWS
    number = numbers + first_row + row
    largest = gl.load(k_scale + head)
    weight = gl.load(number, mask=asked, other=0.0) * (scale * largest)
    less *= weight * (0.0 - ((1 << K_BITS) - 1) * 0.5)
    weight *= 1024.0  # 2^24 / 2^14
    mean_weight = gl.load(number + every, mask=asked, other=0.0) * scale
    bias = gl.load(number + 2 * every, mask=asked, other=0.0) * (scale * largest * largest)
    if not BY_STEPS:
        bias *= 0.0

    token_s = gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
    top = gl.full([R], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SL))
    total = gl.zeros([R], gl.float32, layout=gl.SliceLayout(1, SL))
    zero = gl.zeros([16, R], gl.float32, layout=MMA)
    o0, o1, o2, o3, o4, o5, o6, o7 = zero, zero, zero, zero, zero, zero, zero, zero
    mass = zero
    last = tokens - BN  # where the last whole block begins: a chunk's end is read from there on
    # Copied 16 bytes at a time, keys of 3 bits in single words.
    k_rows: gl.constexpr = gl.SwizzledSharedLayout(2 if K_BITS == 2 else 1, 1, 1, [1, 0])
    v_rows: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    WORD: gl.constexpr = gl.int64 if K_BITS == 2 else gl.int32
    more: gl.constexpr = 1 if K_BITS == 2 else BN
    k0_s = gl.allocate_shared_memory(WORD, [STAGES, BN, 4], k_rows)
    k1_s = gl.allocate_shared_memory(gl.int32, [STAGES, more, 4], k_rows)
    k2_s = gl.allocate_shared_memory(gl.int32, [STAGES, more, 4], k_rows)
    vw_s = gl.allocate_shared_memory(gl.int32, [STAGES, BN, 8], v_rows)
    for early in gl.static_range(STAGES - 1):
        following = line + gl.minimum(begin + early * BN, last)
        _copy(
            k_codes, v_codes, k0_s.index(early), k1_s.index(early), k2_s.index(early),
            vw_s.index(early), following, K_BITS, BN,
        )  # fmt: skip
        async_copy.commit_group()
    ks, kz, vs, vz = _facts(
        k_steps, k_ids, v_steps, v_ids, head, line, gl.minimum(begin, last), tokens, K_LABEL,
        V_LABEL, BN,
    )  # fmt: skip
    ks1, kz1, vs1, vz1 = _facts(
        k_steps, k_ids, v_steps, v_ids, head, line, gl.minimum(begin + BN, last), tokens, K_LABEL,
        V_LABEL, BN,
    )  # fmt: skip
    k_word = gl.arange(0, 4, layout=gl.SliceLayout(1, KL))[:, None]
    v_word = gl.arange(0, 8, layout=gl.SliceLayout(1, VL))[:, None]
    stage = 0
    for first in range(begin, end, BN):
        at = gl.minimum(first, last)
        async_copy.wait_group(STAGES - 2)
        barrier()
        ahead = gl.where(stage == 0, STAGES - 1, stage - 1)
        following = line + gl.minimum(first + (STAGES - 1) * BN, last)
        _copy(
            k_codes, v_codes, k0_s.index(ahead), k1_s.index(ahead), k2_s.index(ahead),
            vw_s.index(ahead), following, K_BITS, BN,
        )  # fmt: skip
        async_copy.commit_group()
        ks2, kz2, vs2, vz2 = _facts(
            k_steps, k_ids, v_steps, v_ids, head, line, gl.minimum(first + 2 * BN, last), tokens,
            K_LABEL, V_LABEL, BN,
        )  # fmt: skip
        if K_BITS == 2:
            kw = k0_s.index(stage).permute((1, 0)).load(KL)
            x0 = kw.to(gl.int32)
            x1 = (kw >> 32).to(gl.int32)
            y0, y1 = x0, x1
        else:
            w0 = k0_s.index(stage).permute((1, 0)).load(KL)
            w1 = k1_s.index(stage).permute((1, 0)).load(KL)
            w2 = k2_s.index(stage).permute((1, 0)).load(KL)
            x0 = gl.inline_asm_elementwise(
                PAIRS[0], "=r,r,r", [w0, w1], dtype=gl.int32, is_pure=True, pack=1
            )
            y0 = gl.inline_asm_elementwise(
                PAIRS[1], "=r,r,r", [w0, w1], dtype=gl.int32, is_pure=True, pack=1
            )
            x1 = gl.inline_asm_elementwise(
                PAIRS[2], "=r,r,r", [w1, w2], dtype=gl.int32, is_pure=True, pack=1
            )
            y1 = gl.inline_asm_elementwise(
                PAIRS[3], "=r,r,r", [w1, w2], dtype=gl.int32, is_pure=True, pack=1
            )
        k_step = gl.convert_layout(_step(ks), gl.SliceLayout(0, SL))[None, :]
        v_step = gl.convert_layout(_step(vs), gl.SliceLayout(0, SL))[None, :]
        own = gl.convert_layout(kz, gl.SliceLayout(0, KL))[None, :]
        first_marks = _marks(own, 2 * k_word)
        blank = gl.zeros([16, BN], gl.float32, layout=MMA)
        if K_LABEL == 4:
            marks = _right(first_marks, _marks(own, 2 * k_word + 8), gl.float16, BN)
            centres = mma_v2(rest, marks, mma_v2(means, marks, blank))
        else:
            centres = mma_v2(means, _right(first_marks, first_marks, gl.float16, BN), blank)
        scores = _plus_keys(blank, a0, x0, y0, x1, y1, 0, K_BITS, BN)
        scores = _plus_keys(scores, a1, x0, y0, x1, y1, 1, K_BITS, BN)
        scores = _plus_keys(scores, a2, x0, y0, x1, y1, 2, K_BITS, BN)
        scores = _plus_keys(scores, a3, x0, y0, x1, y1, 3, K_BITS, BN)
        scores = _plus_keys(scores, a4, x0, y0, x1, y1, 4, K_BITS, BN)
        scores = _plus_keys(scores, a5, x0, y0, x1, y1, 5, K_BITS, BN)
        scores = _plus_keys(scores, a6, x0, y0, x1, y1, 6, K_BITS, BN)
        scores = _plus_keys(scores, a7, x0, y0, x1, y1, 7, K_BITS, BN)
        s = _upper(scores, R) * weight[:, None] + less[:, None]
        s = (s + bias[:, None] * k_step) * k_step
        s += _upper(centres, R) * mean_weight[:, None]
        if (at < first) | (first + BN > end):
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
            mass *= across
        shares = gl.exp2(s - top[:, None])
        total += gl.sum(shares, 1)
        plain = gl.permute(shares, (1, 0)).to(gl.float16)
        plain = gl.convert_layout(plain, RIGHT, assert_trivial=True)
        p = gl.permute(shares * (v_step * GROW), (1, 0)).to(gl.float16)
        p = gl.convert_layout(p, RIGHT, assert_trivial=True)
        own16 = gl.convert_layout(vz, gl.SliceLayout(0, VL))[None, :]
        low = gl.where(own16 == v_word, 1.0, 0.0).to(gl.float16)
        high = low
        if V_LABEL == 4:
            high = gl.where(own16 == v_word + 8, 1.0, 0.0).to(gl.float16)
        mass = mma_v2(_left(low, high, BN), plain, mass)
        vw = vw_s.index(stage).permute((1, 0)).load(VL)
        low16 = vw.to(gl.int16)
        high16 = (vw >> 16).to(gl.int16)
        o0 = _plus_values(o0, p, low16, high16, 0, BN)
        o1 = _plus_values(o1, p, low16, high16, 1, BN)
        o2 = _plus_values(o2, p, low16, high16, 2, BN)
        o3 = _plus_values(o3, p, low16, high16, 3, BN)
        o4 = _plus_values(o4, p, low16, high16, 4, BN)
        o5 = _plus_values(o5, p, low16, high16, 5, BN)
        o6 = _plus_values(o6, p, low16, high16, 6, BN)
        o7 = _plus_values(o7, p, low16, high16, 7, BN)
        ks, kz, vs, vz = ks1, kz1, vs1, vz1
        ks1, kz1, vs1, vz1 = ks2, kz2, vs2, vz2
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    async_copy.wait_group(0)
    place = split * gl.num_programs(1) * ROWS + first_row
    gl.store(lses + place + row, (top + gl.log2(total)) * 0.6931471805599453, mask=asked)
    share = gl.convert_layout(1.0 / total, gl.SliceLayout(0, MMA))
    label = gl.arange(0, 16, layout=gl.SliceLayout(1, MMA))
    column = gl.arange(0, R, layout=gl.SliceLayout(0, MMA))
    target = masses + (place + column)[None, :] * 16 + label[:, None]
    found = mass * share[None, :]
    if V_LABEL != 4:  # rows 8 to 15 of the product repeat the labels 0 to 7
        found = gl.where((label < 8)[:, None], found, 0.0)
    gl.store(target, found, mask=(column < ROWS)[None, :])
    share *= gl.load(v_scale + head) / GROW
    target = sums + place * 128
    _store_code(target, o0, share, 0, ROWS, R)
    _store_code(target, o1, share, 1, ROWS, R)
    _store_code(target, o2, share, 2, ROWS, R)
    _store_code(target, o3, share, 3, ROWS, R)
    _store_code(target, o4, share, 4, ROWS, R)
    _store_code(target, o5, share, 5, ROWS, R)
    _store_code(target, o6, share, 6, ROWS, R)
    _store_code(target, o7, share, 7, ROWS, R)
