"""The Triton kernels: a block of queries stays in registers for all maps; a launch a chunk of keys.

Products are TF32 of factors that are exact in it (16-bit queries, BF16 bases, Hadamard signs of a
power of two). What is taken off in a projection, where numbers cancel, is a sum of three of them;
what is left is rounded to 2^-11 before it is rotated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.gpu import on_device, products
from videokv.noise import QueryMap
from videokv.rotation import Rotation, signs

ROWS, TOKENS = 64, 128
_COUNTS = ["q_b", "q_h", "heads", "group", "rows"]
_KEY_COUNTS = ["o_b", "o_h", "heads", "tokens", "a_b", "a_h", "b_b", "b_h"]


def widen_query(query: Tensor, maps: Sequence[QueryMap], *, scale: float, width: int) -> Tensor:
    """See the package."""
    query = query if query.stride(3) == 1 else query.contiguous()
    batch, heads, rows, size = query.shape
    out = query.new_empty(batch, heads, rows, width)
    held = [m.basis for m in maps if m.basis is not None]
    bases = None
    if held:
        bases = held[0].unsqueeze(0) if len(held) == 1 else torch.stack(held)
        bases = bases.contiguous()
    turn = maps[0].transform
    matrix = None
    if isinstance(turn, Rotation):
        matrix = signs(turn, device=query.device, dtype=torch.float32)
    rank = 1 if bases is None else bases.shape[4]
    shrink = 1.0 if turn is None else 1.0 / size  # the matrix is H sqrt(D)
    with on_device(query.device):
        _widen[(triton.cdiv(rows, ROWS), batch * heads)](
            query,
            *query.stride()[:3],
            out,
            bases,
            matrix,
            -scale / 24 * shrink,
            scale**3 / 2880 * shrink * shrink,
            heads,
            1 if bases is None else heads // bases.shape[2],
            rows,
            D=size,
            BD=triton.next_power_of_2(max(16, size)),
            WIDTH=width,
            BW=triton.next_power_of_2(max(1, width - size)),
            BM=ROWS,
            MAPS=len(maps),
            PROJECTED=sum((m.basis is not None) << i for i, m in enumerate(maps)),
            FOURTH=sum((m.power == 4) << i for i, m in enumerate(maps)),
            GROUP=maps[0].group_size,
            RANK=rank,
            BR=triton.next_power_of_2(max(16, rank)),
            EXACT=products(query.dtype, query.device),
            SPLIT=products(torch.float32, query.device),
            num_warps=8,
            num_stages=1,
        )
    return out


@triton.jit(do_not_specialize=_COUNTS)
def _widen(
    q, q_b, q_h, q_m, out, bases, matrix, second, fourth, heads, group, rows,
    D: tl.constexpr, BD: tl.constexpr, WIDTH: tl.constexpr, BW: tl.constexpr, BM: tl.constexpr,
    MAPS: tl.constexpr, PROJECTED: tl.constexpr, FOURTH: tl.constexpr, GROUP: tl.constexpr,
    RANK: tl.constexpr, BR: tl.constexpr, EXACT: tl.constexpr, SPLIT: tl.constexpr,
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
    used: tl.constexpr = MAPS * (D // GROUP)
    empty = (spare >= used) & (spare < WIDTH - D)
    nothing = tl.zeros([BM, BW], out.dtype.element_ty)
    tl.store(target + D + spare[None, :], nothing, mask=live[:, None] & empty[None, :])
    x = held.to(tl.float32)
    rank = tl.arange(0, BR)
    number = tl.arange(0, BD // GROUP)
    own = (number < D // GROUP)[None, :] & live[:, None]
    basis = q
    lines = rows
    if bases is not None:
        kv_heads = heads // group
        lines = tl.num_programs(1) // heads * kv_heads
        basis = bases + (batch * kv_heads + head // group) * (D * RANK)
    turn = x
    if matrix is not None:
        square = matrix + channel[None, :] * D + channel[:, None]
        within = (channel < D)[None, :] & (channel < D)[:, None]
        turn = tl.load(square, mask=within, other=0.0)
    # A loop that stays one: written out, the compiler mixes the maps and runs out of registers.
    for number_of_map in range(MAPS):
        seen = x
        if PROJECTED > 0:
            projected = (PROJECTED >> number_of_map) & 1
            place = basis + channel[:, None] * RANK + rank[None, :]
            some = (channel < D * projected)[:, None] & (rank < RANK)[None, :]
            span = tl.load(place, mask=some, other=0.0).to(tl.float32)
            part = tl.dot(x, span, input_precision=EXACT)
            seen = x - tl.dot(part, tl.trans(span), input_precision=SPLIT)
            basis += projected * lines.to(tl.int64) * (D * RANK)
        if matrix is not None:
            seen = tl.dot(seen, turn, input_precision=EXACT)
        powers = seen * seen
        weight = second
        if FOURTH > 0:
            raised = (FOURTH >> number_of_map) & 1
            powers *= raised * powers + (1 - raised)
            weight = raised * fourth + (1 - raised) * second
        sums = tl.sum(tl.reshape(powers, [BM, BD // GROUP, GROUP]), 2) * weight
        place = target + D + number_of_map * (D // GROUP) + number[None, :]
        tl.store(place, sums.to(out.dtype.element_ty), mask=own)


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
        _fill[(triton.cdiv(tokens, TOKENS), batch * heads)](
            out,
            *out.stride()[:3],
            *arguments,
            heads,
            tokens,
            **constants,
            COLUMNS=columns,
            BF=triton.next_power_of_2(columns),
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
