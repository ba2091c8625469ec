"""The Triton kernel: one program for a block of queries of one head (FlashAttention's schedule).

The past comes first, the current rows after it in the same softmax. The softmax scale in base 2 is
folded into the exponent's multiply-add, and only a last, partial block is masked. Where the copy
engine of Hopper and later can read the rows, it does (tensor descriptors). Strides, lengths and
numbers of heads are plain arguments, so that a new length compiles nothing. E4M3 keys: the query is
rounded with a scale a row. E4M3 values: softmax weights are multiplied by 256 before they are
rounded, so that weights down to 2^-14 keep three bits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from videokv.kernels.attend.call import Call, Rows
from videokv.kernels.attend.tiles import Tile, padded
from videokv.kernels.gpu import on_device, products
from videokv.kernels.grids import cdiv
from videokv.kernels.launches import alike
from videokv.tensors import E4M3

_LOG2_E = 1.4426950408889634
_COUNTS = [
    *("q_b", "q_h", "e_b", "e_h", "k_b", "k_h", "v_b", "v_h", "x_b", "x_h"),
    *("ck_b", "ck_h", "cv_b", "cv_h", "heads", "group", "rows", "past_tokens", "current_tokens"),
]


def attend(
    call: Call, *, tile: Tile, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """See the package. into: output and log-sum-exp of another kernel; only blocks of queries in
    which a log-sum-exp is not finite are done, in place."""
    query = _last_dense(call.query)
    batch, heads, rows, size = query.shape
    if into is None:
        out = query.new_empty(batch, heads, rows, call.value_dim)
        lse = torch.empty(batch, heads, rows, device=query.device, dtype=torch.float32)
    else:
        out, lse = into
    extra_query, extra_keys = _columns(call)
    past, current = _dense_rows(call.past), _dense_rows(call.current)
    plain = current is None or current.values.stride(3) == 1  # the past's alone may lie turned
    described = plain and tile.descriptors and _describable(query.device, past, current, extra_keys)
    sizes = padded(size), padded(call.value_dim)
    run = alike(
        _forward,
        (cdiv(rows, tile.queries), batch * heads),
        query.device,
        D=size,
        DV=call.value_dim,
        BD=sizes[0],
        BDV=sizes[1],
        BF=0 if extra_query is None else extra_query.shape[3],
        BM=tile.queries,
        BN=tile.keys,
        HAS_PAST=past is not None,
        HAS_CURRENT=current is not None,
        CAUSAL=call.causal,
        KEYS8=past is not None and past.keys.dtype == E4M3,
        VALUES8=past is not None and past.values.dtype == E4M3,
        TURNED=past is not None and past.values.stride(3) != 1,
        DESCRIBED=described,
        AGAIN=into is not None,
        PRECISION=products(query.dtype, query.device),
        ALIGN=_alignment(query, past, current, extra_query, extra_keys),
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
    )
    with on_device(query.device):
        run(
            query,
            *query.stride()[:3],
            extra_query,
            *_strides(extra_query),
            *_pointers(past),
            extra_keys,
            *_strides(extra_keys),
            *_pointers(current),
            *_descriptors(past, extra_keys, sizes, tile.keys if described else 0),
            *_descriptors(current, None, sizes, tile.keys if described else 0)[:2],
            out,
            lse,
            None if past is None else past.key_scale,
            None if past is None else past.value_scale,
            call.scale * _LOG2_E,
            heads,
            heads // _any(past, current).keys.shape[1],
            rows,
            0 if past is None else past.keys.shape[2],
            0 if current is None else current.keys.shape[2],
        )
    return out, lse


@triton.jit(do_not_specialize=_COUNTS)
def _forward(
    q, q_b, q_h, q_m,
    e, e_b, e_h, e_m,
    k, k_b, k_h, k_t, v, v_b, v_h, v_t, v_d,
    x, x_b, x_h, x_t,
    ck, ck_b, ck_h, ck_t, cv, cv_b, cv_h, cv_t, cv_d,
    k_desc, v_desc, x_desc, ck_desc, cv_desc,
    out, lse, key_scale, value_scale, scale, heads, group, rows, past_tokens, current_tokens,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BF: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HAS_PAST: tl.constexpr, HAS_CURRENT: tl.constexpr,
    CAUSAL: tl.constexpr, KEYS8: tl.constexpr, VALUES8: tl.constexpr, TURNED: tl.constexpr,
    DESCRIBED: tl.constexpr, AGAIN: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    kv_head = head // group
    kv_heads = heads // group
    at = batch.to(tl.int32)
    lane = kv_head.to(tl.int32)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    live = row < rows
    if AGAIN:
        found = tl.load(lse + tl.program_id(1).to(tl.int64) * rows + row, mask=live, other=0.0)
        if tl.max((tl.abs(found) < float("inf")).to(tl.int32) == 0, 0) == 0:
            return
    channel = tl.arange(0, BD)
    value_channel = tl.arange(0, BDV)
    places = row[:, None].to(tl.int64) * q_m + channel[None, :]
    present = live[:, None] & (channel < D)[None, :]
    q_base = q + tl.multiple_of(batch * q_b + head * q_h, ALIGN)

    # Scores as the products give them; a weight is 2^(score * unit - peak * unit + shift).
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)
    shift: tl.constexpr = 8.0 if VALUES8 else 0.0

    if HAS_PAST:
        block = tl.load(q_base + places, mask=present, other=0.0)
        unit = scale
        ratio = scale  # set where keys have scales
        if KEYS8:
            largest = tl.max(tl.abs(block.to(tl.float32)), 1)
            step = tl.where(largest > 0, largest, 448.0) * (1 / 448.0)
            block = (block.to(tl.float32) / step[:, None]).to(tl.float8e4nv)
            ratio = step * tl.load(key_scale + batch * kv_heads + kv_head)
            unit = ratio * scale
        k_base = k + tl.multiple_of(batch * k_b + kv_head * k_h, ALIGN)
        v_base = v + tl.multiple_of(batch * v_b + kv_head * v_h, ALIGN)
        x_base = k_base
        extra = block
        if BF > 0:
            column = tl.arange(0, BF)
            e_base = tl.multiple_of(batch * e_b + head * e_h, ALIGN)
            e_place = row[:, None].to(tl.int64) * e_m + column[None, :]
            extra = tl.load(e + e_base + e_place, mask=live[:, None], other=0.0)
            if KEYS8:
                # FP16 keys' columns came multiplied by 256: the query's would leave its range.
                part = ratio * (256.0 if extra.dtype == tl.float16 else 1.0)
                extra = (extra.to(tl.float32) / part[:, None]).to(extra.dtype)
            x_base = x + tl.multiple_of(batch * x_b + kv_head * x_h, ALIGN)
        whole = past_tokens // BN * BN
        bias = peak
        if BF > 0 and DESCRIBED:
            bias = _bias(extra, x_desc, at, lane, 0, BN, BF, PRECISION)
        for start in range(0, whole, BN):
            acc, peak, total, bias = _step(
                acc, peak, total, bias, block, extra, k_base, k_t, v_base, v_t, v_d, x_base, x_t,
                k_desc, v_desc, x_desc, at, lane, unit, shift, row, start, BN,
                D, DV, BD, BDV, BF, BN, False, False, TURNED, DESCRIBED, PRECISION, KEYS8,
            )  # fmt: skip
            if not DESCRIBED:
                k_base += BN * k_t
                v_base += BN * v_t
                if BF > 0:
                    x_base += BN * x_t
        if whole < past_tokens:
            acc, peak, total, bias = _step(
                acc, peak, total, bias, block, extra, k_base, k_t, v_base, v_t, v_d, x_base, x_t,
                k_desc, v_desc, x_desc, at, lane, unit, shift, row, whole, past_tokens - whole,
                D, DV, BD, BDV, BF, BN, True, False, TURNED, DESCRIBED, PRECISION, KEYS8,
            )  # fmt: skip
        if VALUES8:
            acc *= tl.load(value_scale + batch * kv_heads + kv_head)
        if KEYS8:
            peak *= ratio

    if HAS_CURRENT:
        block = tl.load(q_base + places, mask=present, other=0.0)
        k_base = ck + tl.multiple_of(batch * ck_b + kv_head * ck_h, ALIGN)
        v_base = cv + tl.multiple_of(batch * cv_b + kv_head * cv_h, ALIGN)
        seen = current_tokens
        if CAUSAL:
            seen = tl.minimum(current_tokens, (tl.program_id(0) + 1) * BM)
        whole = seen // BN * BN
        if CAUSAL:
            whole = tl.program_id(0) * BM // BN * BN  # blocks that every query of this one sees
        for start in range(0, whole, BN):
            acc, peak, total, _ = _step(
                acc, peak, total, peak, block, block, k_base, ck_t, v_base, cv_t, cv_d, k_base,
                ck_t, ck_desc, cv_desc, ck_desc, at, lane, scale, shift, row, start, BN,
                D, DV, BD, BDV, 0, BN, False, False, False, DESCRIBED, PRECISION, False,
            )  # fmt: skip
            if not DESCRIBED:
                k_base += BN * ck_t
                v_base += BN * cv_t
        for start in range(whole, seen, BN):
            acc, peak, total, _ = _step(
                acc, peak, total, peak, block, block, k_base, ck_t, v_base, cv_t, cv_d, k_base,
                ck_t, ck_desc, cv_desc, ck_desc, at, lane, scale, shift, row, start, seen - start,
                D, DV, BD, BDV, 0, BN, True, CAUSAL, False, DESCRIBED, PRECISION, False,
            )  # fmt: skip
            if not DESCRIBED:
                k_base += BN * ck_t
                v_base += BN * cv_t

    line = tl.program_id(1).to(tl.int64) * rows + row
    log = peak * scale + (tl.log2(total) - shift)
    tl.store(lse + line, log * 0.6931471805599453, mask=live)
    acc = acc / total[:, None]
    target = out + line[:, None] * DV + value_channel[None, :]
    inside = live[:, None] & (value_channel < DV)[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _step(
    acc, peak, total, bias, block, extra, k_base, k_t, v_base, v_t, v_d, x_base, x_t,
    k_desc, v_desc, x_desc, at, lane, unit, shift: tl.constexpr, row, start, count,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BF: tl.constexpr,
    BN: tl.constexpr, PARTIAL: tl.constexpr, CAUSAL: tl.constexpr, TURNED: tl.constexpr,
    DESCRIBED: tl.constexpr, PRECISION: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """One block of keys: the new accumulator, largest score and sum of weights of each query, and
    the bias of the next block (where DESCRIBED).

    start: number of its first key. count: keys in it, where PARTIAL. BY_ROW: unit is one a row, not
    one for all. TURNED: descriptors of values
    have their tokens side by side. What lies outside comes as zeros.
    """
    key = tl.arange(0, BN)
    channel = tl.arange(0, BD)
    value_channel = tl.arange(0, BDV)
    if DESCRIBED:
        keys_t = tl.trans(tl.reshape(k_desc.load([at, lane, start, 0]), [BN, BD]))
    else:
        keys = k_base + key[None, :] * k_t + channel[:, None]
        if PARTIAL:
            keys_t = tl.load(keys, mask=(channel < D)[:, None] & (key < count)[None, :], other=0.0)
        elif D == BD:
            keys_t = tl.load(keys)
        else:
            keys_t = tl.load(keys, mask=(channel < D)[:, None], other=0.0)
    if BF > 0 and DESCRIBED:
        scores = tl.dot(block, keys_t, acc=bias, input_precision=PRECISION)
    else:
        scores = tl.dot(block, keys_t, input_precision=PRECISION)
    if BF > 0 and not DESCRIBED:
        column = tl.arange(0, BF)
        extras = x_base + key[None, :] * x_t + column[:, None]
        if PARTIAL:
            extra_t = tl.load(extras, mask=(key < count)[None, :], other=0.0)
        else:
            extra_t = tl.load(extras)
        scores = tl.dot(extra, extra_t, acc=scores, input_precision=PRECISION)
    if PARTIAL:
        scores = tl.where((key < count)[None, :], scores, float("-inf"))
    if CAUSAL:
        scores = tl.where((start + key)[None, :] <= row[:, None], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    base = higher * unit - shift
    # A product and a difference that become one multiply-add.
    if BY_ROW:
        weights = tl.math.exp2(scores * unit[:, None] - base[:, None])
    else:
        weights = tl.math.exp2(scores * unit - base[:, None])
    shrink = tl.math.exp2((peak - higher) * unit)
    total = total * shrink + tl.sum(weights, 1)
    if DESCRIBED:
        if TURNED:
            value = tl.trans(tl.reshape(v_desc.load([at, lane, 0, start]), [BDV, BN]))
        else:
            value = tl.reshape(v_desc.load([at, lane, start, 0]), [BN, BDV])
    else:
        values = v_base + key[:, None] * v_t + value_channel[None, :] * v_d
        if PARTIAL:
            inside = (key < count)[:, None] & (value_channel < DV)[None, :]
            value = tl.load(values, mask=inside, other=0.0)
        elif DV == BDV:
            value = tl.load(values)
        else:
            value = tl.load(values, mask=(value_channel < DV)[None, :], other=0.0)
    if value.dtype == tl.float8e4nv:
        # E4M3 products round what they add to to 14 bits: a sum of its own for each block.
        added = tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        acc = acc * shrink[:, None] + added
    else:
        acc *= shrink[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc=acc, input_precision=PRECISION)
    if BF > 0 and DESCRIBED and not PARTIAL:
        bias = _bias(extra, x_desc, at, lane, start + BN, BN, BF, PRECISION)
    return acc, higher, total, bias


@triton.jit
def _bias(
    extra, x_desc, at, lane, start,
    BN: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the columns add to the scores of a block (0 past the end). Found one block ahead: the
    product of keys then starts from it without waiting for it."""
    extra_t = tl.trans(tl.reshape(x_desc.load([at, lane, start, 0]), [BN, BF]))
    return tl.dot(extra, extra_t, input_precision=PRECISION)


