"""Few queries on 2-bit chunks in groups of channels, all chunks in one launch.

A row of codes is read as words of eight codes. One slot of all words of a token block is an operand
of its own, [tokens, words]: codes are not put side by side, only words move between threads. In 16
bits a slot takes two instructions for two codes: or-ing a mask with a number whose last bits are
free (1024 in FP16, 128 in BF16), and a multiply-add that takes it away again; a third one applies
step and zero. Queries and outputs are read and written with the slots' order of channels.

The correction of steps is a product of the steps' squares, exact in 16 bits for E4M3, with features
of the query that each program finds out for itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.attend.tiles import padded
from videokv.kernels.attend_packed import triton_words_wide
from videokv.kernels.attend_packed.call import PackedCall
from videokv.kernels.attend_packed.splits import (
    FAST_TOLERANCE,
    LOG2_E,
    in_pairs,
    is_hopper,
    joined,
)
from videokv.kernels.attend_packed.words import CODES, side_of, slot_of, spread
from videokv.kernels.blocks import reach_of
from videokv.kernels.gpu import checked_refusal, disagreement, on_device, products, say_once
from videokv.kernels.launches import alike
from videokv.kernels.reconstruct.parts import Parts
from videokv.tensors import E4M3

WIDTH = 16  # of a row of the table, see _entry


class Tuning:
    """Programs in flight on a large GPU, tokens of a block, warps and stages, for up to
    ``few_rows`` query rows of a KV head, and (by ``triton_words_wide``) for more."""

    few_rows = 16
    few = (1584, 32, 1, 3)
    many = (264, 128, 4, 2)


class Fast:
    """Of the kernels in Gluon: programs in flight on a large GPU, tokens of a block, blocks in
    shared memory, warps, and the most registers of a thread; for up to 8 query rows of a KV head,
    for up to ``few_rows``, and (on Hopper, by ``gluon_words_wide``) for more."""

    few_rows = 16
    fewest = (1056, 64, 4, 1, None)
    few = (1056, 64, 3, 1, None)
    many = (396, 64, 3, 4, 168)


def serves(call: PackedCall) -> bool:
    """Whether keys and values are of this form."""
    return call.extra_query is None and all(map(_fits, (call.keys, call.values)))


def _fits(parts: Parts) -> bool:
    words = parts.group_size // CODES
    return (
        parts.bits == 2
        and parts.axis == "token"
        and parts.zero in ("none", "offset")
        and (parts.zero == "none" or parts.scale is None)
        and parts.steps.dtype == E4M3
        and not parts.stages
        and parts.centres is None
        and parts.low_rank is None
        and parts.head_dim % CODES == 0
        and parts.group_size % CODES == 0
        and words & (words - 1) == 0
        and parts.codes.data_ptr() % 16 == 0
    )


def launch_config(call: PackedCall) -> tuple[Hashable, ...]:
    """Equal for calls of one query whose keys and values can be read by one launch."""
    sides = (call.keys, call.values)
    return tuple((side.shape[:2], side.config(), side.rotation) for side in sides)


def split_attention(
    calls: Sequence[PackedCall], *, fast: bool | None = None
) -> tuple[Tensor, Tensor]:
    """parts ``[S, rows of all heads, Dv]``, in the coordinates of the values' codes, and lses.

    fast: by the kernel in Gluon; None: where it serves.
    """
    call = calls[0]
    batch, heads, queries, size = call.query.shape
    kv_heads, rows, value_dim = call.keys.shape[1], call.rows, call.values.head_dim
    query = call.query
    if call.keys.rotation is not None:
        query = call.keys.rotation.apply(query.float()).to(query.dtype)
    fast = _chosen(calls) if fast is None else fast
    programs, block, warps, stages = _tuning(rows)
    registers = None
    if fast:
        programs, block, stages, warps, registers = _fast_tuning(rows)
    table = _table(calls, programs=programs, block=block)
    splits = table.shape[0]
    device = query.device
    parts = torch.empty(splits, batch * heads * queries, value_dim, device=device)
    lses = torch.empty(splits, batch * heads * queries, device=device)
    numbers = (table, query.contiguous(), parts, lses, call.scale * LOG2_E, call.scale / 24)
    correction = {"BY_STEPS": call.by_steps, "FACTORS": call.factors is not None}
    with on_device(device):
        if fast:
            run = alike(
                _fast_kernel(rows),
                (splits, batch * kv_heads),
                device,
                **_fast_options(call.keys, "K"),
                **_fast_options(call.values, "V"),
                **correction,
                ROWS=rows,
                BN=block,
                STAGES=stages,
                num_warps=warps,
                maxnreg=registers,
            )
            run(*numbers)
            return parts, lses
        kernel = _kernel if rows <= Tuning.few_rows else triton_words_wide.kernel
        kernel[(splits, batch * kv_heads)](
            *numbers,
            **_options(call.keys, "K"),
            **_options(call.values, "V"),
            **correction,
            ROWS=rows,
            BM=padded(rows),
            BN=block,
            FAST=in_pairs(query),
            PRECISION=products(query.dtype, device),
            num_warps=warps,
            num_stages=stages,
            enable_fp_fusion=True,
        )
    return parts, lses


def _chosen(calls: Sequence[PackedCall]) -> bool:
    """``_is_fast``, found out once for a set of chunks (not in the capture of a graph)."""
    call = calls[0]
    kept, key = _tables_of(calls)[1], (call.query.dtype, call.rows, call.by_steps)
    if key not in kept:
        found = _is_fast(calls)
        if call.query.is_cuda and torch.cuda.is_current_stream_capturing():
            return found
        kept[key] = found
    return kept[key]


def _is_fast(calls: Sequence[PackedCall]) -> bool:
    """Whether the kernel in Gluon takes these calls, and has shown that it is right."""
    call = calls[0]
    rows = call.rows
    fits = (
        in_pairs(call.query)
        and (rows <= Fast.few_rows or is_hopper(call.query.device))
        and all(each.keys.tokens >= _fast_tuning(rows)[1] for each in calls)
        and all(_fits_fast(side) for each in calls for side in (each.keys, each.values))
    )
    if not fits:
        return False
    sides = (call.keys.config(), call.values.config(), call.by_steps, call.factors is None)
    refusal = checked_refusal(
        "attend_packed in Gluon",
        (call.query.dtype, rows, *sides),
        call.query.device,
        lambda: _fast_disagreement(call),
    )
    if refusal is not None:
        say_once(f"packed chunks are read by the slower kernel: {refusal}")
    return refusal is None


def _fast_kernel(rows: int) -> Any:
    if rows <= Fast.few_rows:
        from videokv.kernels.attend_packed import gluon_words

        return gluon_words.kernel
    from videokv.kernels.attend_packed import gluon_words_wide

    return gluon_words_wide.kernel


def _fits_fast(parts: Parts) -> bool:
    zeros = parts.zeros is None or parts.zeros.dtype == torch.bfloat16
    held = (parts.codes, parts.steps, parts.zeros)
    aligned = all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in held)
    return zeros and aligned and parts.head_dim == 128 and parts.group_size == 32


def _fast_disagreement(call: PackedCall) -> str | None:
    """What is wrong with the kernel in Gluon; the other one is checked where calls are refused."""
    got, got_lse = split_attention([call], fast=True)
    want, want_lse = split_attention([call], fast=False)
    found = [joined(got, got_lse), joined(want, want_lse)]
    tolerance = FAST_TOLERANCE[call.query.dtype]
    return disagreement(found[0][0], found[1][0], tolerance=tolerance) or disagreement(
        found[0][1], found[1][1], tolerance=tolerance, what="the log-sum-exp"
    )


# For a set of chunks: their tables, and by which kernel queries of a kind read them.
_Kept = tuple[tuple[weakref.ref[Parts], ...], dict[tuple[int, ...], Tensor], dict[Hashable, bool]]
_tables: weakref.WeakKeyDictionary[Parts, _Kept] = weakref.WeakKeyDictionary()


def has_table(calls: Sequence[PackedCall]) -> bool:
    """Whether these calls need nothing from the host, as in the capture of a CUDA graph: there a
    table would be copied at every replay, from memory that is no longer its own."""
    rows = calls[0].rows
    programs, block, *_ = _fast_tuning(rows) if _chosen(calls) else _tuning(rows)
    return _table_key(calls, programs, block) in _tables_of(calls)[0]


def _tuning(rows: int) -> tuple[int, int, int, int]:
    return Tuning.few if rows <= Tuning.few_rows else Tuning.many


def _fast_tuning(rows: int) -> tuple[int, int, int, int, int | None]:
    if rows <= Fast.few_rows:
        return Fast.fewest if rows <= 8 else Fast.few
    return Fast.many


def _tables_of(
    calls: Sequence[PackedCall],
) -> tuple[dict[tuple[int, ...], Tensor], dict[Hashable, bool]]:
    last = calls[-1].keys
    sides = [side for call in calls for side in (call.keys, call.values)]
    kept = _tables.get(last)
    if kept is None or [ref() for ref in kept[0]] != sides:
        kept = _tables[last] = (tuple(weakref.ref(side) for side in sides), {}, {})
    return kept[1], kept[2]


def _table_key(calls: Sequence[PackedCall], programs: int, block: int) -> tuple[int, ...]:
    factors = tuple(0 if call.factors is None else call.factors.data_ptr() for call in calls)
    return (programs, block, *factors)


def _table(calls: Sequence[PackedCall], *, programs: int, block: int) -> Tensor:
    """A row for each split: where everything of its chunk lies; kept as long as the chunks."""
    tables, key = _tables_of(calls)[0], _table_key(calls, programs, block)
    table = tables.get(key)
    if table is None:
        table = tables[key] = _filled_table(calls, programs=programs, block=block)
    return table


def _filled_table(calls: Sequence[PackedCall], *, programs: int, block: int) -> Tensor:
    batch, heads = calls[0].keys.shape[:2]
    tokens = sum(call.keys.tokens for call in calls)
    splits = max(1, programs // (batch * heads))
    stretch = -(-tokens // splits // block) * block
    rows = []
    for call in calls:
        length = call.keys.tokens
        own = -(-length // stretch)
        step = -(-length // own // block) * block
        for begin in range(0, length, step):
            rows.append([*_entry(call), begin, min(length, begin + step)])
    table = torch.tensor(rows, dtype=torch.int64)
    device = calls[0].query.device
    if device.type == "cuda":  # from pinned memory, the copy is not waited for
        table = table.pin_memory()
    return table.to(device, non_blocking=True)


def _entry(call: PackedCall) -> list[int]:
    found = []
    for parts in (call.keys, call.values):
        for tensor in (parts.codes, parts.steps, parts.zeros, parts.scale):
            found.append(_address(tensor))
    found += [_address(call.factors), call.keys.tokens]
    return found + [0] * (WIDTH - 2 - len(found))


def _address(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    if not tensor.is_contiguous():
        raise ValueError(f"packed chunks are stored contiguously, got strides {tensor.stride()}")
    return tensor.data_ptr()


def contiguous(call: PackedCall) -> bool:
    """Whether everything lies as the table says (a chunk's corner does not)."""
    tensors = [call.factors]
    for parts in (call.keys, call.values):
        tensors += [parts.codes, parts.steps, parts.zeros, parts.scale]
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _options(parts: Parts, prefix: str) -> dict:
    constants = {
        "D": parts.head_dim,
        "GROUP": parts.group_size,
        "REACH": int(reach_of(parts)) if parts.zero == "none" else 0,
        "ZERO": None if parts.zeros is None else _TYPES[parts.zeros.dtype],
        "SCALED": parts.scale is not None,
    }
    return {f"{prefix}_{name}": value for name, value in constants.items()}


def _fast_options(parts: Parts, prefix: str) -> dict:
    constants = {"ZERO": parts.zeros is not None, "SCALED": parts.scale is not None}
    return {f"{prefix}_{name}": value for name, value in constants.items()}


@triton.jit
def _query_slot(q, head, row, asked, word, SLOT: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """The channels that one slot of the words holds: [BM, BW]."""
    channel = word * 8 + (3 - SLOT if SLOT < 4 else 11 - SLOT)
    place = (head * ROWS + row)[:, None] * D + channel[None, :]
    return tl.load(q + place, mask=asked[:, None] & (channel < D)[None, :], other=0.0)


@triton.jit
def _squares(x):
    wide = x.to(tl.float32)
    return wide * wide


@triton.jit(do_not_specialize=["scale", "feature_scale"])
def _kernel(
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
    word = tl.arange(0, KW)
    q0 = _query_slot(q, head, row, asked, word, 0, K_D, ROWS)
    q1 = _query_slot(q, head, row, asked, word, 1, K_D, ROWS)
    q2 = _query_slot(q, head, row, asked, word, 2, K_D, ROWS)
    q3 = _query_slot(q, head, row, asked, word, 3, K_D, ROWS)
    q4 = _query_slot(q, head, row, asked, word, 4, K_D, ROWS)
    q5 = _query_slot(q, head, row, asked, word, 5, K_D, ROWS)
    q6 = _query_slot(q, head, row, asked, word, 6, K_D, ROWS)
    q7 = _query_slot(q, head, row, asked, word, 7, K_D, ROWS)
    extra = q0
    k_scale = 1.0
    if K_SCALED:
        k_scale = tl.load(tl.load(entry + 3).to(number) + head)
    if BY_STEPS:
        # phi of a group stands at its first word, what its 16 bits lose at the second.
        each: tl.constexpr = K_GROUP // 8
        groups: tl.constexpr = KW // each
        phi = _squares(q0) + _squares(q1) + _squares(q2) + _squares(q3)
        phi += _squares(q4) + _squares(q5) + _squares(q6) + _squares(q7)
        phi = tl.sum(tl.reshape(phi, [BM, groups, each]), 2)
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
        place = (word % each)[None, :]
        extra = tl.where(place == 0, high, tl.where(place == 1, low, 0.0))
    unit = scale * k_scale

    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc0 = tl.zeros([BM, VW], tl.float32)
    acc1 = tl.zeros([BM, VW], tl.float32)
    acc2 = tl.zeros([BM, VW], tl.float32)
    acc3 = tl.zeros([BM, VW], tl.float32)
    acc4 = tl.zeros([BM, VW], tl.float32)
    acc5 = tl.zeros([BM, VW], tl.float32)
    acc6 = tl.zeros([BM, VW], tl.float32)
    acc7 = tl.zeros([BM, VW], tl.float32)
    for first in range(begin, end, BN):
        token = first + tl.arange(0, BN)
        live = token < end
        w, step, zero = side_of(
            k_codes, k_steps, k_zeros, head, token, live, tokens, TYPE, K_D, KW, K_GROUP,
            K_ZERO, BN,
        )  # fmt: skip
        scores = tl.zeros([BM, BN], tl.float32)
        if BY_STEPS:
            square = step * (step * 0.25).to(TYPE)
            scores = tl.dot(extra, tl.trans(square), acc=scores, input_precision=PRECISION)
        scores = _plus(scores, q0, w, step, zero, 0, K_REACH, FAST, PRECISION)
        scores = _plus(scores, q1, w, step, zero, 1, K_REACH, FAST, PRECISION)
        scores = _plus(scores, q2, w, step, zero, 2, K_REACH, FAST, PRECISION)
        scores = _plus(scores, q3, w, step, zero, 3, K_REACH, FAST, PRECISION)
        scores = _plus(scores, q4, w, step, zero, 4, K_REACH, FAST, PRECISION)
        scores = _plus(scores, q5, w, step, zero, 5, K_REACH, FAST, PRECISION)
        scores = _plus(scores, q6, w, step, zero, 6, K_REACH, FAST, PRECISION)
        scores = _plus(scores, q7, w, step, zero, 7, K_REACH, FAST, PRECISION)
        scores = tl.where(live[None, :], scores * unit, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shares = tl.math.exp2(scores - higher[:, None])
        shrink = tl.math.exp2(peak - higher)
        total = total * shrink + tl.sum(shares, 1)
        p = shares.to(TYPE)
        w, step, zero = side_of(
            v_codes, v_steps, v_zeros, head, token, live, tokens, TYPE, V_D, VW, V_GROUP,
            V_ZERO, BN,
        )  # fmt: skip
        s = shrink[:, None]
        acc0 = tl.dot(p, slot_of(w, step, zero, 0, V_REACH, FAST), acc0 * s, PRECISION)
        acc1 = tl.dot(p, slot_of(w, step, zero, 1, V_REACH, FAST), acc1 * s, PRECISION)
        acc2 = tl.dot(p, slot_of(w, step, zero, 2, V_REACH, FAST), acc2 * s, PRECISION)
        acc3 = tl.dot(p, slot_of(w, step, zero, 3, V_REACH, FAST), acc3 * s, PRECISION)
        acc4 = tl.dot(p, slot_of(w, step, zero, 4, V_REACH, FAST), acc4 * s, PRECISION)
        acc5 = tl.dot(p, slot_of(w, step, zero, 5, V_REACH, FAST), acc5 * s, PRECISION)
        acc6 = tl.dot(p, slot_of(w, step, zero, 6, V_REACH, FAST), acc6 * s, PRECISION)
        acc7 = tl.dot(p, slot_of(w, step, zero, 7, V_REACH, FAST), acc7 * s, PRECISION)
        peak = higher
    line = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * ROWS + row
    tl.store(lses + line, (peak + tl.log2(total)) * 0.6931471805599453, mask=asked)
    share = 1.0 / total
    if V_SCALED:
        share *= tl.load(tl.load(entry + 7).to(number) + head)
    s = share[:, None]
    target = parts + line * V_D
    _store_slot(target, acc0 * s, asked, 0, V_D, VW)
    _store_slot(target, acc1 * s, asked, 1, V_D, VW)
    _store_slot(target, acc2 * s, asked, 2, V_D, VW)
    _store_slot(target, acc3 * s, asked, 3, V_D, VW)
    _store_slot(target, acc4 * s, asked, 4, V_D, VW)
    _store_slot(target, acc5 * s, asked, 5, V_D, VW)
    _store_slot(target, acc6 * s, asked, 6, V_D, VW)
    _store_slot(target, acc7 * s, asked, 7, V_D, VW)


@triton.jit
def _plus(
    scores, q, word, step, zero, SLOT: tl.constexpr, REACH: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    keys = slot_of(word, step, zero, SLOT, REACH, FAST)
    return tl.dot(q, tl.trans(keys), acc=scores, input_precision=PRECISION)


@triton.jit
def _store_slot(target, values, asked, SLOT: tl.constexpr, D: tl.constexpr, BW: tl.constexpr):
    channel = tl.arange(0, BW) * 8 + (3 - SLOT if SLOT < 4 else 11 - SLOT)
    inside = asked[:, None] & (channel < D)[None, :]
    tl.store(target[:, None] + channel[None, :], values, mask=inside)
