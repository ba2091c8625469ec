"""The Gluon kernel for Hopper: two warps that load, two warpgroups that multiply, persistent
programs with an even share of the work. (The division of labour is FlashAttention-3's.)

Each program holds 128 queries of a head, 64 a warpgroup. The loading warps keep rings of keys and
values full through the copy engine. With AHEAD a warpgroup begins the scores of the next block of
keys, and the weighted values of the last one, before the softmax of either is needed; without it
the other warpgroup's products fill the time of a softmax.

Values in E4M3 are multiplied as such, the weights rounded to E4M3 times 256. Their sums keep 14
bits: each block of keys gets a sum of its own.

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

_AFTER = gl.constexpr("""
{
    .reg .pred never;
    setp.lt.f32 never, $1, 0f00000000;
    .reg .b32 at; mov.u32 at, 0; @never st.shared.f32 [at], $1;
    mov.b32 $0, $1;
}
""")


@gluon.jit
def _attend_part(
    acc, peak, total, q, e, rings, bars, done, begin, end, tokens, unit,
    NARROW: gl.constexpr, COLUMNS: gl.constexpr, SHIFT: gl.constexpr,
    KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr, AHEAD: gl.constexpr,
    L: gl.constexpr, LV: gl.constexpr,
):  # fmt: skip
    """Blocks begin to end of the past or of the current rows. done: blocks used before."""
    k_ring, x_ring, v_ring = rings
    k_full, k_empty, v_full, v_empty = bars
    KEYS: gl.constexpr = k_ring.shape[1]
    SIZE: gl.constexpr = v_ring.shape[2]
    QUERIES: gl.constexpr = q.shape[0]
    zeros = gl.zeros([QUERIES, SIZE], gl.float32, layout=LV)
    if AHEAD:
        if begin < end:
            slot = done % KEY_STAGES
            mbarrier.wait(k_full.index(slot), done // KEY_STAGES & 1)
            s = score(q, e, k_ring, x_ring, slot, L, COLUMNS)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(slot), count=1)
            if tokens - begin * KEYS < KEYS:
                s = hidden(s, tokens - begin * KEYS, NARROW, L)
            w, peak, total, shrink = weights_of(s, peak, total, unit, SHIFT, LV)
            p = packed_weights(w, NARROW)
            if not NARROW:
                acc = acc * shrink[:, None]
            for block in range(begin + 1, end):
                v_slot = done % VALUE_STAGES
                v_phase = done // VALUE_STAGES & 1
                done += 1
                slot = done % KEY_STAGES
                mbarrier.wait(k_full.index(slot), done // KEY_STAGES & 1)
                s = score(q, e, k_ring, x_ring, slot, L, COLUMNS)
                mbarrier.wait(v_full.index(v_slot), v_phase)
                if NARROW:
                    added = add_values(p, v_ring, v_slot, zeros, NARROW, LV)
                else:
                    added = add_values(p, v_ring, v_slot, acc, NARROW, LV)
                s = warpgroup_mma_wait(1, deps=[s])
                mbarrier.arrive(k_empty.index(slot), count=1)
                if tokens - block * KEYS < KEYS:
                    s = hidden(s, tokens - block * KEYS, NARROW, L)
                w, peak, total, next_shrink = weights_of(s, peak, total, unit, SHIFT, LV)
                # The assembler would wait before the softmax; it does not move a wait above a trap.
                total = gl.inline_asm_elementwise(
                    _AFTER, "=r,r", [total], dtype=gl.float32, is_pure=False, pack=1
                )
                added, w, total = warpgroup_mma_wait(0, deps=[added, w, total])
                mbarrier.arrive(v_empty.index(v_slot), count=1)
                if NARROW:  # noqa: SIM108 - the compiler takes one branch
                    acc = acc * shrink[:, None] + added
                else:
                    acc = added * next_shrink[:, None]
                shrink = next_shrink
                p = packed_weights(w, NARROW)
            v_slot = done % VALUE_STAGES
            mbarrier.wait(v_full.index(v_slot), done // VALUE_STAGES & 1)
            done += 1
            if NARROW:
                added = add_values(p, v_ring, v_slot, zeros, NARROW, LV)
                added = warpgroup_mma_wait(0, deps=[added])
                acc = acc * shrink[:, None] + added
            else:
                acc = add_values(p, v_ring, v_slot, acc, NARROW, LV)
                acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(v_slot), count=1)
    else:
        for block in range(begin, end):
            slot = done % KEY_STAGES
            mbarrier.wait(k_full.index(slot), done // KEY_STAGES & 1)
            s = score(q, e, k_ring, x_ring, slot, L, COLUMNS)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(slot), count=1)
            if tokens - block * KEYS < KEYS:
                s = hidden(s, tokens - block * KEYS, NARROW, L)
            w, peak, total, shrink = weights_of(s, peak, total, unit, SHIFT, LV)
            p = packed_weights(w, NARROW)
            v_slot = done % VALUE_STAGES
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
    bufs, bars, out, lse, part, part_lse, value_scale, sizes, unit,
    WHICH: gl.constexpr, HAS_PAST: gl.constexpr, HAS_CURRENT: gl.constexpr,
    NARROW: gl.constexpr, COLUMNS: gl.constexpr,
    KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies: 64 queries of each piece."""
    q_buf, e_buf, k_ring, x_ring, v_ring = bufs
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    heads, group, rows, row_blocks, blocks, sharers, past_tokens, current_tokens = sizes
    QUERIES: gl.constexpr = q_buf.shape[1]
    KEYS: gl.constexpr = k_ring.shape[1]
    SIZE: gl.constexpr = v_ring.shape[2]
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    L8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 32])
    LP: gl.constexpr = L8 if NARROW else LO
    SHIFT: gl.constexpr = 8.0 if NARROW else 0.0
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
                begin, gl.minimum(end, past_blocks), past_tokens, unit,
                NARROW, COLUMNS, SHIFT, KEY_STAGES, VALUE_STAGES, AHEAD, L, LP,
            )  # fmt: skip
            if NARROW:
                kv_line = line // heads * (heads // group) + line % heads // group
                acc = acc * gl.load(value_scale + kv_line)
            acc = gl.convert_layout(acc, LO)
        if HAS_CURRENT:
            acc, peak, total, done = _attend_part(
                acc, peak, total, q, e, rings, part_bars, done,
                gl.maximum(begin - past_blocks, 0), end - past_blocks, current_tokens, unit,
                False, 0, SHIFT, KEY_STAGES, VALUE_STAGES, AHEAD, L, LO,
            )  # fmt: skip
        mbarrier.arrive(q_empty, count=1)

        lane = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, LO))
        peak = gl.convert_layout(peak, gl.SliceLayout(1, LO))
        total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, LO))
        channel = gl.arange(0, SIZE, layout=gl.SliceLayout(0, LO))
        log = peak * unit + (gl.log2(total) - SHIFT)
        acc = acc * (1.0 / total)[:, None]
        if end - begin == key_blocks:
            row = block % row_blocks * (2 * QUERIES) + WHICH * QUERIES + lane
            place = line.to(gl.int64) * rows + row
            gl.store(lse + place, log * 0.6931471805599453, mask=row < rows)
            target = out + place[:, None] * SIZE + channel[None, :]
            gl.store(target, acc.to(gl.bfloat16), mask=(row < rows)[:, None])
        else:
            slot = gl.program_id(0) * 2
            if begin == 0:
                slot += 1
            row = slot * (2 * QUERIES) + WHICH * QUERIES + lane
            gl.store(part_lse + row, log)
            gl.store(part + row[:, None] * SIZE + channel[None, :], acc)


