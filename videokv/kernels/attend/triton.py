"""The Triton kernel: one program for a block of queries of one head (FlashAttention's schedule).

Scores live in base 2 and are rescaled online; the past comes first, the current rows after it in
the same softmax. Strides, lengths and numbers of heads are plain arguments, so that a new length
compiles nothing. E4M3: the query is rounded with a scale a head, softmax weights are multiplied by
256 before they are rounded, so that weights down to 2^-14 keep three bits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from videokv.kernels.attend.call import Call, Rows
from videokv.kernels.attend.tiles import Tile, padded
from videokv.kernels.gpu import on_device, products
from videokv.tensors import E4M3, E4M3_MAX

_LOG2_E = 1.4426950408889634
_COUNTS = [
    *("q_b", "q_h", "e_b", "e_h", "k_b", "k_h", "v_b", "v_h", "x_b", "x_h"),
    *("ck_b", "ck_h", "cv_b", "cv_h", "heads", "group", "rows", "past_tokens", "current_tokens"),
]


def attend(call: Call, *, tile: Tile) -> tuple[Tensor, Tensor]:
    """See the package."""
    query = call.query.contiguous() if call.fp8 else _last_dense(call.query)
    batch, heads, rows, size = query.shape
    out = query.new_empty(batch, heads, rows, call.value_dim)
    lse = torch.empty(batch, heads, rows, device=query.device, dtype=torch.float32)
    small, unit = _rounded_query(query, call.past) if call.fp8 else (None, None)
    extra_query, extra_keys = _columns(call)
    past, current = _dense_rows(call.past), _dense_rows(call.current)
    with on_device(query.device):
        _forward[(triton.cdiv(rows, tile.queries), batch * heads)](
            query,
            small,
            *query.stride()[:3],
            extra_query,
            *_strides(extra_query),
            *_pointers(past),
            extra_keys,
            *_strides(extra_keys),
            *_pointers(current),
            out,
            lse,
            unit,
            None if past is None else past.value_scale,
            call.scale * _LOG2_E,
            heads,
            heads // _any(past, current).keys.shape[1],
            rows,
            0 if past is None else past.keys.shape[2],
            0 if current is None else current.keys.shape[2],
            D=size,
            DV=call.value_dim,
            BD=padded(size),
            BDV=padded(call.value_dim),
            BF=0 if extra_query is None else extra_query.shape[3],
            BM=tile.queries,
            BN=tile.keys,
            HAS_PAST=past is not None,
            HAS_CURRENT=current is not None,
            CAUSAL=call.causal,
            FP8=call.fp8,
            PRECISION=products(query.dtype, query.device),
            ALIGN=_alignment(query, past, current, extra_query, extra_keys),
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=True,
        )
    return out, lse


@triton.jit(do_not_specialize=_COUNTS)
def _forward(
    q,
    q_small,
    q_b,
    q_h,
    q_m,
    e,
    e_b,
    e_h,
    e_m,
    k,
    k_b,
    k_h,
    k_t,
    v,
    v_b,
    v_h,
    v_t,
    v_d,
    x,
    x_b,
    x_h,
    x_t,
    ck,
    ck_b,
    ck_h,
    ck_t,
    cv,
    cv_b,
    cv_h,
    cv_t,
    cv_d,
    out,
    lse,
    unit,
    value_scale,
    scale,
    heads,
    group,
    rows,
    past_tokens,
    current_tokens,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BF: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HAS_PAST: tl.constexpr,
    HAS_CURRENT: tl.constexpr,
    CAUSAL: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGN: tl.constexpr,
):
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    kv_head = head // group
    kv_heads = heads // group
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    live = row < rows
    channel = tl.arange(0, BD)
    value_channel = tl.arange(0, BDV)
    places = row[:, None].to(tl.int64) * q_m + channel[None, :]
    present = live[:, None] & (channel < D)[None, :]
    q_base = tl.multiple_of(batch * q_b + head * q_h, ALIGN)

    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)

    if HAS_PAST:
        if FP8:
            block = tl.load(q_small + q_base + places, mask=present, other=0.0)
            past_unit = tl.load(unit + tl.program_id(1))
        else:
            block = tl.load(q + q_base + places, mask=present, other=0.0)
            past_unit = 1.0
        k_base = k + tl.multiple_of(batch * k_b + kv_head * k_h, ALIGN)
        v_base = v + tl.multiple_of(batch * v_b + kv_head * v_h, ALIGN)
        x_base = k_base
        extra = block
        if BF > 0:
            column = tl.arange(0, BF)
            e_base = tl.multiple_of(batch * e_b + head * e_h, ALIGN)
            e_place = row[:, None].to(tl.int64) * e_m + column[None, :]
            extra = tl.load(e + e_base + e_place, mask=live[:, None], other=0.0)
            x_base = x + tl.multiple_of(batch * x_b + kv_head * x_h, ALIGN)
        whole = past_tokens // BN * BN
        for _ in range(0, whole, BN):
            acc, peak, total = _step(
                acc, peak, total, block, extra, k_base, k_t, v_base, v_t, v_d, x_base, x_t,
                past_unit, scale, row, 0, BN, D, DV, BD, BDV, BF, BN, False, False, FP8, PRECISION,
            )  # fmt: skip
            k_base += BN * k_t
            v_base += BN * v_t
            if BF > 0:
                x_base += BN * x_t
        if whole < past_tokens:
            acc, peak, total = _step(
                acc, peak, total, block, extra, k_base, k_t, v_base, v_t, v_d, x_base, x_t,
                past_unit, scale, row, 0, past_tokens - whole, D, DV, BD, BDV, BF, BN, True, False,
                FP8, PRECISION,
            )  # fmt: skip
        if FP8:
            acc *= tl.load(value_scale + batch * kv_heads + kv_head) * 0.00390625  # 1 / 256

    if HAS_CURRENT:
        block = tl.load(q + q_base + places, mask=present, other=0.0)
        k_base = ck + tl.multiple_of(batch * ck_b + kv_head * ck_h, ALIGN)
        v_base = cv + tl.multiple_of(batch * cv_b + kv_head * cv_h, ALIGN)
        seen = current_tokens
        if CAUSAL:
            seen = tl.minimum(current_tokens, (tl.program_id(0) + 1) * BM)
        whole = seen // BN * BN
        if CAUSAL:
            whole = tl.program_id(0) * BM // BN * BN  # blocks that every query of this one sees
        for _ in range(0, whole, BN):
            acc, peak, total = _step(
                acc, peak, total, block, block, k_base, ck_t, v_base, cv_t, cv_d, k_base, ck_t,
                1.0, scale, row, 0, BN, D, DV, BD, BDV, 0, BN, False, False, False, PRECISION,
            )  # fmt: skip
            k_base += BN * ck_t
            v_base += BN * cv_t
        for start in range(whole, seen, BN):
            acc, peak, total = _step(
                acc, peak, total, block, block, k_base, ck_t, v_base, cv_t, cv_d, k_base, ck_t,
                1.0, scale, row, start, seen - start, D, DV, BD, BDV, 0, BN, True, CAUSAL, False,
                PRECISION,
            )  # fmt: skip
            k_base += BN * ck_t
            v_base += BN * cv_t

    line = tl.program_id(1).to(tl.int64) * rows + row
    tl.store(lse + line, (peak + tl.log2(total)) * 0.6931471805599453, mask=live)
    acc = acc / total[:, None]
    target = out + line[:, None] * DV + value_channel[None, :]
    inside = live[:, None] & (value_channel < DV)[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _step(
    acc, peak, total, block, extra, k_base, k_t, v_base, v_t, v_d, x_base, x_t,
    unit, scale, row, start, count,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BF: tl.constexpr,
    BN: tl.constexpr, PARTIAL: tl.constexpr, CAUSAL: tl.constexpr, FP8: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys: the new accumulator, largest score and sum of weights of each query.

    start: number of its first key. count: keys in it, where PARTIAL.
    """
    key = tl.arange(0, BN)
    channel = tl.arange(0, BD)
    value_channel = tl.arange(0, BDV)
    keys = k_base + key[None, :] * k_t + channel[:, None]
    values = v_base + key[:, None] * v_t + value_channel[None, :] * v_d
    if PARTIAL:
        keys_t = tl.load(keys, mask=(channel < D)[:, None] & (key < count)[None, :], other=0.0)
    elif D == BD:
        keys_t = tl.load(keys)
    else:
        keys_t = tl.load(keys, mask=(channel < D)[:, None], other=0.0)
    scores = tl.dot(block, keys_t, input_precision=PRECISION)
    if FP8:
        scores *= unit
    if BF > 0:
        column = tl.arange(0, BF)
        extras = x_base + key[None, :] * x_t + column[:, None]
        if PARTIAL:
            extra_t = tl.load(extras, mask=(key < count)[None, :], other=0.0)
        else:
            extra_t = tl.load(extras)
        scores = tl.dot(extra, extra_t, acc=scores, input_precision=PRECISION)
    scores *= scale
    if PARTIAL:
        scores = tl.where((key < count)[None, :], scores, float("-inf"))
    if CAUSAL:
        scores = tl.where((start + key)[None, :] <= row[:, None], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.math.exp2(scores - higher[:, None])
    shrink = tl.math.exp2(peak - higher)
    total = total * shrink + tl.sum(weights, 1)
    acc *= shrink[:, None]
    if PARTIAL:
        inside = (key < count)[:, None] & (value_channel < DV)[None, :]
        value = tl.load(values, mask=inside, other=0.0)
    elif DV == BDV:
        value = tl.load(values)
    else:
        value = tl.load(values, mask=(value_channel < DV)[None, :], other=0.0)
    if FP8:
        weights *= 256.0
    acc = tl.dot(weights.to(value.dtype), value, acc=acc, input_precision=PRECISION)
    return acc, higher, total


def _rounded_query(query: Tensor, past: Rows | None) -> tuple[Tensor, Tensor]:
    """The (contiguous) query in E4M3, and query scale times key scale ``[B, Hq]``."""
    assert past is not None and past.key_scale is not None
    largest = query.abs().amax((2, 3), keepdim=True).float()
    scale = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
    small = (query / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    repeats = query.shape[1] // past.key_scale.shape[1]
    unit = scale[..., 0, 0] * past.key_scale.repeat_interleave(repeats, 1)
    return small, unit.contiguous()


def _columns(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Columns of the query and of the past's keys, zero-padded for a product of 16 or more."""
    if call.extra_query is None or call.extra_keys is None:
        return None, None
    missing = padded(call.columns) - call.columns
    # FP16 holds 11 bits of each factor whatever the dtype of keys: the columns came balanced.
    dtype = torch.float32 if call.query.dtype == torch.float32 else torch.float16
    extra_query, extra_keys = (pad(x, (0, missing)) for x in (call.extra_query, call.extra_keys))
    # A pad by nothing keeps the strides it finds.
    return _last_dense(extra_query.to(dtype)), _last_dense(extra_keys.to(dtype))


def _dense_rows(rows: Rows | None) -> Rows | None:
    """Keys with channels side by side (values may lie either way)."""
    if rows is None:
        return None
    scales = [s if s is None else s.contiguous() for s in (rows.key_scale, rows.value_scale)]
    return Rows(_last_dense(rows.keys), rows.values, *scales)


def _last_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _pointers(rows: Rows | None) -> list[Tensor | int | None]:
    if rows is None:
        return [None, 0, 0, 0, None, 0, 0, 0, 0]
    return [rows.keys, *rows.keys.stride()[:3], rows.values, *rows.values.stride()]


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _any(past: Rows | None, current: Rows | None) -> Rows:
    rows = past if past is not None else current
    assert rows is not None
    return rows


def _alignment(*holders: Tensor | Rows | None) -> int:
    """What the addresses of all heads are multiples of, in elements (at most 16)."""
    steps: list[int] = []
    for holder in holders:
        tensors = (holder.keys, holder.values) if isinstance(holder, Rows) else (holder,)
        for x in tensors:
            if x is not None:
                steps += [x.stride(axis) for axis in (0, 1) if x.shape[axis] > 1]
    return math.gcd(16, *steps)
