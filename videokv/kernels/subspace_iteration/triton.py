"""The Triton kernel: a program holds one matrix in registers and turns its columns in the cache.

What costs time is one sum over threads after the other. So all columns are multiplied between two
barriers, and each is made orthogonal to those before it in one sum of all their products, twice
(what a first pass leaves of nearly parallel columns is not yet orthogonal). A round with the square
of the matrix is two products with the matrix.
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
            BR=triton.next_power_of_2(rank),
            D=size,
            BD=max(16, triton.next_power_of_2(size)),
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
    begin = start + channel[None, :] * RANK + rank[:, None]
    tl.store(place, tl.load(begin, mask=inside, other=0.0), mask=inside)
    tl.debug_barrier()  # everyone sees it
    for turn in range(0, FIRST + 2 * ROUNDS):
        products = _products(matrix, mine, channel, used, RANK, D)
        tl.debug_barrier()  # everyone has read
        for column in tl.static_range(RANK):
            tl.store(mine + column * D + channel, products[column], mask=used)
        tl.debug_barrier()
        if (turn < FIRST) | ((turn - FIRST) % 2 == 1):
            found = tl.load(place, mask=inside, other=0.0)
            for column in range(0, RANK):
                values = tl.sum(tl.where(rank[:, None] == column, found, 0.0), 0)
                before = tl.where(rank[:, None] < column, found, 0.0)
                values -= tl.sum(before * tl.sum(before * values[None, :], 1)[:, None], 0)
                values = values / tl.sqrt(tl.sum(values * values, 0))
                values -= tl.sum(before * tl.sum(before * values[None, :], 1)[:, None], 0)
                values = values / tl.sqrt(tl.sum(values * values, 0))
                found = tl.where(rank[:, None] == column, values[None, :], found)
            tl.store(place, found, mask=inside)
            tl.debug_barrier()

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
