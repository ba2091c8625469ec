"""The Triton kernel: a program holds one matrix in registers and turns its columns in the cache.

What costs time is one sum over threads after the other. So all columns are multiplied between two
barriers, and one sum a column gives its length and what all later ones lose of it (modified
Gram-Schmidt). What one pass leaves of nearly parallel columns is not yet orthogonal: the last round
has two. A round with the square of the matrix is two products with the matrix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.gpu import on_device
from videokv.kernels.numbers import round_bf16
from videokv.kernels.subspace_iteration.layout import FIRST_ROUNDS, ROUNDS, SHIFT, Directions


def principal(moment: Tensor, start: Tensor) -> Directions:
    """See the package; start: float64 ``[D, r]``."""
    size, rank = start.shape
    moment = moment.contiguous()
    batch, heads = moment.shape[:2]
    count, device = batch * heads, moment.device
    columns = torch.empty(count, rank, size, dtype=torch.float64, device=device)
    basis = torch.empty(batch, heads, size, rank, dtype=torch.bfloat16, device=device)
    seen = torch.empty(batch, heads, size, rank, device=device)
    quadratic = torch.empty(batch, heads, rank, rank, device=device)
    with on_device(device):
        _kernel[(count,)](
            moment,
            start,
            columns,
            basis,
            seen,
            quadratic,
            SHIFT / size,
            RANK=rank,
            BR=1 << (rank - 1).bit_length(),
            D=size,
            BD=max(16, 1 << (size - 1).bit_length()),
            FIRST=FIRST_ROUNDS,
            ROUNDS=ROUNDS,
            num_warps=8,
        )
    return Directions(basis, seen, quadratic)


@triton.jit
def _kernel(
    moment, start, columns, basis, seen, quadratic, shift, RANK: tl.constexpr, BR: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, FIRST: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BD)
    used = channel < D
    square = moment + number * D * D + channel[:, None] * D + channel[None, :]
    both = used[:, None] & used[None, :]
    matrix = tl.load(square, mask=both, other=0.0).to(tl.float64)
    same = channel[:, None] == channel[None, :]
    trace = tl.sum(tl.sum(tl.where(same, matrix, 0.0), 1), 0)
    matrix = matrix / tl.where(trace > 0, trace, 1.0) + tl.where(same & both, shift, 0.0)
    mine = columns + number * RANK * D
    rank = tl.arange(0, BR)
    place = mine + rank[:, None] * D + channel[None, :]
    inside = (rank < RANK)[:, None] & used[None, :]
    tall = mine + rank[None, :] * D + channel[:, None]
    inside_tall = used[:, None] & (rank < RANK)[None, :]
    begin = start + channel[None, :] * RANK + rank[:, None]
    tl.store(place, tl.load(begin, mask=inside, other=0.0), mask=inside)
    tl.debug_barrier()  # everyone sees it
    for turn in range(0, FIRST + 2 * ROUNDS):
        products = _products(matrix, mine, channel, used, RANK, D)
        for _ in tl.static_range(BR - RANK):
            products = products + (tl.zeros([BD], tl.float64),)  # type: ignore[assignment]
        found = _side_by_side(products, BD, BR)
        if (turn < FIRST) | ((turn - FIRST) % 2 == 1):
            found = _orthonormal(found, rank, RANK)
            if turn == FIRST + 2 * ROUNDS - 1:
                found = _orthonormal(found, rank, RANK)
        tl.debug_barrier()  # everyone has read
        tl.store(tall, found, mask=inside_tall)
        tl.debug_barrier()  # everyone sees it

    found = tl.load(place, mask=inside, other=0.0)
    size = tl.abs(found)
    largest = tl.max(size, 1)
    where = tl.min(tl.where(size == largest[:, None], channel[None, :], BD), 1)
    entry = tl.sum(tl.where(channel[None, :] == where[:, None], found, 0.0), 1)
    found = tl.where((entry < 0)[:, None], 0.0 - found, found)
    kept = round_bf16(found.to(tl.float32))
    target = basis + number * D * RANK + channel[None, :] * RANK + rank[:, None]
    tl.store(target, kept.to(tl.bfloat16), mask=inside)
    tl.debug_barrier()  # everyone has read
    tl.store(place, kept.to(tl.float64), mask=inside)
    tl.debug_barrier()
    matrix = tl.load(square, mask=both, other=0.0).to(tl.float64)
    products = _products(matrix, mine, channel, used, RANK, D)
    for column in tl.static_range(RANK):
        across = seen + number * D * RANK + channel * RANK + column
        tl.store(across, products[column].to(tl.float32), mask=used)
        form = tl.sum(kept.to(tl.float64) * products[column][None, :], 1)
        line = quadratic + number * RANK * RANK + rank * RANK + column
        tl.store(line, form.to(tl.float32), mask=rank < RANK)


@triton.jit
def _products(matrix, mine, channel, used, RANK: tl.constexpr, D: tl.constexpr):
    """The matrix times each column."""
    products = ()
    for column in tl.static_range(RANK):
        values = tl.load(mine + column * D + channel, mask=used, other=0.0)
        # Over the rows, which are the columns too.
        products = products + (tl.sum(matrix * values[:, None], 0),)  # type: ignore[assignment]
    return products


@triton.jit
def _side_by_side(columns, BD: tl.constexpr, BR: tl.constexpr):
    """A tuple of BR columns [BD] as [BD, BR], those of a row in one thread."""
    parts = columns
    for level in tl.static_range(BR.bit_length() - 1):
        joined = ()
        for part in tl.static_range(BR >> (level + 1)):
            pair = tl.join(parts[part], parts[part + (BR >> (level + 1))])
            joined = joined + (pair,)  # type: ignore[assignment]
        parts = joined
    return tl.reshape(parts[0], [BD, BR])


@triton.jit
def _orthonormal(found, rank, RANK: tl.constexpr):
    """Columns of [BD, BR] made orthogonal to those before them, of length 1."""
    for column in tl.static_range(RANK):
        own = rank[None, :] == column
        values = tl.sum(tl.where(own, found, 0.0), 1)
        dots = tl.sum(found * values[:, None], 0)
        inverse = 1.0 / tl.sqrt(tl.sum(tl.where(rank == column, dots, 0.0), 0))
        unit = values * inverse
        share = tl.where(rank > column, dots * inverse, 0.0)
        found = tl.where(own, unit[:, None], found - unit[:, None] * share[None, :])
    return found
