"""Subspace iteration of small symmetric matrices, in float64: the directions that grow most.

In PyTorch a round is a dozen launches, most of them for a triangular system of eight unknowns; on a
GPU one Triton kernel does all rounds, a program for each matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from videokv.kernels.gpu import checked_refusal, machine_refusal, say_once, wants_kernels
from videokv.kernels.subspace_iteration import reference

__all__ = ["iterate", "kernel_refusal"]

MAX_SIZE = 128  # a matrix of float64 fills half of a multiprocessor's registers
_TOLERANCE = 1e-6  # of the projections; directions are kept in BF16


def iterate(matrix: Tensor, start: Tensor, *, first: int, rounds: int) -> Tensor:
    """Orthonormal columns ``[..., D, r]`` near the largest eigenvalues.

    matrix: float64 ``[..., D, D]``, symmetric and positive definite; start: float64 ``[D, r]``.
    first: rounds with the matrix; rounds: those after them, with its square.
    """
    if wants_kernels(matrix.device):
        refusal = kernel_refusal(matrix, start, first=first, rounds=rounds)
        if refusal is None:
            from videokv.kernels.subspace_iteration import triton

            return triton.iterate(matrix, start, first=first, rounds=rounds)
        say_once(f"subspace iteration runs in PyTorch steps: {refusal}")
    return reference.iterate(matrix, start, first=first, rounds=rounds)


def kernel_refusal(matrix: Tensor, start: Tensor, *, first: int, rounds: int) -> str | None:
    """Why the Triton kernel does not serve this, or None. Its first use is checked here."""
    if matrix.shape[-1] > MAX_SIZE:
        return f"matrices of {matrix.shape[-1]} rows are above {MAX_SIZE}"
    refusal = machine_refusal(matrix.device)
    if refusal is not None:
        return refusal
    config = (tuple(start.shape), first, rounds)
    return checked_refusal(
        "subspace_iteration", config, matrix.device, lambda: _self_check(start, first, rounds)
    )


def _self_check(start: Tensor, first: int, rounds: int) -> str | None:
    """The same subspace as the reference's, of matrices whose eigenvalues fall by halves."""
    from videokv.kernels.subspace_iteration import triton

    size = start.shape[0]
    generator = torch.Generator().manual_seed(1)
    turn = torch.linalg.qr(torch.randn(2, size, size, generator=generator, dtype=torch.float64)).Q
    values = 0.5 ** torch.arange(size, dtype=torch.float64).clamp(max=20)
    matrix = ((turn * values) @ turn.mT).to(start.device)
    got = triton.iterate(matrix, start, first=first, rounds=rounds)
    want = reference.iterate(matrix, start, first=first, rounds=rounds)
    off = float((got @ got.mT - want @ want.mT).norm(dim=(-2, -1)).max())
    return None if off <= _TOLERANCE else f"self-check failed: projections are off by {off:.1e}"
