"""The Triton kernel: read, rotate, subtract the centroid, try five grids, pack; one pass.

The centroid is subtracted after the rotation, H x - H mu, so that the product is of the tokens as
they come with signs: exact in 16 bits for heads of a power of two, summed in float32. Other heads,
and float32 tokens, are multiplied as three TF32 products. H mu is a product too, of the labels'
indicator with the table in two FP16 halves (2^-22 of its largest value), so that everything stays
in the layout of products, where a token's channels lie with four threads. Only the step of the best
grid is kept while grids are tried; its codes are found again at the end.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from videokv.kernels.blocks import labels_block, row_alignment, store_codes
from videokv.kernels.gpu import on_device, products
from videokv.kernels.pack_codes import packed_length
from videokv.kernels.quantize_unbiased.layout import GAUSSIAN_STEP, TRIED, Centres, half_range
from videokv.rotation import Rotation, signs

BLOCK_ELEMENTS = 8192  # of a program: 64 tokens of 128 channels
WARPS = 4
HALF_ROWS = 16  # of the padded table, the centroid zero among them
_COUNTS = ["x_b", "x_h", "heads", "tokens"]


def quantize(
    x: Tensor, *, bits: int, group_size: int, centres: Centres, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes, ideal steps float32 ``[B, H, T, G]``, and the largest magnitude of ``x``
    (infinity where one is NaN) of each block, float32."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, tokens, size = x.shape
    block = max(16, triton.next_power_of_2(size))
    rows = max(16, min(64, BLOCK_ELEMENTS // block))
    blocks = triton.cdiv(tokens, rows)
    row_bytes = packed_length(size, bits=bits)
    exact = size & (size - 1) == 0 and x.dtype != torch.float32
    kind = x.dtype if exact else torch.float32
    packed = torch.empty(batch, heads, tokens, row_bytes, dtype=torch.uint8, device=x.device)
    steps = torch.empty(batch, heads, tokens, size // group_size, device=x.device)
    largest = torch.empty(batch * heads, blocks, device=x.device)
    table, table_scale = _in_two_halves(rotation.apply(centres.real_table()))
    with on_device(x.device):
        _kernel[(blocks, batch * heads)](
            x,
            *x.stride()[:3],
            heads,
            tokens,
            centres.ids.contiguous(),
            table,
            table_scale,
            signs(rotation, device=x.device, dtype=kind),
            1.0 / math.sqrt(size),
            packed,
            steps,
            largest,
            D=size,
            BD=block,
            BT=rows,
            BC=table.shape[2],
            BITS=bits,
            HALF=half_range(bits),
            UNIT=GAUSSIAN_STEP[bits],
            F0=TRIED[0],
            F1=TRIED[1],
            F2=TRIED[2],
            F3=TRIED[3],
            F4=TRIED[4],
            GROUP=group_size,
            WIDTH=block if group_size == size else group_size,
            ROW_BYTES=row_bytes,
            LABEL_BITS=centres.label_bits,
            EXACT=exact,
            ALIGN=row_alignment(x),
            PRECISION=products(kind, x.device),
            num_warps=WARPS,
            num_stages=1,
            enable_fp_fusion=True,
        )
    return packed, steps, largest


def _in_two_halves(table: Tensor) -> tuple[Tensor, Tensor]:
    """FP16 ``[B, H, 32, D]``, rows 1..K and 17..16+K, whose sum times the scale is the table."""
    scale = table.abs().amax((2, 3), keepdim=True).clamp(min=1e-30)
    ratio = table / scale
    high = ratio.half()
    low = (ratio - high.float()).half()
    missing = HALF_ROWS - 1 - table.shape[2]
    return torch.cat([pad(half, (0, 0, 1, missing)) for half in (high, low)], 2), scale


@triton.jit(do_not_specialize=_COUNTS)
def _kernel(
    x, x_b, x_h, x_t, heads, tokens, ids, table, table_scale, matrix, matrix_scale,
    packed, steps, largest,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BITS: tl.constexpr,
    HALF: tl.constexpr, UNIT: tl.constexpr, F0: tl.constexpr, F1: tl.constexpr,
    F2: tl.constexpr, F3: tl.constexpr, F4: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, ROW_BYTES: tl.constexpr,
    LABEL_BITS: tl.constexpr, EXACT: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BT
    token = first + tl.arange(0, BT)
    live = token < tokens
    channel = tl.arange(0, BD)
    used = channel < D
    base = tl.multiple_of((head // heads) * x_b + (head % heads) * x_h, ALIGN)
    place = x + base + token[:, None].to(tl.int64) * x_t + channel[None, :]
    raw = tl.load(place, mask=live[:, None] & used[None, :], other=0.0)
    sizes = tl.abs(raw.to(tl.float32))
    sizes = tl.where(sizes == sizes, sizes, float("inf"))
    tl.store(largest + head * tl.num_programs(0) + tl.program_id(0), tl.max(tl.max(sizes, 1), 0))

    square = matrix + channel[None, :] * D + channel[:, None]  # transposed: x H^T
    turn = tl.load(square, mask=used[:, None] & used[None, :], other=0.0)
    operand = raw if EXACT else raw.to(tl.float32)
    values = tl.dot(operand, turn, input_precision=PRECISION) * matrix_scale
    number = tl.arange(0, BC)
    halves = table + (head * BC + number)[:, None] * D + channel[None, :]
    means = tl.load(halves, mask=used[None, :] & (number >= 0)[:, None], other=0.0)
    label = labels_block(ids, head, token, live, tokens, LABEL_BITS)
    own = (label[:, None] == (number % (BC // 2))[None, :]).to(tl.float16)
    values -= tl.dot(own, means) * tl.load(table_scale + head)

    per: tl.constexpr = BD // WIDTH  # groups of a token, with those that only fill the block
    groups: tl.constexpr = D // GROUP
    lines: tl.constexpr = BT * per
    y = values
    if per > 1:
        y = tl.reshape(values, [lines, WIDTH])
    inside = (tl.arange(0, WIDTH) < GROUP)[None, :]
    peak = tl.max(tl.abs(y), 1)
    y = y * (1.0 / tl.where(peak > 0, peak, 1.0))[:, None]
    square_sum = tl.sum(y * y, 1)
    unit = tl.maximum(tl.sqrt_rn(square_sum * (1.0 / GROUP)) * UNIT, 1e-20)
    best = tl.full([lines], -1.0, tl.float32)
    product, inverse = best, best
    best, product, inverse = _try(y, unit, F0, inside, HALF, best, product, inverse)
    best, product, inverse = _try(y, unit, F1, inside, HALF, best, product, inverse)
    best, product, inverse = _try(y, unit, F2, inside, HALF, best, product, inverse)
    best, product, inverse = _try(y, unit, F3, inside, HALF, best, product, inverse)
    best, product, inverse = _try(y, unit, F4, inside, HALF, best, product, inverse)
    some = product > 0
    step = tl.where(some, square_sum / tl.where(some, product, 1.0), 0.0) * peak
    line = tl.arange(0, lines)
    group = line % per
    owner = first + line // per
    stored = (owner < tokens) & (group < groups)
    tl.store(steps + (head * tokens + owner) * groups + group, step, mask=stored)

    codes = (_codes(y, inverse, HALF) + HALF).to(tl.int32)
    if per > 1:
        codes = tl.reshape(codes, [BT, BD])
    codes = tl.where(used[None, :], codes, 0)
    row = head * tokens + token
    store_codes(packed, codes, row, live, BT, BD, BITS, ROW_BYTES, False)


@triton.jit
def _try(y, unit, factor, inside, HALF: tl.constexpr, best, product, inverse):
    """The grid of step ``unit * factor`` where it is better: its score, y.c and 1 / step."""
    own = 1.0 / (unit * factor)
    codes = tl.where(inside, _codes(y, own, HALF), 0.0)
    found = tl.sum(y * codes, 1)
    score = found * found / tl.sum(codes * codes, 1)
    better = score > best
    best = tl.where(better, score, best)
    product = tl.where(better, found, product)
    inverse = tl.where(better, own, inverse)
    return best, product, inverse


@triton.jit
def _codes(y, inverse, HALF: tl.constexpr):
    """Codes around zero, float32."""
    # A clamp to 0..1 costs nothing where it ends a multiplication.
    share = tl.clamp(y * (inverse * (0.5 / HALF))[:, None] + 0.5, 0.0, 1.0)
    whole = share * (2 * HALF) + 12582912.0  # 1.5 * 2^23: rounds to nearest even
    return (whole - 12582912.0) - HALF
