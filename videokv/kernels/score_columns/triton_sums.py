"""Columns of one map without a basis: a rotated group's energy without the rotated query.

Sylvester's H of D channels is that of D / g groups crossed with that of a group's g channels, which
keeps lengths. So the energy of rotated group j is that of the sum of all groups of the query, each
with the sign that the small H has for it: additions of whole groups, no product of matrices. The
query is read once, as groups side by side in a thread, and written with its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.grids import cdiv, next_power_of_2
from videokv.kernels.launches import Launches
from videokv.kernels.score_columns.widener import widener
from videokv.noise import QueryMap
from videokv.rotation import Rotation, signs

ROWS = 64
WARPS = 8
MOST_GROUPS = 8
SMALLEST_GROUP = 16
_COUNTS = ["heads", "rows"]


def serves(query: Tensor, maps: Sequence[QueryMap]) -> bool:
    """Whether there is one map: of squares, projected off nothing; rotated by signs alone or not at
    all; few groups of a power of two."""
    if len(maps) != 1:
        return False
    (only,), size = maps, query.shape[3]
    groups = size // only.group_size
    known = only.transform is None or isinstance(only.transform, Rotation)
    plain = only.basis is None and only.power == 2 and known
    fits = only.group_size >= SMALLEST_GROUP and groups <= MOST_GROUPS
    return plain and fits and size & (size - 1) == 0


def widening(
    query: Tensor, maps: Sequence[QueryMap], *, scale: float, width: int
) -> Callable[[Tensor], Tensor]:
    """``widen_query`` of the package for queries of this dtype and shape, on this device."""
    (only,), turn = maps, maps[0].transform
    batch, heads, rows, size = query.shape
    groups = size // only.group_size
    flips, shrink = None, 1.0
    if isinstance(turn, Rotation) and groups > 1:
        # The first row of H sqrt(D) is its signs.
        flips = signs(turn, device=query.device, dtype=torch.float32)
        shrink = 1.0 / groups
    numbers = (-scale / 24 * shrink, heads, rows)
    constants = {
        "D": size,
        "WIDTH": width,
        "BW": next_power_of_2(width - size),
        "BM": ROWS,
        "GROUP": only.group_size,
        "num_warps": WARPS,
    }
    launches = Launches(_widen, (cdiv(rows, ROWS), batch * heads), constants)
    return widener(launches, flips, *numbers, width=width)


@triton.jit(do_not_specialize=_COUNTS)
def _widen(
    q, q_b, q_h, q_m, out, flips, weight, heads, rows,
    D: tl.constexpr, WIDTH: tl.constexpr, BW: tl.constexpr, BM: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = D // GROUP
    line = tl.program_id(1).to(tl.int64)
    batch, head = line // heads, line % heads
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    live = row < rows
    channel = tl.arange(0, GROUP)
    source = q + batch * q_b + head * q_h + row[:, None].to(tl.int64) * q_m + channel[None, :]
    target = out + (line * rows + row)[:, None] * WIDTH
    held = ()
    for group in tl.static_range(GROUPS):
        x = tl.load(source + group * GROUP, mask=live[:, None], other=0.0)
        held = held + (x,)  # type: ignore[assignment]
    parts = ()
    for group in tl.static_range(GROUPS):
        tl.store(target + group * GROUP + channel[None, :], held[group], mask=live[:, None])
        wide = held[group].to(tl.float32)  # type: ignore[var-annotated]
        if flips is not None:
            wide *= tl.load(flips + group * GROUP + channel)[None, :]
        parts = parts + (wide,)  # type: ignore[assignment]
    if flips is not None:
        for level in tl.static_range(GROUPS.bit_length() - 1):
            parts = _butterfly(parts, GROUPS, 1 << level)
    spare = tl.arange(0, BW)
    columns = tl.zeros([BM, BW], tl.float32)
    for group in tl.static_range(GROUPS):
        energy = tl.sum(parts[group] * parts[group], 1) * weight
        columns = tl.where((spare == group)[None, :], energy[:, None], columns)
    inside = live[:, None] & (spare < WIDTH - D)[None, :]
    tl.store(target + D + spare[None, :], columns.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _butterfly(parts, GROUPS: tl.constexpr, APART: tl.constexpr):
    """Sums and differences of the parts that are so far apart."""
    made = ()
    for group in tl.static_range(GROUPS):
        if group & APART == 0:
            made = made + (parts[group] + parts[group + APART],)  # type: ignore[assignment]
        else:
            made = made + (parts[group - APART] - parts[group],)  # type: ignore[assignment]
    return made
