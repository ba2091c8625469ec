"""The Gluon kernel for Hopper: a warp that loads, two warpgroups that multiply (FlashAttention-3's
division of labour), persistent programs with an even share of the work.

Each program holds 128 queries of a head, 64 a warpgroup. The loading warp keeps rings of keys and
values full through the copy engine; the warpgroups start the scores of the next block of keys, and
the weighted values of the last one, before the softmax of either is needed. They take turns at the
matrix units (one multiplies while the other exponentiates).

Values in E4M3 are multiplied as such, the weights rounded to E4M3 times 256. An E4M3 product takes
the weights of four keys side by side from one thread, while a score product leaves every thread two
keys and two keys eight further on; instead of moving weights between threads, the copy engine lays
the rows of cached keys in shared memory in such an order that each thread's weights are of four
neighbouring keys. Its sums keep 14 bits: each block of keys gets a sum of its own.

All blocks of queries that fill whole waves of programs are done by one program each. Those left over
are cut along their keys into equal shares, one a program; a second kernel adds up the shares in a
fixed order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from videokv.kernels.attend.call import Call, Rows
from videokv.kernels.gpu import on_device
from videokv.tensors import E4M3

_LOG2_E = 1.4426950408889634
SIZE = 128  # of heads and of values
COLUMNS = 16
QUERIES = 64  # of a warpgroup
KEYS = 128  # of a block
_WARPS = 12  # 4 + 4 that multiply, 1 that loads and 3 that fill up its warpgroup
_REGISTERS = 65536
_SMALLEST_SHARE = 4  # blocks of keys


@dataclass(frozen=True)
class Schedule:
    """Constants of the kernel, for tuning.

    ahead: whether scores of the next block start before the values of this one. turns: whether the
    warpgroups take turns at the matrix units. shared_tail: whether blocks of queries that do not
    fill a wave are cut along their keys. registers: of a thread that multiplies. poly: of every 8
    exponentials so many are polynomials on the multiply-add units.
    """

    ahead: bool = True
    turns: bool = True
    key_stages: int = 2
    value_stages: int = 2
    shared_tail: bool = True
    registers: int = 240
    poly: int = 0
    programs: int = 0


_FOUR_E4M3 = gl.constexpr("""
{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}
""")
_SAME = gl.constexpr("mov.b32 $0, $1;")
_AFTER = gl.constexpr("""
{
    .reg .pred never;
    setp.lt.f32 never, $1, 0f00000000;
    .reg .b32 at; mov.u32 at, 0; @never st.shared.f32 [at], $1;
    mov.b32 $0, $1;
}
""")


@gluon.jit
def _polynomial(x):
    """2^x for x <= 127 on the multiply-add units, to 1e-4 (Cody and Waite's split, degree 3)."""
    x = gl.maximum(x, -126.0)
    shifted = x + 12582912.0  # 1.5 2^23: the nearest whole number is in the lowest bits
    f = x - (shifted - 12582912.0)
    y = gl.fma(f, 0.05550410866, 0.2402265070)
    y = gl.fma(gl.fma(y, f, 0.6931471806), f, 1.0)
    bits = y.to(gl.int32, bitcast=True) + (shifted.to(gl.int32, bitcast=True) << 23)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _halves(x):
    """Every other eight of keys: a thread holds two keys of each, so that nothing moves."""
    x = gl.reshape(x, [x.shape[0], x.shape[1] // 16, 2, 8])
    a, b = gl.split(gl.permute(x, [0, 1, 3, 2]))
    ROWS: gl.constexpr = x.shape[0]
    HALF: gl.constexpr = x.shape[1] * 8
    return gl.reshape(a, [ROWS, HALF]), gl.reshape(b, [ROWS, HALF])


@gluon.jit
def _whole(a, b):
    """What ``_halves`` took apart."""
    ROWS: gl.constexpr = a.shape[0]
    HALF: gl.constexpr = a.shape[1]
    a = gl.reshape(a, [ROWS, HALF // 8, 8])
    b = gl.convert_layout(gl.reshape(b, [ROWS, HALF // 8, 8]), a.type.layout)
    return gl.reshape(gl.permute(gl.join(a, b), [0, 1, 3, 2]), [ROWS, 2 * HALF])


@gluon.jit
def _exp2(x, POLY: gl.constexpr):
    """2^x, of every 16 POLY (0, 2, 4, 6 or 8) as polynomials."""
    if POLY == 0:
        w = gl.exp2(x)
    elif POLY == 99:
        w = x * 0.25
    else:
        a, b = _halves(x)
        if POLY == 8:
            w = _whole(_polynomial(a), gl.exp2(b))
        else:
            c, d = _halves(a)
            if POLY == 4:
                a = _whole(_polynomial(c), gl.exp2(d))
            else:
                e, f = _halves(d)
                if POLY == 6:
                    c = _polynomial(c)
                else:
                    c = gl.exp2(c)
                a = _whole(c, _whole(_polynomial(e), gl.exp2(f)))
            w = _whole(a, gl.exp2(b))
    return w


@gluon.jit
def _own_sums(w):
    """Sums of what each thread holds of a row (a row is spread over four threads)."""
    ROWS: gl.constexpr = w.shape[0]
    COUNT: gl.constexpr = w.shape[1]
    return gl.sum(gl.sum(gl.reshape(w, [ROWS, COUNT // 8, 4, 2]), 3), 1)


@gluon.jit
def _weights(
    s, peak, total, unit, SHIFT: gl.constexpr, POLY: gl.constexpr, LV: gl.constexpr
):  # fmt: skip
    """Weights of a block's scores, the new largest score and sums of weights, and what earlier ones
    shrink by (for the accumulator, whose layout is LV)."""
    higher = gl.maximum(peak, gl.max(s, 1))
    base = higher * unit - SHIFT
    w = _exp2(s * unit - base[:, None], POLY)
    w = gl.convert_layout(w, s.type.layout)
    shrink = gl.exp2((peak - higher) * unit)
    of_sums = gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))
    total = total * of_sums[:, None] + _own_sums(w)
    return w, higher, total, gl.convert_layout(shrink, gl.SliceLayout(1, LV))


@gluon.jit
def _packed(w, NARROW: gl.constexpr):
    """Weights rounded to the type of the values; in E4M3 four keys in one number, which puts the
    columns in the order of their keys (see the module) and moves nothing between threads."""
    if NARROW:
        QUERIES: gl.constexpr = w.shape[0]
        FOURS: gl.constexpr = w.shape[1] // 4
        even, odd = gl.split(gl.reshape(w, [QUERIES, 2, FOURS, 2]))
        a, c = gl.split(gl.permute(even, [0, 2, 1]))
        b, d = gl.split(gl.permute(odd, [0, 2, 1]))
        p = gl.inline_asm_elementwise(
            _FOUR_E4M3, "=r,r,r,r,r", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        p = w.to(gl.bfloat16)
    return p


@gluon.jit
def _operand(p, NARROW: gl.constexpr, L: gl.constexpr):
    """Packed weights as the left side of the product with values."""
    if NARROW:
        # Each number four times, of which the assembly takes one: four elements in its place.
        p = gl.join(p, p)
        p = gl.join(p, p)
        p = gl.reshape(p, [p.shape[0], p.shape[1] * 4])
        p = gl.convert_layout(p, gl.DotOperandLayout(0, L, 4))
        operand = gl.inline_asm_elementwise(
            _SAME, "=r,r,r,r,r", [p], dtype=gl.float8e4nv, is_pure=True, pack=4
        )
    else:
        operand = gl.convert_layout(p, gl.DotOperandLayout(0, L, 2))
    return operand


@gluon.jit
def _add_values(p, v_ring, slot, acc, NARROW: gl.constexpr, L: gl.constexpr):
    """The product with a block of values, begun: in E4M3 a sum of its own, else added to acc."""
    KEYS: gl.constexpr = v_ring.shape[1]
    left = _operand(p, NARROW, L)
    if NARROW:
        added = warpgroup_mma(
            left, _value(v_ring, slot, NARROW), acc, use_acc=False, is_async=True,
            max_num_imprecise_acc=KEYS,
        )  # fmt: skip
    else:
        added = warpgroup_mma(left, _value(v_ring, slot, NARROW), acc, is_async=True)
    return added


@gluon.jit
def _score(q, e, k_ring, x_ring, slot, L: gl.constexpr, COLUMNS: gl.constexpr):
    """Scores of a block of keys, begun."""
    QUERIES: gl.constexpr = q.shape[0]
    KEYS: gl.constexpr = k_ring.shape[1]
    zeros = gl.zeros([QUERIES, KEYS], gl.float32, layout=L)
    s = warpgroup_mma(q, k_ring.index(slot).permute([1, 0]), zeros, use_acc=False, is_async=True)
    if COLUMNS:
        s = warpgroup_mma(e, x_ring.index(slot).permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def _value(v_ring, slot, NARROW: gl.constexpr):
    """The block of values in a slot, keys x channels."""
    KEYS: gl.constexpr = v_ring.shape[1]
    SIZE: gl.constexpr = v_ring.shape[2]
    value = v_ring.index(slot)
    if NARROW:
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
        if value.dtype == gl.float8e4nv:
            narrow = value
        else:
            narrow = value._reinterpret(gl.float8e4nv, [2, SIZE, KEYS], layout).index(0)
        block = narrow.permute([1, 0])
    else:
        block = value
    return block


@gluon.jit
def _hidden(s, left, NARROW: gl.constexpr, L: gl.constexpr):
    """-inf for the scores of keys from the left-th on."""
    KEYS: gl.constexpr = s.shape[1]
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, L))
    if NARROW:
        HALF: gl.constexpr = KEYS // 2
        key = (column % HALF) // 2 * 4 + column // HALF * 2 + column % 2
    else:
        key = column
    return gl.where((key < left)[None, :], s, float("-inf"))


@gluon.jit
def _attend_part(
    acc, peak, total, q, e, rings, bars, done, turn, begin, end, tokens, unit,
    WHICH: gl.constexpr, NARROW: gl.constexpr, COLUMNS: gl.constexpr, SHIFT: gl.constexpr,
    KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr, AHEAD: gl.constexpr,
    TURNS: gl.constexpr, POLY: gl.constexpr,
    L: gl.constexpr, LV: gl.constexpr,
):  # fmt: skip
    """Blocks begin to end of the past or of the current rows. done: blocks used before. turn: turns
    taken before."""
    k_ring, x_ring, v_ring = rings
    k_full, k_empty, v_full, v_empty, turns = bars
    KEYS: gl.constexpr = k_ring.shape[1]
    SIZE: gl.constexpr = v_ring.shape[2]
    QUERIES: gl.constexpr = q.shape[0]
    zeros = gl.zeros([QUERIES, SIZE], gl.float32, layout=LV)
    if AHEAD:
        if begin < end:
            slot = done % KEY_STAGES
            mbarrier.wait(k_full.index(slot), done // KEY_STAGES & 1)
            s = _score(q, e, k_ring, x_ring, slot, L, COLUMNS)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(slot), count=1)
            if tokens - begin * KEYS < KEYS:
                s = _hidden(s, tokens - begin * KEYS, NARROW, L)
            w, peak, total, shrink = _weights(s, peak, total, unit, SHIFT, POLY, LV)
            p = _packed(w, NARROW)
            if not NARROW:
                acc = acc * shrink[:, None]
            for block in range(begin + 1, end):
                v_slot = done % VALUE_STAGES
                v_phase = done // VALUE_STAGES & 1
                done += 1
                slot = done % KEY_STAGES
                mbarrier.wait(k_full.index(slot), done // KEY_STAGES & 1)
                if TURNS:
                    mbarrier.wait(turns.index(WHICH), (turn + WHICH + 1) & 1)
                s = _score(q, e, k_ring, x_ring, slot, L, COLUMNS)
                mbarrier.wait(v_full.index(v_slot), v_phase)
                if NARROW:
                    added = _add_values(p, v_ring, v_slot, zeros, NARROW, LV)
                else:
                    added = _add_values(p, v_ring, v_slot, acc, NARROW, LV)
                if TURNS:
                    mbarrier.arrive(turns.index(1 - WHICH), count=1)
                    turn += 1
                s = warpgroup_mma_wait(1, deps=[s])
                mbarrier.arrive(k_empty.index(slot), count=1)
                if tokens - block * KEYS < KEYS:
                    s = _hidden(s, tokens - block * KEYS, NARROW, L)
                w, peak, total, next_shrink = _weights(s, peak, total, unit, SHIFT, POLY, LV)
                # The assembler would wait before the softmax; it does not move a wait above a trap.
                total = gl.inline_asm_elementwise(
                    _AFTER, "=r,r", [total], dtype=gl.float32, is_pure=False, pack=1
                )
                added, w, total = warpgroup_mma_wait(0, deps=[added, w, total])
                mbarrier.arrive(v_empty.index(v_slot), count=1)
                if NARROW:
                    acc = acc * shrink[:, None] + added
                else:
                    acc = added * next_shrink[:, None]
                shrink = next_shrink
                p = _packed(w, NARROW)
            v_slot = done % VALUE_STAGES
            mbarrier.wait(v_full.index(v_slot), done // VALUE_STAGES & 1)
            done += 1
            if NARROW:
                added = _add_values(p, v_ring, v_slot, zeros, NARROW, LV)
                added = warpgroup_mma_wait(0, deps=[added])
                acc = acc * shrink[:, None] + added
            else:
                acc = _add_values(p, v_ring, v_slot, acc, NARROW, LV)
                acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(v_slot), count=1)
    else:
        for block in range(begin, end):
            slot = done % KEY_STAGES
            mbarrier.wait(k_full.index(slot), done // KEY_STAGES & 1)
            s = _score(q, e, k_ring, x_ring, slot, L, COLUMNS)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(slot), count=1)
            if tokens - block * KEYS < KEYS:
                s = _hidden(s, tokens - block * KEYS, NARROW, L)
            w, peak, total, shrink = _weights(s, peak, total, unit, SHIFT, POLY, LV)
            p = _packed(w, NARROW)
            v_slot = done % VALUE_STAGES
            mbarrier.wait(v_full.index(v_slot), done // VALUE_STAGES & 1)
            if NARROW:
                added = _add_values(p, v_ring, v_slot, zeros, NARROW, LV)
                added = warpgroup_mma_wait(0, deps=[added])
                acc = acc * shrink[:, None] + added
            else:
                acc = acc * shrink[:, None]
                acc = _add_values(p, v_ring, v_slot, acc, NARROW, LV)
                acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(v_slot), count=1)
            done += 1
    return acc, peak, total, done, turn


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
    TURNS: gl.constexpr, POLY: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies: 64 queries of each piece."""
    q_buf, e_buf, k_ring, x_ring, v_ring = bufs
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns = bars
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
    turn = 0
    q = q_buf.index(WHICH)
    e = q
    if COLUMNS:
        e = e_buf.index(WHICH)
    rings = (k_ring, x_ring, v_ring)
    part_bars = (k_full, k_empty, v_full, v_empty, turns)
    for number in range(_pieces(whole, first, last, key_blocks)):
        block, begin, end = _piece(number, whole, first, last, key_blocks)
        line = block // row_blocks  # batch and head
        peak = gl.full([QUERIES], float("-inf"), gl.float32, layout=gl.SliceLayout(1, L))
        total = _own_sums(gl.zeros([QUERIES, KEYS], gl.float32, layout=L))
        acc = gl.zeros([QUERIES, SIZE], gl.float32, layout=LO)
        mbarrier.wait(q_full, number & 1)
        if HAS_PAST:
            acc = gl.convert_layout(acc, LP)
            acc, peak, total, done, turn = _attend_part(
                acc, peak, total, q, e, rings, part_bars, done, turn,
                begin, gl.minimum(end, past_blocks), past_tokens, unit,
                WHICH, NARROW, COLUMNS, SHIFT, KEY_STAGES, VALUE_STAGES, AHEAD, TURNS, POLY, L, LP,
            )  # fmt: skip
            if NARROW:
                kv_line = line // heads * (heads // group) + line % heads // group
                acc = acc * gl.load(value_scale + kv_line)
            acc = gl.convert_layout(acc, LO)
        if HAS_CURRENT:
            acc, peak, total, done, turn = _attend_part(
                acc, peak, total, q, e, rings, part_bars, done, turn,
                gl.maximum(begin - past_blocks, 0), end - past_blocks, current_tokens, unit,
                WHICH, False, 0, SHIFT, KEY_STAGES, VALUE_STAGES, AHEAD, TURNS, POLY, L, LO,
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
            turned = _value(v_ring, slot, True).permute([1, 0])
            _fetch(v_desc, [batch, lane, 0, step * KEYS], bar, turned, [1, 1, SIZE, KEYS])
        else:
            _fetch(v_desc, [batch, lane, step * KEYS, 0], bar, v_ring.index(slot), [1, 1, KEYS, SIZE])
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
def _forward(
    q_desc, e_desc, k_desc, x_desc, v_desc, ck_desc, cv_desc,
    out, lse, part, part_lse, value_scale,
    unit, heads, group, rows, row_blocks, blocks, sharers, past_tokens, current_tokens,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, SIZE: gl.constexpr,
    HAS_PAST: gl.constexpr, HAS_CURRENT: gl.constexpr, NARROW: gl.constexpr,
    COLUMNS: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
    AHEAD: gl.constexpr, TURNS: gl.constexpr, POLY: gl.constexpr,
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
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(KEY_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(VALUE_STAGES):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()

    bufs = (q_buf, e_buf, k_ring, x_ring, v_ring)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty, turns)
    sizes = (heads, group, rows, row_blocks, blocks, sharers, past_tokens, current_tokens)
    gl.warp_specialize(
        [
            (_consume, (bufs, bars, out, lse, part, part_lse, value_scale, sizes, unit,
                        0, HAS_PAST, HAS_CURRENT, NARROW, COLUMNS, KEY_STAGES, VALUE_STAGES,
                        AHEAD, TURNS, POLY)),
            (_consume, (bufs, bars, out, lse, part, part_lse, value_scale, sizes, unit,
                        1, HAS_PAST, HAS_CURRENT, NARROW, COLUMNS, KEY_STAGES, VALUE_STAGES,
                        AHEAD, TURNS, POLY)),
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
def _merge(
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


def refusal(call: Call) -> str | None:
    """Why this kernel does not serve a call, by what it looks like (not by its device), or None."""
    query, past, current = call.query, call.past, call.current
    if query.dtype != torch.bfloat16:
        return f"queries must be BF16, got {query.dtype}"
    if (query.shape[3], call.value_dim) != (SIZE, SIZE):
        return f"head and value sizes must be {SIZE}, got {query.shape[3]} and {call.value_dim}"
    if call.columns > COLUMNS:
        return f"up to {COLUMNS} columns of a correction, got {call.columns}"
    if call.causal:
        return "causal attention is not served"
    if not call.scale > 0:
        return f"the scale must be positive, got {call.scale}"
    for name, tensor in _named(past, current):
        if "values" in name and tensor.dtype == E4M3:
            if not _movable(tensor.mT):
                return f"{name} in E4M3 must lie with tokens side by side, whole 16 bytes apart"
        elif tensor.dtype != torch.bfloat16:
            return f"{name} must be BF16, got {tensor.dtype}"
        elif not _movable(tensor):
            return f"{name} must lie with channels side by side, whole 16 bytes apart"
    if past is not None and past.values.dtype == E4M3 and not _in_fours(past.keys):
        return "beside values in E4M3, keys must lie in whole fours of a dense batch"
    return None


def _named(past: Rows | None, current: Rows | None) -> list[tuple[str, Tensor]]:
    pairs = [("cached", past), ("current", current)]
    return [
        (f"{name} {side}", getattr(rows, side))
        for name, rows in pairs
        if rows is not None
        for side in ("keys", "values")
    ]


def _movable(x: Tensor) -> bool:
    """Whether the copy engine takes these rows: addresses and steps of whole 16 bytes."""
    steps = [s for s, n in zip(x.stride()[:3], x.shape[:3], strict=True) if n > 1]
    odd = any(step * x.element_size() % 16 for step in steps)
    return not odd and x.data_ptr() % 16 == 0 and x.stride(3) == 1


def _in_fours(keys: Tensor) -> bool:
    """Whether rows can be read four at a time: heads evenly spaced over the batch, and memory
    behind the last row up to a whole four."""
    batch, heads, tokens, size = keys.shape
    if batch > 1 and heads > 1 and keys.stride(0) != heads * keys.stride(1):
        return False
    over = -tokens % 4
    last = keys.storage_offset() + sum(
        (n - 1) * s for n, s in zip(keys.shape, keys.stride(), strict=True)
    )
    end = last + over * keys.stride(2) + 1
    return end * keys.element_size() <= keys.untyped_storage().nbytes()


def attend(call: Call, *, schedule: Schedule | None = None) -> tuple[Tensor, Tensor]:
    """See the package; for calls that ``refusal`` finds no reason against."""
    query, past, current = call.query, call.past, call.current
    if not _movable(query):
        query = query.contiguous()
    batch, heads, rows, _ = query.shape
    extra_query, extra_keys = _columns(call)
    columns = 0 if extra_query is None else COLUMNS
    narrow = past is not None and past.values.dtype == E4M3
    schedule = schedule or default_schedule(narrow, past is not None and current is not None)
    keys = past.keys if past is not None else current.keys  # type: ignore[union-attr]
    past_tokens = 0 if past is None else past.keys.shape[2]
    current_tokens = 0 if current is None else current.keys.shape[2]
    row_blocks = triton.cdiv(rows, 2 * QUERIES)
    blocks = row_blocks * batch * heads
    key_blocks = triton.cdiv(past_tokens, KEYS) + triton.cdiv(current_tokens, KEYS)
    programs = _programs(query.device) if schedule.shared_tail else blocks
    programs = schedule.programs or programs
    first_block = blocks // programs * programs
    rest = (blocks - first_block) * key_blocks
    sharers = min(programs, max(1, rest // _SMALLEST_SHARE))
    out = query.new_empty(batch, heads, rows, SIZE)
    lse = torch.empty(batch, heads, rows, device=query.device, dtype=torch.float32)
    shares = 2 * sharers if rest else 1
    part = torch.empty(shares, 2 * QUERIES, SIZE, device=query.device, dtype=torch.float32)
    part_lse = torch.empty(shares, 2 * QUERIES, device=query.device, dtype=torch.float32)
    past_descs = [None, None, None]
    if past is not None:
        rows_of = _fours if narrow else _blocks
        past_descs = [
            rows_of(past.keys, SIZE),
            None if extra_keys is None else rows_of(extra_keys, COLUMNS),
            _described(past.values.mT, [1, 1, SIZE, KEYS]) if narrow else _blocks(past.values),
        ]
    with on_device(query.device):
        _forward[(programs,)](
            _described(query, [1, 1, QUERIES, SIZE]),
            None if extra_query is None else _described(extra_query, [1, 1, QUERIES, COLUMNS]),
            *past_descs,
            None if current is None else _blocks(current.keys),
            None if current is None else _blocks(current.values),
            out,
            lse,
            part,
            part_lse,
            None if past is None or past.value_scale is None else past.value_scale.contiguous(),
            call.scale * _LOG2_E,
            heads,
            heads // keys.shape[1],
            rows,
            row_blocks,
            blocks,
            sharers,
            past_tokens,
            current_tokens,
            QUERIES=QUERIES,
            KEYS=KEYS,
            SIZE=SIZE,
            HAS_PAST=past is not None,
            HAS_CURRENT=current is not None,
            NARROW=narrow,
            COLUMNS=columns,
            KEY_STAGES=schedule.key_stages,
            VALUE_STAGES=schedule.value_stages,
            AHEAD=schedule.ahead,
            TURNS=schedule.turns and schedule.ahead,
            POLY=schedule.poly,
            REGISTERS=schedule.registers,
            LOADER_REGISTERS=24,
            num_warps=4,
            maxnreg=_REGISTERS // (_WARPS * 32) // 8 * 8,
        )
        if rest:
            _merge[(blocks - first_block, 4)](
                out, lse, part, part_lse, rows, row_blocks, first_block, rest, key_blocks,
                sharers, QUERIES=2 * QUERIES, SIZE=SIZE, BM=QUERIES // 2, num_warps=4,
            )  # fmt: skip
    return out, lse


def default_schedule(narrow: bool, both: bool) -> Schedule:
    """What was fastest on an H200."""
    return Schedule()


@functools.lru_cache(maxsize=16)
def _programs(device: torch.device) -> int:
    """One a multiprocessor: a program takes most of its shared memory."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _columns(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Columns of queries and of the past's keys in BF16, zero-padded to what one product takes."""
    if call.extra_query is None or call.extra_keys is None:
        return None, None
    padded = (_padded(call.extra_query), _padded(call.extra_keys))
    return padded


def _padded(x: Tensor) -> Tensor:
    if x.shape[3] < COLUMNS:
        x = torch.nn.functional.pad(x, (0, COLUMNS - x.shape[3]))
    x = x.to(torch.bfloat16)
    if _movable(x) and _in_fours(x):
        return x
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % 4))


_LAYOUTS = {
    (item_bytes, rank, width): gl.NVMMASharedLayout(width, 8 * item_bytes, rank)
    for item_bytes in (1, 2)
    for rank in (4, 5)
    for width in (32, 128)
}


def _described(x: Tensor, block: list[int]) -> TensorDescriptor:
    """A descriptor of ``x``. Steps of dimensions of one element may be anything; the copy engine
    wants whole 16 bytes."""
    unit = 16 // x.element_size()
    steps = [
        s if n > 1 else -(-s // unit) * unit or unit
        for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True)
    ]
    width = min(128, block[-1] * x.element_size())
    layout = _LAYOUTS[x.element_size(), len(block), width]
    return TensorDescriptor(x, list(x.shape), [*steps, 1], block, layout)


def _blocks(x: Tensor, size: int = SIZE) -> TensorDescriptor:
    """Of rows as they lie, a block of keys at a time."""
    return _described(x, [1, 1, KEYS, size])


def _fours(x: Tensor, size: int) -> TensorDescriptor:
    """Of rows such that a block comes as the first two of every four rows, then the last two."""
    batch, heads, tokens, _ = x.shape
    head, row = x.stride(1), x.stride(2)
    if heads == 1:
        head = x.stride(0)
    shape = [batch * heads, 2, -(-tokens // 4), 2, size]
    view = x.as_strided(shape, [head, 2 * row, 4 * row, row, 1], x.storage_offset())
    return _described(view, [1, 2, KEYS // 4, 2, size])
