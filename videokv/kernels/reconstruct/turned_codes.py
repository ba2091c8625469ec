"""Packed codes times a rotation, in a Triton kernel's registers, without unpacking rows.

A sum does not ask for the order of its terms: with 2 bits the first code of every byte meets every
fourth row of the matrix in one product, the second code the rows after those, and so on. So a byte
becomes operands where it was loaded; the codes of a row are never brought into their order, which
would take a pass through shared memory.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.numbers import e4m3_halves
from videokv.rotation import Rotation, signs


@triton.jit
def rotation_rows(matrix, D: tl.constexpr, BD: tl.constexpr, SLOTS: tl.constexpr):
    """The matrix [BD, BD] as a tuple: entry s holds the rows s, SLOTS + s, 2 SLOTS + s, ..."""
    column = tl.arange(0, BD)
    first = tl.arange(0, BD // SLOTS) * SLOTS
    rows = ()
    for slot in tl.static_range(SLOTS):
        row = first + slot
        square = matrix + row[:, None] * D + column[None, :]
        inside = (row < D)[:, None] & (column < D)[None, :]
        rows = rows + (tl.load(square, mask=inside, other=0),)  # type: ignore[assignment]
    return rows


@functools.lru_cache(maxsize=64)
def signs_and_sums(rotation: Rotation, *, group_size: int, device: torch.device) -> Tensor:
    """The signs [D, D] in FP16 and, below, their sums over each group of rows [D / group, D].

    The sums are what an offset of 1 in a group is turned into; of at most 256 signs, so exact.
    """
    # On the host: what a stream computed, those of other caches would have to wait for.
    matrix = signs(rotation, device=torch.device("cpu"), dtype=torch.float16)
    sums = matrix.float().unflatten(0, (-1, group_size)).sum(1)
    return torch.cat([matrix, sums.half()]).to(device)


@triton.jit
def offset_rows(
    matrix, zeros, D: tl.constexpr, BD: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr
):
    """The sums of ``signs_and_sums`` [16 or more, BD] in the dtype of ``zeros``.

    WIDE: float32 instead, where BF16 cannot be multiplied.
    """
    group = tl.arange(0, 16 if BD // GROUP < 16 else BD // GROUP)
    column = tl.arange(0, BD)
    place = matrix + D * D + group[:, None] * D + column[None, :]
    inside = (group < D // GROUP)[:, None] & (column < D)[None, :]
    return tl.load(place, mask=inside, other=0).to(tl.float32 if WIDE else zeros.dtype.element_ty)


@triton.jit
def turned_codes(
    packed, steps, scale, zeros, head, row, live, turn, sums, matrix_scale,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BITS: tl.constexpr, REACH: tl.constexpr,
    ROW_BYTES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, SLOTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(Codes times steps plus offsets) H, float32 [BT, BD], with operands that are exact.

    steps: E4M3 bytes; codes times steps have few significant bits and fit FP16. Offsets are turned
    by a product of their own in their own dtype: any size of them is right.
    turn: of ``rotation_rows``; sums: of ``offset_rows``; SLOTS: codes of a byte. GROUP: a power of
    two, a multiple of SLOTS.
    """
    columns: tl.constexpr = BD // SLOTS
    groups: tl.constexpr = D // GROUP
    column = tl.arange(0, columns)
    place = packed + row[:, None] * ROW_BYTES + column[None, :]
    bits = tl.load(place, mask=live[:, None] & (column < ROW_BYTES)[None, :], other=0)
    group = tl.arange(0, BD // GROUP)
    each = row[:, None] * groups + group[None, :]
    step = e4m3_halves(tl.load(steps + each, mask=live[:, None] & (group < groups), other=0))
    step = tl.broadcast_to(step[:, :, None], [BT, BD // GROUP, GROUP // SLOTS])
    step = tl.reshape(step, [BT, columns])
    if ZERO == 0:
        values = tl.zeros([BT, BD], dtype=tl.float32)
    else:
        group = tl.arange(0, sums.shape[0])
        each = row[:, None] * groups + group[None, :]
        offset = tl.load(zeros + each, mask=live[:, None] & (group < groups), other=0)
        values = tl.dot(offset.to(sums.dtype), sums, input_precision=PRECISION)
    origin: tl.constexpr = 1024.0 + (REACH if ZERO == 0 else 0.0)
    bits = bits.to(tl.int32)
    for slot in tl.static_range(SLOTS):
        # 1024 + n is FP16's bits 0x6400 + n: two cheap operations instead of a conversion.
        code = ((bits >> (8 - BITS - BITS * slot)) & ((1 << BITS) - 1)) | 0x6400
        code = code.to(tl.int16).to(tl.float16, bitcast=True) - origin
        values = tl.dot(code * step, turn[slot], acc=values)
    if scale is not None:
        matrix_scale = matrix_scale * tl.load(scale + head).to(tl.float32)
    return values * matrix_scale


@triton.jit
def turned_odd_codes(
    packed, row, live, turn, BD: tl.constexpr, BITS: tl.constexpr, ROW_BYTES: tl.constexpr,
    SLOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Codes around zero, doubled, times the matrix: float32 [BT, BD], exact for signs.

    turn: of ``rotation_rows``; SLOTS: codes of a byte, or of three bytes with 3 bits (8).
    """
    columns: tl.constexpr = BD // SLOTS
    top: tl.constexpr = 24 if BITS == 3 else 8
    column = tl.arange(0, columns)
    if BITS == 3:
        place = packed + row[:, None] * ROW_BYTES + (column * 3)[None, :]
        inside = live[:, None] & (column * 3 < ROW_BYTES)[None, :]
        bits = tl.load(place, mask=inside, other=0).to(tl.int32) << 16
        bits |= tl.load(place + 1, mask=inside, other=0).to(tl.int32) << 8
        bits |= tl.load(place + 2, mask=inside, other=0).to(tl.int32)
    else:
        place = packed + row[:, None] * ROW_BYTES + column[None, :]
        inside = live[:, None] & (column < ROW_BYTES)[None, :]
        bits = tl.load(place, mask=inside, other=0).to(tl.int32)
    for slot in tl.static_range(SLOTS):
        # Doubled: shifted by one bit less.
        code = ((bits << 1) >> (top - BITS - BITS * slot)) & ((2 << BITS) - 2) | 0x6400
        code = code.to(tl.int16).to(tl.float16, bitcast=True) - (1023.0 + (1 << BITS))
        if slot == 0:
            values = tl.dot(code.to(turn[0].dtype), turn[0], input_precision=PRECISION)
        else:
            values = tl.dot(
                code.to(turn[slot].dtype), turn[slot], acc=values, input_precision=PRECISION
            )
    return values
