"""The Triton kernels: rotate the centroids; read tokens, rotate, subtract the centroid, try five
grids, pack; code the steps. Three launches, of which the second does the work in one pass.

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

from videokv.kernels.blocks import as_bytes, labels_block, row_alignment, store_codes
from videokv.kernels.gpu import on_device, products
from videokv.kernels.grids import cdiv, next_power_of_2
from videokv.kernels.launches import alike
from videokv.kernels.numbers import e4m3_halves, round_even
from videokv.kernels.pack_codes import packed_length
from videokv.kernels.quantize_unbiased.layout import (
    GAUSSIAN_STEP,
    NO_STEP,
    STEPS_AN_OCTAVE,
    TRIED,
    Centres,
    half_range,
)
from videokv.rotation import Rotation, signs

BLOCK_ELEMENTS = 8192  # of a program: 64 tokens of 128 channels
WARPS = 4
HALF_ROWS = 16  # of the padded table, the centroid zero among them
CODED_STEPS = 1024  # of a program
_COUNTS = ["x_b", "x_h", "heads", "tokens", "centroids", "count", "blocks"]


def quantize(
    x: Tensor, *, bits: int, group_size: int, centres: Centres, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes, ideal steps float32 ``[B, H, T, G]``, and the largest magnitude of ``x``
    (infinity where one is NaN) and the largest step of each block: float32 ``[2, B H, blocks]``."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, tokens, size = x.shape
    block = max(16, next_power_of_2(size))
    rows = max(16, min(64, BLOCK_ELEMENTS // block))
    blocks = cdiv(tokens, rows)
    row_bytes = packed_length(size, bits=bits)
    exact = size & (size - 1) == 0 and x.dtype != torch.float32
    kind = x.dtype if exact else torch.float32
    packed = torch.empty(batch, heads, tokens, row_bytes, dtype=torch.uint8, device=x.device)
    steps = torch.empty(batch, heads, tokens, size // group_size, device=x.device)
    largest = torch.empty(2, batch * heads, blocks, device=x.device)
    table, table_scale = turned_table(centres, rotation)
    with on_device(x.device):
        alike(
            _kernel,
            (blocks, batch * heads),
            x.device,
            D=size,
            BD=block,
            BT=rows,
            BC=2 * HALF_ROWS,
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
        )(
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
        )
    return packed, steps, largest


def turned_table(centres: Centres, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """H mu as the kernel takes it: FP16 ``[B, H, 32, D]``, rows 1..K and 17..16+K, whose sum times
    the scale float32 ``[B, H, 1, 1]`` is the rotated table. Rows of E4M3 times signs are exact."""
    batch, heads, centroids, size = centres.table.shape
    device = centres.table.device
    exact = size & (size - 1) == 0
    kind = torch.float16 if exact else torch.float32
    halves = torch.empty(batch, heads, 2 * HALF_ROWS, size, dtype=torch.float16, device=device)
    scale = torch.empty(batch, heads, 1, 1, device=device)
    with on_device(device):
        alike(
            _turn,
            (batch * heads,),
            device,
            D=size,
            BD=max(16, next_power_of_2(size)),
            BK=HALF_ROWS,
            EXACT=exact,
            PRECISION=products(kind, device),
            num_warps=4,
            num_stages=1,
            enable_fp_fusion=True,
        )(
            as_bytes(centres.table.contiguous()),
            centres.scale.contiguous(),
            signs(rotation, device=device, dtype=kind),
            1.0 / math.sqrt(size),
            halves,
            scale,
            centroids,
        )
    return halves, scale


def code_steps(ideal: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``layout.coded_steps`` of what ``quantize`` gave, and the largest magnitude of each head."""
    batch, heads, tokens, groups = ideal.shape
    count = tokens * groups
    codes = torch.empty(ideal.shape, dtype=torch.uint8, device=ideal.device)
    scale = torch.empty(batch, heads, 1, 1, device=ideal.device)
    whole = torch.empty(batch, heads, device=ideal.device)
    with on_device(ideal.device):
        alike(
            _code,
            (cdiv(count, CODED_STEPS), batch * heads),
            ideal.device,
            BLOCK=CODED_STEPS,
            OCTAVE=STEPS_AN_OCTAVE,
            NONE=NO_STEP,
            num_warps=4,
            enable_fp_fusion=False,
        )(
            ideal,
            largest,
            codes,
            scale,
            whole,
            count,
            largest.shape[2],
        )
    return codes, scale, whole


@triton.jit(do_not_specialize=_COUNTS)
def _turn(
    table, table_scale, matrix, matrix_scale, halves, scale, centroids,
    D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BK)
    channel = tl.arange(0, BD)
    used = channel < D
    inside = ((number > 0) & (number <= centroids))[:, None] & used[None, :]
    place = (head * centroids + number - 1)[:, None] * D + channel[None, :]
    rows = e4m3_halves(tl.load(table + place, mask=inside, other=0))
    if not EXACT:
        rows = rows.to(tl.float32)
    square = matrix + channel[None, :] * D + channel[:, None]  # transposed: mu H^T
    turn = tl.load(square, mask=used[:, None] & used[None, :], other=0.0)
    turned = tl.dot(rows, turn, input_precision=PRECISION)
    factor = matrix_scale * tl.load(table_scale + head)
    peak = tl.maximum(tl.max(tl.max(tl.abs(turned), 1), 0), 1e-30)
    ratio = tl.div_rn(turned, tl.broadcast_to(peak, turned.shape))
    high = ratio.to(tl.float16)
    low = (ratio - high.to(tl.float32)).to(tl.float16)
    target = halves + (head * (2 * BK) + number)[:, None] * D + channel[None, :]
    whole = (number >= 0)[:, None] & used[None, :]
    tl.store(target, high, mask=whole)
    tl.store(target + BK * D, low, mask=whole)
    tl.store(scale + head, peak * factor)


