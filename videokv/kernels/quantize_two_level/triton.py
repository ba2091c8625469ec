"""The Triton kernels: ranges of heads, then codes, the residual found in registers both times."""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.assign_centroids.layout import Clusters
from videokv.kernels.blocks import row_alignment
from videokv.kernels.code_repair.triton import columns, repair_rows
from videokv.kernels.gpu import on_device
from videokv.kernels.numbers import round_even
from videokv.kernels.quantize_two_level.layout import TOP, TwoLevelCodes
from videokv.kernels.subspace_iteration.layout import Directions

BLOCK_ELEMENTS = 4096
WARPS = 4
REPAIR_WARPS = 8  # with 4 a thread needs 186 registers, and few programs run at once
_COUNTS = ["x_b", "x_h", "heads", "tokens", "centroids"]


def encode(
    x: Tensor,
    clusters: Clusters | None,
    *,
    group_size: int,
    directions: Directions | None = None,
) -> tuple[TwoLevelCodes, tuple[Tensor, Tensor] | None, Tensor]:
    """See ``reference.encode``; with directions codes and scales of ``code_repair``, and the facts:
    int32 ``[2, B H]``, the bits of each head's widest range (infinite where x is not finite) and
    its repaired rows. Never synchronises."""
    batch, heads, tokens, size = x.shape
    groups = size // group_size
    options: Any = {"dtype": torch.uint8, "device": x.device}
    packed = torch.empty(batch, heads, tokens * size // 4, **options)
    zeros = torch.empty(batch, heads, -(-tokens * groups // 4), **options)
    steps = torch.empty(batch, heads, tokens, groups, **options)
    scale = torch.empty(batch, heads, 1, 1, dtype=torch.float16, device=x.device)
    facts = torch.zeros(2, batch * heads, dtype=torch.int32, device=x.device)
    repair: tuple[Tensor, Tensor] | None = None
    operands: tuple[Tensor | None, ...] = (None,) * 5
    rank = 0
    if directions is not None:
        rank = directions.basis.shape[3]
        repair = (
            torch.empty(batch, heads, tokens, rank, dtype=torch.int8, device=x.device),
            torch.empty(batch, heads, tokens, 1, dtype=torch.float16, device=x.device),
        )
        operands = (*(operand.contiguous() for operand in directions), *repair)
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows = max(16, BLOCK_ELEMENTS // size)
    grid = (-(-tokens // rows), batch * heads)
    table: tuple[Any, ...] = (None, None, 1)
    if clusters is not None:
        table = (clusters.ids.contiguous(), clusters.table.contiguous(), clusters.table.shape[2])
    chunk = (x, *x.stride()[:3], *table, heads, tokens)
    shape: Any = {"ALIGN": row_alignment(x), "D": size, "BT": rows, "GROUP": group_size, "TOP": TOP}
    shape |= {"num_warps": WARPS, "enable_fp_fusion": False}
    repairing = shape if directions is None else shape | {"num_warps": REPAIR_WARPS}
    words = packed.view(torch.int16)  # eight codes each
    with on_device(x.device):
        _spans[grid](*chunk, facts, **shape)
        _encode[grid](
            *chunk,
            facts,
            scale,
            words,
            zeros,
            steps,
            *operands,
            RANK=rank,
            BR=columns(rank) if rank else 8,
            **repairing,
        )
    return TwoLevelCodes(packed, zeros, steps, scale), repair, facts


def read_facts(facts: Tensor) -> tuple[float, list[int]]:
    """The widest range of all heads, and the repaired rows of each. Synchronises."""
    spans, kept = facts.tolist()
    widest: float = struct.unpack("f", struct.pack("i", max(spans)))[0]  # ordered as their bits
    return widest, kept


@triton.jit(do_not_specialize=_COUNTS)
def _spans(
    x,
    x_b,
    x_h,
    x_t,
    ids,
    table,
    centroids,
    heads,
    tokens,
    facts,
    ALIGN: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    GROUP: tl.constexpr,
    TOP: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    values = _residual(x, x_b, x_h, x_t, ids, table, centroids, head, heads, tokens, ALIGN, D, BT)
    values = tl.reshape(values, [BT, D // GROUP, GROUP])
    low, high = tl.minimum(tl.min(values, 2), 0.0), tl.maximum(tl.max(values, 2), 0.0)
    # Dead rows are 0, whose range is 0. NaN is no maximum: found by itself.
    lost = tl.max(tl.max((values != values).to(tl.int32), 2), 1)
    widest = tl.max(tl.max(high - low, 1), 0)
    widest = tl.where(tl.max(lost, 0) > 0, float("inf"), widest)
    tl.atomic_max(facts + head, widest.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=_COUNTS)
def _encode(
    x,
    x_b,
    x_h,
    x_t,
    ids,
    table,
    centroids,
    heads,
    tokens,
    facts,
    scale,
    packed,
    zeros,
    steps,
    basis,
    seen,
    quadratic,
    repairs,
    repair_scales,
    ALIGN: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    GROUP: tl.constexpr,
    TOP: tl.constexpr,
    RANK: tl.constexpr,
    BR: tl.constexpr,
):
    groups: tl.constexpr = D // GROUP
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    live = token < tokens
    values = _residual(x, x_b, x_h, x_t, ids, table, centroids, head, heads, tokens, ALIGN, D, BT)
    values = tl.reshape(values, [BT, groups, GROUP])
    low, high = tl.minimum(tl.min(values, 2), 0.0), tl.maximum(tl.max(values, 2), 0.0)
    span = high - low
    # As ``layout.head_scale``.
    unit = tl.div_rn(tl.load(facts + head).to(tl.float32, bitcast=True), TOP * 1.0)
    unit = tl.maximum(tl.div_rn(unit, 255.0), 5.9604644775390625e-08).to(tl.float16)
    if tl.program_id(0) == 0:
        tl.store(scale + head, unit)
    unit = unit.to(tl.float32)
    ideal = tl.div_rn(span, tl.full(span.shape, TOP, tl.float32))
    step = round_even(tl.div_rn(ideal, tl.zeros(span.shape, tl.float32) + unit))
    step = tl.where(span > 0, tl.minimum(tl.maximum(step, 1.0), 255.0), 0.0)
    divisor = tl.where(step > 0, step * unit, float("inf"))
    zero = tl.minimum(tl.maximum(round_even(tl.div_rn(-low, divisor)), 0.0), TOP)
    # A code is the number of bounds that a value reaches. Steps have 19 significant bits, so bounds
    # are exact, and no quotient of a value on one side of a bound rounds to the other side.
    first = _short_of(values, zero, divisor, 1)
    second = ~_short_of(values, zero, divisor, 2)
    third = _short_of(values, zero, divisor, 3)
    codes = (((first ^ second ^ third) >> 31) & 1) | ((second >> 30) & 2)

    slot = tl.arange(0, 8)
    places = 8 * (slot // 4) + 6 - 2 * (slot % 4)
    row = head * tokens + token
    word = tl.sum(tl.reshape(codes, [BT, D // 8, 8]) << places[None, None, :], 2)
    column = tl.arange(0, D // 8)
    target = packed + row[:, None] * (D // 8) + column[None, :]
    tl.store(target, word.to(tl.int16), mask=live[:, None])
    shifts = 6 - 2 * tl.arange(0, 4)
    group = tl.arange(0, groups)
    tl.store(steps + row[:, None] * groups + group[None, :], step.to(tl.uint8), mask=live[:, None])
    # Zero points of all tokens in a row: four a byte, whole bytes in each block of 16 tokens.
    shift = zero[:, :, None]
    zero = tl.where(live[:, None], zero, 0.0).to(tl.int32)
    byte = tl.sum(tl.reshape(zero, [BT * groups // 4, 4]) << shifts[None, :], 1)
    head_bytes = (tokens.to(tl.int64) * groups + 3) // 4
    place = tl.program_id(0) * (BT * groups // 4) + tl.arange(0, BT * groups // 4)
    tl.store(zeros + head * head_bytes + place, byte.to(tl.uint8), mask=place < head_bytes)
    if RANK > 0:
        numbers = tl.reshape(codes, [BT, groups, GROUP]).to(tl.float32)
        real = (step * unit)[:, :, None]
        error = tl.reshape(
            values - (numbers - tl.broadcast_to(shift, numbers.shape)) * real, [BT, D]
        )
        kept = facts + tl.num_programs(1)
        repair_rows(
            error, basis, seen, quadratic, repairs, repair_scales, kept, head, row, live,
            D, D, BT, RANK, BR,
        )  # fmt: skip


@triton.jit
def _short_of(values, zero, divisor, CODE: tl.constexpr):
    """An int32 that is negative where values / divisor + zero rounds to less than CODE."""
    whole = CODE - zero
    bound = (whole - 0.5) * divisor
    # Halves go to even numbers: where ``whole`` is odd the bound itself is too small.
    bits = bound.to(tl.int32, bitcast=True)
    beyond = tl.where(bound > 0, bits + 1, bits - 1).to(tl.float32, bitcast=True)
    odd = (whole.to(tl.int32) & 1) == 1
    bound = tl.where(odd & (divisor < float("inf")), beyond, bound)
    return (values - bound[:, :, None]).to(tl.int32, bitcast=True)


@triton.jit
def _residual(
    x, x_b, x_h, x_t, ids, table, centroids, head, heads, tokens, ALIGN: tl.constexpr,
    D: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Float32 [BT, D] tokens less their centroids; 0 outside."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    live = token < tokens
    channel = tl.arange(0, D)
    base = tl.multiple_of((head // heads) * x_b + (head % heads) * x_h, ALIGN)
    place = x + base + token[:, None].to(tl.int64) * x_t + channel[None, :]
    values = tl.load(place, mask=live[:, None], other=0.0).to(tl.float32)
    if table is not None:
        label = tl.load(ids + head * tokens + token, mask=live, other=0).to(tl.int64)
        centre = table + ((head * centroids + label) * D)[:, None] + channel[None, :]
        values -= tl.load(centre, mask=live[:, None], other=0.0).to(tl.float32)
    return values
