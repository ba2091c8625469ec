"""``gluon_unbiased`` for up to 64 query rows of a KV head, on Hopper: as ``gluon_words_wide``.

A block's codes become FP16 numbers (subnormal, exact) in shared memory; steps multiply scores and
weights, labels are columns of two narrow products.
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

from videokv.kernels.attend_packed.gluon_unbiased import (
    GROW,
    PAIRS,
    VALUE_SLOTS,
    _label,
    _step,
    _taken,
)
from videokv.kernels.attend_packed.gluon_words import _halves, barrier, copy_ahead
from videokv.kernels.attend_packed.gluon_words_wide import _side_by_side


@gluon.constexpr_function
def unit_layout():
    """[64 tokens, 4 units of 32 codes]: written to shared memory without conflicts."""
    lanes = [[0, 1], [1, 0], [2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout([[0, 2]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.constexpr_function
def label_layout(columns):
    """[64 tokens, labels]: half of a token's a thread."""
    registers = [[0, 1 << bit] for bit in range(columns.bit_length() - 2)]
    lanes = [[0, columns // 2], [1, 0], [2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def _copy(k_codes, v_codes, k0, k1, k2, vw, line, K_BITS: gl.constexpr, BN: gl.constexpr):
    """Begin to copy the codes of the tokens from ``line`` on to shared memory."""
    pair: gl.constexpr = gl.BlockedLayout([1, 2], [16, 2], [4, 1], [1, 0])
    row = gl.arange(0, BN, layout=gl.SliceLayout(1, pair))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, pair))
    place = gl.multiple_of(v_codes + line * 4, 16)
    copy_ahead(vw, place + (row[:, None] * 4 + word[None, :]))
    if K_BITS == 2:
        place = gl.multiple_of(k_codes + line * 4, 16)
        copy_ahead(k0, place + (row[:, None] * 4 + word[None, :]))
    else:
        single: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
        row = gl.arange(0, BN, layout=gl.SliceLayout(1, single))
        word = gl.arange(0, 4, layout=gl.SliceLayout(0, single))
        place = k_codes + line * 12 + (row[:, None] * 12 + word[None, :] * 3)
        copy_ahead(k0, place)
        copy_ahead(k1, place + 1)
        copy_ahead(k2, place + 2)


