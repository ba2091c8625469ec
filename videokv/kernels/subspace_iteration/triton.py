"""The Triton kernel: a program holds one matrix in registers and turns its columns in the cache.

What costs time is one sum over threads after the other. So all columns are multiplied between two
barriers, and each is made orthogonal to those before it in one sum of all their products, twice
(what a first pass leaves of nearly parallel columns is not yet orthogonal).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.gpu import on_device


def iterate(matrix: Tensor, start: Tensor, *, first: int, rounds: int) -> Tensor:
    """See the package."""
    size, rank = start.shape
    matrix = matrix.contiguous()
    count = matrix.numel() // (size * size)
    columns = start.mT.expand(count, rank, size).contiguous()  # each one side by side
    with on_device(matrix.device):
        for power, steps in ((matrix, first), (matrix @ matrix, rounds)):
            _kernel[(count,)](
                power,
                columns,
                RANK=rank,
                BR=triton.next_power_of_2(rank),
                D=size,
                BD=max(16, triton.next_power_of_2(size)),
                STEPS=steps,
                num_warps=8,
            )
    return columns.mT.reshape(*matrix.shape[:-1], rank)


@triton.jit
def _kernel(
    matrix, columns, RANK: tl.constexpr, BR: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BD)
    used = channel < D
    square = matrix + number * D * D + channel[:, None] * D + channel[None, :]
    rows = tl.load(square, mask=used[:, None] & used[None, :], other=0.0)
    mine = columns + number * RANK * D
    rank = tl.arange(0, BR)
    place = mine + rank[:, None] * D + channel[None, :]
    inside = (rank < RANK)[:, None] & used[None, :]
    for _ in range(0, STEPS):
        products = ()
        for column in tl.static_range(RANK):
            values = tl.load(mine + column * D + channel, mask=used, other=0.0)
            # Over the rows, which are the columns too.
            products = products + (tl.sum(rows * values[:, None], 0),)  # type: ignore[assignment]
        tl.debug_barrier()  # everyone has read
        for column in tl.static_range(RANK):
            tl.store(mine + column * D + channel, products[column], mask=used)
        tl.debug_barrier()  # everyone sees it
        basis = tl.load(place, mask=inside, other=0.0)
        for column in range(0, RANK):
            values = tl.sum(tl.where(rank[:, None] == column, basis, 0.0), 0)
            before = tl.where(rank[:, None] < column, basis, 0.0)
            values -= tl.sum(before * tl.sum(before * values[None, :], 1)[:, None], 0)
            values = values / tl.sqrt(tl.sum(values * values, 0))
            values -= tl.sum(before * tl.sum(before * values[None, :], 1)[:, None], 0)
            values = values / tl.sqrt(tl.sum(values * values, 0))
            basis = tl.where(rank[:, None] == column, values[None, :], basis)
        tl.store(place, basis, mask=inside)
        tl.debug_barrier()
