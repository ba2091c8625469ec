"""The Triton kernel for unbiased codes: products of codes that are exact, one write of the rows.

    x^ = (H^T c) Delta + E mu

With one step a token (the default up to 128 channels) Delta is applied after the rotation: its
operands are small odd numbers and signs, exact in FP16, and their sums are exact in float32. (Heads
that are no power of two have a rounded matrix, several steps a token rounded ratios: 2^-12.) The
centroids are a product too, of the labels' indicator E with the table, which E4M3 makes exact.

A program stays with one head and walks over blocks of tokens, so the matrix (32 KiB at 128
channels, as much as two blocks of output) is fetched once a stretch. Codes are turned where they
were loaded (``turned_codes``); with several steps a token they are unpacked first, 3-bit codes from
three 32-bit words of 32 codes where rows are made of them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.blocks import (
    as_bytes,
    code_words,
    in_words,
    labels_block,
    low_rank_span,
    low_rank_terms,
    low_rank_width,
    odd_block,
    row_alignment,
    store_block,
)
from videokv.kernels.gpu import on_device, products
from videokv.kernels.grids import cdiv, next_power_of_2
from videokv.kernels.numbers import e4m3_halves, exp2_codes
from videokv.kernels.pack_codes import packed_length
from videokv.kernels.reconstruct.parts import Parts
from videokv.kernels.reconstruct.plan import (
    Batch,
    Plan,
    pointer,
    target_rows,
    types_of,
)
from videokv.kernels.reconstruct.rope import Rope
from videokv.kernels.reconstruct.rope_block import rope_arguments, turned_block
from videokv.kernels.reconstruct.turned_codes import rotation_rows, turned_odd_codes
from videokv.rotation import signs
from videokv.tensors import E4M3

BLOCK_ELEMENTS = 8192  # of one step of a program: 64 tokens of 128 channels
PROGRAMS = 1056  # eight for each of 132 multiprocessors; more would only fetch the matrix again
LONGEST = 8  # blocks of a stretch
REGISTERS: int | None = 128  # of a thread, or as the compiler likes
STAGES = 3  # of packed codes on their way
WARPS = 4  # of a block of 64 tokens: one warp group, whose registers are the operands
SPLIT_BITS = (2, 3, 4)  # codes of one step a token that are turned without unpacking rows
CENTRES = 16  # rows of the padded table
_COUNTS = ["out_b", "out_h", "heads", "tokens", "stretch", "centres", "rope_rows"]
_NARROW = frozenset({2, 3, 5, 8})  # of ``Plan.stored``: scales and labels of tokens
_MANY_COUNTS = ["heads", "stretch", "a_b", "a_h", "b_b", "b_h"]


def reconstruct(
    parts: Parts,
    out: Tensor,
    *,
    factor: Tensor | None,
    rope: Rope | None,
    programs: int | None = None,
) -> None:
    """See the package and ``triton.reconstruct``; ``out`` is ``[B, H, T, D]`` of any strides."""
    plan = planned(parts, out.dtype, out.device)
    batch, heads, tokens, _ = parts.shape
    some = cdiv(tokens, plan.rows) * batch * heads // (programs or PROGRAMS)
    stretch = max(1, min(plan.longest, some)) * plan.rows
    with on_device(out.device):
        _kernel[(cdiv(tokens, stretch), batch * heads)](
            as_bytes(out),
            *out.stride(),
            heads,
            tokens,
            stretch,
            None if factor is None else factor.contiguous(),
            *rope_arguments(rope, tokens),
            *plan.stored,
            plan.scale,
            INTERLEAVED=rope is not None and rope.interleaved,
            PAIRS=0 if rope is None else rope.pairs,
            ALIGN=row_alignment(out),
            **plan.options,
        )


def launch_many(batch: Batch, a: Tensor, b: Tensor, factor: Tensor | None) -> None:
    """Every chunk of the batch into its rows of ``a`` or ``b``, in one launch."""
    batch.launch_by(_many, a, b, factor, programs=PROGRAMS, loops=False)


def planned(parts: Parts, dtype: torch.dtype, device: torch.device) -> Plan:
    """See ``plan.Plan``."""
    centres, rotation = parts.centres, parts.rotation
    assert centres is not None and rotation is not None and parts.scale is not None
    size = parts.head_dim
    block = max(16, next_power_of_2(size))
    wide = dtype == torch.float32
    matrix = signs(rotation, device=device, dtype=torch.float32 if wide else torch.float16)
    low = None if parts.low_rank is None else parts.low_rank.dense(parts.tokens)
    rank = 0 if low is None else low.codes.shape[3]
    slots = _slots(parts, block)
    packed = code_words(parts) if slots == 1 else parts.codes.contiguous()
    stored: list[Tensor | int | None] = [
        packed,
        parts.steps.contiguous(),
        parts.scale.contiguous(),
        centres.ids.contiguous(),
        as_bytes(centres.table.contiguous()),
        centres.scale.contiguous(),
        centres.table.shape[2],
        None if low is None else low.codes.contiguous(),
        None if low is None else low.scales.contiguous(),
        None if low is None else low.basis.contiguous(),
        matrix,
    ]
    rows = max(16, min(128, BLOCK_ELEMENTS // block))
    options = {
        "D": size,
        "BD": block,
        "BT": rows,
        "BC": CENTRES,
        "BITS": parts.bits,
        "WORDS": in_words(parts),
        "ROW_BYTES": packed_length(size, bits=parts.bits),
        "GROUP": parts.group_size,
        "LABEL_BITS": centres.label_bits,
        "RANK": rank,
        "BR": low_rank_width(rank),
        "WIDE": wide,
        "PRECISION": _precision(parts, dtype, device),
        "AS_BYTES": dtype == E4M3,
        "SLOTS": slots,
        "num_warps": WARPS,
        "num_stages": STAGES,
        "maxnreg": REGISTERS,
        "enable_fp_fusion": True,
    }
    scale = 0.5 / math.sqrt(size)  # codes are doubled
    types = types_of({"PACKED": packed, "SCALE": parts.scale, "MATRIX": matrix})
    return Plan(rows, LONGEST, stored, scale, options, launch_many, types, _NARROW)


def _precision(parts: Parts, dtype: torch.dtype, device: torch.device) -> str:
    """Of float32 products: one of TF32 where codes, signs and E4M3 are exact in it."""
    found = products(dtype, device)
    exact = parts.head_dim & (parts.head_dim - 1) == 0 and parts.group_size == parts.head_dim
    return "tf32" if found == "tf32x3" and exact else found


def _slots(parts: Parts, block: int) -> int:
    """How many products undo the rotation: one of each place in a byte (or three), or one."""
    slots = {2: 4, 3: 8, 4: 2}.get(parts.bits, 1)
    whole = parts.group_size == parts.head_dim and block // slots >= 16
    return slots if whole and parts.bits in SPLIT_BITS else 1


@triton.jit
def _program(
    out, out_b, out_h, out_t, out_d, heads, tokens, stretch, factor, cos, sin, rope_rows,
    packed, steps, scale, ids, table, table_scale, centres,
    low_codes, low_scales, basis, matrix, matrix_scale,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BITS: tl.constexpr,
    WORDS: tl.constexpr, ROW_BYTES: tl.constexpr, GROUP: tl.constexpr, LABEL_BITS: tl.constexpr,
    RANK: tl.constexpr, BR: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    AS_BYTES: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, ALIGN: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BD)
    used = channel < D
    turn = rotation_rows(matrix, D, BD, SLOTS)
    number = tl.arange(0, BC)
    place = table + (head * centres + number)[:, None] * D + channel[None, :]
    stored = tl.load(place, mask=(number < centres)[:, None] & used[None, :], other=0)
    means = e4m3_halves(stored)
    if WIDE:
        means = means.to(tl.float32)
    mean_scale = tl.load(table_scale + head)
    # Centroids are added to the rotation's sums, which are in their unit until the end.
    mean_scale = tl.where(mean_scale > 0, mean_scale, 1.0)
    step_scale = tl.load(scale + head) * matrix_scale / mean_scale
    base = tl.multiple_of((head // heads) * out_b + (head % heads) * out_h, ALIGN)
    if RANK > 0:
        span = low_rank_span(basis, head, channel, D, RANK, BR)
    begin = tl.program_id(0) * stretch
    for first in range(begin, tl.minimum(begin + stretch, tokens), BT):
        token = first + tl.arange(0, BT)
        live = token < tokens
        row = head * tokens + token
        label = labels_block(ids, head, token, live, tokens, LABEL_BITS)
        if RANK > 0:
            terms = low_rank_terms(low_codes, low_scales, row, live, RANK, BR)
        if SLOTS > 1:
            step = exp2_codes(tl.load(steps + row, mask=live, other=255))
            values = turned_odd_codes(
                packed, row, live, turn, BD, BITS, ROW_BYTES, SLOTS, PRECISION
            )
        else:
            codes = odd_block(packed, row, live, ROW_BYTES, BITS, BD, WORDS)
            values, step = _operands(codes, steps, row, live, D, BD, GROUP, WIDE)
            values = tl.dot(values, turn[0], input_precision=PRECISION)
        values = values * (step * step_scale)[:, None]
        own = (label[:, None] == (number + 1)[None, :]).to(means.dtype)
        values = tl.dot(own, means, acc=values, input_precision=PRECISION) * mean_scale
        if RANK > 0:
            values = tl.dot(terms, span, acc=values, input_precision=PRECISION)
        if PAIRS > 0:
            line = (head // heads) * rope_rows
            values = turned_block(values, cos, sin, line, token, live, INTERLEAVED, PAIRS, BT, BD)
        if factor is not None:
            values = values * tl.load(factor + head)
        target = out + base + token[:, None].to(tl.int64) * out_t + channel[None, :] * out_d
        store_block(target, values, live[:, None] & used[None, :], AS_BYTES)


@triton.jit(do_not_specialize=_COUNTS)
def _kernel(
    out, out_b, out_h, out_t, out_d, heads, tokens, stretch, factor, cos, sin, rope_rows,
    packed, steps, scale, ids, table, table_scale, centres,
    low_codes, low_scales, basis, matrix, matrix_scale,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BITS: tl.constexpr,
    WORDS: tl.constexpr, ROW_BYTES: tl.constexpr, GROUP: tl.constexpr, LABEL_BITS: tl.constexpr,
    RANK: tl.constexpr, BR: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    AS_BYTES: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, ALIGN: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """One chunk."""
    _program(
        out, out_b, out_h, out_t, out_d, heads, tokens, stretch, factor, cos, sin, rope_rows,
        packed, steps, scale, ids, table, table_scale, centres, low_codes, low_scales, basis,
        matrix, matrix_scale, D, BD, BT, BC, BITS, WORDS, ROW_BYTES, GROUP, LABEL_BITS, RANK, BR,
        WIDE, PRECISION, AS_BYTES, INTERLEAVED, PAIRS, ALIGN, SLOTS,
    )  # fmt: skip


@triton.jit(do_not_specialize=_MANY_COUNTS)
def _many(
    jobs, a, a_b, a_h, a_t, a_d, b, b_b, b_h, b_t, heads, stretch, factor, matrix_scale,
    PACKED: tl.constexpr, SCALE: tl.constexpr, MATRIX: tl.constexpr, ALIGNED: tl.constexpr,
    JOB: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BITS: tl.constexpr,
    WORDS: tl.constexpr, ROW_BYTES: tl.constexpr, GROUP: tl.constexpr, LABEL_BITS: tl.constexpr,
    RANK: tl.constexpr, BR: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    AS_BYTES: tl.constexpr, ALIGN: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """A chunk a program_id(2): a row of ``jobs`` holds its numbers and addresses (``plan.Job``)."""
    job = jobs + tl.program_id(2) * JOB
    tokens = tl.load(job).to(tl.int32)
    if tl.program_id(0) * stretch < tokens:
        out, out_b, out_h, out_t = target_rows(job, a, a_b, a_h, a_t, b, b_b, b_h, b_t)
        _program(
            out, out_b, out_h, out_t, a_d, heads, tokens, stretch, factor, None, None, 0,
            pointer(job, 3, PACKED, ALIGNED), pointer(job, 4, tl.uint8, ALIGNED),
            pointer(job, 5, SCALE, False), pointer(job, 6, tl.uint8, False),
            pointer(job, 7, tl.uint8, ALIGNED), pointer(job, 8, tl.float32, False),
            tl.load(job + 9).to(tl.int32), pointer(job, 10, tl.int8, ALIGNED),
            pointer(job, 11, tl.float16, False), pointer(job, 12, tl.bfloat16, ALIGNED),
            pointer(job, 13, MATRIX, ALIGNED), matrix_scale, D, BD, BT, BC, BITS, WORDS,
            ROW_BYTES, GROUP, LABEL_BITS, RANK, BR, WIDE, PRECISION, AS_BYTES, False, 0, ALIGN,
            SLOTS,
        )  # fmt: skip


@triton.jit
def _operands(
    values, steps, row, live, D: tl.constexpr, BD: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Operands of the rotation [BT, BD], and the step of each token without the head's scale.

    With several steps a token the operands hold their ratio to the largest.
    """
    groups: tl.constexpr = D // GROUP
    if WIDE:
        values = values.to(tl.float32)
    if groups == 1:
        step = exp2_codes(tl.load(steps + row, mask=live, other=255))
    else:
        group = tl.arange(0, BD) // GROUP
        there = live[:, None] & (group < groups)[None, :]
        byte = tl.load(steps + row[:, None] * groups + group[None, :], mask=there, other=255)
        each = exp2_codes(byte)
        step = tl.max(each, 1)
        ratio = each * (1.0 / tl.where(step > 0, step, 1.0))[:, None]
        values = (values.to(tl.float32) * ratio).to(values.dtype)
    return values, step
