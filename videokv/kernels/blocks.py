"""Blocks of a packed chunk in a Triton kernel's registers; import only where Triton is there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.numbers import decode_e4m3, unpack_rows
from videokv.kernels.reconstruct.parts import Parts
from videokv.tensors import E4M3

ZERO_CODES = {"none": 0, "offset": 1, "integer": 2, "packed": 3}


def as_bytes(x: Tensor) -> Tensor:
    """E4M3 as its bytes (kernels handle them before compute capability 8.9 too)."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x


def whole_groups(parts: Parts, block: int) -> bool:
    """Whether a step serves a block of channels of a power of two: loaded once, not per channel."""
    size = parts.group_size
    return parts.axis == "token" and size & (size - 1) == 0 and size <= block


@triton.jit
def dequantize_block(
    packed, steps, scale, zeros, head, token, live, tokens, time_groups,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BITS: tl.constexpr, REACH: tl.constexpr,
    ROW_BYTES: tl.constexpr, GROUP: tl.constexpr, BY_TOKEN: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr, ZERO: tl.constexpr, STEP_BYTES: tl.constexpr,
):  # fmt: skip
    """Codes times steps plus offsets of the tokens ``token``: float32 [BT, BD], 0 outside.

    See ``reconstruct.parts.Parts``; head: int64 number of the (batch row, head).
    """
    row = head * tokens + token
    channel = tl.arange(0, BD)
    groups: tl.constexpr = D // GROUP
    codes = unpack_rows(packed, row, live, ROW_BYTES, BITS, BD).to(tl.float32)
    if BY_TOKEN:
        group = tl.arange(0, BD // GROUP) if WHOLE_GROUPS else channel // GROUP
        place = row[:, None] * groups + group[None, :]
        used = live[:, None] & (group < groups)[None, :]
    else:
        place = (head * time_groups + token // GROUP)[:, None] * D + channel[None, :]
        used = live[:, None] & (channel < D)[None, :]
    step = tl.load(steps + place, mask=used, other=0)
    step = decode_e4m3(step) if STEP_BYTES else step.to(tl.float32)
    if scale is not None:
        step = step * tl.load(scale + head).to(tl.float32)
    if ZERO == 0:
        offset = step * -REACH
    elif ZERO == 3:
        number = token[:, None].to(tl.int64) * groups + group[None, :]
        head_bytes = (tokens.to(tl.int64) * groups + 3) // 4
        byte = tl.load(zeros + head * head_bytes + number // 4, mask=used, other=0).to(tl.int32)
        offset = ((byte >> (6 - 2 * (number % 4)).to(tl.int32)) & 3).to(tl.float32)
    else:
        offset = tl.load(zeros + place, mask=used, other=0).to(tl.float32)
        if ZERO == 2:
            offset = tl.where(step > 0, offset * -step, offset)
    if WHOLE_GROUPS:
        codes = tl.reshape(codes, [BT, BD // GROUP, GROUP])
        step = step[:, :, None]
        offset = offset[:, :, None]
    values = (codes - offset) * step if ZERO == 3 else codes * step + offset
    if WHOLE_GROUPS:
        values = tl.reshape(values, [BT, BD])
    return values


@triton.jit
def centroids_block(ids, table, size, head, row, live, inside, channel, D: tl.constexpr):
    """The centroid of each token, float32 [rows, BD]; size: centroids of a head."""
    label = tl.load(ids + row, mask=live, other=0).to(tl.int64)
    place = ((head * size + label) * D)[:, None] + channel[None, :]
    return tl.load(table + place, mask=inside, other=0).to(tl.float32)
