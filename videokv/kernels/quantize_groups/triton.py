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
import struct
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.assign_centroids.layout import Clusters
from videokv.kernels.blocks import row_alignment, store_codes
from videokv.kernels.gpu import on_device, products
from videokv.kernels.grids import cdiv, next_power_of_2
from videokv.kernels.launches import Launches
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
    device = x.device
    plan = planned(
        format, x.shape, x.dtype, row_alignment(x), rotation, clusters is not None, away, device
    )
    packed = torch.empty(plan.packed_shape, dtype=torch.uint8, device=device)
    steps = torch.empty(plan.shape, dtype=format.scale_dtype, device=device)
    zeros = None
    if plan.zero_dtype is not None:
        zeros = torch.empty(plan.shape, dtype=plan.zero_dtype, device=device)
    facts = torch.zeros(plan.heads, FACTS, dtype=torch.int32, device=device)
    stages: tuple[Any, ...] = ()
    if clusters is not None:
        stages = (clusters.ids.contiguous(), clusters.table.contiguous(), clusters.table.shape[2])
    with on_device(device):
        plan.launches(
            x,
            *x.stride()[:3],
            *plan.counts,
            packed if plan.word == torch.uint8 else packed.view(plan.word),
            steps.view(torch.uint8) if format.scale_dtype == E4M3 else steps,
            zeros,
            facts,
            *plan.operands,
            *(stages or plan.no_stages),
        )
    return PackedGroups(packed, steps, zeros, None), facts


class Plan(NamedTuple):
    """What a launch has whatever the numbers in its tensors are.

    counts: plain arguments before the results. operands: after them, the rotation's. word: packed
    codes as the kernel stores them. no_stages: in the place of centroids where there are none.
    """

    launches: Launches
    heads: int
    counts: tuple[int, ...]
    operands: tuple[Tensor | float | None, ...]
    no_stages: tuple[int | None, ...]
    packed_shape: tuple[int, ...]
    shape: tuple[int, ...]
    word: torch.dtype
    zero_dtype: torch.dtype | None


