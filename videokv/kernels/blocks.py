"""Blocks of a packed chunk in a Triton kernel's registers; import only where Triton is there."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.grids import next_power_of_2
from videokv.kernels.numbers import (
    decode_e4m3,
    encode_e4m3,
    exp2_codes,
    unpack_rows,
    unpack_words3,
)
from videokv.kernels.quantize_groups.layout import reach
from videokv.kernels.quantize_unbiased.layout import half_range
from videokv.kernels.reconstruct.parts import Parts
from videokv.tensors import E4M3

ZERO_CODES = {"none": 0, "offset": 1, "integer": 2, "packed": 3, "centred": 0}


def as_bytes(x: Tensor) -> Tensor:
    """E4M3 as its bytes (kernels handle them before compute capability 8.9 too)."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x


def row_alignment(x: Tensor) -> int:
    """What offsets of heads are multiples of, in elements (at most 16): how wide loads may be."""
    (batch, heads, *_), (of_batch, of_head, *_) = x.shape, x.stride()
    return math.gcd(16, of_batch if batch > 1 else 0, of_head if heads > 1 else 0)


def reach_of(parts: Parts) -> float:
    """What is subtracted from codes that have no stored zero."""
    return half_range(parts.bits) if parts.zero == "centred" else reach(parts.bits)


def step_kind(parts: Parts) -> int:
    """0: numbers, 1: E4M3 bytes, 2: logarithmic codes."""
    if parts.log_steps:
        return 2
    return 1 if parts.steps.dtype == E4M3 else 0


def whole_groups(parts: Parts, block: int) -> bool:
    """Whether a step serves a block of channels of a power of two: loaded once, not per channel."""
    size = parts.group_size
    return parts.axis == "token" and size & (size - 1) == 0 and size <= block


