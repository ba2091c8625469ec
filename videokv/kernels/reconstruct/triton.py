"""The Triton kernel: a program reconstructs a block of tokens of one head in registers.

Bytes per element that must move: bits / 8 and the steps in, the output's width out; centroid tables
and the rotation matrix stay in the caches. The rotation is a product of the block with the matrix
(FP16 operands for 8- and 16-bit outputs, each token scaled by its largest value, so the operands'
rounding is 2^-12 of it; three TF32 products for float32). Tokens, heads and table sizes are plain
arguments: a new length compiles nothing.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.blocks import (
    ZERO_CODES,
    as_bytes,
    centroids_block,
    dequantize_block,
    low_rank_block,
    reach_of,
    row_alignment,
    step_kind,
    store_block,
    whole_groups,
)
from videokv.kernels.gpu import on_device, products
from videokv.kernels.pack_codes import packed_length
from videokv.kernels.reconstruct import triton_unbiased
from videokv.kernels.reconstruct.parts import Parts
from videokv.kernels.reconstruct.rope import Rope
from videokv.kernels.reconstruct.rope_block import rope_arguments, turned_block
from videokv.rotation import signs
from videokv.tensors import E4M3

BLOCK_ELEMENTS = 8192  # of one program: 64 tokens of 128 channels
_COUNTS = ["heads", "tokens", "time_groups", "out_b", "out_h", "size0", "size1", "size2", "size3"]
_COUNTS += ["rope_rows"]


def reconstruct(
    parts: Parts, out: Tensor, *, factor: Tensor | None, rope: Rope | None = None
) -> None:
    """See the package; ``out`` is ``[B, H, T, D]`` of any strides."""
    if parts.centres is not None:
        triton_unbiased.reconstruct(parts, out, factor=factor, rope=rope)
        return
    batch, heads, tokens, size = parts.shape
    block = max(16, triton.next_power_of_2(size))
    rows = max(16, min(128, BLOCK_ELEMENTS // block))
    wide = out.dtype == torch.float32
    low = None if parts.low_rank is None else parts.low_rank.dense(tokens)
    rank = 0 if low is None else low.codes.shape[3]
    matrix = None
    if parts.rotation is not None:
        kind = torch.float32 if wide else torch.float16
        matrix = signs(parts.rotation, device=out.device, dtype=kind)
    with on_device(out.device):
        _kernel[(triton.cdiv(tokens, rows), batch * heads)](
            as_bytes(out),
            *out.stride(),
            heads,
            tokens,
            parts.steps.shape[2],
            parts.codes.contiguous(),
            as_bytes(parts.steps.contiguous()),
            _whole(parts.scale),
            _whole(parts.zeros),
            _whole(factor),
            *_stage_arguments(parts),
            None if low is None else low.codes.contiguous(),
            None if low is None else low.scales.contiguous(),
            None if low is None else low.basis.contiguous(),
            matrix,
            1.0 / math.sqrt(size),
            *rope_arguments(rope, tokens),
            D=size,
            BD=block,
            BT=rows,
            BITS=parts.bits,
            REACH=reach_of(parts),
            ROW_BYTES=packed_length(size, bits=parts.bits),
            GROUP=parts.group_size,
            BY_TOKEN=parts.axis == "token",
            WHOLE_GROUPS=whole_groups(parts, block),
            ZERO=ZERO_CODES[parts.zero],
            STEP_KIND=step_kind(parts),
            STAGES=len(parts.stages),
            RANK=rank,
            BR=max(16, triton.next_power_of_2(max(1, rank))),
            WIDE=wide,
            PRECISION=products(out.dtype, out.device),
            AS_BYTES=out.dtype == E4M3,
            INTERLEAVED=rope is not None and rope.interleaved,
            PAIRS=0 if rope is None else rope.pairs,
            ALIGN=row_alignment(out),
            num_warps=8 if parts.rotation is not None else 4,
            enable_fp_fusion=False,  # the same roundings as the reference
        )


@triton.jit(do_not_specialize=_COUNTS)
def _kernel(
    out,
    out_b,
    out_h,
    out_t,
    out_d,
    heads,
    tokens,
    time_groups,
    packed,
    steps,
    scale,
    zeros,
    factor,
    ids0,
    table0,
    size0,
    ids1,
    table1,
    size1,
    ids2,
    table2,
    size2,
    ids3,
    table3,
    size3,
    low_codes,
    low_scales,
    basis,
    matrix,
    matrix_scale,
    cos,
    sin,
    rope_rows,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BITS: tl.constexpr,
    REACH: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr,
    ZERO: tl.constexpr,
    STEP_KIND: tl.constexpr,
    STAGES: tl.constexpr,
    RANK: tl.constexpr,
    BR: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    AS_BYTES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    live = token < tokens
    row = head * tokens + token
    channel = tl.arange(0, BD)
    inside = live[:, None] & (channel < D)[None, :]

    values = dequantize_block(
        packed, steps, scale, zeros, head, token, live, tokens, time_groups,
        D, BD, BT, BITS, REACH, ROW_BYTES, GROUP, BY_TOKEN, WHOLE_GROUPS, ZERO, STEP_KIND,
    )  # fmt: skip

    if STAGES > 0:
        values += centroids_block(ids0, table0, size0, head, row, live, inside, channel, D)
    if STAGES > 1:
        values += centroids_block(ids1, table1, size1, head, row, live, inside, channel, D)
    if STAGES > 2:
        values += centroids_block(ids2, table2, size2, head, row, live, inside, channel, D)
    if STAGES > 3:
        values += centroids_block(ids3, table3, size3, head, row, live, inside, channel, D)

    if matrix is not None:
        square = matrix + channel[:, None] * D + channel[None, :]
        turn = tl.load(square, mask=(channel < D)[:, None] & (channel < D)[None, :], other=0)
        if WIDE:
            values = tl.dot(values, turn, input_precision=PRECISION) * matrix_scale
        else:
            largest = tl.max(tl.abs(values), 1)
            inverse = 1.0 / tl.where(largest > 0, largest, 1.0)
            halves = (values * inverse[:, None]).to(tl.float16)
            values = tl.dot(halves, turn) * (largest * matrix_scale)[:, None]

    if RANK > 0:
        values += low_rank_block(
            low_codes, low_scales, basis, head, row, live, channel, D, RANK, BR, WIDE, PRECISION
        )

    if PAIRS > 0:
        first = (head // heads) * rope_rows
        values = turned_block(values, cos, sin, first, token, live, INTERLEAVED, PAIRS, BT, BD)

    if factor is not None:
        values = values * tl.load(factor + head)
    base = (head // heads) * out_b + (head % heads) * out_h
    base = tl.multiple_of(base, ALIGN)
    target = out + base + token[:, None].to(tl.int64) * out_t + channel[None, :] * out_d
    store_block(target, values, inside, AS_BYTES)


def _stage_arguments(parts: Parts) -> list[Tensor | int | None]:
    arguments: list[Tensor | int | None] = []
    for stage in parts.stages:
        arguments += [stage.ids.contiguous(), stage.table.contiguous(), stage.table.shape[2]]
    return arguments + [None, None, 1] * (4 - len(parts.stages))


def _whole(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
