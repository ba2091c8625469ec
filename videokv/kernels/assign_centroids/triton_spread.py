"""k-means++ of many centroids in two launches: tokens gathered channel by channel, then all draws.

One program draws for a head. Its evenly spaced tokens, up to 4,096, do not fit into registers: they
are read again from the second-level cache for every draw, a plane of tokens a channel, so that each
thread adds up the distances of its own tokens and nothing is exchanged before a draw. What it keeps
are the smallest distances, one number a token.

The draws are those of ``starts.spread_tokens``: the same numbers, the same integers to draw from.
Only a distance is rounded otherwise (squares are added channel after channel, each with one
rounding), so that a draw may fall to a neighbour where it comes within 1e-6 of the border.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.assign_centroids.starts import TOKENS_PER_CENTROID, uniforms
from videokv.kernels.blocks import row_alignment
from videokv.kernels.gpu import on_device

ROWS = 64  # tokens of a program that gathers
TOKENS_A_THREAD = 8  # 16 bytes of a plane
CHANNELS = 8  # planes in flight
MOST_WARPS = 8  # 12 heads, 256 draws: 3.9 ms on an H200, with 16 warps 5.8; 720 heads: 44 and 51
_COUNTS = ["x_b", "x_h", "heads", "tokens", "spaced", "count"]


def spread(x: Tensor, *, count: int, seed: int) -> Tensor:
    """See ``starts.spread_tokens``: float32 ``[B, H, count, D]``.

    x ``[B, H, T, D]`` of any floating dtype. Takes a copy of the tokens that are drawn among.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, tokens, size = x.shape
    limit = TOKENS_PER_CENTROID * count
    line = max(ROWS, 1 << (limit - 1).bit_length())
    planes = -(-size // CHANNELS) * CHANNELS
    block = max(16, 1 << (planes - 1).bit_length())
    gathered = torch.empty(batch * heads, planes, line, dtype=x.dtype, device=x.device)
    found = torch.empty(batch, heads, count, size, device=x.device)
    chunk = (x, *x.stride()[:3])
    counts = (heads, tokens, min(tokens, limit))
    shape = {"ALIGN": row_alignment(x), "D": size, "PLANES": planes, "LINE": line, "BD": block}
    with on_device(x.device):
        _gather[(line // ROWS, batch * heads)](
            *chunk, gathered, *counts, BT=ROWS, num_warps=4, **shape
        )
        _draw[(batch * heads,)](
            *chunk,
            gathered,
            _uniforms(count, seed, x.device),
            found,
            *counts,
            count,
            CHANNELS=CHANNELS,
            num_warps=max(1, min(MOST_WARPS, line // (32 * TOKENS_A_THREAD))),
            **shape,
        )
    return found


@functools.lru_cache(maxsize=64)
def _uniforms(count: int, seed: int, device: torch.device) -> Tensor:
    return torch.tensor(uniforms(count, seed), dtype=torch.float64, device=device)


@triton.jit(do_not_specialize=_COUNTS)
def _gather(
    x, x_b, x_h, x_t, gathered, heads, tokens, spaced,
    ALIGN: tl.constexpr, D: tl.constexpr, PLANES: tl.constexpr, LINE: tl.constexpr,
    BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The evenly spaced tokens of a head, [PLANES, LINE]; 0 beyond the channels and tokens."""
    head = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BD)
    line = tl.program_id(0) * BT + tl.arange(0, BT)
    base = tl.multiple_of((head // heads) * x_b + (head % heads) * x_h, ALIGN)
    place = x + base + _token(line, tokens, spaced)[:, None] * x_t + channel[None, :]
    block = tl.load(place, mask=(line < spaced)[:, None] & (channel < D)[None, :], other=0.0)
    target = gathered + (head * PLANES + channel)[None, :] * LINE + line[:, None]
    tl.store(target, block, mask=(channel < PLANES)[None, :] & (line < LINE)[:, None])


@triton.jit
def _token(line, tokens, spaced):
    """The token that is drawn as number ``line``."""
    return line.to(tl.int64) * tokens // spaced


@triton.jit(do_not_specialize=_COUNTS)
def _draw(
    x, x_b, x_h, x_t, gathered, uniform, found, heads, tokens, spaced, count,
    ALIGN: tl.constexpr, D: tl.constexpr, PLANES: tl.constexpr, LINE: tl.constexpr,
    BD: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BD)
    base = tl.multiple_of((head // heads) * x_b + (head % heads) * x_h, ALIGN)
    line = tl.arange(0, LINE)
    mine = gathered + head * PLANES * LINE + line
    live = line < spaced
    smallest = tl.where(live, float("inf"), 0.0)
    chosen = (tl.load(uniform) * spaced.to(tl.float64)).to(tl.int32)
    for number in range(0, count):
        chosen = tl.maximum(0, tl.minimum(chosen, spaced - 1))
        one = x + base + _token(chosen, tokens, spaced) * x_t
        row = tl.load(one + channel, mask=channel < D, other=0.0).to(tl.float32)
        tl.store(found + (head * count + number) * D + channel, row, mask=channel < D)
        distance = tl.zeros([LINE], tl.float32)
        for first in range(0, PLANES, CHANNELS):
            for plane in tl.static_range(CHANNELS):
                centre = tl.load(one + first + plane, mask=first + plane < D, other=0.0)
                values = tl.load(mine + (first + plane) * LINE)
                apart = values.to(tl.float32) - centre.to(tl.float32)
                distance = tl.fma(apart, apart, distance)
        smallest = tl.where(live, tl.minimum(smallest, distance), 0.0)
        # As in ``starts``: integers, whose sums are the same in any order.
        largest = tl.max(smallest, 0).to(tl.float64)
        unit = tl.where(largest > 0, 1099511627776.0 / tl.where(largest > 0, largest, 1.0), 0.0)
        steps = (smallest.to(tl.float64) * unit).to(tl.int64)
        total = tl.sum(steps, 0).to(tl.float64)
        goal = (total * tl.load(uniform + tl.minimum(number + 1, count - 1))).to(tl.int64) + 1
        chosen = tl.sum((tl.cumsum(steps, 0) < goal).to(tl.int32), 0)
