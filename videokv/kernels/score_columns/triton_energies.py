"""Energies of projected queries without the projected queries: all maps of all chunks at once.

    |x_g - U_g c|^2 = |x_g|^2 - 2 c . (U_g^T x_g) + c . (U_g^T U_g) c        c = sum_g U_g^T x_g

for a group g of channels and a map's basis U (BF16, r columns; nothing is assumed of it). The
directions of all maps stand side by side as one operand, 64 columns wide, so that a block of
queries needs two products a group where the direct way takes each direction off each query in turn
(0.10 ms for six maps of rank 8; this is what QuantWM's chunks need). Products of 16-bit queries and
BF16 bases are exact; what is left after the subtraction is right to 2^-22 of the query's energy.
Tokens without repair have a map without a basis: it may stand anywhere among the others and takes
nothing off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.gpu import products
from videokv.kernels.grids import cdiv, next_power_of_2
from videokv.kernels.launches import Launches
from videokv.kernels.score_columns.widener import widener
from videokv.noise import QueryMap

ROWS = 64
WARPS = 4
COLUMNS = 64  # directions of all maps, each map's padded to a power of two
MOST_GROUPS = 2
_COUNTS = ["heads", "group", "rows", "maps", "bare"]


def serves(query: Tensor, maps: Sequence[QueryMap], bases: Tensor | None) -> bool:
    """Whether all maps are such: projected (but one), not rotated, squares, one or two groups a
    head."""
    size, group = query.shape[3], maps[0].group_size
    plain = all(m.transform is None and m.power == 2 for m in maps)
    if bases is None or not plain or len(_bare(maps)) > 1:
        return False
    if bases.dtype != torch.bfloat16 and query.dtype != torch.float32:
        return False
    fits = len(maps) * next_power_of_2(bases.shape[3]) <= COLUMNS
    return fits and group >= 16 and size % group == 0 and size // group <= MOST_GROUPS


def _bare(maps: Sequence[QueryMap]) -> list[int]:
    """The maps without a basis."""
    return [number for number, m in enumerate(maps) if m.basis is None]


def widening(
    query: Tensor, maps: Sequence[QueryMap], *, scale: float, width: int, bases: Tensor
) -> Callable[[Tensor], Tensor]:
    """``widen_query`` of the package for queries of this dtype and shape, on this device.

    bases: ``[maps that have one, B, Hkv, r, D]``.
    """
    batch, heads, rows, size = query.shape
    numbers = (
        -scale / 24,
        heads,
        heads // bases.shape[2],
        rows,
        len(maps),
        next(iter(_bare(maps)), len(maps)),
    )
    constants = {
        "D": size,
        "WIDTH": width,
        "BW": next_power_of_2(max(1, width - size)),
        "BM": ROWS,
        "GROUP": maps[0].group_size,
        "RANK": bases.shape[3],
        "BR": next_power_of_2(bases.shape[3]),
        "BN": COLUMNS,
        "EXACT": products(query.dtype, query.device),
        "SPLIT": products(torch.float32, query.device),
        "num_warps": WARPS,
    }
    launches = Launches(_widen, (cdiv(rows, ROWS), batch * heads), constants)
    return widener(launches, bases, *numbers, width=width)


@triton.jit(do_not_specialize=_COUNTS)
def _widen(
    q, q_b, q_h, q_m, out, bases, weight, heads, group, rows, maps, bare,
    D: tl.constexpr, WIDTH: tl.constexpr, BW: tl.constexpr, BM: tl.constexpr, GROUP: tl.constexpr,
    RANK: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, EXACT: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = D // GROUP
    line = tl.program_id(1).to(tl.int64)
    batch, head = line // heads, line % heads
    kv_heads = heads // group
    lines = (tl.num_programs(1) // heads * kv_heads).to(tl.int64)
    basis = bases + (batch * kv_heads + head // group) * (D * RANK)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    live = row < rows
    source = q + batch * q_b + head * q_h + row[:, None].to(tl.int64) * q_m
    target = out + (line * rows + row)[:, None] * WIDTH
    spare = tl.arange(0, BW)
    empty = (spare >= maps * GROUPS) & (spare < WIDTH - D)
    nothing = tl.zeros([BM, BW], out.dtype.element_ty)
    tl.store(target + D + spare[None, :], nothing, mask=live[:, None] & empty[None, :])

    first, first_basis, first_share = _group(
        source, target, basis, lines, live, maps, bare, 0, GROUP, D, RANK, BR, BN, EXACT
    )
    shares = first_share
    if GROUPS == 2:
        second, second_basis, second_share = _group(
            source, target, basis, lines, live, maps, bare, GROUP, GROUP, D, RANK, BR, BN, EXACT
        )
        shares += second_share
    energies = _energies(first, first_basis, first_share, shares, BR, BN, EXACT, SPLIT)
    _stored(target, energies * weight, live, maps, 0, D, GROUPS, BR, BN)
    if GROUPS == 2:
        energies = _energies(second, second_basis, second_share, shares, BR, BN, EXACT, SPLIT)
        _stored(target, energies * weight, live, maps, 1, D, GROUPS, BR, BN)


@triton.jit
def _group(
    source, target, basis, lines, live, maps, bare, start: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Channels of a group (copied on the way), those of all directions, their products."""
    channel = start + tl.arange(0, GROUP)
    column = tl.arange(0, BN)
    number, direction = column // BR, column % BR
    x = tl.load(source + channel[None, :], mask=live[:, None], other=0.0)
    tl.store(target + channel[None, :], x, mask=live[:, None])
    held = number - (number > bare).to(tl.int32)  # of the maps that have a basis
    place = basis + held[None, :] * (lines * (D * RANK)) + direction[None, :] * D
    some = (number < maps) & (number != bare) & (direction < RANK)
    span = tl.load(place + channel[:, None], mask=some[None, :], other=0.0).to(x.dtype)
    return x, span, tl.dot(x, span, input_precision=EXACT)


@triton.jit
def _energies(
    x, span, share, shares, BR: tl.constexpr, BN: tl.constexpr, EXACT: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """What every map leaves of a group's squares, float32 [rows, BN // BR]."""
    number = tl.arange(0, BN) // BR
    gram = tl.dot(tl.trans(span), span, input_precision=EXACT)
    gram = tl.where(number[:, None] == number[None, :], gram, 0.0)
    taken = shares * (tl.dot(shares, gram, input_precision=SPLIT) - 2.0 * share)
    taken = tl.sum(tl.reshape(taken, [taken.shape[0], BN // BR, BR]), 2)
    wide = x.to(tl.float32)
    return tl.maximum(taken + tl.sum(wide * wide, 1)[:, None], 0.0)


@triton.jit
def _stored(
    target, columns, live, maps, group: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    number = tl.arange(0, BN // BR)
    place = target + D + number[None, :] * GROUPS + group
    mask = live[:, None] & (number < maps)[None, :]
    tl.store(place, columns.to(target.dtype.element_ty), mask=mask)
