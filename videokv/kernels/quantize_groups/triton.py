"""The Triton kernel: read, rotate, find steps, round and pack in one pass; codes never leave it.

A program walks over a stretch of blocks of one head: the rotation's matrix is fetched once, and
what the host has to know is reduced once, into four numbers of a head (maxima: in any order).

Everything is rounded as the reference rounds it: divisions to nearest, E4M3 and BF16 by integer
arithmetic. A rotation is one product of the block with a matrix of 1 and -1, exact in the input's
own 16 bits, summed in float32. Heads that need a normaliser are found out from the facts; the
caller encodes such tensors by the reference.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.assign_centroids.layout import Clusters
from videokv.kernels.blocks import row_alignment, store_codes
from videokv.kernels.gpu import on_device, products
from videokv.kernels.numbers import round_bf16, round_even
from videokv.kernels.pack_codes import packed_length
from videokv.kernels.quantize_groups import triton_owned as owning
from videokv.kernels.quantize_groups import triton_turned as turning
from videokv.kernels.quantize_groups.arithmetic import (
    divided,
    e4m3,
    extremes,
    largest_bits,
    rounded,
    two_bits,
)
from videokv.kernels.quantize_groups.layout import PackedGroups, reach
from videokv.kernels.quantize_groups.reference import Facts
from videokv.rotation import Rotation, signs
from videokv.tensors import E4M3, GroupFormat

BLOCK_ELEMENTS = 4096  # of one step of a program: 16 a thread
CLUSTERED_ELEMENTS = 2048  # the same where centroids are subtracted
CLUSTERED_WARPS = 2
ROTATED_ELEMENTS = 8192  # the same with a rotation: 64 tokens of 128 channels
WARPS = 4
ROTATED_WARPS = 8
PROGRAMS = 1056  # eight for each of 132 multiprocessors
TURNED_PROGRAMS = 264  # two for each of 132 multiprocessors
LONGEST = 8  # blocks that a program walks over
FACTS = 4  # of a head: largest step, largest magnitude, largest offset, largest code of zero
_ZERO = {"offset": 1, "integer": 2}
_COUNTS = ["x_b", "x_h", "heads", "tokens", "time_groups", "stretch", "blocks", "centroids"]


def quantize(
    x: Tensor,
    *,
    format: GroupFormat,
    rotation: Rotation | None = None,
    clusters: Clusters | None = None,
    away: bool = False,
) -> tuple[PackedGroups, Facts]:
    """Packed codes without a normaliser (integer zeros in float32), and the facts; where they say
    ``normalised`` the codes are of no use. Synchronises: the facts come in one transfer."""
    groups, found = launch(x, format=format, rotation=rotation, clusters=clusters, away=away)
    return groups, _facts(found, format)


def launch(
    x: Tensor,
    *,
    format: GroupFormat,
    rotation: Rotation | None,
    clusters: Clusters | None,
    away: bool,
) -> tuple[PackedGroups, Tensor]:
    """``quantize`` without a wait: the facts are the bits of ``[B H, 4]`` numbers on the device."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, tokens, size = x.shape
    by_token = format.axis == "token"
    block = max(16, triton.next_power_of_2(size))
    elements = BLOCK_ELEMENTS if rotation is None else ROTATED_ELEMENTS
    elements = CLUSTERED_ELEMENTS if clusters is not None else elements
    warps = WARPS if rotation is None else ROTATED_WARPS
    warps = CLUSTERED_WARPS if clusters is not None else warps
    rows = max(16, min(128, elements // block)) if by_token else format.group_size
    groups = size // format.group_size if by_token else size
    lines = tokens if by_token else -(-tokens // format.group_size)
    blocks = -(-tokens // rows)
    stretch = max(1, min(LONGEST, blocks * batch * heads // PROGRAMS))
    device = x.device
    row_bytes = packed_length(size, bits=format.bits)
    words = format.bits != 3 and row_bytes % 2 == 0
    packed = torch.empty(batch, heads, tokens, row_bytes, dtype=torch.uint8, device=device)
    shape = (batch, heads, lines, groups)
    steps = torch.empty(shape, dtype=format.scale_dtype, device=device)
    zeros = _zeros(shape, format, device)
    facts = torch.zeros(batch * heads, FACTS, dtype=torch.int32, device=device)
    levels = reach(format.bits) if format.symmetric else (1 << format.bits) - 1
    fits = x.dtype != torch.float32 and 32 <= size <= 128  # tile and matrix in shared memory
    if fits and by_token and rotation is not None and _two_bit_offsets(format):
        blocks = -(-tokens // turning.ROWS)
        stretch = max(1, min(turning.LONGEST, blocks * batch * heads // TURNED_PROGRAMS))
        with on_device(device):
            turning.turned[(-(-blocks // stretch), batch * heads)](
                x,
                *x.stride()[:3],
                heads,
                tokens,
                stretch,
                blocks,
                packed.view(torch.int32),
                steps.view(torch.uint8),
                zeros,
                facts,
                signs(rotation, device=device, dtype=x.dtype),
                1.0 / math.sqrt(size),
                ALIGN=row_alignment(x),
                D=size,
                BT=turning.ROWS,
                LEVELS=levels,
                INVERSE=_inverse(levels),
                GROUP=format.group_size,
                ZERO_BF16=format.zero_dtype == torch.bfloat16,
                LIMIT=_largest(format.scale_dtype),
                NATIVE=isinstance(_kernel, triton.JITFunction),
                num_warps=turning.WARPS,
                num_stages=turning.STAGES,
                enable_fp_fusion=False,
            )
        return PackedGroups(packed, steps, zeros, None), facts
    if by_token and rotation is None and clusters is None and _owned_by_threads(format, size):
        rows = max(1, owning.GROUPS // _power(groups))
        blocks = -(-tokens // rows)
        stretch = max(1, min(owning.LONGEST, blocks * batch * heads // PROGRAMS))
        with on_device(device):
            owning.owned[(-(-blocks // stretch), batch * heads)](
                x,
                *x.stride()[:3],
                heads,
                tokens,
                stretch,
                blocks,
                packed.view(torch.int32),
                steps.view(torch.uint8),
                zeros,
                facts,
                ALIGN=row_alignment(x),
                D=size,
                BG=_power(groups),
                BT=rows,
                LEVELS=levels,
                INVERSE=_inverse(levels),
                GROUP=format.group_size,
                ZERO_BF16=format.zero_dtype == torch.bfloat16,
                LIMIT=_largest(format.scale_dtype),
                AWAY=away,
                NATIVE=isinstance(_kernel, triton.JITFunction),
                num_warps=owning.WARPS,
                enable_fp_fusion=False,
            )
        return PackedGroups(packed, steps, zeros, None), facts
    with on_device(device):
        _kernel[(-(-blocks // stretch), batch * heads)](
            x,
            *x.stride()[:3],
            heads,
            tokens,
            lines,
            stretch,
            blocks,
            packed.view(torch.int16) if words else packed,
            steps.view(torch.uint8) if format.scale_dtype == E4M3 else steps,
            zeros,
            facts,
            None if rotation is None else signs(rotation, device=device, dtype=x.dtype),
            1.0 / math.sqrt(size),
            None if clusters is None else clusters.ids.contiguous(),
            None if clusters is None else clusters.table.contiguous(),
            1 if clusters is None else clusters.table.shape[2],
            ALIGN=row_alignment(x),
            D=size,
            BD=block,
            BT=rows,
            BITS=format.bits,
            LEVELS=levels,
            GROUP=format.group_size,
            BY_TOKEN=by_token,
            ZERO=0 if format.symmetric else _ZERO[format.zero_point],
            ZERO_BF16=format.zero_dtype == torch.bfloat16,
            STEP=_STEP[format.scale_dtype],  # type: ignore[index]
            LIMIT=_largest(format.scale_dtype),
            ROW_BYTES=row_bytes,
            WORDS=words,
            AWAY=away,
            PRECISION=products(x.dtype, device),
            LATE=by_token and rotation is not None and _two_bit_offsets(format),
            INVERSE=_inverse(levels),
            NATIVE=isinstance(_kernel, triton.JITFunction),
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return PackedGroups(packed, steps, zeros, None), facts


_STEP = {E4M3: 0, torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


@functools.lru_cache(maxsize=8)
def _largest(dtype: torch.dtype | None) -> float:
    return float(torch.finfo(dtype).max)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=8)
def _inverse(levels: int) -> float:
    """1 / levels, rounded to float32."""
    return float(1.0 / torch.tensor(float(levels)))


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _owned_by_threads(format: GroupFormat, size: int) -> bool:
    """Whether ``triton_owned`` takes this."""
    plain = format.bits == 2 and format.scale_dtype == E4M3 and 16 <= format.group_size <= 64
    return plain and size % format.group_size == 0 and format.zero_point != "integer"


def _two_bit_offsets(format: GroupFormat) -> bool:
    """Whether codes are found by ``_two_bits`` above an offset."""
    offsets = not format.symmetric and format.zero_point == "offset" and format.group_size >= 16
    return offsets and format.bits == 2 and format.scale_dtype == E4M3


@triton.jit(do_not_specialize=_COUNTS)
def _kernel(
    x, x_b, x_h, x_t, heads, tokens, time_groups, stretch, blocks, packed, steps, zeros, facts,
    matrix, matrix_scale, ids, table, centroids,
    ALIGN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BITS: tl.constexpr,
    LEVELS: tl.constexpr, GROUP: tl.constexpr, BY_TOKEN: tl.constexpr, ZERO: tl.constexpr,
    ZERO_BF16: tl.constexpr, STEP: tl.constexpr, LIMIT: tl.constexpr, ROW_BYTES: tl.constexpr,
    WORDS: tl.constexpr, AWAY: tl.constexpr, PRECISION: tl.constexpr, LATE: tl.constexpr,
    INVERSE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BD)
    base = tl.multiple_of((head // heads) * x_b + (head % heads) * x_h, ALIGN)
    if matrix is not None:
        square = matrix + channel[None, :] * D + channel[:, None]  # transposed: x H^T
        turn = tl.load(square, mask=(channel < D)[:, None] & (channel < D)[None, :], other=0.0)
    lines: tl.constexpr = BT if BY_TOKEN else 1
    columns: tl.constexpr = BD // GROUP if BY_TOKEN else BD
    seen = tl.zeros([lines, columns], tl.float32)
    peak = tl.zeros([lines, columns], tl.float32)
    offset_peak = tl.zeros([lines, columns], tl.float32)
    code_peak = tl.zeros([lines, columns], tl.float32)
    begin = tl.program_id(0) * stretch
    for number in range(begin, tl.minimum(begin + stretch, blocks)):
        token = number * BT + tl.arange(0, BT)
        live = token < tokens
        row = head * tokens + token
        inside = live[:, None] & (channel < D)[None, :]
        if not BY_TOKEN:  # copies of the last token, which change no extreme
            token = tl.minimum(token, tokens - 1)
            inside = tl.broadcast_to((channel < D)[None, :], [BT, BD])
        place = x + base + token[:, None].to(tl.int64) * x_t + channel[None, :]
        raw = tl.load(place, mask=inside, other=0.0)
        if matrix is not None:
            values = tl.dot(raw, turn, input_precision=PRECISION)
            if not LATE:
                values *= matrix_scale
        else:
            values = raw.to(tl.float32)
        if table is not None:
            label = tl.load(ids + head * tokens + token, mask=token < tokens, other=0).to(tl.int64)
            centre = table + ((head * centroids + label) * D)[:, None] + channel[None, :]
            values -= tl.load(centre, mask=inside, other=0.0).to(tl.float32)

        groups: tl.constexpr = D // GROUP if BY_TOKEN else D
        if BY_TOKEN:
            values = tl.reshape(values, [BT, BD // GROUP, GROUP])
            low, high = extremes(values, 2, NATIVE)
            if LATE:  # rounding is monotonous: the extremes of the scaled values
                low, high = low * matrix_scale, high * matrix_scale
            group = tl.arange(0, BD // GROUP)
            line = row[:, None] * groups + group[None, :]
            used = live[:, None] & (group < groups)[None, :]
        else:
            low, high = extremes(values, 0, NATIVE)
            low, high = low[None, :], high[None, :]
            line = (head * time_groups + number) * D + channel[None, :]
            used = (channel < D)[None, :]

        extreme = tl.maximum(tl.abs(low), tl.abs(high), propagate_nan=tl.PropagateNan.ALL)
        seen = tl.maximum(seen, extreme, propagate_nan=tl.PropagateNan.ALL)
        span = extreme if ZERO == 0 else high - low
        ideal = divided(span, LEVELS, INVERSE, NATIVE and STEP == 0)
        peak = tl.maximum(peak, tl.where(used, ideal, 0.0))
        clamped = tl.minimum(ideal, LIMIT)
        if STEP == 0:
            stored, step = e4m3(clamped)
        elif STEP == 1:
            step = round_bf16(clamped)
            stored = step.to(tl.bfloat16)
        elif STEP == 2:
            stored = clamped.to(tl.float16)
            step = stored.to(tl.float32)
        else:
            stored = clamped
            step = clamped
        tl.store(steps + line, stored, mask=used)

        some = step > 0
        divisor = tl.where(some, step, float("inf"))
        if ZERO > 0:
            middle = low + (high - low) * 0.5
            if ZERO == 1:
                zero = rounded(tl.where(some, low, middle), zeros, ZERO_BF16)
                offset_peak = tl.maximum(offset_peak, tl.where(used, tl.abs(zero), 0.0))
            else:
                whole = round_even(tl.div_rn(-low, divisor))
                # Integer zeros are stored in float32 here: the host may have to keep them so.
                zero = tl.where(some, whole, round_bf16(middle) if ZERO_BF16 else _half(middle))
                size = tl.where(used, tl.abs(zero), 0.0)
                offset_peak = tl.maximum(offset_peak, tl.where(some, 0.0, size))
                code_peak = tl.maximum(code_peak, tl.where(some, size, 0.0))
            tl.store(zeros + line, zero.to(zeros.dtype.element_ty), mask=used)
        else:
            zero = step

        if BY_TOKEN:
            divisor, zero, some = divisor[:, :, None], zero[:, :, None], some[:, :, None]
        if BITS == 2 and STEP == 0 and ZERO < 2:
            codes = two_bits(values, divisor, zero, matrix_scale, ZERO, AWAY, LATE, NATIVE)
        else:
            divisor = tl.broadcast_to(divisor, values.shape)
            zero = tl.broadcast_to(zero, values.shape)
            if ZERO == 0:
                ratio = tl.div_rn(values, divisor)
                ratio = tl.minimum(tl.maximum(ratio, -LEVELS), LEVELS)
                codes = (_away(ratio) if AWAY else _whole(ratio)) + LEVELS
            elif ZERO == 1:
                ratio = tl.div_rn(values - zero, divisor)
                codes = _whole(tl.minimum(tl.maximum(ratio, 0.0), LEVELS))
            else:
                ratio = round_even(tl.div_rn(values, divisor)) + tl.where(some, zero, 0.0)
                codes = tl.minimum(tl.maximum(ratio, 0.0), LEVELS).to(tl.int32)
        codes = tl.reshape(codes, [BT, BD])
        if BD > D:
            codes = tl.where((channel < D)[None, :], codes, 0)
        store_codes(packed, codes, row, live, BT, BD, BITS, ROW_BYTES, WORDS)

    tl.atomic_max(facts + head * 4 + 0, largest_bits(peak))
    tl.atomic_max(facts + head * 4 + 1, largest_bits(seen))
    if ZERO > 0:
        tl.atomic_max(facts + head * 4 + 2, largest_bits(offset_peak))
    if ZERO == 2:
        tl.atomic_max(facts + head * 4 + 3, largest_bits(code_peak))


@triton.jit
def _whole(x):
    """rint(x) as int32, for |x| below 2^22."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _away(x):
    """The nearest whole number as int32, halves away from zero."""
    size = tl.abs(x)
    whole = size.to(tl.int32)
    whole += (size - whole.to(tl.float32) >= 0.5).to(tl.int32)
    return tl.where(x < 0, -whole, whole)


@triton.jit
def _half(x):
    return x.to(tl.float16).to(tl.float32)


def _zeros(shape: tuple[int, ...], format: GroupFormat, device: torch.device) -> Tensor | None:
    if format.symmetric:
        return None
    integer = format.zero_point == "integer"
    return torch.empty(shape, dtype=torch.float32 if integer else format.zero_dtype, device=device)


def _facts(found: Tensor, format: GroupFormat) -> Facts:
    """Of all heads, from the bits of their numbers ``[B H, 4]``."""
    limits = torch.finfo(format.scale_dtype)  # type: ignore[arg-type]
    heads = found.cpu().view(torch.float32)
    _, magnitude, offset, code = heads.amax(0).tolist()
    peaks = heads[:, 0].tolist()
    overflow = any(peak > limits.max for peak in peaks)
    small = any(0 < peak < limits.smallest_normal for peak in peaks)
    return Facts(magnitude, offset, code, float(overflow or small), float(overflow))