@gluon.jit
def _slot(x, y, BITS: gl.constexpr, CENTRED: gl.constexpr, CODE: gl.constexpr):
    if CENTRED:
        found = gl.inline_asm_elementwise(
            VALUE_SLOTS[CODE], "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        found = _taken(x, y, CODE, BITS)
    return _halves(found, gl.float16)


@gluon.jit
def _half_units(x, y, BITS: gl.constexpr, CENTRED: gl.constexpr, BN: gl.constexpr):
    """Sixteen numbers of each unit: [BN, 4, 16]."""
    return gl.reshape(
        _side_by_side(
            _slot(x, y, BITS, CENTRED, 0), _slot(x, y, BITS, CENTRED, 1),
            _slot(x, y, BITS, CENTRED, 2), _slot(x, y, BITS, CENTRED, 3),
            _slot(x, y, BITS, CENTRED, 4), _slot(x, y, BITS, CENTRED, 5),
            _slot(x, y, BITS, CENTRED, 6), _slot(x, y, BITS, CENTRED, 7), BN, 4,
        ),
        [BN, 4, 16],
    )  # fmt: skip


@gluon.jit
def _unpack(w0, w1, w2, tile, BITS: gl.constexpr, CENTRED: gl.constexpr, BN: gl.constexpr):
    """The codes of a block as numbers (of values, around zero), in the order of ``_channel``."""
    L: gl.constexpr = unit_layout()
    if BITS == 2:
        w = w0.load(L)
        x0 = w.to(gl.int32)
        x1 = (w >> 32).to(gl.int32)
        y0, y1 = x0, x1
    else:
        a, b, c = w0.load(L), w1.load(L), w2.load(L)
        x0 = gl.inline_asm_elementwise(
            PAIRS[0], "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
        )
        y0 = gl.inline_asm_elementwise(
            PAIRS[1], "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
        )
        x1 = gl.inline_asm_elementwise(
            PAIRS[2], "=r,r,r", [b, c], dtype=gl.int32, is_pure=True, pack=1
        )
        y1 = gl.inline_asm_elementwise(
            PAIRS[3], "=r,r,r", [b, c], dtype=gl.int32, is_pure=True, pack=1
        )
    both = gl.join(_half_units(x0, y0, BITS, CENTRED, BN), _half_units(x1, y1, BITS, CENTRED, BN))
    tile.store(gl.reshape(gl.permute(both, (0, 1, 3, 2)), [BN, 128]))


@gluon.jit
def _channel(place):
    """The channel at a place of the order that unpacking gives."""
    return place // 16 * 16 + place % 2 * 8 + place % 16 // 2


@gluon.jit
def _lowest_bit(place, BITS: gl.constexpr):
    """Of the code at a place: see ``PLACES``."""
    code = place % 16 // 2
    if BITS == 2:
        found = 6 - code % 4 * 2 + gl.where(code == 7, 8, 0)
    else:
        found = gl.where(code < 2, 7, gl.where(code < 5, 13, 21)) - code * 3
    return found


@gluon.jit
def _power(exponent):
    return ((exponent + 127) << 23).to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def _facts(
    steps, ids, head, line, first, tokens, LABEL: gl.constexpr, COLUMNS: gl.constexpr,
    BN: gl.constexpr,
):  # fmt: skip
    """Steps and labels of a block's tokens."""
    token = first + gl.arange(0, BN, layout=gl.BlockedLayout([1], [32], [4], [0]))
    own = first + gl.arange(0, BN, layout=gl.SliceLayout(1, label_layout(COLUMNS)))
    return gl.load(steps + line + token), _label(ids, head, own, tokens, LABEL)


@gluon.jit
def _mark(tile, label, COUNT: gl.constexpr, COLUMNS: gl.constexpr):
    """1 at each token's label, counted by COUNT."""
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, label_layout(COLUMNS)))
    found = label[:, None] == (column % COUNT)[None, :]
    tile.store(gl.where(found, 1.0, 0.0).to(gl.float16))


