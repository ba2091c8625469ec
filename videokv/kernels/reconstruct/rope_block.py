"""Rotary embedding of a block of keys in a Triton kernel's registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.reconstruct.rope import Rope


def rope_arguments(rope: Rope | None, tokens: int) -> list[Tensor | int | None]:
    """Tables, and how far apart those of two batch rows are (0: one for all)."""
    if rope is None:
        return [None, None, 0]
    return [rope.cos.contiguous(), rope.sin.contiguous(), tokens if rope.cos.ndim == 3 else 0]


@triton.jit
def turned_block(
    values, cos, sin, first, token, live, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Keys float32 [BT, BD] of the tokens ``token``, turned (see ``rope.Rope``).

    first: row of the tables that belongs to token 0 of this batch row.
    """
    line = (first + token)[:, None] * PAIRS
    if INTERLEAVED:
        pair = tl.arange(0, BD // 2)
        turns = live[:, None] & (pair < PAIRS)[None, :]
        c = tl.load(cos + line + pair[None, :], mask=turns, other=1.0)
        s = tl.load(sin + line + pair[None, :], mask=turns, other=0.0)
        a, b = tl.split(tl.reshape(values, [BT, BD // 2, 2]))
        turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), [BT, BD])
    else:
        channel = tl.arange(0, BD)
        turns = live[:, None] & (channel < 2 * PAIRS)[None, :]
        c = tl.load(cos + line + (channel % PAIRS)[None, :], mask=turns, other=1.0)
        s = tl.load(sin + line + (channel % PAIRS)[None, :], mask=turns, other=0.0)
        partner = tl.where(channel < PAIRS, channel + PAIRS, channel - PAIRS)
        partner = tl.where(channel < 2 * PAIRS, partner, channel)
        other = tl.gather(values, tl.broadcast_to(partner[None, :], [BT, BD]), 1)
        turned = values * c + other * tl.where((channel < PAIRS)[None, :], -s, s)
    return turned
