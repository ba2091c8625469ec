"""The Gluon kernel for Hopper: two warps that load, warpgroups that multiply, persistent programs
with an even share of the work. (The division of labour is FlashAttention-3's.)

Each program holds 192 queries of a head, 64 a warpgroup. The loading warps keep rings of keys and
values full through the copy engine. While one warpgroup computes a softmax, the products of the
others keep the matrix units busy.

Weights in BF16 have the range of float32: the largest scores of the first block of keys are their
base, and no later block looks for its largest ones or scales what was summed up (FIXED). Where a
sum leaves what float32 holds, which takes a score 60 above the first block's, the row's log-sum-exp
is inf, and the package has its block done again.

Values in E4M3 are multiplied as such, the weights rounded to E4M3 times 256, which takes the
largest score so far. Their sums keep 14 bits: each block of keys gets a sum of its own.

All blocks of queries that fill whole waves of programs are done by one program each. Those left
over are cut along their keys into equal shares, one a program; a second kernel adds up the shares
in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from videokv.kernels.attend.gluon_blocks import (
    add_values,
    hidden,
    own_sums,
    packed_weights,
    score,
    value_block,
    weights_of,
)

# Newer releases of Triton have another name for it.
copy_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

_LARGEST_SUM = gl.constexpr(2.0**90)  # of weights; values up to 2^30 can be summed with them
_LARGEST = gl.constexpr(3.0e38)  # of the magnitudes of a row's channels, added up


@gluon.jit
def _attend_part(
    acc, peak, total, q, e, rings, bars, done, begin, end, based_at, tokens, unit,
    FIXED: gl.constexpr, NARROW: gl.constexpr, COLUMNS: gl.constexpr, SHIFT: gl.constexpr,
    KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr, L: gl.constexpr, LV: gl.constexpr,
):  # fmt: skip
    """Blocks begin to end of the past or of the current rows. done: blocks used before. based_at:
    with FIXED, the block whose largest scores are the base of all weights."""
    k_ring, x_ring, v_ring = rings
    k_full, k_empty, v_full, v_empty = bars
    KEYS: gl.constexpr = k_ring.shape[1]
    SIZE: gl.constexpr = v_ring.shape[2]
    QUERIES: gl.constexpr = q.shape[0]
    zeros = gl.zeros([QUERIES, SIZE], gl.float32, layout=LV)
    for block in range(begin, end):
        slot = done % KEY_STAGES
        mbarrier.wait(k_full.index(slot), done // KEY_STAGES & 1)
        s = score(q, e, k_ring, x_ring, slot, L, COLUMNS)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(slot), count=1)
        if tokens - block * KEYS < KEYS:
            s = hidden(s, tokens - block * KEYS, NARROW, L)
        v_slot = done % VALUE_STAGES
        if FIXED:
            if block == based_at:
                peak = gl.max(s, 1)
            w = gl.exp2(s * unit - (peak * unit)[:, None])
            total += own_sums(w)
            p = packed_weights(w, NARROW)
            mbarrier.wait(v_full.index(v_slot), done // VALUE_STAGES & 1)
            acc = add_values(p, v_ring, v_slot, acc, NARROW, LV)
            acc = warpgroup_mma_wait(0, deps=[acc])
        else:
            w, peak, total, shrink = weights_of(s, peak, total, unit, SHIFT, LV)
            p = packed_weights(w, NARROW)
            mbarrier.wait(v_full.index(v_slot), done // VALUE_STAGES & 1)
            if NARROW:
                added = add_values(p, v_ring, v_slot, zeros, NARROW, LV)
                added = warpgroup_mma_wait(0, deps=[added])
                acc = acc * shrink[:, None] + added
            else:
                acc = acc * shrink[:, None]
                acc = add_values(p, v_ring, v_slot, acc, NARROW, LV)
                acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        done += 1
    return acc, peak, total, done


@gluon.jit
def _share(blocks, key_blocks, sharers):
    """How many blocks of queries this program does whole, and its share of the rest: from and to
    which block of keys, counted through the rest."""
    program = gl.program_id(0)
    whole = blocks // gl.num_programs(0)
    rest = (blocks - whole * gl.num_programs(0)) * key_blocks
    sharer = gl.minimum(program, sharers)
    next_sharer = gl.minimum(program + 1, sharers)
    return whole, sharer * rest // sharers, next_sharer * rest // sharers


@gluon.jit
def _pieces(whole, first, last, key_blocks):
    """Number of pieces of this program."""
    pieces = whole
    if last > first:
        pieces += (last - 1) // key_blocks - first // key_blocks + 1
    return pieces


@gluon.jit
def _piece(number, whole, first, last, key_blocks):
    """Block of queries of a piece, its first and last block of keys (exclusive)."""
    programs = gl.num_programs(0)
    row = first // key_blocks + (number - whole)
    block = whole * programs + row
    begin = gl.maximum(first - row * key_blocks, 0)
    end = gl.minimum(last - row * key_blocks, key_blocks)
    if number < whole:
        block = number * programs + gl.program_id(0)
        begin = 0
        end = key_blocks
    return block, begin, end


@gluon.jit
def _consume(
    given, WHICH: gl.constexpr, HAS_PAST: gl.constexpr, HAS_CURRENT: gl.constexpr,
    NARROW: gl.constexpr, COLUMNS: gl.constexpr,
    KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies: 64 queries of each piece."""
    bufs, bars, out, lse, part, part_lse, value_scale, sizes, unit = given
    q_buf, e_buf, k_ring, x_ring, v_ring = bufs
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    heads, group, rows, row_blocks, blocks, sharers, past_tokens, current_tokens = sizes
    GROUPS: gl.constexpr = q_buf.shape[0]
    QUERIES: gl.constexpr = q_buf.shape[1]
    KEYS: gl.constexpr = k_ring.shape[1]
    SIZE: gl.constexpr = v_ring.shape[2]
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    L8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 32])
    LP: gl.constexpr = L8 if NARROW else LO
    SHIFT: gl.constexpr = 8.0 if NARROW else 0.0
    FIXED: gl.constexpr = not NARROW
    past_blocks = gl.cdiv(past_tokens, KEYS)
    key_blocks = past_blocks + gl.cdiv(current_tokens, KEYS)
    whole, first, last = _share(blocks, key_blocks, sharers)
    done = 0
    q = q_buf.index(WHICH)
    e = q
    if COLUMNS:
        e = e_buf.index(WHICH)
    rings = (k_ring, x_ring, v_ring)
    part_bars = (k_full, k_empty, v_full, v_empty)
    for number in range(_pieces(whole, first, last, key_blocks)):
        block, begin, end = _piece(number, whole, first, last, key_blocks)
        line = block // row_blocks  # batch and head
        peak = gl.full([QUERIES], float("-inf"), gl.float32, layout=gl.SliceLayout(1, L))
        total = own_sums(gl.zeros([QUERIES, KEYS], gl.float32, layout=L))
        acc = gl.zeros([QUERIES, SIZE], gl.float32, layout=LO)
        mbarrier.wait(q_full, number & 1)
        if HAS_PAST:
            acc = gl.convert_layout(acc, LP)
            acc, peak, total, done = _attend_part(
                acc, peak, total, q, e, rings, part_bars, done,
                begin, gl.minimum(end, past_blocks), begin, past_tokens, unit,
                FIXED, NARROW, COLUMNS, SHIFT, KEY_STAGES, VALUE_STAGES, L, LP,
            )  # fmt: skip
            if NARROW:
                kv_line = line // heads * (heads // group) + line % heads // group
                acc = acc * gl.load(value_scale + kv_line)
            acc = gl.convert_layout(acc, LO)
        if HAS_CURRENT:
            acc, peak, total, done = _attend_part(
                acc, peak, total, q, e, rings, part_bars, done,
                gl.maximum(begin - past_blocks, 0), end - past_blocks, begin - past_blocks,
                current_tokens, unit,
                FIXED, False, 0, SHIFT, KEY_STAGES, VALUE_STAGES, L, LO,
            )  # fmt: skip
        mbarrier.arrive(q_empty, count=1)

        lane = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, LO))
        peak = gl.convert_layout(peak, gl.SliceLayout(1, LO))
        total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, LO))
        channel = gl.arange(0, SIZE, layout=gl.SliceLayout(0, LO))
        log = peak * unit + (gl.log2(total) - SHIFT)
        if FIXED:
            # A largest magnitude would pass over NaN, which sums become that left float32 twice.
            fits = (total < _LARGEST_SUM) & (gl.sum(gl.abs(acc), 1) < _LARGEST)
            log = gl.where(fits, log, float("inf"))
        acc = acc * (1.0 / total)[:, None]
        if end - begin == key_blocks:
            row = block % row_blocks * (GROUPS * QUERIES) + WHICH * QUERIES + lane
            place = line.to(gl.int64) * rows + row
            gl.store(lse + place, log * 0.6931471805599453, mask=row < rows)
            target = out + place[:, None] * SIZE + channel[None, :]
            gl.store(target, acc.to(gl.bfloat16), mask=(row < rows)[:, None])
        else:
            slot = gl.program_id(0) * 2
            if begin == 0:
                slot += 1
            row = slot * (GROUPS * QUERIES) + WHICH * QUERIES + lane
            gl.store(part_lse + row, log)
            gl.store(part + row[:, None] * SIZE + channel[None, :], acc)


