"""The Triton kernels: ranges of heads, then codes, the residual found in registers both times."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.assign_centroids.layout import Clusters
from videokv.kernels.blocks import row_alignment
from videokv.kernels.gpu import on_device
from videokv.kernels.numbers import round_even
from videokv.kernels.quantize_two_level.layout import TOP, TwoLevelCodes, head_scale

BLOCK_ELEMENTS = 4096
_COUNTS = ["x_b", "x_h", "heads", "tokens", "centroids", "blocks"]


def spans(x: Tensor, clusters: Clusters | None, *, group_size: int) -> Tensor:
    """See ``reference.spans``; infinite where x is not finite."""
    blocks = triton.cdiv(x.shape[2], _rows(x))
    found = torch.empty(*x.shape[:2], blocks, 1, device=x.device)
    _launch(_spans, x, clusters, group_size, (found,))
    return found.amax(2, keepdim=True)


def encode(
    x: Tensor, clusters: Clusters | None, widest: Tensor, *, group_size: int
) -> TwoLevelCodes:
    """See ``reference.encode``."""
    batch, heads, tokens, size = x.shape
    groups = size // group_size
    options = {"dtype": torch.uint8, "device": x.device}
    packed = torch.empty(batch, heads, tokens * size // 4, **options)  # type: ignore[call-overload]
    zeros = torch.empty(batch, heads, -(-tokens * groups // 4), **options)  # type: ignore[call-overload]
    steps = torch.empty(batch, heads, tokens, groups, **options)  # type: ignore[call-overload]
    scale = head_scale(widest).contiguous()
    words = packed.view(torch.int16)  # eight codes each
    _launch(_encode, x, clusters, group_size, (scale, words, zeros, steps))
    return TwoLevelCodes(packed, zeros, steps, scale)


def _launch(
    kernel: triton.JITFunction,
    x: Tensor,
    clusters: Clusters | None,
    group_size: int,
    results: tuple[Tensor, ...],
) -> None:
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, tokens, size = x.shape
    rows = _rows(x)
    blocks = triton.cdiv(tokens, rows)
    with on_device(x.device):
        kernel[(blocks, batch * heads)](
            x,
            *x.stride()[:3],
            None if clusters is None else clusters.ids.contiguous(),
            None if clusters is None else clusters.table.contiguous(),
            1 if clusters is None else clusters.table.shape[2],
            heads,
            tokens,
            blocks,
            *results,
            ALIGN=row_alignment(x),
            D=size,
            BT=rows,
            GROUP=group_size,
            TOP=TOP,
            num_warps=8,
            enable_fp_fusion=False,
        )


def _rows(x: Tensor) -> int:
    return max(16, BLOCK_ELEMENTS // x.shape[3])


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
    blocks,
    found,
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
    tl.store(found + head * blocks + tl.program_id(0), widest)


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
    blocks,
    scale,
    packed,
    zeros,
    steps,
    ALIGN: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    GROUP: tl.constexpr,
    TOP: tl.constexpr,
):
    groups: tl.constexpr = D // GROUP
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    live = token < tokens
    values = _residual(x, x_b, x_h, x_t, ids, table, centroids, head, heads, tokens, ALIGN, D, BT)
    values = tl.reshape(values, [BT, groups, GROUP])
    low, high = tl.minimum(tl.min(values, 2), 0.0), tl.maximum(tl.max(values, 2), 0.0)
    span = high - low
    unit = tl.load(scale + head).to(tl.float32)
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
    zero = tl.where(live[:, None], zero, 0.0).to(tl.int32)
    byte = tl.sum(tl.reshape(zero, [BT * groups // 4, 4]) << shifts[None, :], 1)
    head_bytes = (tokens.to(tl.int64) * groups + 3) // 4
    place = tl.program_id(0) * (BT * groups // 4) + tl.arange(0, BT * groups // 4)
    tl.store(zeros + head * head_bytes + place, byte.to(tl.uint8), mask=place < head_bytes)


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
