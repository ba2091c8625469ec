"""Subspace iteration in PyTorch: products and small triangular systems."""

from __future__ import annotations

import torch
from torch import Tensor

from videokv.kernels.subspace_iteration.layout import FIRST_ROUNDS, ROUNDS, SHIFT, Directions


def principal(moment: Tensor, start: Tensor) -> Directions:
    """See the package; start: float64 ``[D, r]``. Never synchronises."""
    matrix = moment.double()
    size = matrix.shape[-1]
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    shift = SHIFT / size * torch.eye(size, dtype=torch.float64, device=matrix.device)
    matrix = matrix / torch.where(trace > 0, trace, 1.0) + shift
    basis = iterate(matrix, start, first=FIRST_ROUNDS, rounds=ROUNDS)
    largest = basis.gather(-2, basis.abs().argmax(-2, keepdim=True))
    return operands((basis * largest.sign()).to(torch.bfloat16), moment)


def operands(basis: Tensor, moment: Tensor) -> Directions:
    """With the products of a basis bfloat16 ``[B, H, D, r]`` that is known."""
    wide = basis.float()
    seen = moment.float() @ wide
    return Directions(basis, seen, wide.mT @ seen)


def iterate(matrix: Tensor, start: Tensor, *, first: int, rounds: int) -> Tensor:
    """Orthonormal columns ``[..., D, r]`` near the largest eigenvalues.

    matrix: float64 ``[..., D, D]``, symmetric and positive definite; start: float64 ``[D, r]``.
    first: rounds with the matrix; rounds: those after them, with its square.
    """
    basis = start.expand(*matrix.shape[:-1], start.shape[1])
    for _ in range(first):
        basis = _orthonormal(matrix @ basis)
    matrix = matrix @ matrix
    for _ in range(rounds):
        basis = _orthonormal(matrix @ basis)
    return _orthonormal(basis)


def _orthonormal(columns: Tensor) -> Tensor:
    """Gram-Schmidt of ``[..., D, r]`` through Cholesky factors."""
    unit = columns / columns.norm(dim=-2, keepdim=True)
    lower = torch.linalg.cholesky_ex(unit.mT @ unit).L
    return torch.linalg.solve_triangular(lower, unit.mT, upper=False).mT
