"""``gluon_words`` for up to 64 query rows of a KV head, on Hopper: codes are unpacked once for all.

A program is four warps. A block's codes become FP16 numbers in shared memory, where products of 64
rows read them; while keys are multiplied, values are unpacked, and while values are, the keys of
the next block. Keys are as in ``gluon_words`` (subnormal codes times steps; zeros and the
correction by steps in a product of their own, added to the same sums), values are rounded to FP16.

Channels stand in the order in which unpacking gives them: of 16, first those of the lowest codes of
two words.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from videokv.kernels.attend_packed.gluon_words import (
    SLOTS,
    SQUARES,
    TWIN_MINUS,
    TWIN_STEPS,
    TWIN_ZEROS,
    _halves,
    _in_two,
    barrier,
    copy_ahead,
)


def _value_slot(slot: int) -> str:
    """Codes of two words, times their steps, plus their zeros."""
    mask = 0x00030003 << (2 + 2 * (slot % 4))
    shift = "shl.b32 w, $1, 2;" if slot < 4 else "shr.u32 w, $1, 6;"
    power = 0x00010001 * ((30 - 2 * (slot % 4)) << 10)
    return (
        f"{{ .reg .b32 w, f; {shift} and.b32 w, w, {mask:#x}; mul.rn.f16x2 w, w, $2;"
        f" mov.b32 f, {power:#x}; fma.rn.f16x2 $0, w, f, $3; }}"
    )


VALUE_SLOTS = gl.constexpr([_value_slot(slot) for slot in range(8)])
# Minus a step, of what TWIN_STEPS gives.
MINUS = gl.constexpr("{ .reg .b32 f; mov.b32 f, 0xA000A000; mul.rn.f16x2 $0, $1, f; }")


@gluon.constexpr_function
def word_layout():
    """[64 tokens, 8 words]: written to shared memory without conflicts, 16 bytes at a time."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 4], [32, 0]], lanes, [[8, 0], [16, 0]], [], [64, 8])


