"""The Triton kernel: a program reconstructs a block of tokens of one head in registers.

Bytes per element that must move: bits / 8 and the steps in, the output's width out; centroid tables
and the rotation matrix stay in the caches. The rotation is a product of the block with the matrix;
for 8- and 16-bit outputs of FP16 operands, exact where E4M3 steps and signs allow it
(``turned_codes``), else each token scaled by its largest value, so that the operands' rounding is
2^-12 of it; for float32 three TF32 products. With a rotation or a repair a program
walks over a stretch of blocks and fetches their matrices once. Tokens, heads and table sizes are
plain arguments: a new length compiles nothing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.blocks import (
    ZERO_CODES,
    as_bytes,
    dequantize_block,
    low_rank_span,
    low_rank_terms,
    low_rank_width,
    reach_of,
    row_alignment,
    step_kind,
    store_block,
    stored_centroids,
    whole_groups,
)
from videokv.kernels.gpu import on_device, products
from videokv.kernels.grids import next_power_of_2
from videokv.kernels.pack_codes import packed_length
from videokv.kernels.reconstruct import triton_unbiased
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
from videokv.kernels.reconstruct.turned_codes import (
    offset_rows,
    rotation_rows,
    signs_and_sums,
    turned_codes,
)
from videokv.rotation import signs
from videokv.tensors import E4M3, walk_tensors

ELEMENTS = {"plain": 8192, "stages": 4096, "rotated": 8192, "low_rank": 4096}  # of one step
WARPS = {"plain": 4, "stages": 4, "rotated": 4, "low_rank": 4}
# Of a thread, or as the compiler likes.
REGISTERS: dict[str, int | None] = dict.fromkeys(WARPS)
PROGRAMS = 1056  # eight for each of 132 multiprocessors
LONGEST = {"plain": 1, "stages": 1, "rotated": 3, "low_rank": 1}  # steps of a program
SPLIT = True  # a product for each place of a code in its byte
_COUNTS = ["heads", "tokens", "stretch", "time_groups", "out_b", "out_h"]
_COUNTS += ["size0", "size1", "size2", "size3", "rope_rows"]
_NARROW = frozenset({3, 5, 8, 11, 14, 18})  # of ``Plan.stored``: scales and labels of tokens
_MANY_COUNTS = ["heads", "stretch", "a_b", "a_h", "b_b", "b_h"]


def reconstruct(
    parts: Parts,
    out: Tensor,
    *,
    factor: Tensor | None,
    rope: Rope | None = None,
    programs: int | None = None,
) -> None:
    """See the package; ``out`` is ``[B, H, T, D]`` of any strides.

    programs: as many as keep the device busy, None for the module's number; with more blocks a
    program does several.
    """
    if parts.centres is not None:
        triton_unbiased.reconstruct(parts, out, factor=factor, rope=rope, programs=programs)
        return
    plan = _planned(parts, out.dtype, out.device)
    batch, heads, tokens, _ = parts.shape
    blocks = -(-tokens // plan.rows)
    some = blocks * batch * heads // (programs or PROGRAMS)
    stretch = max(1, min(plan.longest, some)) * plan.rows
    with on_device(out.device):
        _kernel[(-(-tokens // stretch), batch * heads)](
            as_bytes(out),
            *out.stride(),
            heads,
            tokens,
            stretch,
            factor if factor is None else factor.contiguous(),
            *rope_arguments(rope, tokens),
            *plan.stored,
            plan.scale,
            INTERLEAVED=rope is not None and rope.interleaved,
            PAIRS=0 if rope is None else rope.pairs,
            ALIGN=row_alignment(out),
            LOOP=stretch > plan.rows,
            **plan.options,
        )


def launch_many(batch: Batch, a: Tensor, b: Tensor, factor: Tensor | None) -> None:
    """Every chunk of the batch into its rows of ``a`` or ``b``, in one launch."""
    batch.launch_by(_many, a, b, factor, programs=PROGRAMS, loops=True)


def planned(parts: Parts, dtype: torch.dtype, device: torch.device) -> Plan:
    """See ``plan.Plan``; of the kernel that takes these parts, made anew."""
    if parts.centres is not None:
        return triton_unbiased.planned(parts, dtype, device)
    return _plan(parts, dtype, device)


_plans: weakref.WeakKeyDictionary[Parts, dict[Hashable, Plan]] = weakref.WeakKeyDictionary()


def _planned(parts: Parts, dtype: torch.dtype, device: torch.device) -> Plan:
    """Kept as long as ``parts`` where it holds no tensor that ``parts`` does not."""
    kept = _plans.get(parts)
    plan = None if kept is None else kept.get(dtype)
    if plan is None:
        plan = _plan(parts, dtype, device)
        if _as_stored(parts):
            _plans.setdefault(parts, {})[dtype] = plan
    return plan


def _as_stored(parts: Parts) -> bool:
    low = parts.low_rank
    return (low is None or low.places is None) and all(
        tensor.is_contiguous() for tensor in walk_tensors(parts)
    )


def _plan(parts: Parts, dtype: torch.dtype, device: torch.device) -> Plan:
    size = parts.head_dim
    wide = dtype == torch.float32
    low = None if parts.low_rank is None else parts.low_rank.dense(parts.tokens)
    rank = 0 if low is None else low.codes.shape[3]
    block = max(16, next_power_of_2(size))
    slots = _slots(parts, block, wide=wide)
    matrix = None
    if parts.rotation is not None:
        if slots > 1:
            matrix = signs_and_sums(parts.rotation, group_size=parts.group_size, device=device)
        else:
            kind = torch.float32 if wide else torch.float16
            matrix = signs(parts.rotation, device=device, dtype=kind)
    load = _load(parts)
    rows = max(16, min(128, ELEMENTS[load] // block))
    stored = [
        parts.steps.shape[2],
        parts.codes.contiguous(),
        as_bytes(parts.steps.contiguous()),
        _whole(parts.scale),
        _whole(parts.zeros),
        *_stage_arguments(parts),
        None if low is None else low.codes.contiguous(),
        None if low is None else low.scales.contiguous(),
        None if low is None else low.basis.contiguous(),
        matrix,
    ]
    options = {
        "D": size,
        "BD": block,
        "BT": rows,
        "BITS": parts.bits,
        "REACH": reach_of(parts),
        "ROW_BYTES": packed_length(size, bits=parts.bits),
        "GROUP": parts.group_size,
        "BY_TOKEN": parts.axis == "token",
        "WHOLE_GROUPS": whole_groups(parts, block),
        "ZERO": ZERO_CODES[parts.zero],
        "STEP_KIND": step_kind(parts),
        "STAGES": len(parts.stages),
        "RANK": rank,
        "BR": low_rank_width(rank),
        "WIDE": wide,
        "PRECISION": products(dtype, device),
        "AS_BYTES": dtype == E4M3,
        "SLOTS": slots,
        # The interpreter multiplies BF16 wrongly.
        "WIDE_OFFSETS": products(torch.float32, device) == "ieee",
        "num_warps": WARPS[load],
        "maxnreg": REGISTERS[load],
        "enable_fp_fusion": False,  # the same roundings as the reference
    }
    kinds = {"STEPS": parts.steps, "SCALE": parts.scale, "ZEROS": parts.zeros, "MATRIX": matrix}
    scale, types = 1.0 / math.sqrt(size), types_of(kinds)
    return Plan(rows, LONGEST[load], stored, scale, options, launch_many, types, _NARROW)


def _slots(parts: Parts, block: int, *, wide: bool) -> int:
    """How many products undo the rotation: one of each place in a byte, or a single one (1).

    Several where operands are made in FP16 (``turned_codes``): signs, steps in E4M3, and offsets
    in 16 bits or none.
    """
    slots = 8 // parts.bits if parts.bits in (2, 4) else 1
    narrow = parts.zeros is not None and parts.zeros.dtype in (torch.bfloat16, torch.float16)
    halves = narrow and parts.zero == "offset" and parts.scale is None
    fits = (
        SPLIT
        and slots > 1
        and parts.rotation is not None
        and not wide
        and not parts.stages
        and parts.steps.dtype == E4M3
        and (parts.zero == "none" or halves)
        and whole_groups(parts, block)
        and parts.group_size % slots == 0
        and block == parts.head_dim  # signs, exact in every dtype
        and block // slots >= 16
    )
    return slots if fits else 1


def _load(parts: Parts) -> str:
    """What weighs most in a block, for its size."""
    if parts.low_rank is not None:
        return "low_rank"
    if parts.rotation is not None:
        return "rotated"
    return "stages" if parts.stages else "plain"


@triton.jit
def _program(
    out, out_b, out_h, out_t, out_d, heads, tokens, stretch, factor, cos, sin, rope_rows,
    time_groups, packed, steps, scale, zeros,
    ids0, table0, size0, ids1, table1, size1, ids2, table2, size2, ids3, table3, size3,
    low_codes, low_scales, basis, matrix, matrix_scale,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BITS: tl.constexpr, REACH: tl.constexpr,
    ROW_BYTES: tl.constexpr, GROUP: tl.constexpr, BY_TOKEN: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr, ZERO: tl.constexpr, STEP_KIND: tl.constexpr,
    STAGES: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, AS_BYTES: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr, SLOTS: tl.constexpr, WIDE_OFFSETS: tl.constexpr, ALIGN: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BD)
    turn = None
    sums = None
    if matrix is not None:
        turn = rotation_rows(matrix, D, BD, SLOTS)
        if SLOTS > 1 and ZERO > 0:
            sums = offset_rows(matrix, zeros, D, BD, GROUP, WIDE_OFFSETS)
    span = None
    if RANK > 0:
        span = low_rank_span(basis, head, channel, D, RANK, BR)
    base = (head // heads) * out_b + (head % heads) * out_h
    base = tl.multiple_of(base, ALIGN)
    begin = tl.program_id(0) * stretch
    if LOOP:
        for start in range(begin, tl.minimum(begin + stretch, tokens), BT):
            _block(
                out, out_t, out_d, base, heads, head, start, tokens, factor, cos, sin,
                rope_rows, time_groups, packed, steps, scale, zeros, ids0, table0, size0, ids1,
                table1, size1, ids2, table2, size2, ids3, table3, size3, low_codes, low_scales,
                span, turn, sums, matrix_scale, D, BD, BT, BITS, REACH, ROW_BYTES, GROUP, BY_TOKEN,
                WHOLE_GROUPS, ZERO, STEP_KIND, STAGES, RANK, BR, WIDE, PRECISION, AS_BYTES,
                INTERLEAVED, PAIRS, SLOTS,
            )  # fmt: skip
    else:  # a loop of one step would take more registers
        _block(
            out, out_t, out_d, base, heads, head, begin, tokens, factor, cos, sin, rope_rows,
            time_groups, packed, steps, scale, zeros, ids0, table0, size0, ids1, table1, size1,
            ids2, table2, size2, ids3, table3, size3, low_codes, low_scales, span, turn,
            sums, matrix_scale, D, BD, BT, BITS, REACH, ROW_BYTES, GROUP, BY_TOKEN, WHOLE_GROUPS,
            ZERO, STEP_KIND, STAGES, RANK, BR, WIDE, PRECISION, AS_BYTES, INTERLEAVED, PAIRS,
            SLOTS,
        )  # fmt: skip


@triton.jit
def _block(
    out, out_t, out_d, base, heads, head, start, tokens, factor, cos, sin, rope_rows,
    time_groups, packed, steps, scale, zeros,
    ids0, table0, size0, ids1, table1, size1, ids2, table2, size2, ids3, table3, size3,
    low_codes, low_scales, span, turn, sums, matrix_scale,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BITS: tl.constexpr, REACH: tl.constexpr,
    ROW_BYTES: tl.constexpr, GROUP: tl.constexpr, BY_TOKEN: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr, ZERO: tl.constexpr, STEP_KIND: tl.constexpr,
    STAGES: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, AS_BYTES: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, BD)
    token = start + tl.arange(0, BT)
    live = token < tokens
    row = head * tokens + token
    inside = live[:, None] & (channel < D)[None, :]

    # Loads first, the longest way before the others: nothing below is to wait twice.
    if STAGES > 0:
        centre0 = stored_centroids(ids0, table0, size0, head, row, live, inside, channel, D)
    if STAGES > 1:
        centre1 = stored_centroids(ids1, table1, size1, head, row, live, inside, channel, D)
    if STAGES > 2:
        centre2 = stored_centroids(ids2, table2, size2, head, row, live, inside, channel, D)
    if STAGES > 3:
        centre3 = stored_centroids(ids3, table3, size3, head, row, live, inside, channel, D)
    if RANK > 0:
        terms = low_rank_terms(low_codes, low_scales, row, live, RANK, BR)

    if SLOTS > 1:
        values = turned_codes(
            packed, steps, scale, zeros, head, row, live, turn, sums, matrix_scale,
            D, BD, BT, BITS, REACH, ROW_BYTES, GROUP, ZERO, SLOTS, PRECISION,
        )  # fmt: skip
    else:
        values = dequantize_block(
            packed, steps, scale, zeros, head, token, live, tokens, time_groups,
            D, BD, BT, BITS, REACH, ROW_BYTES, GROUP, BY_TOKEN, WHOLE_GROUPS, ZERO, STEP_KIND,
        )  # fmt: skip

    if STAGES > 0:
        values += centre0.to(tl.float32)
    if STAGES > 1:
        values += centre1.to(tl.float32)
    if STAGES > 2:
        values += centre2.to(tl.float32)
    if STAGES > 3:
        values += centre3.to(tl.float32)

    if turn is not None and SLOTS == 1:
        if WIDE:
            values = tl.dot(values, turn[0], input_precision=PRECISION) * matrix_scale
        else:
            largest = tl.max(tl.abs(values), 1)
            inverse = 1.0 / tl.where(largest > 0, largest, 1.0)
            halves = (values * inverse[:, None]).to(tl.float16)
            values = tl.dot(halves, turn[0]) * (largest * matrix_scale)[:, None]

    if RANK > 0:
        values = tl.dot(terms, span, acc=values, input_precision=PRECISION)

    if PAIRS > 0:
        line = (head // heads) * rope_rows
        values = turned_block(values, cos, sin, line, token, live, INTERLEAVED, PAIRS, BT, BD)

    if factor is not None:
        values = values * tl.load(factor + head)
    target = out + base + token[:, None].to(tl.int64) * out_t + channel[None, :] * out_d
    store_block(target, values, inside, AS_BYTES)


@triton.jit(do_not_specialize=_COUNTS)
def _kernel(
    out, out_b, out_h, out_t, out_d, heads, tokens, stretch, factor, cos, sin, rope_rows,
    time_groups, packed, steps, scale, zeros,
    ids0, table0, size0, ids1, table1, size1, ids2, table2, size2, ids3, table3, size3,
    low_codes, low_scales, basis, matrix, matrix_scale,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BITS: tl.constexpr, REACH: tl.constexpr,
    ROW_BYTES: tl.constexpr, GROUP: tl.constexpr, BY_TOKEN: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr, ZERO: tl.constexpr, STEP_KIND: tl.constexpr,
    STAGES: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, AS_BYTES: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr, SLOTS: tl.constexpr, WIDE_OFFSETS: tl.constexpr, ALIGN: tl.constexpr,
    LOOP: tl.constexpr,
):  # fmt: skip
    """One chunk."""
    _program(
        out, out_b, out_h, out_t, out_d, heads, tokens, stretch, factor, cos, sin, rope_rows,
        time_groups, packed, steps, scale, zeros, ids0, table0, size0, ids1, table1, size1, ids2,
        table2, size2, ids3, table3, size3, low_codes, low_scales, basis, matrix, matrix_scale, D,
        BD, BT, BITS, REACH, ROW_BYTES, GROUP, BY_TOKEN, WHOLE_GROUPS, ZERO, STEP_KIND, STAGES,
        RANK, BR, WIDE, PRECISION, AS_BYTES, INTERLEAVED, PAIRS, SLOTS, WIDE_OFFSETS, ALIGN, LOOP,
    )  # fmt: skip


@triton.jit(do_not_specialize=_MANY_COUNTS)
def _many(
    jobs, a, a_b, a_h, a_t, a_d, b, b_b, b_h, b_t, heads, stretch, factor, matrix_scale,
    STEPS: tl.constexpr, SCALE: tl.constexpr, ZEROS: tl.constexpr, MATRIX: tl.constexpr,
    ALIGNED: tl.constexpr, JOB: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BITS: tl.constexpr, REACH: tl.constexpr,
    ROW_BYTES: tl.constexpr, GROUP: tl.constexpr, BY_TOKEN: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr, ZERO: tl.constexpr, STEP_KIND: tl.constexpr,
    STAGES: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, AS_BYTES: tl.constexpr, SLOTS: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr, ALIGN: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """A chunk a program_id(2): a row of ``jobs`` holds its numbers and addresses (``plan.Job``)."""
    job = jobs + tl.program_id(2) * JOB
    tokens = tl.load(job).to(tl.int32)
    if tl.program_id(0) * stretch < tokens:
        out, out_b, out_h, out_t = target_rows(job, a, a_b, a_h, a_t, b, b_b, b_h, b_t)
        _program(
            out, out_b, out_h, out_t, a_d, heads, tokens, stretch, factor, None, None, 0,
            tl.load(job + 3).to(tl.int32), pointer(job, 4, tl.uint8, ALIGNED),
            pointer(job, 5, STEPS, ALIGNED), pointer(job, 6, SCALE, False),
            pointer(job, 7, ZEROS, ALIGNED), pointer(job, 8, tl.uint8, False),
            pointer(job, 9, tl.bfloat16, ALIGNED), tl.load(job + 10).to(tl.int32),
            pointer(job, 11, tl.uint8, False), pointer(job, 12, tl.bfloat16, ALIGNED),
            tl.load(job + 13).to(tl.int32), pointer(job, 14, tl.uint8, False),
            pointer(job, 15, tl.bfloat16, ALIGNED), tl.load(job + 16).to(tl.int32),
            pointer(job, 17, tl.uint8, False), pointer(job, 18, tl.bfloat16, ALIGNED),
            tl.load(job + 19).to(tl.int32), pointer(job, 20, tl.int8, ALIGNED),
            pointer(job, 21, tl.float16, False), pointer(job, 22, tl.bfloat16, ALIGNED),
            pointer(job, 23, MATRIX, ALIGNED), matrix_scale, D, BD, BT, BITS, REACH, ROW_BYTES,
            GROUP, BY_TOKEN, WHOLE_GROUPS, ZERO, STEP_KIND, STAGES, RANK, BR, WIDE, PRECISION,
            AS_BYTES, False, 0, SLOTS, WIDE_OFFSETS, ALIGN, LOOP,
        )  # fmt: skip


def _stage_arguments(parts: Parts) -> list[Tensor | int | None]:
    arguments: list[Tensor | int | None] = []
    for stage in parts.stages:
        arguments += [stage.ids.contiguous(), stage.table.contiguous(), stage.table.shape[2]]
    return arguments + [None, None, 1] * (4 - len(parts.stages))


def _whole(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
