"""Triton kernels of k-means: labels by a product and an argmin, means by a product with the labels'
indicator.

Tokens of 16 bits are operands as they are; only the table is moved to an origin near the tokens,
because a common offset would leave no digits of the differences:

    |x - mu|^2 / 2 = |mu'|^2 / 2 + o mu' - x mu' + ...,     mu' = mu - o

mu' is rounded to 16 bits (2^-9 of it in BF16), the o mu' is that of the rounded mu', so a common
offset does not enter the error. Sums of tokens are exact products with 0 and 1. Float32 tokens are
moved while they are loaded, and multiplied as TF32 on a GPU. Either way a label may differ from the
reference's where two centroids are nearly as far, which leaves the clusters as tight.

Means are summed in a fixed order whatever the launch order, and whatever other heads there are:
every program adds the tokens of one stretch, and the stretches are added one after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.blocks import row_alignment
from videokv.kernels.gpu import on_device

BLOCK_TOKENS = 64
BLOCK_CENTROIDS = 64
# Of tokens of 16 bits, for which one block holds the whole table.
ASSIGN_TOKENS = 64
ASSIGN_WARPS = 4
ASSIGN_BLOCKS = 8  # blocks of tokens of a program, which fetches the table once
SUM_TOKENS = 64
SUM_CENTROIDS = 128
SUM_WARPS = 4
SUM_STAGES = 3
CHOOSE_TOKENS = 64
CHOOSE_BLOCKS = 8
CHOOSE_WARPS = 8
STRETCHES = 11  # of tokens that are summed apart: with 12 heads and 256 centroids two programs each
_COUNTS = ["x_b", "x_h", "heads", "tokens", "centroids", "stretch", "stretches"]


def padded(count: int) -> int:
    """The power of two that holds ``count``, at least 16: what products take. (Triton's own costs
    the host two microseconds.)"""
    return max(16, 1 << (count - 1).bit_length())


def nearest_one(x: Tensor, origin: Tensor, table: Tensor) -> Tensor:
    """Label uint8 ``[B, H, T]`` of the nearest row of ``table`` float32 ``[B, H, K, D]``.

    x ``[B, H, T, D]`` of any dtype; origin float32 ``[B, H, 1, D]`` is subtracted from x; the
    table is given without it. Ties go to the lower label.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, tokens, size = x.shape
    centroids = table.shape[2]
    origin = origin.contiguous()
    device = x.device
    half = x.dtype != torch.float32
    operand = torch.empty(table.shape, dtype=x.dtype, device=device)
    norms = torch.empty(table.shape[:3], dtype=torch.float32, device=device)
    labels = torch.empty(batch, heads, tokens, dtype=torch.uint8, device=device)
    block = padded(size)
    whole = padded(centroids)
    rows = ASSIGN_TOKENS if half else BLOCK_TOKENS
    stretch = rows * ASSIGN_BLOCKS if half else rows
    with on_device(device):
        _prepare[(-(-centroids // 16), batch * heads)](
            table.contiguous(),
            origin,
            operand,
            norms,
            centroids,
            D=size,
            BD=block,
            BK=16,
            HALF=half,
            num_warps=4,
            enable_fp_fusion=False,
        )
        _assign[(-(-tokens // stretch), batch * heads)](
            x,
            *x.stride()[:3],
            origin,
            operand,
            norms,
            labels,
            heads,
            tokens,
            centroids,
            stretch,
            ALIGN=row_alignment(x),
            D=size,
            BD=block,
            BT=rows,
            BK=whole if half else min(BLOCK_CENTROIDS, whole),
            HALF=half,
            PRECISION=_precision(x),
            num_warps=ASSIGN_WARPS if half else 4,
            num_stages=2,
            enable_fp_fusion=True,
        )
    return labels


def means(x: Tensor, origin: Tensor, labels: Tensor, fallback: Tensor) -> Tensor:
    """Means of ``x - origin`` of each label, float32 ``[B, H, K, D]``; ``fallback`` where none."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, tokens, size = x.shape
    centroids = fallback.shape[2]
    half = x.dtype != torch.float32
    rows = SUM_TOKENS if half else BLOCK_TOKENS
    most = SUM_CENTROIDS if half else BLOCK_CENTROIDS
    block_centroids = max(64, min(most, padded(centroids)))
    stretch = -(-tokens // (STRETCHES * rows)) * rows
    count = -(-tokens // stretch)
    block = padded(size)
    origin = origin.contiguous()
    device = x.device
    sums = torch.empty(count, batch, heads, centroids, size, device=device)
    counts = torch.zeros(batch, heads, centroids, dtype=torch.int32, device=device)
    found = torch.empty(batch, heads, centroids, size, device=device)
    with on_device(device):
        _sum[(count, -(-centroids // block_centroids), batch * heads)](
            x,
            *x.stride()[:3],
            origin,
            labels.contiguous(),
            sums,
            counts,
            heads,
            tokens,
            centroids,
            stretch,
            ALIGN=row_alignment(x),
            D=size,
            BD=block,
            BT=rows,
            BK=block_centroids,
            HALF=half,
            PRECISION=_precision(x),
            num_warps=SUM_WARPS if half else 4,
            num_stages=SUM_STAGES if half else 2,
            enable_fp_fusion=True,
        )
        _finish[(-(-centroids // 8), batch * heads)](
            sums,
            counts,
            origin,
            fallback.contiguous(),
            found,
            centroids,
            count,
            D=size,
            BD=block,
            BK=8,
            HALF=half,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return found


@triton.jit(do_not_specialize=_COUNTS)
def _prepare(
    table, origin, operand, norms, centroids, D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Rows as operands, and what is left of the distances without the product."""
    head = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * BK + tl.arange(0, BK)
    channel = tl.arange(0, BD)
    place = (head * centroids + number)[:, None] * D + channel[None, :]
    inside = (number < centroids)[:, None] & (channel < D)[None, :]
    rows = tl.load(table + place, mask=inside, other=0.0)
    constant = tl.sum(rows * rows, 1) * 0.5
    if HALF:
        if operand.dtype.element_ty == tl.float16:
            rows = tl.minimum(tl.maximum(rows, -65504.0), 65504.0)
        rounded = rows.to(operand.dtype.element_ty)
        tl.store(operand + place, rounded, mask=inside)
        middle = tl.load(origin + head * D + channel, mask=channel < D, other=0.0)
        constant += tl.sum(rounded.to(tl.float32) * middle[None, :], 1)
    else:
        tl.store(operand + place, rows, mask=inside)
    tl.store(norms + head * centroids + number, constant, mask=number < centroids)


@triton.jit(do_not_specialize=_COUNTS)
def _finish(
    sums, counts, origin, fallback, found, centroids, stretches, D: tl.constexpr,
    BD: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Sums of the stretches, in their order, to means."""
    head = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * BK + tl.arange(0, BK)
    channel = tl.arange(0, BD)
    line = head * centroids + number
    inside = (number < centroids)[:, None] & (channel < D)[None, :]
    total = tl.zeros([BK, BD], tl.float32)
    place = line[:, None] * D + channel[None, :]
    apart = tl.num_programs(1).to(tl.int64) * centroids * D
    for stretch in range(0, stretches):
        total += tl.load(sums + stretch * apart + place, mask=inside, other=0.0)
    members = tl.load(counts + line, mask=number < centroids, other=0)
    mean = tl.div_rn(
        total, tl.broadcast_to(tl.maximum(members, 1).to(tl.float32)[:, None], total.shape)
    )
    if HALF:
        middle = tl.load(origin + head * D + channel, mask=channel < D, other=0.0)
        mean -= middle[None, :]
    old = tl.load(fallback + place, mask=inside, other=0.0)
    tl.store(found + place, tl.where((members > 0)[:, None], mean, old), mask=inside)


@triton.jit(do_not_specialize=_COUNTS)
def _assign(
    x, x_b, x_h, x_t, origin, table, norms, labels, heads, tokens, centroids, stretch,
    ALIGN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BD)
    begin = tl.program_id(0) * stretch
    if HALF:  # the table stays
        number = tl.arange(0, BK)
        there = number < centroids
        place = (head * centroids + number)[None, :] * D + channel[:, None]
        rows = tl.load(table + place, mask=(channel < D)[:, None] & there[None, :], other=0.0)
        constant = tl.load(norms + head * centroids + number, mask=there, other=float("inf"))
        for first in range(begin, tl.minimum(begin + stretch, tokens), BT):
            token = first + tl.arange(0, BT)
            live = token < tokens
            block = raw_tokens(x, x_b, x_h, x_t, head, heads, token, live, channel, D, ALIGN)
            distance = constant[None, :] - tl.dot(block, rows)
            smallest = tl.min(distance, 1)
            label = tl.min(tl.where(distance == smallest[:, None], number[None, :], BK), 1)
            tl.store(labels + head * tokens + token, label.to(tl.uint8), mask=live)
    else:
        token = begin + tl.arange(0, BT)
        live = token < tokens
        block = _tokens(x, x_b, x_h, x_t, origin, head, heads, token, live, channel, D, ALIGN)
        best = tl.full([BT], float("inf"), tl.float32)
        label = tl.zeros([BT], tl.int32)
        for first in range(0, centroids, BK):
            number = first + tl.arange(0, BK)
            there = number < centroids
            place = (head * centroids + number)[None, :] * D + channel[:, None]
            rows = tl.load(table + place, mask=(channel < D)[:, None] & there[None, :], other=0.0)
            half = tl.load(norms + head * centroids + number, mask=there, other=float("inf"))
            distance = half[None, :] - tl.dot(block, rows, input_precision=PRECISION)
            smallest = tl.min(distance, 1)
            found = tl.min(tl.where(distance == smallest[:, None], number[None, :], 1 << 30), 1)
            closer = smallest < best
            best = tl.where(closer, smallest, best)
            label = tl.where(closer, found, label)
        tl.store(labels + head * tokens + token, label.to(tl.uint8), mask=live)


@triton.jit(do_not_specialize=_COUNTS)
def _sum(
    x, x_b, x_h, x_t, origin, labels, sums, counts, heads, tokens, centroids, stretch,
    ALIGN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2).to(tl.int64)
    number = tl.program_id(1) * BK + tl.arange(0, BK)
    channel = tl.arange(0, BD)
    begin = tl.program_id(0) * stretch
    total = tl.zeros([BK, BD], tl.float32)
    for first in range(begin, tl.minimum(begin + stretch, tokens), BT):
        token = first + tl.arange(0, BT)
        live = token < tokens
        label = tl.load(labels + head * tokens + token, mask=live, other=0).to(tl.int32)
        if tl.program_id(1) == 0:
            tl.atomic_add(counts + head * centroids + label, 1, mask=live)
        label = tl.where(live, label, -1)
        if HALF:
            block = raw_tokens(x, x_b, x_h, x_t, head, heads, token, live, channel, D, ALIGN)
        else:
            block = _tokens(x, x_b, x_h, x_t, origin, head, heads, token, live, channel, D, ALIGN)
        belongs = (number[:, None] == label[None, :]).to(block.dtype)
        total = tl.dot(belongs, block, acc=total, input_precision=PRECISION)
    line = (tl.program_id(0) * tl.num_programs(2) + head) * centroids + number
    place = sums + line[:, None] * D + channel[None, :]
    tl.store(place, total, mask=(number < centroids)[:, None] & (channel < D)[None, :])


@triton.jit
def raw_tokens(
    x, x_b, x_h, x_t, head, heads, token, live, channel, D: tl.constexpr, ALIGN: tl.constexpr
):
    """Tokens as they are; 0 outside."""
    base = tl.multiple_of((head // heads) * x_b + (head % heads) * x_h, ALIGN)
    place = x + base + token[:, None].to(tl.int64) * x_t + channel[None, :]
    return tl.load(place, mask=live[:, None] & (channel < D)[None, :], other=0.0)


@triton.jit
def _tokens(
    x, x_b, x_h, x_t, origin, head, heads, token, live, channel, D: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Float32 tokens less their mean; 0 outside."""
    inside = live[:, None] & (channel < D)[None, :]
    base = tl.multiple_of((head // heads) * x_b + (head % heads) * x_h, ALIGN)
    place = x + base + token[:, None].to(tl.int64) * x_t + channel[None, :]
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    middle = tl.load(origin + head * D + channel, mask=channel < D, other=0.0)
    return tl.where(inside, values - middle[None, :], 0.0)


def choose_by_range(
    x: Tensor, table: Tensor, moment: Tensor, *, group_size: int, candidates: int
) -> Tensor:
    """QSAC's choice: of the ``candidates`` centroids nearest in the queries' metric, the one
    whose residual has the smallest weighted range (2609.26425, Eq. 9-12). uint8 ``[B, H, T]``.

    x ``[B, H, T, D]``; table ``[B, H, K, D]``, as it is stored; moment ``[B, H, D, D]``.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, tokens, size = x.shape
    centroids = table.shape[2]
    device = x.device
    table = table.contiguous()
    count, whole = batch * heads, padded(centroids)
    block = padded(size)
    sizes = [count * size, count * size, count * centroids, count * (size // group_size)]
    origin, lens, norms, group_weights = torch.empty(sum(sizes), device=device).split(sizes)
    seen = torch.empty(table.shape, dtype=torch.float16, device=device)
    labels = torch.empty(batch, heads, tokens, dtype=torch.uint8, device=device)
    rows = CHOOSE_TOKENS if block <= 128 else min(CHOOSE_TOKENS, 64)  # by shared memory
    with on_device(device):
        _see[(count,)](
            table,
            moment.contiguous(),
            origin,
            seen,
            norms,
            lens,
            group_weights,
            centroids,
            D=size,
            BD=block,
            BK=whole,
            GROUP=group_size,
            num_warps=16,
            enable_fp_fusion=False,
        )
        _choose[(-(-tokens // (rows * CHOOSE_BLOCKS)), batch * heads)](
            x,
            *x.stride()[:3],
            origin,
            table,
            seen,
            norms,
            lens,
            group_weights,
            labels,
            heads,
            tokens,
            centroids,
            ALIGN=row_alignment(x),
            D=size,
            BD=block,
            BT=rows,
            STEPS=CHOOSE_BLOCKS,
            BK=whole,
            GROUP=group_size,
            CANDIDATES=candidates,
            num_warps=CHOOSE_WARPS,
            enable_fp_fusion=True,
        )
    return labels


@triton.jit(do_not_specialize=_COUNTS)
def _see(
    table, moment, origin, seen, half_norms, lens, group_weights, centroids, D: tl.constexpr,
    BD: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """What the choice needs of a head: its table less the origin, through the metric, in FP16.

    Brought to 64, which leaves tokens a thousand times that.
    """
    head = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BK)
    channel = tl.arange(0, BD)
    line = head * centroids + number
    place = line[:, None] * D + channel[None, :]
    inside = (number < centroids)[:, None] & (channel < D)[None, :]
    # As ``choice.channel_weights``.
    diagonal = moment + head * D * D + channel * (D + 1)
    weight = tl.maximum(tl.load(diagonal, mask=channel < D, other=0.0).to(tl.float32), 0.0)
    mean = (tl.sum(weight.to(tl.float64), 0) / D).to(tl.float32)
    share = tl.div_rn(weight, tl.zeros([BD], tl.float32) + tl.where(mean > 0, mean, 1.0))
    weight = tl.where(channel < D, tl.where(mean > 0, share, 1.0), 0.0)
    eye = tl.sqrt(weight)
    rows = tl.load(table + place, mask=inside, other=0.0).to(tl.float32)
    middle = tl.sum(rows, 0) / centroids
    rows = tl.where(inside, (rows - middle[None, :]) * eye[None, :], 0.0)
    scale = 64.0 / tl.maximum(tl.max(tl.max(tl.abs(rows), 1), 0), 1e-30)
    rows *= scale
    tl.store(origin + head * D + channel, middle, mask=channel < D)
    tl.store(lens + head * D + channel, eye * scale, mask=channel < D)
    tl.store(seen + place, rows.to(tl.float16), mask=inside)
    tl.store(half_norms + line, tl.sum(rows * rows, 1) * 0.5, mask=number < centroids)
    group = tl.arange(0, BD // GROUP)
    sums = tl.sum(tl.reshape(weight, [BD // GROUP, GROUP]), 1)
    tl.store(group_weights + head * (D // GROUP) + group, sums, mask=group < D // GROUP)


@triton.jit(do_not_specialize=_COUNTS)
def _choose(
    x,
    x_b,
    x_h,
    x_t,
    origin,
    table,
    seen,
    half_norms,
    lens,
    group_weights,
    labels,
    heads,
    tokens,
    centroids,
    ALIGN: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    CANDIDATES: tl.constexpr,
    STEPS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BD)
    number = tl.arange(0, BK)
    there = number < centroids
    eye = tl.load(lens + head * D + channel, mask=channel < D, other=0.0)
    place = (head * centroids + number)[None, :] * D + channel[:, None]
    rows = tl.load(seen + place, mask=(channel < D)[:, None] & there[None, :], other=0.0)
    half = tl.load(half_norms + head * centroids + number, mask=there, other=3.0e38)
    group = tl.arange(0, BD // GROUP)
    weight = tl.load(
        group_weights + head * (D // GROUP) + group, mask=group < D // GROUP, other=0.0
    )
    begin = tl.program_id(0) * (BT * STEPS)
    for first in range(begin, tl.minimum(begin + BT * STEPS, tokens), BT):
        token = first + tl.arange(0, BT)
        live = token < tokens
        block = _tokens(x, x_b, x_h, x_t, origin, head, heads, token, live, channel, D, ALIGN)
        view = tl.minimum(tl.maximum(block * eye[None, :], -60000.0), 60000.0).to(tl.float16)
        keys = numbered(half[None, :] - tl.dot(view, rows), number)
        # Pairs in order: who is taken is followed by the other, and half as many are looked at.
        one, other = tl.split(tl.reshape(keys, [BT, BK // 2, 2]))
        first_key, later_key = tl.minimum(one, other), tl.maximum(one, other)
        found = ()
        for _ in tl.static_range(CANDIDATES):
            smallest = tl.min(first_key, 1)
            found = found + (tl.minimum(number_of(smallest), centroids - 1),)  # type: ignore[assignment]
            taken = first_key == smallest[:, None]
            first_key = tl.where(taken, later_key, first_key)
            later_key = tl.where(taken, 3.0e38, later_key)
        # Read again: to keep the tokens beside the distances would take too many registers.
        values = raw_tokens(x, x_b, x_h, x_t, head, heads, token, live, channel, D, ALIGN)
        values = values.to(tl.float32)
        best = tl.full([BT], float("inf"), tl.float32)
        label = tl.zeros([BT], tl.int32)
        for candidate in tl.static_range(CANDIDATES):
            near = found[candidate]  # type: ignore[var-annotated]
            where = (head * centroids + near)[:, None] * D + channel[None, :]
            inside = live[:, None] & (channel < D)[None, :]
            rest = values - tl.load(table + where, mask=inside, other=0.0).to(tl.float32)
            rest = tl.reshape(rest, [BT, BD // GROUP, GROUP])
            spread = tl.max(rest, 2) - tl.min(rest, 2)
            score = tl.sum(spread * spread * weight[None, :], 1)
            better = (score < best) | ((score == best) & (near < label))
            best = tl.where(better, score, best)
            label = tl.where(better, near, label)
        tl.store(labels + head * tokens + token, label.to(tl.uint8), mask=live)


@triton.jit
def numbered(distance, number):
    """Distances, right to 2^-15 of their size, whose last eight bits are their columns' numbers."""
    bits = distance.to(tl.int32, bitcast=True)
    return ((bits & -256) | number[None, :]).to(tl.float32, bitcast=True)


@triton.jit
def number_of(key):
    """The number that ``numbered`` wrote into a distance."""
    return key.to(tl.int32, bitcast=True) & 255


def _precision(x: Tensor) -> str:
    """Of products of float32: the interpreter on the CPU knows the exact ones only."""
    return "tf32" if x.device.type == "cuda" else "ieee"
