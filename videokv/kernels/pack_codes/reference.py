"""PyTorch bodies. Unpacking looks bytes up: one gather of four codes is one int32."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad


def pack(codes: Tensor, *, bits: int) -> Tensor:
    """See ``videokv.kernels.pack_codes.pack``."""
    if bits == 8:
        return codes.clone(memory_format=torch.contiguous_format)
    if bits == 3:
        return _pack_words(codes)
    per_byte = 8 // bits
    slots = pad(codes, (0, -codes.shape[-1] % per_byte)).unflatten(-1, (-1, per_byte)).unbind(-1)
    packed = slots[0].clone(memory_format=torch.contiguous_format)
    for slot in slots[1:]:
        packed.bitwise_left_shift_(bits).bitwise_or_(slot)
    return packed


def _pack_words(codes: Tensor) -> Tensor:
    slots = pad(codes, (0, -codes.shape[-1] % 8)).unflatten(-1, (-1, 8)).unbind(-1)
    word = slots[0].to(torch.int32)
    for slot in slots[1:]:
        word = (word << 3) | slot
    return torch.stack([word >> 16, (word >> 8) & 255, word & 255], -1).to(torch.uint8).flatten(-2)


def unpack(packed: Tensor, *, bits: int, count: int) -> Tensor:
    """See ``videokv.kernels.pack_codes.unpack``."""
    if bits == 8:
        return packed
    if bits == 3:
        table, index = _table(3, 12, packed.device), _twelve_bits(packed)
    else:
        table, index = _table(bits, 8, packed.device), packed.to(torch.int32)
    found = table.index_select(0, index.reshape(-1)).view(torch.uint8)
    slots = index.shape[-1] * table.element_size()
    return found.view(*packed.shape[:-1], slots)[..., :count]


def _twelve_bits(packed: Tensor) -> Tensor:
    """Every 3-byte word as its upper and lower 12 bits, four codes each: int32 ``[..., 2 w]``."""
    first, middle, last = packed.to(torch.int32).unflatten(-1, (-1, 3)).unbind(-1)
    upper = (first << 4) | (middle >> 4)
    lower = ((middle & 15) << 8) | last
    return torch.stack([upper, lower], -1).flatten(-2)


@functools.lru_cache(maxsize=32)
def _table(bits: int, width: int, device: torch.device) -> Tensor:
    """Codes in each ``width``-bit number, first code first, seen as one integer a number."""
    shifts = torch.arange(width - bits, -1, -bits)
    codes = (torch.arange(1 << width)[:, None] >> shifts) & ((1 << bits) - 1)
    wide = torch.int32 if codes.shape[1] == 4 else torch.int16
    return codes.to(torch.uint8).view(wide).flatten().to(device)