@gluon.constexpr_function
def group_layout():
    """[64 tokens, 4 groups]."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[32, 0]], lanes, [[8, 0], [16, 0]], [], [64, 4])


@gluon.jit
def _copy(codes, steps, zeros, words, sizes, offsets, line, ZERO: gl.constexpr, BN: gl.constexpr):
    """Begin to copy what belongs to the tokens from ``line`` on to shared memory."""
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0])
    row = gl.arange(0, BN, layout=gl.SliceLayout(1, wide))
    word = gl.arange(0, 8, layout=gl.SliceLayout(0, wide))
    place = gl.multiple_of(codes + line * 8, 16)
    copy_ahead(words, place + (row[:, None] * 8 + word[None, :]))
    token = gl.arange(0, BN, layout=gl.BlockedLayout([1], [32], [4], [0]))
    copy_ahead(sizes, steps + line + token)
    if ZERO:
        copy_ahead(offsets, zeros + line + token)


@gluon.jit
def _key_slot(words, step, SLOT: gl.constexpr):
    found = gl.inline_asm_elementwise(
        SLOTS[SLOT], "=r,r,r", [words, step], dtype=gl.int32, is_pure=True, pack=1
    )
    return _halves(found, gl.float16)


@gluon.jit
def _value_slot_of(words, step, zero, SLOT: gl.constexpr):
    found = gl.inline_asm_elementwise(
        VALUE_SLOTS[SLOT], "=r,r,r,r", [words, step, zero], dtype=gl.int32, is_pure=True, pack=1
    )
    return _halves(found, gl.float16)


@gluon.jit
def _side_by_side(x0, x1, x2, x3, x4, x5, x6, x7, BN: gl.constexpr, WORDS: gl.constexpr):
    """[BN, 16 WORDS] of eight slots [BN, WORDS, 2]."""
    low = gl.join(gl.join(x0, x1), gl.join(x2, x3))
    high = gl.join(gl.join(x4, x5), gl.join(x6, x7))
    return gl.reshape(gl.permute(gl.join(low, high), (0, 1, 5, 4, 3, 2)), [BN, 16 * WORDS])


@gluon.jit
def _unpack_keys(words, sizes, offsets, tile, extra, ZERO: gl.constexpr, BN: gl.constexpr):
    """Codes times steps to ``tile``, zeros and squared steps to ``extra``."""
    WL: gl.constexpr = word_layout()
    GL: gl.constexpr = group_layout()
    w = words.load(WL)
    size = sizes.load(gl.SliceLayout(1, WL))[:, None]
    selector = gl.arange(0, 8, layout=gl.SliceLayout(0, WL))[None, :] // 2 * 0x1111
    step = gl.inline_asm_elementwise(
        TWIN_STEPS, "=r,r,r", [size, selector], dtype=gl.int32, is_pure=True, pack=1
    )
    tile.store(
        _side_by_side(
            _key_slot(w, step, 0), _key_slot(w, step, 1), _key_slot(w, step, 2),
            _key_slot(w, step, 3), _key_slot(w, step, 4), _key_slot(w, step, 5),
            _key_slot(w, step, 6), _key_slot(w, step, 7), BN, 8,
        )
    )  # fmt: skip
    size = sizes.load(gl.SliceLayout(1, GL))[:, None]
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, GL))[None, :]
    square = gl.inline_asm_elementwise(
        SQUARES, "=r,r,r", [size, group * 0x1111], dtype=gl.int32, is_pure=True, pack=1
    )
    if ZERO:
        zero = offsets.load(gl.SliceLayout(1, GL))[:, None]
        offset = gl.inline_asm_elementwise(
            TWIN_ZEROS, "=r,l,r", [zero, group * 0x2222 + 0x1010], dtype=gl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        offset = gl.inline_asm_elementwise(
            TWIN_MINUS, "=r,r,r", [size, group * 0x1111], dtype=gl.int32, is_pure=True, pack=1
        )
    both = gl.join(_halves(offset, gl.bfloat16), _halves(square, gl.bfloat16))
    extra.store(gl.reshape(both, [BN, 16]))


@gluon.jit
def _unpack_values(words, sizes, offsets, tile, ZERO: gl.constexpr, BN: gl.constexpr):
    WL: gl.constexpr = word_layout()
    w = words.load(WL)
    size = sizes.load(gl.SliceLayout(1, WL))[:, None]
    group = gl.arange(0, 8, layout=gl.SliceLayout(0, WL))[None, :] // 2
    step = gl.inline_asm_elementwise(
        TWIN_STEPS, "=r,r,r", [size, group * 0x1111], dtype=gl.int32, is_pure=True, pack=1
    )
    if ZERO:
        zeros = offsets.load(gl.SliceLayout(1, WL))[:, None]
        zero = gl.inline_asm_elementwise(
            TWIN_ZEROS, "=r,l,r", [zeros, group * 0x2222 + 0x1010], dtype=gl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
        number = (zero << 16).to(gl.float32, bitcast=True)
        number = gl.minimum(gl.maximum(number, -65504.0), 65504.0).to(gl.float16)
        half = number.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
        zero = half | (half << 16)
    else:
        zero = gl.inline_asm_elementwise(
            MINUS, "=r,r", [step], dtype=gl.int32, is_pure=True, pack=1
        )
    tile.store(
        _side_by_side(
            _value_slot_of(w, step, zero, 0), _value_slot_of(w, step, zero, 1),
            _value_slot_of(w, step, zero, 2), _value_slot_of(w, step, zero, 3),
            _value_slot_of(w, step, zero, 4), _value_slot_of(w, step, zero, 5),
            _value_slot_of(w, step, zero, 6), _value_slot_of(w, step, zero, 7), BN, 8,
        )
    )  # fmt: skip


@gluon.jit
def _channel(place):
    """The channel at a place of the order that unpacking gives."""
    slot = place % 16 // 2
    return place // 16 * 16 + place % 2 * 8 + gl.where(slot < 4, 3 - slot, 11 - slot)


@gluon.jit
def _sums(x):
    """Of [64, 128] over each 32."""
    return gl.sum(gl.reshape(x, [64, 4, 32]), 2)


@gluon.jit(do_not_specialize=["scale", "feature_scale"])
def kernel(
    table, q, parts, lses, scale, feature_scale,
    K_ZERO: gl.constexpr, K_SCALED: gl.constexpr, V_ZERO: gl.constexpr, V_SCALED: gl.constexpr,
    BY_STEPS: gl.constexpr, FACTORS: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    gl.static_assert(BN == 64)
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    split = gl.program_id(0).to(gl.int64)
    head = gl.program_id(1).to(gl.int64)
    entry = table + split * 16
    number: gl.constexpr = gl.pointer_type(gl.float32)
    words4: gl.constexpr = gl.pointer_type(gl.int32)
    zeros4: gl.constexpr = gl.pointer_type(gl.int64)
    k_codes = gl.multiple_of(gl.load(entry).to(words4), 16)
    k_steps = gl.multiple_of(gl.load(entry + 1).to(words4), 16)
    k_zeros = gl.multiple_of(gl.load(entry + 2).to(zeros4), 16)
    v_codes = gl.multiple_of(gl.load(entry + 4).to(words4), 16)
    v_steps = gl.multiple_of(gl.load(entry + 5).to(words4), 16)
    v_zeros = gl.multiple_of(gl.load(entry + 6).to(zeros4), 16)
    tokens = gl.load(entry + 9).to(gl.int32)
    line = head * tokens
    begin = gl.load(entry + 14).to(gl.int32)
    end = gl.load(entry + 15).to(gl.int32)
    last = tokens - BN  # where the last whole block begins: a chunk's end is read from there on

    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])  # copied 16 bytes at a time
    kw_s = gl.allocate_shared_memory(gl.int32, [STAGES, BN, 8], rows)
    ks_s = gl.allocate_shared_memory(gl.int32, [STAGES, BN], flat)
    kz_s = gl.allocate_shared_memory(gl.int64, [STAGES, BN if K_ZERO else 1], flat)
    vw_s = gl.allocate_shared_memory(gl.int32, [STAGES, BN, 8], rows)
    vs_s = gl.allocate_shared_memory(gl.int32, [STAGES, BN], flat)
    vz_s = gl.allocate_shared_memory(gl.int64, [STAGES, BN if V_ZERO else 1], flat)
    for early in gl.static_range(STAGES):
        following = line + gl.minimum(begin + early * BN, last)
        _copy(
            k_codes, k_steps, k_zeros, kw_s.index(early), ks_s.index(early), kz_s.index(early),
            following, K_ZERO, BN,
        )  # fmt: skip
        _copy(
            v_codes, v_steps, v_zeros, vw_s.index(early), vs_s.index(early), vz_s.index(early),
            following, V_ZERO, BN,
        )  # fmt: skip
        async_copy.commit_group()

    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    thin: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    q_tile = gl.allocate_shared_memory(gl.float16, [64, 128], wide)
    e_tile = gl.allocate_shared_memory(gl.bfloat16, [64, 16], thin)
    k_tile = gl.allocate_shared_memory(gl.float16, [BN, 128], wide)
    x_tile = gl.allocate_shared_memory(gl.bfloat16, [BN, 16], thin)
    v_tile = gl.allocate_shared_memory(gl.float16, [BN, 128], wide)

    QL: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, QL))
    place = gl.arange(0, 128, layout=gl.SliceLayout(0, QL))
    address = (head * ROWS + row)[:, None] * 128 + _channel(place)[None, :]
    x = gl.load(q + address, mask=(row < ROWS)[:, None], other=0.0).to(gl.float32)
    peak = gl.minimum(gl.maximum(gl.max(gl.abs(x), 1), 1e-30), 1e30)
    # 2^-e, of the row's largest 2^e x, 1 <= x < 2
    exponent = peak.to(gl.int32, bitcast=True) & 0x7F800000
    inverse = (0x7F000000 - exponent).to(gl.float32, bitcast=True)
    k_scale = 1.0
    if K_SCALED:
        k_scale = gl.load(gl.load(entry + 3).to(number) + head)
    sums = _sums(x)
    phi = _sums(x * x) * (0.0 - feature_scale * k_scale)
    if FACTORS:
        group = gl.arange(0, 4, layout=gl.SliceLayout(0, phi.type.layout))
        phi *= gl.load(gl.load(entry + 8).to(number) + head * 4 + group)[None, :]
    if not BY_STEPS:
        phi *= 0.0
    # In what scores of codes are in.
    own = gl.convert_layout(inverse, gl.SliceLayout(1, phi.type.layout)) * 0.5
    terms = gl.join(_in_two(sums * own[:, None]), _in_two(phi * own[:, None]))
    e_tile.store(gl.reshape(terms, [64, 16]))
    power = ((127 - place % 8 // 2 * 2) << 23).to(gl.float32, bitcast=True)
    q_tile.store((x * (inverse * 16384.0)[:, None] * power[None, :]).to(gl.float16))
    unit = 2.0 / gl.convert_layout(inverse, gl.SliceLayout(1, SL)) * (scale * k_scale)

    async_copy.wait_group(STAGES - 1)
    barrier()
    _unpack_keys(kw_s.index(0), ks_s.index(0), kz_s.index(0), k_tile, x_tile, K_ZERO, BN)
    fence_async_shared()
    barrier()
    token = gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
    top = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SL))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SL))
    blank = gl.zeros([64, BN], gl.float32, layout=SL)
    o = gl.zeros([64, 128], gl.float32, layout=OL)
    stage = 0
    for first in range(begin, end, BN):
        scores = warpgroup_mma(q_tile, k_tile.permute([1, 0]), blank, use_acc=False, is_async=True)
        scores = warpgroup_mma(e_tile, x_tile.permute([1, 0]), scores, is_async=True)
        _unpack_values(vw_s.index(stage), vs_s.index(stage), vz_s.index(stage), v_tile, V_ZERO, BN)
        s = warpgroup_mma_wait(0, deps=[scores])
        at = gl.minimum(first, last)
        if (at < first) | (first + BN > end):
            live = (at + token >= first) & (at + token < end)
            s = gl.where(live[None, :], s, float("-inf"))
        higher = gl.maximum(top, gl.max(s, 1) * unit)
        shrink = gl.exp2(top - higher)
        top = higher
        shares = gl.exp2(s * unit[:, None] - top[:, None])
        total = total * shrink + gl.sum(shares, 1)
        p = gl.convert_layout(shares.to(gl.float16), gl.DotOperandLayout(0, OL, 2))
        o *= gl.convert_layout(shrink, gl.SliceLayout(1, OL))[:, None]
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        barrier()
        added = warpgroup_mma(p, v_tile, o, is_async=True)
        following = line + gl.minimum(first + STAGES * BN, last)
        _copy(
            k_codes, k_steps, k_zeros, kw_s.index(stage), ks_s.index(stage), kz_s.index(stage),
            following, K_ZERO, BN,
        )  # fmt: skip
        _copy(
            v_codes, v_steps, v_zeros, vw_s.index(stage), vs_s.index(stage), vz_s.index(stage),
            following, V_ZERO, BN,
        )  # fmt: skip
        async_copy.commit_group()
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        _unpack_keys(
            kw_s.index(stage), ks_s.index(stage), kz_s.index(stage), k_tile, x_tile, K_ZERO, BN
        )
        o, p = warpgroup_mma_wait(0, deps=[added, p])
        fence_async_shared()
        barrier()
    async_copy.wait_group(0)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, SL))
    start = (split * gl.num_programs(1) + head) * ROWS
    gl.store(lses + start + row, (top + gl.log2(total)) * 0.6931471805599453, mask=row < ROWS)
    share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, OL))
    if V_SCALED:
        share *= gl.load(gl.load(entry + 7).to(number) + head)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, OL))
    channel = _channel(gl.arange(0, 128, layout=gl.SliceLayout(0, OL)))
    target = parts + start * 128 + (row[:, None] * 128 + channel[None, :])
    gl.store(target, o * share[:, None], mask=(row < ROWS)[:, None])