@gluon.jit
def _fetch(desc, place, bar, target, SHAPE: gl.constexpr):
    """One copy into a block of shared memory that has another shape."""
    copy_block(desc, place, bar, target.reshape(SHAPE))


@gluon.jit
def _load_keys_of(
    k_desc, x_desc, k_ring, x_ring, k_full, k_empty, done, batch, lane, kv_heads, begin, end,
    NARROW: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Keys of blocks begin to end of the past or of the current rows, and their columns."""
    KEYS: gl.constexpr = k_ring.shape[1]
    SIZE: gl.constexpr = k_ring.shape[2]
    for step in range(begin, end):
        slot = done % STAGES
        bar = k_full.index(slot)
        mbarrier.wait(k_empty.index(slot), (done // STAGES + 1) & 1)
        if COLUMNS:
            mbarrier.expect(bar, k_desc.block_type.nbytes + x_desc.block_type.nbytes)
        else:
            mbarrier.expect(bar, k_desc.block_type.nbytes)
        if NARROW:
            fours = [batch * kv_heads + lane, 0, step * (KEYS // 4), 0, 0]
            _fetch(k_desc, fours, bar, k_ring.index(slot), [1, 2, KEYS // 4, 2, SIZE])
            if COLUMNS:
                _fetch(x_desc, fours, bar, x_ring.index(slot), [1, 2, KEYS // 4, 2, COLUMNS])
        else:
            place = [batch, lane, step * KEYS, 0]
            _fetch(k_desc, place, bar, k_ring.index(slot), [1, 1, KEYS, SIZE])
            if COLUMNS:
                _fetch(x_desc, place, bar, x_ring.index(slot), [1, 1, KEYS, COLUMNS])
        done += 1
    return done


@gluon.jit
def _load_values_of(
    v_desc, v_ring, v_full, v_empty, done, batch, lane, begin, end,
    NARROW: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Values of blocks begin to end of the past or of the current rows."""
    KEYS: gl.constexpr = v_ring.shape[1]
    SIZE: gl.constexpr = v_ring.shape[2]
    for step in range(begin, end):
        slot = done % STAGES
        bar = v_full.index(slot)
        mbarrier.wait(v_empty.index(slot), (done // STAGES + 1) & 1)
        mbarrier.expect(bar, v_desc.block_type.nbytes)
        if NARROW:
            turned = value_block(v_ring, slot, True).permute([1, 0])
            _fetch(v_desc, [batch, lane, 0, step * KEYS], bar, turned, [1, 1, SIZE, KEYS])
        else:
            _fetch(
                v_desc, [batch, lane, step * KEYS, 0], bar, v_ring.index(slot), [1, 1, KEYS, SIZE]
            )
        done += 1
    return done


@gluon.jit
def _load_keys(
    given, HAS_PAST: gl.constexpr, HAS_CURRENT: gl.constexpr, NARROW: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads the queries of each piece, then its keys."""
    descs, bufs, bars, sizes = given
    q_desc, e_desc, k_desc, x_desc, ck_desc = descs
    q_buf, e_buf, k_ring, x_ring = bufs
    q_full, q_empty, k_full, k_empty = bars
    heads, group, rows, row_blocks, blocks, sharers, past_tokens, current_tokens = sizes
    GROUPS: gl.constexpr = q_buf.shape[0]
    QUERIES: gl.constexpr = q_buf.shape[1]
    SIZE: gl.constexpr = k_ring.shape[2]
    past_blocks = gl.cdiv(past_tokens, k_ring.shape[1])
    key_blocks = past_blocks + gl.cdiv(current_tokens, k_ring.shape[1])
    whole, first, last = _share(blocks, key_blocks, sharers)
    done = 0
    for number in range(_pieces(whole, first, last, key_blocks)):
        block, begin, end = _piece(number, whole, first, last, key_blocks)
        line = block // row_blocks
        row = block % row_blocks * (GROUPS * QUERIES)
        batch = line // heads
        head = line % heads
        lane = head // group
        mbarrier.wait(q_empty, (number + 1) & 1)
        if COLUMNS:
            mbarrier.expect(q_full, (q_desc.block_type.nbytes + e_desc.block_type.nbytes) * GROUPS)
        else:
            mbarrier.expect(q_full, q_desc.block_type.nbytes * GROUPS)
        for which in gl.static_range(GROUPS):
            place = [batch, head, row + which * QUERIES, 0]
            _fetch(q_desc, place, q_full, q_buf.index(which), [1, 1, QUERIES, SIZE])
            if COLUMNS:
                _fetch(e_desc, place, q_full, e_buf.index(which), [1, 1, QUERIES, COLUMNS])
        if HAS_PAST:
            done = _load_keys_of(
                k_desc, x_desc, k_ring, x_ring, k_full, k_empty, done, batch, lane, heads // group,
                begin, gl.minimum(end, past_blocks), NARROW, COLUMNS, STAGES,
            )  # fmt: skip
        if HAS_CURRENT:
            done = _load_keys_of(
                ck_desc, ck_desc, k_ring, x_ring, k_full, k_empty, done, batch, lane,
                heads // group, gl.maximum(begin - past_blocks, 0), end - past_blocks,
                False, 0, STAGES,
            )  # fmt: skip


@gluon.jit
def _load_values(
    given, HAS_PAST: gl.constexpr, HAS_CURRENT: gl.constexpr, NARROW: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads values. Keys are another's: they are wanted a block earlier, and would
    wait here for room for values."""
    descs, v_ring, bars, sizes = given
    v_desc, cv_desc = descs
    v_full, v_empty = bars
    heads, group, rows, row_blocks, blocks, sharers, past_tokens, current_tokens = sizes
    past_blocks = gl.cdiv(past_tokens, v_ring.shape[1])
    key_blocks = past_blocks + gl.cdiv(current_tokens, v_ring.shape[1])
    whole, first, last = _share(blocks, key_blocks, sharers)
    done = 0
    for number in range(_pieces(whole, first, last, key_blocks)):
        block, begin, end = _piece(number, whole, first, last, key_blocks)
        line = block // row_blocks
        batch = line // heads
        lane = line % heads // group
        if HAS_PAST:
            done = _load_values_of(
                v_desc, v_ring, v_full, v_empty, done, batch, lane,
                begin, gl.minimum(end, past_blocks), NARROW, STAGES,
            )  # fmt: skip
        if HAS_CURRENT:
            done = _load_values_of(
                cv_desc, v_ring, v_full, v_empty, done, batch, lane,
                gl.maximum(begin - past_blocks, 0), end - past_blocks, False, STAGES,
            )  # fmt: skip


_COUNTS = [
    *("unit", "heads", "group", "rows", "row_blocks", "blocks", "sharers"),
    *("past_tokens", "current_tokens"),
]


@gluon.jit(do_not_specialize=_COUNTS)
def forward(
    q_desc, e_desc, k_desc, x_desc, v_desc, ck_desc, cv_desc,
    out, lse, part, part_lse, value_scale,
    unit, heads, group, rows, row_blocks, blocks, sharers, past_tokens, current_tokens,
    GROUPS: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, SIZE: gl.constexpr,
    HAS_PAST: gl.constexpr, HAS_CURRENT: gl.constexpr, NARROW: gl.constexpr,
    COLUMNS: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    thin: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    bytes_: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_buf = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, QUERIES, SIZE], wide)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [KEY_STAGES, KEYS, SIZE], wide)
    e_buf = q_buf
    x_ring = k_ring
    if COLUMNS:
        e_buf = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, QUERIES, COLUMNS], thin)
        x_ring = gl.allocate_shared_memory(gl.bfloat16, [KEY_STAGES, KEYS, COLUMNS], thin)
    if NARROW and not HAS_CURRENT:
        v_ring = gl.allocate_shared_memory(gl.float8e4nv, [VALUE_STAGES, SIZE, KEYS], bytes_)
    else:
        v_ring = gl.allocate_shared_memory(gl.bfloat16, [VALUE_STAGES, KEYS, SIZE], wide)
    q_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [VALUE_STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [VALUE_STAGES, 1], bar)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=GROUPS)
    for i in gl.static_range(KEY_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
    for i in gl.static_range(VALUE_STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    fence_async_shared()

    bufs = (q_buf, e_buf, k_ring, x_ring, v_ring)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (heads, group, rows, row_blocks, blocks, sharers, past_tokens, current_tokens)
    consumed = (bufs, bars, out, lse, part, part_lse, value_scale, sizes, unit)
    keys_of = ((q_desc, e_desc, k_desc, x_desc, ck_desc), (q_buf, e_buf, k_ring, x_ring),
               (q_full, q_empty, k_full, k_empty), sizes)  # fmt: skip
    values_of = ((v_desc, cv_desc), v_ring, (v_full, v_empty), sizes)
    gl.warp_specialize(
        [
            (_consume, (consumed, 0, HAS_PAST, HAS_CURRENT, NARROW, COLUMNS, KEY_STAGES,
                        VALUE_STAGES)),
            (_consume, (consumed, 1, HAS_PAST, HAS_CURRENT, NARROW, COLUMNS, KEY_STAGES,
                        VALUE_STAGES)),
            (_consume, (consumed, 2, HAS_PAST, HAS_CURRENT, NARROW, COLUMNS, KEY_STAGES,
                        VALUE_STAGES)),
            (_load_keys, (keys_of, HAS_PAST, HAS_CURRENT, NARROW, COLUMNS, KEY_STAGES)),
            (_load_values, (values_of, HAS_PAST, HAS_CURRENT, NARROW, VALUE_STAGES)),
        ],
        [4, 4, 1, 1],
        [REGISTERS, REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


_MERGE_COUNTS = ["rows", "row_blocks", "first_block", "rest", "key_blocks", "sharers"]


@triton.jit(do_not_specialize=_MERGE_COUNTS)
def merge(
    out, lse, part, part_lse, rows, row_blocks, first_block, rest, key_blocks, sharers,
    QUERIES: tl.constexpr, SIZE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Adds up the shares of a block of queries, BM of them, where there are several.

    rest: blocks of keys of all blocks of queries from first_block on.
    """
    start = tl.program_id(0) * key_blocks  # the block's first block of keys, among all
    first = ((start + 1) * sharers - 1) // rest
    last = ((start + key_blocks) * sharers - 1) // rest
    if first < last:
        lane = tl.program_id(1) * BM + tl.arange(0, BM)
        channel = tl.arange(0, SIZE)
        highest = tl.full([BM], float("-inf"), tl.float32)
        for program in range(first, last + 1):
            slot = program * 2 + (program == first).to(tl.int32)
            highest = tl.maximum(highest, tl.load(part_lse + slot * QUERIES + lane))
        acc = tl.zeros([BM, SIZE], tl.float32)
        total = tl.zeros([BM], tl.float32)
        for program in range(first, last + 1):
            slot = program * 2 + (program == first).to(tl.int32)
            row = slot * QUERIES + lane
            weight = tl.math.exp2(tl.load(part_lse + row) - highest)
            acc += weight[:, None] * tl.load(part + row[:, None] * SIZE + channel[None, :])
            total += weight
        block = first_block + tl.program_id(0)
        at = block % row_blocks * QUERIES + lane
        place = (block // row_blocks).to(tl.int64) * rows + at
        log = highest + tl.log2(total)
        tl.store(lse + place, log * 0.6931471805599453, mask=at < rows)
        target = out + place[:, None] * SIZE + channel[None, :]
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=(at < rows)[:, None])