@functools.lru_cache(maxsize=256)
def planned(
    format: GroupFormat,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    alignment: int,
    rotation: Rotation | None,
    clustered: bool,
    away: bool,
    device: torch.device,
) -> Plan:
    """Launches and sizes for tensors of a kind; kept, because finding them takes the host
    as long as a launch."""
    batch, heads, tokens, size = shape
    by_token = format.axis == "token"
    groups = size // format.group_size if by_token else size
    lines = tokens if by_token else -(-tokens // format.group_size)
    row_bytes = packed_length(size, bits=format.bits)
    levels = reach(format.bits) if format.symmetric else (1 << format.bits) - 1
    zero_dtype = None if format.symmetric else format.zero_dtype
    common: dict[str, Any] = {
        "heads": batch * heads,
        "packed_shape": (batch, heads, tokens, row_bytes),
        "shape": (batch, heads, lines, groups),
        "zero_dtype": torch.float32
        if format.zero_point == "integer" and zero_dtype
        else zero_dtype,
    }
    options: dict[str, Any] = {
        "ALIGN": alignment,
        "D": size,
        "LEVELS": levels,
        "INVERSE": _inverse(levels),
        "GROUP": format.group_size,
        "ZERO_BF16": format.zero_dtype == torch.bfloat16,
        "LIMIT": _largest(format.scale_dtype),
        "NATIVE": isinstance(_kernel, triton.JITFunction),
        "enable_fp_fusion": False,
    }
    turn: tuple[Tensor | float | None, ...] = (None, 1.0 / math.sqrt(size))
    if rotation is not None:
        turn = (signs(rotation, device=device, dtype=dtype), 1.0 / math.sqrt(size))
    fits = dtype != torch.float32 and 32 <= size <= 128  # tile and matrix in shared memory
    if fits and by_token and rotation is not None and _two_bit_offsets(format):
        rows, programs, longest = turning.ROWS, TURNED_PROGRAMS, turning.LONGEST
        kernel, word, operands = turning.turned, torch.int32, turn
        options |= {"num_warps": turning.WARPS, "num_stages": turning.STAGES}
    elif by_token and rotation is None and not clustered and _owned_by_threads(format, size):
        rows = max(1, owning.GROUPS // next_power_of_2(groups))
        programs, longest = PROGRAMS, owning.LONGEST
        kernel, word, operands = owning.owned, torch.int32, ()
        options |= {"BG": next_power_of_2(groups), "AWAY": away, "num_warps": owning.WARPS}
    else:
        return _general_plan(format, shape, dtype, rotation, clustered, away, device, turn,
                             common, options)  # fmt: skip
    blocks = -(-tokens // rows)
    stretch = max(1, min(longest, blocks * batch * heads // programs))
    return Plan(
        Launches(kernel, (cdiv(blocks, stretch), batch * heads), options | {"BT": rows}),
        counts=(heads, tokens, stretch, blocks),
        operands=operands,
        no_stages=(),
        word=word,
        **common,
    )


def _general_plan(
    format: GroupFormat,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    rotation: Rotation | None,
    clustered: bool,
    away: bool,
    device: torch.device,
    turn: tuple[Tensor | float | None, ...],
    common: dict[str, Any],
    options: dict[str, Any],
) -> Plan:
    """That of the kernel that takes everything."""
    batch, heads, tokens, size = shape
    by_token = format.axis == "token"
    block = max(16, next_power_of_2(size))
    elements = BLOCK_ELEMENTS if rotation is None else ROTATED_ELEMENTS
    elements = CLUSTERED_ELEMENTS if clustered else elements
    warps = WARPS if rotation is None else ROTATED_WARPS
    rows = max(16, min(128, elements // block)) if by_token else format.group_size
    blocks = -(-tokens // rows)
    stretch = max(1, min(LONGEST, blocks * batch * heads // PROGRAMS))
    row_bytes = common["packed_shape"][3]
    words = format.bits != 3 and row_bytes % 2 == 0
    options |= {
        "BD": block,
        "BT": rows,
        "BITS": format.bits,
        "BY_TOKEN": by_token,
        "ZERO": 0 if format.symmetric else _ZERO[format.zero_point],
        "STEP": _STEP[format.scale_dtype],  # type: ignore[index]
        "ROW_BYTES": row_bytes,
        "WORDS": words,
        "AWAY": away,
        "PRECISION": products(dtype, device),
        "LATE": by_token and rotation is not None and _two_bit_offsets(format),
        "num_warps": CLUSTERED_WARPS if clustered else warps,
    }
    return Plan(
        Launches(_kernel, (cdiv(blocks, stretch), batch * heads), options),
        counts=(heads, tokens, common["shape"][2], stretch, blocks),
        operands=turn,
        no_stages=(None, None, 1),
        word=torch.int16 if words else torch.uint8,
        **common,
    )


_STEP = {E4M3: 0, torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


@functools.lru_cache(maxsize=8)
def _largest(dtype: torch.dtype | None) -> float:
    return float(torch.finfo(dtype).max)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=8)
def _inverse(levels: int) -> float:
    """1 / levels, rounded to float32."""
    return float(1.0 / torch.tensor(float(levels)))


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


def _facts(found: Tensor, format: GroupFormat) -> Facts:
    """Of all heads, from the bits of their numbers ``[B H, 4]``, which are ordered as they are."""
    peaks, sizes, offsets, codes = zip(*found.tolist(), strict=True)
    least, most = _normal_bits(format.scale_dtype)
    magnitude, offset, code = struct.unpack(
        "3f", struct.pack("3i", max(sizes), max(offsets), max(codes))
    )
    overflow = most < max(peaks)
    small = any(0 < peak < least for peak in peaks)
    return Facts(magnitude, offset, code, float(overflow or small), float(overflow))


@functools.lru_cache(maxsize=8)
def _normal_bits(dtype: torch.dtype | None) -> tuple[int, int]:
    """The bits of the smallest normal and the largest number of a dtype, as float32."""
    limits = torch.finfo(dtype)  # type: ignore[arg-type]
    least, most = struct.unpack("2i", struct.pack("2f", limits.smallest_normal, limits.max))
    return least, most