@gluon.jit(do_not_specialize=["every", "scale", "tokens", "stretch"])
def kernel(
    q, m, numbers, every,
    k_codes, k_steps, k_scale, k_ids, v_codes, v_steps, v_scale, v_ids,
    sums, masses, lses, scale, tokens, stretch,
    K_BITS: gl.constexpr, K_LABEL: gl.constexpr, V_LABEL: gl.constexpr, BY_STEPS: gl.constexpr,
    ROWS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    gl.static_assert(BN == 64)
    COUNT: gl.constexpr = 16 if K_LABEL == 4 else 8
    COLUMNS: gl.constexpr = 2 * COUNT
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ML: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    split = gl.program_id(0).to(gl.int64)
    head = gl.program_id(1).to(gl.int64)
    first_row = head * ROWS
    line = head * tokens
    begin = (split * stretch).to(gl.int32)
    end = gl.minimum(begin + stretch, tokens)
    last = tokens - BN  # where the last whole block begins: a chunk's end is read from there on

    rows: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 1, [1, 0])  # copied 16 bytes at a time
    singles: gl.constexpr = gl.SwizzledSharedLayout(2 if K_BITS == 2 else 1, 1, 1, [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WORD: gl.constexpr = gl.int64 if K_BITS == 2 else gl.int32
    more: gl.constexpr = 1 if K_BITS == 2 else BN
    k0_s = gl.allocate_shared_memory(WORD, [STAGES, BN, 4], singles)
    k1_s = gl.allocate_shared_memory(gl.int32, [STAGES, more, 4], singles)
    k2_s = gl.allocate_shared_memory(gl.int32, [STAGES, more, 4], singles)
    vw_s = gl.allocate_shared_memory(gl.int64, [STAGES, BN, 4], rows)
    for early in gl.static_range(STAGES):
        following = line + gl.minimum(begin + early * BN, last)
        _copy(
            k_codes, v_codes, k0_s.index(early), k1_s.index(early), k2_s.index(early),
            vw_s.index(early), following, K_BITS, BN,
        )  # fmt: skip
        async_copy.commit_group()
    at = gl.minimum(begin, last)
    k_byte, k_label = _facts(k_steps, k_ids, head, line, at, tokens, K_LABEL, COLUMNS, BN)
    v_byte, v_label = _facts(v_steps, v_ids, head, line, at, tokens, V_LABEL, 16, BN)

    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    thin: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    q_tile = gl.allocate_shared_memory(gl.float16, [64, 128], wide)
    k_tile = gl.allocate_shared_memory(gl.float16, [BN, 128], wide)
    v_tile = gl.allocate_shared_memory(gl.float16, [BN, 128], wide)
    labels: gl.constexpr = gl.NVMMASharedLayout(2 * COLUMNS, 16, 2)
    means_tile = gl.allocate_shared_memory(gl.float16, [64, COLUMNS], labels)
    k_marks = gl.allocate_shared_memory(gl.float16, [BN, COLUMNS], labels)
    v_marks = gl.allocate_shared_memory(gl.float16, [BN, 16], thin)
    k_sizes = gl.allocate_shared_memory(gl.float32, [BN], flat)
    v_sizes = gl.allocate_shared_memory(gl.float32, [BN], flat)

    QL: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, QL))
    place = gl.arange(0, 128, layout=gl.SliceLayout(0, QL))
    address = (first_row + row)[:, None] * 128 + _channel(place)[None, :]
    x = gl.load(q + address, mask=(row < ROWS)[:, None], other=0.0).to(gl.float32)
    less = gl.convert_layout(gl.sum(x, 1), gl.SliceLayout(1, SL))
    q_tile.store((x * _power(14 - _lowest_bit(place, K_BITS))[None, :]).to(gl.float16))
    # Scores with the centroids of all labels, then what their 16 bits lose.
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, label_layout(COLUMNS)))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, label_layout(COLUMNS)))
    place = column % COUNT + column // COUNT * 16
    address = (first_row + row)[:, None] * 32 + place[None, :]
    means_tile.store(gl.load(m + address, mask=(row < ROWS)[:, None], other=0.0))

    row = gl.arange(0, 64, layout=gl.SliceLayout(1, SL))
    asked = row < ROWS
    number = numbers + first_row + row
    largest = gl.load(k_scale + head)
    weight = gl.load(number, mask=asked, other=0.0) * (scale * largest)
    less *= weight * (0.0 - ((1 << K_BITS) - 1) * 0.5)
    weight *= 1024.0  # 2^24 / 2^14
    mean_weight = gl.load(number + every, mask=asked, other=0.0) * scale
    bias = gl.load(number + 2 * every, mask=asked, other=0.0) * (scale * largest * largest)

    async_copy.wait_group(STAGES - 1)
    barrier()
    _unpack(k0_s.index(0), k1_s.index(0), k2_s.index(0), k_tile, K_BITS, False, BN)
    _mark(k_marks, k_label, COUNT, COLUMNS)
    k_sizes.store(_step(k_byte))
    v_sizes.store(_step(v_byte))
    fence_async_shared()
    barrier()
    token = gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
    top = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SL))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SL))
    blank = gl.zeros([64, BN], gl.float32, layout=SL)
    o = gl.zeros([64, 128], gl.float32, layout=OL)
    mass = gl.zeros([64, 16], gl.float32, layout=ML)
    stage = 0
    for first in range(begin, end, BN):
        scores = warpgroup_mma(q_tile, k_tile.permute([1, 0]), blank, use_acc=False, is_async=True)
        centres = warpgroup_mma(
            means_tile, k_marks.permute([1, 0]), blank, use_acc=False, is_async=True
        )
        _unpack(vw_s.index(stage), vw_s.index(stage), vw_s.index(stage), v_tile, 2, True, BN)
        _mark(v_marks, v_label, 16, 16)
        at = gl.minimum(first, last)
        ahead = gl.minimum(first + BN, last)
        k_byte, k_label = _facts(k_steps, k_ids, head, line, ahead, tokens, K_LABEL, COLUMNS, BN)
        v_byte, v_label = _facts(v_steps, v_ids, head, line, ahead, tokens, V_LABEL, 16, BN)
        k_size = k_sizes.load(gl.SliceLayout(0, SL))[None, :]
        v_size = v_sizes.load(gl.SliceLayout(0, SL))[None, :]
        s, c = warpgroup_mma_wait(0, deps=[scores, centres])
        s = s * weight[:, None] + less[:, None]
        if BY_STEPS:
            s += bias[:, None] * k_size
        s = s * k_size + c * mean_weight[:, None]
        if (at < first) | (first + BN > end):
            live = (at + token >= first) & (at + token < end)
            s = gl.where(live[None, :], s, float("-inf"))
        higher = gl.maximum(top, gl.max(s, 1))
        shrink = gl.exp2(top - higher)
        top = higher
        shares = gl.exp2(s - top[:, None])
        total = total * shrink + gl.sum(shares, 1)
        sized = shares * (v_size * GROW)
        p = gl.convert_layout(sized.to(gl.float16), gl.DotOperandLayout(0, OL, 2))
        plain = gl.convert_layout(shares.to(gl.float16), gl.DotOperandLayout(0, ML, 2))
        o *= gl.convert_layout(shrink, gl.SliceLayout(1, OL))[:, None]
        mass *= gl.convert_layout(shrink, gl.SliceLayout(1, ML))[:, None]
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        barrier()
        added = warpgroup_mma(p, v_tile, o, is_async=True)
        masses_added = warpgroup_mma(plain, v_marks, mass, is_async=True)
        following = line + gl.minimum(first + STAGES * BN, last)
        _copy(
            k_codes, v_codes, k0_s.index(stage), k1_s.index(stage), k2_s.index(stage),
            vw_s.index(stage), following, K_BITS, BN,
        )  # fmt: skip
        async_copy.commit_group()
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        _unpack(k0_s.index(stage), k1_s.index(stage), k2_s.index(stage), k_tile, K_BITS, False, BN)
        _mark(k_marks, k_label, COUNT, COLUMNS)
        k_sizes.store(_step(k_byte))
        v_sizes.store(_step(v_byte))
        o, mass, p, plain = warpgroup_mma_wait(0, deps=[added, masses_added, p, plain])
        fence_async_shared()
        barrier()
    async_copy.wait_group(0)
    start = split * gl.num_programs(1) * ROWS + first_row
    gl.store(lses + start + row, (top + gl.log2(total)) * 0.6931471805599453, mask=asked)
    share = 1.0 / total
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ML))
    label = gl.arange(0, 16, layout=gl.SliceLayout(0, ML))
    target = masses + (start + row)[:, None] * 16 + label[None, :]
    found = mass * gl.convert_layout(share, gl.SliceLayout(1, ML))[:, None]
    gl.store(target, found, mask=(row < ROWS)[:, None])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, OL))
    place = gl.arange(0, 128, layout=gl.SliceLayout(0, OL))
    share = gl.convert_layout(share, gl.SliceLayout(1, OL)) * (gl.load(v_scale + head) / GROW)
    target = sums + start * 128 + (row[:, None] * 128 + _channel(place)[None, :])
    gl.store(target, o * share[:, None], mask=(row < ROWS)[:, None])
