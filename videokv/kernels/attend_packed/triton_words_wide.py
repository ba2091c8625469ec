"""The kernel of ``triton_words`` for many query rows: all slots of the words as one operand.

Products of 64 rows read their second operand from shared memory: it is written once a block, slot
after slot, and not once a slot.
"""

from __future__ import annotations

import triton
import triton.language as tl

from videokv.kernels.attend_packed.words import side_of, slot_of, spread


@triton.jit
def _joined(w, step, zero, REACH: tl.constexpr, FAST: tl.constexpr, BN: tl.constexpr,
            BW: tl.constexpr):  # fmt: skip
    """Values [BN, 8 BW], slot after slot."""
    s0 = slot_of(w, step, zero, 0, REACH, FAST)
    s1 = slot_of(w, step, zero, 1, REACH, FAST)
    s2 = slot_of(w, step, zero, 2, REACH, FAST)
    s3 = slot_of(w, step, zero, 3, REACH, FAST)
    s4 = slot_of(w, step, zero, 4, REACH, FAST)
    s5 = slot_of(w, step, zero, 5, REACH, FAST)
    s6 = slot_of(w, step, zero, 6, REACH, FAST)
    s7 = slot_of(w, step, zero, 7, REACH, FAST)
    low = tl.join(tl.join(s0, s1), tl.join(s2, s3))
    high = tl.join(tl.join(s4, s5), tl.join(s6, s7))
    return tl.reshape(tl.permute(tl.join(low, high), (0, 4, 3, 2, 1)), [BN, 8 * BW])


@triton.jit
def _channels(BW: tl.constexpr):
    column = tl.arange(0, 8 * BW)
    slot = column // BW
    return column % BW * 8 + tl.where(slot < 4, 3 - slot, 11 - slot)


@triton.jit(do_not_specialize=["scale", "feature_scale"])
def kernel(
    table, q, parts, lses, scale, feature_scale,
    K_D: tl.constexpr, K_GROUP: tl.constexpr, K_REACH: tl.constexpr, K_ZERO: tl.constexpr,
    K_SCALED: tl.constexpr,
    V_D: tl.constexpr, V_GROUP: tl.constexpr, V_REACH: tl.constexpr, V_ZERO: tl.constexpr,
    V_SCALED: tl.constexpr,
    BY_STEPS: tl.constexpr, FACTORS: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    TYPE: tl.constexpr = q.dtype.element_ty
    KW: tl.constexpr = triton.next_power_of_2(K_D // 8) if K_D > 64 else 16
    VW: tl.constexpr = triton.next_power_of_2(V_D // 8) if V_D > 64 else 16
    entry = table + tl.program_id(0).to(tl.int64) * 16
    word16 = tl.pointer_type(tl.int16)
    byte = tl.pointer_type(tl.uint8)
    number = tl.pointer_type(tl.float32)
    k_codes = tl.multiple_of(tl.load(entry).to(word16), 16)
    k_steps = tl.load(entry + 1).to(byte)
    k_zeros = k_steps
    if K_ZERO is not None:
        k_zeros = tl.load(entry + 2).to(tl.pointer_type(K_ZERO))
    v_codes = tl.multiple_of(tl.load(entry + 4).to(word16), 16)
    v_steps = tl.load(entry + 5).to(byte)
    v_zeros = v_steps
    if V_ZERO is not None:
        v_zeros = tl.load(entry + 6).to(tl.pointer_type(V_ZERO))
    tokens = tl.load(entry + 9).to(tl.int32)
    begin = tl.load(entry + 14).to(tl.int32)
    end = tl.load(entry + 15).to(tl.int32)

    row = tl.arange(0, BM)
    asked = row < ROWS
    channel = _channels(KW)
    place = (head * ROWS + row)[:, None] * K_D + channel[None, :]
    block = tl.load(q + place, mask=asked[:, None] & (channel < K_D)[None, :], other=0.0)
    extra = block
    k_scale = 1.0
    if K_SCALED:
        k_scale = tl.load(tl.load(entry + 3).to(number) + head)
    if BY_STEPS:
        # phi of a group stands at its first word, what its 16 bits lose at the second.
        each: tl.constexpr = K_GROUP // 8
        groups: tl.constexpr = KW // each
        natural = tl.arange(0, 8 * KW)
        place = (head * ROWS + row)[:, None] * K_D + natural[None, :]
        phi = tl.load(q + place, mask=asked[:, None] & (natural < K_D)[None, :], other=0.0)
        phi = phi.to(tl.float32)
        phi = tl.sum(tl.reshape(phi * phi, [BM, groups, 8 * each]), 2)
        if FACTORS:
            group = tl.arange(0, groups)
            at = tl.load(entry + 8).to(number) + head * (K_D // K_GROUP) + group
            phi *= tl.load(at, mask=group < K_D // K_GROUP, other=0.0)[None, :]
        # Squares are multiplied by 1/4, to stay within FP16.
        phi = spread(phi * (-4.0 * feature_scale * k_scale), BM, groups, each)
        if q.dtype.element_ty == tl.float16:  # beyond it: no weight, not NaN
            phi = tl.minimum(tl.maximum(phi, -65504.0), 65504.0)
        high = phi.to(TYPE)
        low = (phi - high.to(tl.float32)).to(TYPE)
        at = (tl.arange(0, KW) % each)[None, :]
        extra = tl.where(at == 0, high, tl.where(at == 1, low, 0.0))
    unit = scale * k_scale

    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, 8 * VW], tl.float32)
    for first in range(begin, end, BN):
        token = first + tl.arange(0, BN)
        live = token < end
        w, step, zero = side_of(
            k_codes, k_steps, k_zeros, head, token, live, tokens, TYPE, K_D, KW, K_GROUP,
            K_ZERO, BN,
        )  # fmt: skip
        keys = _joined(w, step, zero, K_REACH, FAST, BN, KW)
        scores = tl.dot(block, tl.trans(keys), input_precision=PRECISION)
        if BY_STEPS:
            square = step * (step * 0.25).to(TYPE)
            scores = tl.dot(extra, tl.trans(square), acc=scores, input_precision=PRECISION)
        scores = tl.where(live[None, :], scores * unit, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shares = tl.math.exp2(scores - higher[:, None])
        shrink = tl.math.exp2(peak - higher)
        total = total * shrink + tl.sum(shares, 1)
        w, step, zero = side_of(
            v_codes, v_steps, v_zeros, head, token, live, tokens, TYPE, V_D, VW, V_GROUP,
            V_ZERO, BN,
        )  # fmt: skip
        values = _joined(w, step, zero, V_REACH, FAST, BN, VW)
        acc = tl.dot(shares.to(TYPE), values, acc * shrink[:, None], PRECISION)
        peak = higher
    line = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * ROWS + row
    tl.store(lses + line, (peak + tl.log2(total)) * 0.6931471805599453, mask=asked)
    share = 1.0 / total
    if V_SCALED:
        share *= tl.load(tl.load(entry + 7).to(number) + head)
    channel = _channels(VW)
    target = parts + line[:, None] * V_D + channel[None, :]
    tl.store(target, acc * share[:, None], mask=asked[:, None] & (channel < V_D)[None, :])
