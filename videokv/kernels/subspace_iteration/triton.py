"""The Triton kernel: a program holds one matrix in registers and turns its columns in the cache.

Columns are made orthonormal one after the other, each against those before it twice (what a first
pass leaves of nearly parallel columns is not yet orthogonal).
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
        _kernel[(count,)](
            matrix,
            columns,
            RANK=rank,
            D=size,
            BD=max(16, triton.next_power_of_2(size)),
            FIRST=first,
            ROUNDS=rounds,
            num_warps=8,
        )
    return columns.mT.reshape(*matrix.shape[:-1], rank)


@triton.jit
def _kernel(
    matrix, columns, RANK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, FIRST: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BD)
    used = channel < D
    square = matrix + number * D * D + channel[:, None] * D + channel[None, :]
    rows = tl.load(square, mask=used[:, None] & used[None, :], other=0.0)
    mine = columns + number * RANK * D
    for step in range(0, FIRST + ROUNDS):
        for column in range(0, RANK):
            _multiply(rows, mine + column * D, channel, used)
            if step >= FIRST:
                _multiply(rows, mine + column * D, channel, used)
        for column in range(0, RANK):
            values = tl.load(mine + column * D + channel, mask=used, other=0.0)
            values = values / tl.sqrt(tl.sum(values * values, 0))
            for before in range(0, 2 * column):
                other = tl.load(mine + (before % column) * D + channel, mask=used, other=0.0)
                values -= tl.sum(values * other, 0) * other
            values = values / tl.sqrt(tl.sum(values * values, 0))
            tl.store(mine + column * D + channel, values, mask=used)
            tl.debug_barrier()


@triton.jit
def _multiply(rows, place, channel, used):
    """One column, in place; over the rows, which are the columns too: sums stay inside threads."""
    values = tl.load(place + channel, mask=used, other=0.0)
    product = tl.sum(rows * values[:, None], 0)
    tl.debug_barrier()  # everyone has read
    tl.store(place + channel, product, mask=used)
    tl.debug_barrier()  # everyone sees it
