"""The Triton kernels: a block of queries stays in registers for all maps; one launch for all keys.

A projection takes one direction of the basis after the other off the queries, in float32: numbers
cancel there, and a product of a block with a basis is too narrow for ``tl.dot`` (Triton 3.6
compiled one 16 wide for compute capability 9.0 so that it read beyond shared memory). A rotation of
16-bit queries by Hadamard signs of a power of two is a product in 16 bits, which are exact; other
rotations are TF32 products: what a projection left is rounded to 2^-11 before it is rotated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.gpu import on_device, products
from videokv.kernels.grids import cdiv, next_power_of_2
from videokv.kernels.launches import Launches
from videokv.kernels.score_columns import triton_energies, triton_sums
from videokv.kernels.score_columns.placement import TOKENS, Placement
from videokv.kernels.score_columns.widener import widener
from videokv.noise import QueryMap
from videokv.rotation import Rotation, signs

ROWS = 64
WARPS = 8
UNROLLED = 8  # directions of a basis that are in flight at once
# Strides are specialised on: whether 16 divides them, as it does for nearly all heads, decides
# whether 16 bytes are moved at once.
_COUNTS = ["heads", "group", "rows", "maps", "projected_maps", "fourth_maps"]
_PLACE_COUNTS = ["heads", "past", "tokens", "known", "columns"]
_KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_KEY_COUNTS = ["o_b", "o_h", "heads", "tokens", "a_b", "a_h", "b_b", "b_h"]


def widen_query(
    query: Tensor,
    maps: Sequence[QueryMap],
    *,
    scale: float,
    width: int,
    bases: Tensor | None = None,
) -> Tensor:
    """See the package."""
    return widening(query, maps, scale=scale, width=width, bases=bases)(query)


def widening(
    query: Tensor,
    maps: Sequence[QueryMap],
    *,
    scale: float,
    width: int,
    bases: Tensor | None = None,
) -> Callable[[Tensor], Tensor]:
    """``widen_query`` of the package for queries of this dtype and shape, on this device."""
    if bases is not None and triton_energies.serves(query, maps, bases):
        return triton_energies.widening(query, maps, scale=scale, width=width, bases=bases)
    if triton_sums.serves(query, maps):
        return triton_sums.widening(query, maps, scale=scale, width=width)
    batch, heads, rows, size = query.shape
    turn = maps[0].transform
    matrix = None
    native = bases is None and size & (size - 1) == 0
    if isinstance(turn, Rotation):
        kind = query.dtype if native else torch.float32
        matrix = signs(turn, device=query.device, dtype=kind)
    shrink = 1.0 if turn is None else 1.0 / size  # the matrix is H sqrt(D)
    numbers = (
        -scale / 24 * shrink,
        scale**3 / 2880 * shrink * shrink,
        heads,
        1 if bases is None else heads // bases.shape[2],
        rows,
        len(maps),
        sum((m.basis is not None) << i for i, m in enumerate(maps)),
        sum((m.power == 4) << i for i, m in enumerate(maps)),
    )
    constants = {
        "D": size,
        "BD": next_power_of_2(max(16, size)),
        "WIDTH": width,
        "BW": next_power_of_2(max(1, width - size)),
        "BM": ROWS,
        "FOURTH": any(m.power == 4 for m in maps),
        "GROUP": maps[0].group_size,
        "RANK": 1 if bases is None else bases.shape[3],
        "UNROLL": UNROLLED,
        "NATIVE": native,
        "EXACT": products(query.dtype, query.device),
        "num_warps": WARPS,
        "num_stages": 1,
    }
    launches = Launches(_widen, (cdiv(rows, ROWS), batch * heads), constants)
    return widener(launches, bases, matrix, *numbers, width=width)


@triton.jit(do_not_specialize=_COUNTS)
def _widen(
    q, q_b, q_h, q_m, out, bases, matrix, second, fourth, heads, group, rows,
    maps, projected_maps, fourth_maps,
    D: tl.constexpr, BD: tl.constexpr, WIDTH: tl.constexpr, BW: tl.constexpr, BM: tl.constexpr,
    FOURTH: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, UNROLL: tl.constexpr,
    NATIVE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(1).to(tl.int64)
    batch, head = line // heads, line % heads
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    live = row < rows
    channel = tl.arange(0, BD)
    inside = live[:, None] & (channel < D)[None, :]
    source = q + batch * q_b + head * q_h + row[:, None].to(tl.int64) * q_m + channel[None, :]
    held = tl.load(source, mask=inside, other=0.0)
    target = out + (line * rows + row)[:, None] * WIDTH
    tl.store(target + channel[None, :], held, mask=inside)
    spare = tl.arange(0, BW)
    empty = (spare >= maps * (D // GROUP)) & (spare < WIDTH - D)
    nothing = tl.zeros([BM, BW], out.dtype.element_ty)
    tl.store(target + D + spare[None, :], nothing, mask=live[:, None] & empty[None, :])
    x = held.to(tl.float32)
    number = tl.arange(0, BD // GROUP)
    own = (number < D // GROUP)[None, :] & live[:, None]
    basis = q
    lines = rows
    if bases is not None:
        kv_heads = heads // group
        lines = tl.num_programs(1) // heads * kv_heads
        basis = bases + (batch * kv_heads + head // group) * (D * RANK)
    turn = held
    if matrix is not None:
        square = matrix + channel[None, :] * D + channel[:, None]
        within = (channel < D)[None, :] & (channel < D)[:, None]
        turn = tl.load(square, mask=within, other=0.0)
    # A loop that stays one: written out, the compiler mixes the maps and runs out of registers.
    for number_of_map in range(maps):
        seen = x
        if bases is not None:
            projected = (projected_maps >> number_of_map) & 1
            if projected == 1:
                for direction in tl.range(0, RANK, loop_unroll_factor=UNROLL):
                    place = basis + direction * D + channel
                    along = tl.load(place, mask=channel < D, other=0.0).to(tl.float32)
                    share = tl.sum(x * along[None, :], 1)
                    seen -= share[:, None] * along[None, :]
                basis += lines.to(tl.int64) * (D * RANK)
        if matrix is not None:
            if NATIVE:
                seen = tl.dot(held, turn, input_precision=EXACT)
            else:
                seen = tl.dot(seen, turn, input_precision=EXACT)
        powers = seen * seen
        weight = second
        if FOURTH:
            raised = (fourth_maps >> number_of_map) & 1
            powers *= raised * powers + (1 - raised)
            weight = raised * fourth + (1 - raised) * second
        sums = tl.sum(tl.reshape(powers, [BM, BD // GROUP, GROUP]), 2) * weight
        place = target + D + number_of_map * (D // GROUP) + number[None, :]
        tl.store(place, sums.to(out.dtype.element_ty), mask=own)


# Kept as long as the placement, for columns of one shape.
_placings: WeakKeyDictionary[Placement, tuple[torch.Size, Launches]] = WeakKeyDictionary()


def place_key_columns(out: Tensor, placement: Placement) -> None:
    """See the package."""
    shape, tiles = out.shape, placement.tiles
    batch, heads, tokens, columns = shape
    past, known = placement.tokens, tiles.shape[0]
    kept = _placings.get(placement)
    if kept is None or kept[0] != shape:
        constants = {
            "KIND": _KINDS[placement.dtype],
            "COLUMNS": columns,
            "BF": next_power_of_2(columns),
            "BT": TOKENS,
            "num_warps": 4 if columns <= 32 else 8,
        }
        grid = (known + cdiv(tokens - past, TOKENS), batch * heads)
        kept = _placings[placement] = shape, Launches(_place, grid, constants)
    with on_device(out.device):
        kept[1](
            out,
            *out.stride()[:3],
            placement.places,
            tiles,
            placement.origins,
            heads,
            past,
            tokens,
            known,
            placement.columns,
        )


@triton.jit(do_not_specialize=_PLACE_COUNTS)
def _place(
    out, o_b, o_h, o_t, places, tiles, origins, heads, past, tokens, known, columns,
    KIND: tl.constexpr, COLUMNS: tl.constexpr, BF: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(1).to(tl.int64)
    batch, head = line // heads, line % heads
    tile = tl.program_id(0)
    old = tile < known
    entry = tiles + tl.minimum(tile, known - 1) * 4
    later = past + (tile - known) * BT  # rows behind the history: zeros
    first = tl.where(old, tl.load(entry), later).to(tl.int64)
    count = tl.where(old, tl.load(entry + 1), tokens - later)
    source = tl.load(entry + 2).to(tl.int64)
    part = tl.load(entry + 3)
    place = places + part * 3
    weights = tl.load(place).to(tl.pointer_type(KIND)) + line * tl.load(place + 1)
    token = tl.arange(0, BT)
    column = tl.arange(0, BF)
    live = token < count
    origin = tl.load(origins + part * columns + column, column < columns, other=-1)
    origin = tl.where(old, origin, -1)
    held = weights + (source + token)[:, None] * tl.load(place + 2) + origin[None, :]
    values = tl.load(held, mask=live[:, None] & (origin >= 0)[None, :], other=0.0)
    target = out + batch * o_b + head * o_h + (first + token)[:, None] * o_t + column[None, :]
    inside = live[:, None] & (column < COLUMNS)[None, :]
    tl.store(target, values.to(out.dtype.element_ty), mask=inside)


def fill_key_columns(out: Tensor, blocks: Sequence[tuple[int, Tensor]]) -> None:
    """See the package."""
    batch, heads, tokens, columns = out.shape
    arguments: list = []
    constants: dict = {}
    for name, place in zip("AB", (0, 1), strict=True):
        first, weights = blocks[place] if place < len(blocks) else (0, None)
        if weights is None:
            arguments += [None, 0, 0, 0]
            constants |= {f"{name}_FIRST": 0, f"{name}_COLUMNS": 0}
            continue
        if weights.stride(3) != 1 and weights.shape[3] > 1:
            weights = weights.contiguous()
        row = 0 if weights.shape[2] == 1 and tokens > 1 else weights.stride(2)
        arguments += [weights, *_steps(weights, batch, heads), row]
        constants |= {f"{name}_FIRST": first, f"{name}_COLUMNS": weights.shape[3]}
    with on_device(out.device):
        _fill[(cdiv(tokens, TOKENS), batch * heads)](
            out,
            *out.stride()[:3],
            *arguments,
            heads,
            tokens,
            **constants,
            COLUMNS=columns,
            BF=next_power_of_2(columns),
            BT=TOKENS,
            num_warps=4,
        )


def _steps(weights: Tensor, batch: int, heads: int) -> tuple[int, int]:
    """Strides of batch rows and heads, 0 where one serves all."""
    pairs = zip(weights.shape[:2], weights.stride()[:2], (batch, heads), strict=True)
    first, second = (0 if held == 1 and wanted > 1 else step for held, step, wanted in pairs)
    return first, second


@triton.jit(do_not_specialize=_KEY_COUNTS)
def _fill(
    out, o_b, o_h, o_t, a, a_b, a_h, a_t, b, b_b, b_h, b_t, heads, tokens,
    A_FIRST: tl.constexpr, A_COLUMNS: tl.constexpr, B_FIRST: tl.constexpr, B_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr, BF: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(1).to(tl.int64)
    batch, head = line // heads, line % heads
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    live = token < tokens
    column = tl.arange(0, BF)
    row = token[:, None].to(tl.int64)
    values = tl.zeros([BT, BF], tl.float32)
    if A_COLUMNS > 0:
        own = live[:, None] & ((column >= A_FIRST) & (column < A_FIRST + A_COLUMNS))[None, :]
        place = a + batch * a_b + head * a_h + row * a_t + column[None, :] - A_FIRST
        values += tl.load(place, mask=own, other=0.0).to(tl.float32)
    if B_COLUMNS > 0:
        own = live[:, None] & ((column >= B_FIRST) & (column < B_FIRST + B_COLUMNS))[None, :]
        place = b + batch * b_b + head * b_h + row * b_t + column[None, :] - B_FIRST
        values += tl.load(place, mask=own, other=0.0).to(tl.float32)
    target = out + batch * o_b + head * o_h + row * o_t + column[None, :]
    inside = live[:, None] & (column < COLUMNS)[None, :]
    tl.store(target, values.to(out.dtype.element_ty), mask=inside)
