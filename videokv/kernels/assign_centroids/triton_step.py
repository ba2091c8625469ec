"""k-means of 16-bit tokens that reads them once an iteration: labels, and sums under those labels.

A program walks over a stretch of tokens of one head. Its distances lie in registers as tiles of
tokens x centroids; each carries the number of its centroid in its last eight bits, so that the
smallest of a row names its centroid. The indicator of these labels times the tile's tokens is added
to the sums, float32 in registers; they are written once. Two halves of a large table are taken one
after the other: the distances to both would not fit beside the sums. A second kernel adds the
stretches in their order, whatever the launch order, and makes the next iteration's operand. Counts
are integers, the same in any order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.assign_centroids.triton import number_of, numbered, padded, raw_tokens
from videokv.kernels.blocks import row_alignment
from videokv.kernels.gpu import on_device
from videokv.kernels.launches import alike
from videokv.kernels.numbers import round_bf16

STEP_TOKENS = 128
STEP_WARPS = 8
STEP_STAGES = 3
STEP_STRETCHES = 11  # of a head, fixed: with 12 heads a program for each of 132 multiprocessors
FINISH_CENTROIDS = 8
LARGEST_TABLE = 256 * 128  # centroids times channels whose float32 sums fit into registers
_COUNTS = ["x_b", "x_h", "heads", "tokens", "centroids", "stretch", "stretches", "iterations"]


def refusal(x: Tensor, *, centroids: int) -> str | None:
    """Why tokens are read twice an iteration, or None."""
    if x.dtype == torch.float32:
        return "float32 tokens are moved to their mean first"
    if padded(centroids) * padded(x.shape[3]) > LARGEST_TABLE:
        return f"{centroids} centroids of {x.shape[3]} channels do not fit into registers"
    return None


def cluster(
    x: Tensor, start: Tensor, *, iterations: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """See the package: labels uint8 ``[B, H, T]`` and centroids ``[B, H, K, D]`` in ``dtype``.

    x ``[B, H, T, D]`` of 16 bits; start ``[B, H, K, D]`` of any floating dtype.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    start = start.contiguous()
    batch, heads, tokens, size = x.shape
    centroids = start.shape[2]
    device = x.device
    stretch = -(-tokens // (STEP_STRETCHES * STEP_TOKENS)) * STEP_TOKENS
    stretches = -(-tokens // stretch)
    lines = batch * heads * centroids
    # float32: the table, its origin, constants of distances, sums of the stretches.
    sizes = [lines * size, batch * heads * size, lines, stretches * lines * size]
    found, origin, norms, sums = torch.empty(sum(sizes), device=device).split(sizes)
    stored = torch.empty(start.shape, dtype=dtype, device=device)
    operand = torch.empty(start.shape, dtype=x.dtype, device=device)
    # One row an iteration: were it set to zero where it is read, another warp might read the zero.
    counts = torch.empty(iterations, lines, dtype=torch.int32, device=device)
    labels = torch.empty(batch, heads, tokens, dtype=torch.uint8, device=device)
    block, whole = padded(size), padded(centroids)
    options: dict[str, Any] = {"D": size, "BD": block, "enable_fp_fusion": False}
    step_options: dict[str, Any] = {
        "ALIGN": row_alignment(x),
        "BT": STEP_TOKENS,
        "BK": whole,
        "PARTS": 2 if whole > 128 else 1,
        "num_warps": STEP_WARPS,
        "num_stages": STEP_STAGES,
    } | options
    tables = (found, origin, operand, norms)
    chunk = (x, *x.stride()[:3], operand, norms, labels)
    finishers = (-(-centroids // FINISH_CENTROIDS), batch * heads)
    begin = alike(_begin, (batch * heads,), device, BK=whole, num_warps=16, **options)
    step = alike(_step, (stretches, batch * heads), device, **step_options)
    finish = alike(_finish_step, finishers, device, BK=FINISH_CENTROIDS, **options)
    with on_device(device):
        begin(start, *tables, counts, centroids, iterations)
        for left, members in zip(range(iterations)[::-1], counts.unbind(), strict=True):
            step(*chunk, sums, members, heads, tokens, centroids, stretch)
            target = found if left else stored
            finish(*tables, target, sums, members, centroids, stretches)
    return labels, stored


@triton.jit(do_not_specialize=_COUNTS)
def _begin(
    start, found, origin, operand, norms, counts, centroids, iterations, D: tl.constexpr,
    BD: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The first table: copied, its mean as the origin, the first operand. Counts of 0."""
    head = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BK)
    channel = tl.arange(0, BD)
    line = head * centroids + number
    place = line[:, None] * D + channel[None, :]
    inside = (number < centroids)[:, None] & (channel < D)[None, :]
    rows = tl.load(start + place, mask=inside, other=0.0).to(tl.float32)
    middle = tl.sum(rows, 0) / centroids
    tl.store(origin + head * D + channel, middle, mask=channel < D)
    tl.store(found + place, rows, mask=inside)
    for iteration in range(0, iterations):
        row = counts + iteration * tl.num_programs(0) * centroids + line
        tl.store(row, tl.zeros([BK], tl.int32), mask=number < centroids)
    _store_operand(operand, norms, rows, middle, line, place, inside, number < centroids)


@triton.jit
def _store_operand(operand, norms, rows, middle, line, place, inside, there):
    """Rows less the origin in 16 bits, and what is left of the distances without the product."""
    centred = tl.where(inside, rows - middle[None, :], 0.0)
    constant = tl.sum(centred * centred, 1) * 0.5
    if operand.dtype.element_ty == tl.float16:
        centred = tl.minimum(tl.maximum(centred, -65504.0), 65504.0)
    rounded = centred.to(operand.dtype.element_ty)
    tl.store(operand + place, rounded, mask=inside)
    # The origin's part is that of the rounded rows: a common offset must not enter the error.
    constant += tl.sum(rounded.to(tl.float32) * middle[None, :], 1)
    tl.store(norms + line, constant, mask=there)


@triton.jit(do_not_specialize=_COUNTS)
def _step(
    x, x_b, x_h, x_t, table, norms, labels, sums, counts, heads, tokens, centroids, stretch,
    ALIGN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BD)
    half: tl.constexpr = BK // PARTS
    number = tl.arange(0, half)
    rows, constant = _operand(table, norms, head, centroids, number, channel, D)
    total = tl.zeros([half, BD], tl.float32)
    if PARTS == 2:
        above = number + half
        rows_above, constant_above = _operand(table, norms, head, centroids, above, channel, D)
        total_above = tl.zeros([half, BD], tl.float32)
    begin = tl.program_id(0) * stretch
    for first in range(begin, tl.minimum(begin + stretch, tokens), BT):
        token = first + tl.arange(0, BT)
        live = token < tokens
        block = raw_tokens(x, x_b, x_h, x_t, head, heads, token, live, channel, D, ALIGN)
        smallest = tl.min(numbered(constant[None, :] - tl.dot(block, rows), number), 1)
        if PARTS == 2:
            keys = numbered(constant_above[None, :] - tl.dot(block, rows_above), above)
            smallest = tl.minimum(smallest, tl.min(keys, 1))
        label = tl.minimum(number_of(smallest), centroids - 1)
        tl.store(labels + head * tokens + token, label.to(tl.uint8), mask=live)
        tl.atomic_add(counts + head * centroids + label, 1, mask=live, sem="relaxed")
        belongs = tl.where(label[:, None] == number[None, :], 1.0, 0.0).to(block.dtype)
        total = tl.dot(tl.trans(belongs), block, acc=total)
        if PARTS == 2:
            belongs = tl.where(label[:, None] == above[None, :], 1.0, 0.0).to(block.dtype)
            total_above = tl.dot(tl.trans(belongs), block, acc=total_above)
    place = sums + (tl.program_id(0) * tl.num_programs(1) + head) * centroids * D
    _store_sums(place, total, number, centroids, channel, D)
    if PARTS == 2:
        _store_sums(place, total_above, above, centroids, channel, D)


@triton.jit
def _operand(table, norms, head, centroids, number, channel, D: tl.constexpr):
    """Rows of the table as columns of an operand, and the constants of their distances."""
    there = number < centroids
    place = (head * centroids + number)[None, :] * D + channel[:, None]
    rows = tl.load(table + place, mask=(channel < D)[:, None] & there[None, :], other=0.0)
    return rows, tl.load(norms + head * centroids + number, mask=there, other=3.0e38)


@triton.jit
def _store_sums(place, total, number, centroids, channel, D: tl.constexpr):
    inside = (number < centroids)[:, None] & (channel < D)[None, :]
    tl.store(place + number[:, None] * D + channel[None, :], total, mask=inside)


@triton.jit(do_not_specialize=_COUNTS)
def _finish_step(
    found, origin, operand, norms, stored, sums, counts, centroids, stretches, D: tl.constexpr,
    BD: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Sums of the stretches, in their order, to means; the operand of the next iteration."""
    head = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * BK + tl.arange(0, BK)
    channel = tl.arange(0, BD)
    there = number < centroids
    line = head * centroids + number
    place = line[:, None] * D + channel[None, :]
    inside = there[:, None] & (channel < D)[None, :]
    total = tl.zeros([BK, BD], tl.float32)
    apart = tl.num_programs(1).to(tl.int64) * centroids * D
    for stretch in range(0, stretches):
        total += tl.load(sums + stretch * apart + place, mask=inside, other=0.0)
    members = tl.load(counts + line, mask=there, other=0)
    old = tl.load(found + place, mask=inside, other=0.0)
    share = tl.maximum(members, 1).to(tl.float32)[:, None]
    mean = tl.div_rn(total, tl.broadcast_to(share, total.shape))
    mean = tl.where((members > 0)[:, None], mean, old)
    if stored.dtype.element_ty == tl.bfloat16:
        kept = round_bf16(mean).to(tl.bfloat16)
    else:
        kept = mean.to(stored.dtype.element_ty)
    tl.store(stored + place, kept, mask=inside)
    middle = tl.load(origin + head * D + channel, mask=channel < D, other=0.0)
    _store_operand(operand, norms, mean, middle, line, place, inside, there)