@gluon.jit
def _fetch(desc, place, bar, target, SHAPE: gl.constexpr):
    """One copy into a block of shared memory that has another shape."""
    tma.async_copy_global_to_shared(desc, place, bar, target.reshape(SHAPE))


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
    descs, bufs, bars, sizes,
    HAS_PAST: gl.constexpr, HAS_CURRENT: gl.constexpr, NARROW: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads the queries of each piece, then its keys."""
    q_desc, e_desc, k_desc, x_desc, ck_desc = descs
    q_buf, e_buf, k_ring, x_ring = bufs
    q_full, q_empty, k_full, k_empty = bars
    heads, group, rows, row_blocks, blocks, sharers, past_tokens, current_tokens = sizes
    QUERIES: gl.constexpr = q_buf.shape[1]
    SIZE: gl.constexpr = k_ring.shape[2]
    past_blocks = gl.cdiv(past_tokens, k_ring.shape[1])
    key_blocks = past_blocks + gl.cdiv(current_tokens, k_ring.shape[1])
    whole, first, last = _share(blocks, key_blocks, sharers)
    done = 0
    for number in range(_pieces(whole, first, last, key_blocks)):
        block, begin, end = _piece(number, whole, first, last, key_blocks)
        line = block // row_blocks
        row = block % row_blocks * (2 * QUERIES)
        batch = line // heads
        head = line % heads
        lane = head // group
        mbarrier.wait(q_empty, (number + 1) & 1)
        if COLUMNS:
            mbarrier.expect(q_full, q_desc.block_type.nbytes * 2 + e_desc.block_type.nbytes * 2)
        else:
            mbarrier.expect(q_full, q_desc.block_type.nbytes * 2)
        for which in gl.static_range(2):
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
    descs, v_ring, bars, sizes,
    HAS_PAST: gl.constexpr, HAS_CURRENT: gl.constexpr, NARROW: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads values. Keys are another's: they are wanted a block earlier, and would
    wait here for room for values."""
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
    QUERIES: gl.constexpr, KEYS: gl.constexpr, SIZE: gl.constexpr,
    HAS_PAST: gl.constexpr, HAS_CURRENT: gl.constexpr, NARROW: gl.constexpr,
    COLUMNS: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    thin: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    bytes_: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_buf = gl.allocate_shared_memory(gl.bfloat16, [2, QUERIES, SIZE], wide)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [KEY_STAGES, KEYS, SIZE], wide)
    e_buf = q_buf
    x_ring = k_ring
    if COLUMNS:
        e_buf = gl.allocate_shared_memory(gl.bfloat16, [2, QUERIES, COLUMNS], thin)
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
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(KEY_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(VALUE_STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()

    bufs = (q_buf, e_buf, k_ring, x_ring, v_ring)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (heads, group, rows, row_blocks, blocks, sharers, past_tokens, current_tokens)
    gl.warp_specialize(
        [
            (_consume, (bufs, bars, out, lse, part, part_lse, value_scale, sizes, unit,
                        0, HAS_PAST, HAS_CURRENT, NARROW, COLUMNS, KEY_STAGES, VALUE_STAGES,
                        AHEAD)),
            (_consume, (bufs, bars, out, lse, part, part_lse, value_scale, sizes, unit,
                        1, HAS_PAST, HAS_CURRENT, NARROW, COLUMNS, KEY_STAGES, VALUE_STAGES,
                        AHEAD)),
            (_load_keys, ((q_desc, e_desc, k_desc, x_desc, ck_desc),
                          (q_buf, e_buf, k_ring, x_ring), (q_full, q_empty, k_full, k_empty),
                          sizes, HAS_PAST, HAS_CURRENT, NARROW, COLUMNS, KEY_STAGES)),
            (_load_values, ((v_desc, cv_desc), v_ring, (v_full, v_empty), sizes,
                            HAS_PAST, HAS_CURRENT, NARROW, VALUE_STAGES)),
        ],
        [4, 1, 1],
        [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
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
