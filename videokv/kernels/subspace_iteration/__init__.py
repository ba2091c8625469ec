"""PSAC's directions: those in which queries are largest, by subspace iteration in float64.

    U = the r columns that M = mean of q q^T makes grow most,  M U,  U^T M U   (2609.26425, Eq. 13)

In PyTorch a round is a dozen launches, most of them for a triangular system of eight unknowns; on a
GPU one Triton kernel does all rounds and what is made of their result, a program for each matrix.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from videokv.kernels.gpu import checked_refusal, machine_refusal, say_once, wants_kernels
from videokv.kernels.subspace_iteration import reference
from videokv.kernels.subspace_iteration.layout import Directions
from videokv.kernels.subspace_iteration.reference import operands

__all__ = ["Directions", "kernel_refusal", "operands", "principal"]

MAX_SIZE = 128  # a matrix of float64 fills half of a multiprocessor's registers
_TOLERANCE = 1e-2  # of the projections on directions kept in BF16


def principal(moment: Tensor, *, rank: int) -> Directions:
    """The ``rank`` directions of ``[B, H, D, D]`` with the largest eigenvalues.

    Directions whose eigenvalues are within a tenth of each other may stay mixed: they are worth the
    same. In float64, though BF16 is kept: float32 directions change with the number of threads.
    Each one's largest entry is positive, for a sign is free. Never synchronises, but for the first
    use on a GPU.
    """
    if wants_kernels(moment.device):
        refusal = kernel_refusal(moment, rank=rank)
        if refusal is None:
            from videokv.kernels.subspace_iteration import triton

            return triton.principal(moment, start(moment.shape[-1], rank, moment.device))
        say_once(f"subspace iteration runs in PyTorch steps: {refusal}")
    return reference.principal(moment, start(moment.shape[-1], rank, moment.device))


@functools.lru_cache(maxsize=16)
def start(size: int, rank: int, device: torch.device) -> Tensor:
    """Random directions ``[size, rank]``, float64."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, rank, generator=generator, dtype=torch.float64).to(device)


def kernel_refusal(moment: Tensor, *, rank: int) -> str | None:
    """Why the Triton kernel does not serve this, or None. Its first use is checked here."""
    size = moment.shape[-1]
    if size > MAX_SIZE:
        return f"matrices of {size} rows are above {MAX_SIZE}"
    refusal = machine_refusal(moment.device)
    if refusal is not None:
        return refusal
    config = (size, rank, moment.dtype)
    return checked_refusal(
        "subspace_iteration", config, moment.device, lambda: _self_check(moment, rank)
    )


def _self_check(moment: Tensor, rank: int) -> str | None:
    """The same subspace as the reference's, of matrices whose eigenvalues fall by halves."""
    from videokv.kernels.subspace_iteration import triton

    size = moment.shape[-1]
    generator = torch.Generator().manual_seed(1)
    turn = torch.linalg.qr(torch.randn(2, size, size, generator=generator, dtype=torch.float64)).Q
    values = 0.5 ** torch.arange(size, dtype=torch.float64).clamp(max=20)
    matrix = ((turn * values) @ turn.mT)[None].to(moment.device, moment.dtype)
    begin = start(size, rank, moment.device)
    got, want = triton.principal(matrix, begin), reference.principal(matrix, begin)
    a, b = got.basis.double(), want.basis.double()
    off = float((a @ a.mT - b @ b.mT).norm(dim=(-2, -1)).max())
    if not off <= _TOLERANCE:
        return f"self-check failed: projections are off by {off:.1e}"
    seen = matrix.double() @ a
    for found, exact in ((got.seen, seen), (got.quadratic, a.mT @ seen)):
        off = float((found.double() - exact).norm() / exact.norm())
        if not off <= 1e-5:
            return f"self-check failed: products with directions are off by {off:.1e}"
    return None