def _describable(device: torch.device, *holders: Tensor | Rows | None) -> bool:
    """Whether the copy engine takes these rows: addresses and steps of whole 16 bytes."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        return False
    for holder in holders:
        tensors = (holder.keys, holder.values) if isinstance(holder, Rows) else (holder,)
        for x in tensors:
            if x is None:
                continue
            steps = [s for s, n in zip(x.stride(), x.shape, strict=True) if s != 1 and n > 1]
            odd = any(step * x.element_size() % 16 for step in steps)
            if odd or x.data_ptr() % 16 or 1 not in x.stride()[2:]:
                return False
    return True


def _descriptors(
    rows: Rows | None, columns: Tensor | None, sizes: tuple[int, int], keys: int
) -> list:
    """Of keys, values and columns, blocks of ``keys`` tokens; None where there is nothing, or for
    keys = 0."""
    if rows is None or not keys:
        return [None, None, None]
    turned = rows.values.stride(3) != 1
    values = rows.values.mT if turned else rows.values
    block = [sizes[1], keys] if turned else [keys, sizes[1]]
    extra = None if columns is None else _descriptor(columns, [keys, columns.shape[3]])
    return [_descriptor(rows.keys, [keys, sizes[0]]), _descriptor(values, block), extra]


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    # Steps of dimensions of one element may be anything; the copy engine wants whole 16 bytes.
    unit = 16 // x.element_size()
    steps = [
        s if n > 1 and axis < 3 else 1 if axis == 3 else -(-s // unit) * unit or unit
        for axis, (s, n) in enumerate(zip(x.stride(), x.shape, strict=True))
    ]
    return TensorDescriptor(x, list(x.shape), steps, [1, 1, *block])


def _columns(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Columns of the query and of the past's keys, zero-padded for a product of 16 or more."""
    if call.extra_query is None or call.extra_keys is None:
        return None, None
    missing = padded(call.columns) - call.columns
    extra_query, extra_keys = (
        pad(x, (0, missing)) if missing else x for x in (call.extra_query, call.extra_keys)
    )
    dtype = call.query.dtype
    if dtype == torch.bfloat16 and extra_keys.dtype != dtype:
        dtype = torch.float16  # columns that were balanced keep 11 bits of each factor in it
    if dtype == torch.float16 and call.past is not None and call.past.keys.dtype == E4M3:
        extra_keys = extra_keys * 256
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