@triton.jit(do_not_specialize=_COUNTS)
def _code(
    ideal, largest, codes, scale, whole, count, blocks,
    BLOCK: tl.constexpr, OCTAVE: tl.constexpr, NONE: tl.constexpr,
):  # fmt: skip
    """Steps as logarithms of their share of the head's largest, which every program looks for."""
    head = tl.program_id(1).to(tl.int64)
    rest = tl.num_programs(1).to(tl.int64) * blocks  # the steps lie behind the magnitudes
    place = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.float32)
    size = tl.zeros([BLOCK], tl.float32)
    for first in range(0, blocks, BLOCK):
        some = first + place < blocks
        line = largest + head * blocks + first + place
        size = tl.maximum(size, tl.load(line, mask=some, other=0.0))
        top = tl.maximum(top, tl.load(line + rest, mask=some, other=0.0))
    most = tl.max(top, 0)
    if tl.program_id(0) == 0:
        tl.store(scale + head, most)
        tl.store(whole + head, tl.max(size, 0))
    number = tl.program_id(0) * BLOCK + place
    live = number < count
    step = tl.load(ideal + head * count + number, mask=live, other=0.0)
    share = tl.div_rn(tl.broadcast_to(most, step.shape), tl.where(step > 0, step, 1.0))
    down = tl.minimum(round_even(tl.log2(share) * OCTAVE), NONE)
    code = tl.where(step > 0, tl.maximum(down, 0.0), NONE)
    tl.store(codes + head * count + number, code.to(tl.uint8), mask=live)


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
    own_block = largest + head * tl.num_programs(0) + tl.program_id(0)
    tl.store(own_block, tl.max(tl.max(sizes, 1), 0))

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
    best, product, inverse = _try(y, unit, F0, inside, HALF, GROUP, best, product, inverse)
    best, product, inverse = _try(y, unit, F1, inside, HALF, GROUP, best, product, inverse)
    best, product, inverse = _try(y, unit, F2, inside, HALF, GROUP, best, product, inverse)
    best, product, inverse = _try(y, unit, F3, inside, HALF, GROUP, best, product, inverse)
    best, product, inverse = _try(y, unit, F4, inside, HALF, GROUP, best, product, inverse)
    some = product > 0
    step = tl.where(some, square_sum / tl.where(some, product, 1.0), 0.0) * peak
    rest = tl.num_programs(1).to(tl.int64) * tl.num_programs(0)
    tl.store(own_block + rest, tl.max(step, 0))
    line = tl.arange(0, lines)
    group = line % per
    owner = first + line // per
    stored = (owner < tokens) & (group < groups)
    tl.store(steps + (head * tokens + owner) * groups + group, step, mask=stored)

    # The mantissa of 1.5 * 2^23 + code ends in the code.
    codes = _shifted(y, inverse, HALF).to(tl.int32, bitcast=True) & ((1 << BITS) - 1)
    if per > 1:
        codes = tl.reshape(codes, [BT, BD])
    codes = tl.where(used[None, :], codes, 0)
    row = head * tokens + token
    store_codes(packed, codes, row, live, BT, BD, BITS, ROW_BYTES, False)


@triton.jit
def _try(
    y, unit, factor, inside, HALF: tl.constexpr, GROUP: tl.constexpr, best, product, inverse
):  # fmt: skip
    """The grid of step ``unit * factor`` where it is better: its score, y.c and 1 / step."""
    own = 1.0 / (unit * factor)
    if HALF == 1.5:
        # Codes of 2 bits are +-(0.5 + far): sums over |y| take half the operations. The clamp is 0
        # or 1: |y| / step is 1 exactly, or off by 2^-24 at least.
        far = tl.clamp(tl.abs(y) * (own * 67108864.0)[:, None] - 67108864.0, 0.0, 1.0)
        count = tl.sum(far, 1)
        found = tl.sum(tl.abs(y) * far, 1) + 0.5 * tl.sum(tl.abs(y), 1)
        score = found * found / (2.0 * count + 0.25 * GROUP)
    else:
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
    return (_shifted(y, inverse, HALF) - 12582912.0) - HALF


@triton.jit
def _shifted(y, inverse, HALF: tl.constexpr):
    """1.5 * 2^23 and the code, float32, where numbers are whole: rounded to nearest even."""
    # A clamp to 0..1 costs nothing where it ends a multiplication.
    share = tl.clamp(y * (inverse * (0.5 / HALF))[:, None] + 0.5, 0.0, 1.0)
    return share * (2 * HALF) + 12582912.0
