"""Triton kernels of k-means with at most 15 centroids beside zero: starts, iterations, labels.

    starts      k-means++, one program a head: its tokens stay in registers for all draws
    iterations  one launch each: nearest row, sums of its tokens, a stretch of tokens a program
    labels      the table to E4M3, the nearest of its rows, packed

Nothing runs between the launches: each begins with the means of the sums that the one before left,
which every program of a head adds up by itself, the stretches in their order. So the result depends
neither on the launch order nor on what other heads there are.

Distances are found as in ``triton``: of 16-bit tokens as they come to rows moved to an origin near
them, rounded to 16 bits; float32 tokens are moved while they are loaded.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.assign_centroids.starts import TOKENS_PER_CENTROID, uniforms
from videokv.kernels.blocks import row_alignment
from videokv.kernels.gpu import on_device
from videokv.kernels.launches import alike
from videokv.kernels.numbers import e4m3_halves, encode_e4m3
from videokv.kernels.pack_codes import packed_length
from videokv.tensors import E4M3

ROWS = 16  # of the table in a kernel, zero the first
START_ELEMENTS = 4096  # of the drawn tokens a warp: 128 registers of a thread
STRETCHES = 16  # of tokens, each summed by one program; the sums are read by all of the next launch
LABEL_BLOCKS = 8  # blocks of tokens of a program, which finds the table once
WARPS = 4
STAGES = 3
_COUNTS = ["x_b", "x_h", "heads", "tokens", "limit", "centroids", "stretch", "stretches", "length"]


def spread(x: Tensor, *, count: int, seed: int) -> Tensor:
    """``starts.spread_tokens`` of at most 15 tokens: float32 ``[B, H, count, D]``."""
    batch, heads, tokens, size = x.shape
    limit = TOKENS_PER_CENTROID * count
    found = torch.empty(batch, heads, count, size, device=x.device)
    block, drawn = _block(size), 1 << (limit - 1).bit_length()
    with on_device(x.device):
        alike(
            _spread,
            (batch * heads,),
            x.device,
            ALIGN=row_alignment(x),
            D=size,
            BD=block,
            BT=drawn,
            num_warps=max(4, min(16, drawn * block // START_ELEMENTS)),
            # A sum of squares must be the same for equal tokens wherever they lie.
            enable_fp_fusion=False,
        )(
            x,
            *x.stride()[:3],
            _uniforms(count, seed, x.device),
            found,
            heads,
            tokens,
            limit,
            count,
        )
    return found


@functools.lru_cache(maxsize=64)
def _uniforms(count: int, seed: int, device: torch.device) -> Tensor:
    return torch.tensor(uniforms(count, seed), dtype=torch.float64, device=device)


def few_centres(
    x: Tensor, start: Tensor, *, iterations: int, bits: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed labels uint8 ``[B, H, bytes]``, table E4M3 ``[B, H, K, D]``, scale ``[B, H, 1, 1]``.

    x ``[B, H, T, D]`` with channels side by side; start float32 ``[B, H, K, D]``, contiguous;
    iterations may be 0.
    """
    batch, heads, tokens, size = x.shape
    centroids = start.shape[2]
    rows = _tokens_of_a_block(x)
    stretch = -(-tokens // (STRETCHES * rows)) * rows
    stretches = -(-tokens // stretch)
    device = x.device
    # Sums of the stretches, a count after each, and the table before them: of two iterations,
    # because programs of one still read what others of it replace.
    sums = torch.empty(2, stretches, batch * heads, centroids, size + 16, device=device)
    tables = torch.empty(2, batch * heads, centroids, size, device=device)
    length = packed_length(tokens, bits=bits)
    ids = torch.empty(batch, heads, length, dtype=torch.uint8, device=device)
    stored = torch.empty(batch, heads, centroids, size, dtype=torch.uint8, device=device)
    scale = torch.empty(batch, heads, 1, 1, device=device)
    shape: dict[str, Any] = {
        "ALIGN": row_alignment(x),
        "D": size,
        "BD": _block(size),
        "BT": rows,
        "BK": ROWS,
        "STRETCHES": STRETCHES,
        "HALF": x.dtype != torch.float32,
        "PRECISION": _precision(x),
        "num_warps": WARPS,
        "num_stages": STAGES,
        "enable_fp_fusion": True,
    }
    strides = x.stride()[:3]
    with on_device(device):
        for turn in range(iterations):
            iterate = alike(
                _iterate,
                (stretches, batch * heads),
                device,
                TURN=min(turn, 2 + turn % 2),
                **shape,
            )
            iterate(x, *strides, start, sums, tables, heads, tokens, centroids, stretch, stretches)
        alike(
            _label,
            (-(-tokens // (rows * LABEL_BLOCKS)), batch * heads),
            device,
            TURN=min(iterations, 2 + iterations % 2),
            BITS=bits,
            BLOCKS=LABEL_BLOCKS,
            **shape,
        )(
            x,
            *strides,
            start,
            sums,
            tables,
            ids,
            stored,
            scale,
            heads,
            tokens,
            centroids,
            stretches,
            length,
        )
    return ids, stored.view(E4M3), scale


def _block(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _tokens_of_a_block(x: Tensor) -> int:
    """64, or 32 of more than 256 bytes: blocks in flight have to fit beside the products."""
    return 64 if _block(x.shape[3]) * x.element_size() <= 256 else 32


def _precision(x: Tensor) -> str:
    """Of products of float32: the interpreter on the CPU knows the exact ones only."""
    return "tf32" if x.device.type == "cuda" else "ieee"


@triton.jit(do_not_specialize=_COUNTS)
def _spread(
    x, x_b, x_h, x_t, uniform, found, heads, tokens, limit, count,
    ALIGN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    spaced = tl.minimum(tokens, limit)
    channel = tl.arange(0, BD)
    used = channel < D
    base = tl.multiple_of((head // heads) * x_b + (head % heads) * x_h, ALIGN)
    line = tl.arange(0, BT)
    live = line < spaced
    token = line.to(tl.int64) * tokens // spaced
    place = x + base + token[:, None] * x_t + channel[None, :]
    block = tl.load(place, mask=live[:, None] & used[None, :], other=0.0).to(tl.float32)
    distance = tl.where(live, float("inf"), 0.0)
    chosen = (tl.load(uniform) * spaced.to(tl.float64)).to(tl.int32)
    for number in range(0, count):
        chosen = tl.maximum(0, tl.minimum(chosen, spaced - 1))
        one = x + base + (chosen.to(tl.int64) * tokens // spaced) * x_t + channel
        row = tl.load(one, mask=used, other=0.0).to(tl.float32)
        tl.store(found + (head * count + number) * D + channel, row, mask=used)
        apart = block - row[None, :]
        distance = tl.where(live, tl.minimum(distance, tl.sum(apart * apart, 1)), 0.0)
        # As in ``starts``: integers, whose sums are the same in any order.
        largest = tl.max(distance, 0).to(tl.float64)
        unit = tl.where(largest > 0, 1099511627776.0 / tl.where(largest > 0, largest, 1.0), 0.0)
        steps = (distance.to(tl.float64) * unit).to(tl.int64)
        total = tl.sum(steps, 0).to(tl.float64)
        later = tl.load(uniform + tl.minimum(number + 1, count - 1))
        goal = (total * later).to(tl.int64) + 1
        chosen = tl.sum((tl.cumsum(steps, 0) < goal).to(tl.int32), 0)


@triton.jit
def _means(
    start, sums, tables, head, all_heads, number, channel, centroids, stretches,
    D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, STRETCHES: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """The table after TURN iterations (2 and 3: any even and odd), float32 [BK, BD]; row 0: 0."""
    there = (number > 0) & (number <= centroids)
    inside = there[:, None] & (channel < D)[None, :]
    line = head * centroids + number - 1
    old = start
    if TURN > 1:
        old = tables + ((TURN + 1) % 2) * all_heads * centroids * D
    rows = tl.load(old + line[:, None] * D + channel[None, :], mask=inside, other=0.0)
    if TURN > 0:
        total = tl.zeros([BK, BD], tl.float32)
        seen = tl.zeros([BK], tl.float32)
        apart = all_heads * centroids * (D + 16)
        base = sums + ((TURN + 1) % 2) * stretches * apart + line * (D + 16)
        for stretch in tl.static_range(STRETCHES):
            some = there & (number * 0 + stretch < stretches)
            part = base + stretch * apart
            mask = some[:, None] & (channel < D)[None, :]
            total += tl.load(part[:, None] + channel[None, :], mask=mask, other=0.0)
            seen += tl.load(part + D, mask=some, other=0.0)
        divisor = tl.broadcast_to(tl.maximum(seen, 1.0)[:, None], total.shape)
        rows = tl.where((seen > 0)[:, None], tl.div_rn(total, divisor), rows)
    return rows


@triton.jit
def _operands(rows, x, number, centroids, HALF: tl.constexpr):
    """Rows less an origin near the tokens, as operands; the rest of the distances; the origin."""
    inside = number <= centroids
    origin = tl.sum(rows, 0) / centroids.to(tl.float32)
    moved = tl.where(inside[:, None], rows - origin[None, :], 0.0)
    if HALF:
        if x.dtype.element_ty == tl.float16:
            moved = tl.minimum(tl.maximum(moved, -65504.0), 65504.0)
        operand = moved.to(x.dtype.element_ty)
        # Distances to the rounded rows: |r|^2 / 2 + o r - x r.
        moved = operand.to(tl.float32)
        constant = tl.sum(moved * (0.5 * moved + origin[None, :]), 1)
    else:
        operand = moved
        constant = tl.sum(moved * moved, 1) * 0.5
    return operand, tl.where(inside, constant, float("inf")), origin


@triton.jit
def _labels(
    x, x_b, x_h, x_t, origin, operand, constant, number, head, heads, token, live, channel,
    D: tl.constexpr, BK: tl.constexpr, ALIGN: tl.constexpr, HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Labels int32 of tokens (ties to the lower), and the tokens: as they are where HALF."""
    inside = live[:, None] & (channel < D)[None, :]
    base = tl.multiple_of((head // heads) * x_b + (head % heads) * x_h, ALIGN)
    place = x + base + token[:, None].to(tl.int64) * x_t + channel[None, :]
    block = tl.load(place, mask=inside, other=0.0)
    if not HALF:
        block = tl.where(inside, block - origin[None, :], 0.0)
    product = tl.dot(block, tl.trans(operand), input_precision=PRECISION)
    distance = constant[None, :] - product
    smallest = tl.min(distance, 1)
    label = tl.min(tl.where(distance == smallest[:, None], number[None, :], BK), 1)
    return label, block


@triton.jit(do_not_specialize=_COUNTS)
def _iterate(
    x, x_b, x_h, x_t, start, sums, tables, heads, tokens, centroids, stretch, stretches,
    ALIGN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    STRETCHES: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    all_heads = tl.num_programs(1).to(tl.int64)
    number = tl.arange(0, BK)
    channel = tl.arange(0, BD)
    rows = _means(
        start, sums, tables, head, all_heads, number, channel, centroids, stretches,
        D, BD, BK, STRETCHES, TURN,
    )  # fmt: skip
    there = (number > 0) & (number <= centroids)
    inside = there[:, None] & (channel < D)[None, :]
    line = head * centroids + number - 1
    if tl.program_id(0) == 0:
        kept = tables + (TURN % 2) * all_heads * centroids * D
        tl.store(kept + line[:, None] * D + channel[None, :], rows, mask=inside)
    operand, constant, origin = _operands(rows, x, number, centroids, HALF)
    total = tl.zeros([BK, BD], tl.float32)
    members = tl.zeros([BK, BT], tl.float32)
    begin = tl.program_id(0) * stretch
    for first in range(begin, tl.minimum(begin + stretch, tokens), BT):
        token = first + tl.arange(0, BT)
        live = token < tokens
        label, block = _labels(
            x, x_b, x_h, x_t, origin, operand, constant, number, head, heads, token, live, channel,
            D, BK, ALIGN, HALF, PRECISION,
        )  # fmt: skip
        own = (number[:, None] == label[None, :]) & live[None, :]
        total = tl.dot(own.to(block.dtype), block, acc=total, input_precision=PRECISION)
        members += own.to(tl.float32)
    seen = tl.sum(members, 1)
    if not HALF:
        total += seen[:, None] * origin[None, :]
    slot = (TURN % 2) * stretches + tl.program_id(0)
    target = sums + (slot * all_heads * centroids + line) * (D + 16)
    tl.store(target[:, None] + channel[None, :], total, mask=inside)
    tl.store(target + D, seen, mask=there)


@triton.jit(do_not_specialize=_COUNTS)
def _label(
    x, x_b, x_h, x_t, start, sums, tables, ids, stored, scales, heads, tokens, centroids,
    stretches, length,
    ALIGN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    STRETCHES: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr, TURN: tl.constexpr,
    BITS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    number = tl.arange(0, BK)
    channel = tl.arange(0, BD)
    rows = _means(
        start, sums, tables, head, tl.num_programs(1).to(tl.int64), number, channel, centroids,
        stretches, D, BD, BK, STRETCHES, TURN,
    )  # fmt: skip
    largest = tl.max(tl.max(tl.abs(rows), 1), 0)
    scale = tl.where(largest > 0, tl.div_rn(largest, 448.0), 1.0)
    byte = encode_e4m3(tl.div_rn(rows, tl.broadcast_to(scale, rows.shape)))
    rows = e4m3_halves(byte).to(tl.float32) * scale
    if tl.program_id(0) == 0:
        inside = ((number > 0) & (number <= centroids))[:, None] & (channel < D)[None, :]
        line = head * centroids + number - 1
        tl.store(stored + line[:, None] * D + channel[None, :], byte, mask=inside)
        tl.store(scales + head, scale)
    operand, constant, origin = _operands(rows, x, number, centroids, HALF)
    each: tl.constexpr = 8 if BITS == 3 else 8 // BITS  # labels of a word
    column = tl.arange(0, BT // each)
    shift = (each - 1 - tl.arange(0, each)) * BITS
    begin = tl.program_id(0) * (BT * BLOCKS)
    for first in range(begin, tl.minimum(begin + BT * BLOCKS, tokens), BT):
        token = first + tl.arange(0, BT)
        live = token < tokens
        label, _ = _labels(
            x, x_b, x_h, x_t, origin, operand, constant, number, head, heads, token, live, channel,
            D, BK, ALIGN, HALF, PRECISION,
        )  # fmt: skip
        label = tl.where(live, label, 0)
        word = tl.sum(tl.reshape(label, [BT // each, each]) << shift[None, :], 1)
        if BITS == 3:
            place = (first // each + column) * 3
            target = ids + head * length + place
            tl.store(target, (word >> 16).to(tl.uint8), mask=place < length)
            tl.store(target + 1, ((word >> 8) & 255).to(tl.uint8), mask=place < length)
            tl.store(target + 2, (word & 255).to(tl.uint8), mask=place < length)
        else:
            place = first // each + column
            tl.store(ids + head * length + place, word.to(tl.uint8), mask=place < length)