@triton.jit
def dequantize_block(
    packed, steps, scale, zeros, head, token, live, tokens, time_groups,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BITS: tl.constexpr, REACH: tl.constexpr,
    ROW_BYTES: tl.constexpr, GROUP: tl.constexpr, BY_TOKEN: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr, ZERO: tl.constexpr, STEP_KIND: tl.constexpr,
):  # fmt: skip
    """Codes times steps plus offsets of the tokens ``token``: float32 [BT, BD], 0 outside.

    See ``reconstruct.parts.Parts``; head: int64 number of the (batch row, head).
    """
    row = head * tokens + token
    channel = tl.arange(0, BD)
    groups: tl.constexpr = D // GROUP
    # Codes last: their way through shared memory would make what is loaded after them wait.
    if BY_TOKEN:
        group = tl.arange(0, BD // GROUP) if WHOLE_GROUPS else channel // GROUP
        place = row[:, None] * groups + group[None, :]
        used = live[:, None] & (group < groups)[None, :]
    else:
        place = (head * time_groups + token // GROUP)[:, None] * D + channel[None, :]
        used = live[:, None] & (channel < D)[None, :]
    step = tl.load(steps + place, mask=used, other=0)
    if STEP_KIND == 2:
        step = exp2_codes(step)
    elif STEP_KIND == 1:
        step = decode_e4m3(step)
    else:
        step = step.to(tl.float32)
    if scale is not None:
        step = step * tl.load(scale + head).to(tl.float32)
    if ZERO == 0:
        offset = step * -REACH
    elif ZERO == 3:
        number = token[:, None].to(tl.int64) * groups + group[None, :]
        head_bytes = (tokens.to(tl.int64) * groups + 3) // 4
        byte = tl.load(zeros + head * head_bytes + number // 4, mask=used, other=0).to(tl.int32)
        offset = ((byte >> (6 - 2 * (number % 4)).to(tl.int32)) & 3).to(tl.float32)
    else:
        offset = tl.load(zeros + place, mask=used, other=0).to(tl.float32)
        if ZERO == 2:
            offset = tl.where(step > 0, offset * -step, offset)
    codes = unpack_rows(packed, row, live, ROW_BYTES, BITS, BD).to(tl.float32)
    if WHOLE_GROUPS:
        codes = tl.reshape(codes, [BT, BD // GROUP, GROUP])
        step = step[:, :, None]
        offset = offset[:, :, None]
    if ZERO == 3:
        values = (codes - offset) * step
    elif STEP_KIND == 1 and scale is None:
        # Codes times steps of 4 significant bits are exact: fused or not, the sum is rounded once.
        step, offset = tl.broadcast_to(step, codes.shape), tl.broadcast_to(offset, codes.shape)
        values = tl.fma(codes, step, offset)
    else:
        values = codes * step + offset
    if WHOLE_GROUPS:
        values = tl.reshape(values, [BT, BD])
    return values


@triton.jit
def centroids_block(ids, table, size, head, row, live, inside, channel, D: tl.constexpr):
    """The centroid of each token, float32 [rows, BD]; size: centroids of a head."""
    return stored_centroids(ids, table, size, head, row, live, inside, channel, D).to(tl.float32)


@triton.jit
def stored_centroids(ids, table, size, head, row, live, inside, channel, D: tl.constexpr):
    """``centroids_block`` in the table's dtype."""
    label = tl.load(ids + row, mask=live, other=0).to(tl.int32)
    place = (label * D)[:, None] + channel[None, :]
    return tl.load(table + head * size * D + place, mask=inside, other=0)


def in_words(parts: Parts) -> bool:
    """Whether rows of 3-bit codes can be read as 32-bit words, three for 32 codes."""
    aligned = parts.codes.contiguous().storage_offset() % 4 == 0
    return parts.bits == 3 and parts.head_dim % 32 == 0 and aligned


def code_words(parts: Parts) -> Tensor:
    """Packed codes as ``odd_block`` reads them."""
    codes = parts.codes.contiguous()
    return codes.view(torch.int32) if in_words(parts) else codes


@triton.jit
def odd_block(
    packed, row, live, ROW_BYTES: tl.constexpr, BITS: tl.constexpr, BD: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Codes around zero, doubled: odd FP16 numbers [rows, BD], small enough to be exact."""
    if WORDS:
        codes = unpack_words3(packed, row, live, ROW_BYTES, BD)
    else:
        codes = unpack_rows(packed, row, live, ROW_BYTES, BITS, BD)
    # 1024 + n is FP16's bits 0x6400 + n: two cheap operations instead of a conversion.
    halves = ((codes << 1) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    return halves - (1023.0 + (1 << BITS))


@triton.jit
def labels_block(ids, head, token, live, tokens, BITS: tl.constexpr):
    """Labels int32 of tokens, packed in rows of a head at 2, 3 or 4 bits."""
    if BITS == 3:
        start = ids + head * ((tokens.to(tl.int64) + 7) // 8 * 3) + token // 8 * 3
        word = tl.load(start, mask=live, other=0).to(tl.int32) << 16
        word |= tl.load(start + 1, mask=live, other=0).to(tl.int32) << 8
        word |= tl.load(start + 2, mask=live, other=0).to(tl.int32)
        label = (word >> (21 - 3 * (token % 8))) & 7
    else:
        each: tl.constexpr = 8 // BITS
        start = ids + head * ((tokens.to(tl.int64) + each - 1) // each) + token // each
        byte = tl.load(start, mask=live, other=0).to(tl.int32)
        label = (byte >> (8 - BITS - BITS * (token % each))) & ((1 << BITS) - 1)
    return label


@triton.jit
def centres_block(
    ids, table, size, head, token, live, tokens, channel, D: tl.constexpr, BITS: tl.constexpr
):
    """The centroid of each token beside zero (label 0), float32 [rows, BD]; size: those stored."""
    label = labels_block(ids, head, token, live, tokens, BITS).to(tl.int64)
    place = ((head * size + label - 1) * D)[:, None] + channel[None, :]
    inside = (live & (label > 0))[:, None] & (channel < D)[None, :]
    return tl.load(table + place, mask=inside, other=0).to(tl.float32)


def low_rank_width(rank: int) -> int:
    """Terms of the repair's product: each coefficient in two parts, padded."""
    return max(16, next_power_of_2(2 * rank))


@triton.jit
def low_rank_span(basis, head, channel, D: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr):
    """The head's basis as an operand, float32 [BR, BD], each column twice: exact in TF32."""
    term = tl.arange(0, BR)
    across = basis + head * D * RANK + channel[None, :] * RANK + (term % RANK)[:, None]
    inside = (term < 2 * RANK)[:, None] & (channel < D)[None, :]
    return tl.load(across, mask=inside, other=0).to(tl.float32)


@triton.jit
def low_rank_terms(codes, scales, row, live, RANK: tl.constexpr, BR: tl.constexpr):
    """What multiplies ``low_rank_span``: codes times scales, float32 [rows, BR] that TF32 holds.

    A coefficient has at most 18 significant bits, 7 of the code and 11 of the scale: its upper 11
    and the rest are two terms. So nothing is scaled after the product, which adds to the values.
    """
    term = tl.arange(0, BR)
    some = live[:, None] & (term < 2 * RANK)[None, :]
    small = tl.load(codes + row[:, None] * RANK + (term % RANK)[None, :], mask=some, other=0)
    weight = tl.load(scales + row, mask=live, other=0).to(tl.float32)
    whole = small.to(tl.float32) * weight[:, None]
    upper = (whole.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return tl.where((term < RANK)[None, :], upper, whole - upper)


@triton.jit
def store_block(target, values, inside, AS_BYTES: tl.constexpr):
    """Store float32 values in the target's dtype; FP16 and E4M3 (as bytes) saturate."""
    if AS_BYTES:
        tl.store(target, encode_e4m3(values), mask=inside)
    else:
        if target.dtype.element_ty == tl.float16:
            values = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
        tl.store(target, values.to(target.dtype.element_ty), mask=inside)


@triton.jit
def store_codes(
    packed, codes, row, live, BT: tl.constexpr, BD: tl.constexpr, BITS: tl.constexpr,
    ROW_BYTES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Codes int32 [BT, BD] as packed rows; WORDS: in words of 16 bits, the first byte lowest."""
    if BITS == 3:
        slot = tl.arange(0, 8)
        word = tl.sum(tl.reshape(codes, [BT, BD // 8, 8]) << (21 - 3 * slot)[None, None, :], 2)
        column = tl.arange(0, BD // 8) * 3
        target = packed + row[:, None] * ROW_BYTES + column[None, :]
        fits = live[:, None] & (column < ROW_BYTES)[None, :]
        tl.store(target, (word >> 16).to(tl.uint8), mask=fits)
        tl.store(target + 1, ((word >> 8) & 255).to(tl.uint8), mask=fits)
        tl.store(target + 2, (word & 255).to(tl.uint8), mask=fits)
    else:
        each: tl.constexpr = 8 // BITS  # of a byte
        count: tl.constexpr = 2 * each if WORDS else each
        length: tl.constexpr = ROW_BYTES // 2 if WORDS else ROW_BYTES
        slot = tl.arange(0, count)
        shifts = 8 * (slot // each) + (8 - BITS) - BITS * (slot % each)
        word = tl.sum(tl.reshape(codes, [BT, BD // count, count]) << shifts[None, None, :], 2)
        column = tl.arange(0, BD // count)
        target = packed + row[:, None] * length + column[None, :]
        fits = live[:, None] & (column < length)[None, :]
        tl.store(target, word.to(packed.dtype.element_ty), mask=fits)
