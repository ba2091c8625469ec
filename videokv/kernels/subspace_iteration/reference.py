"""Subspace iteration in PyTorch: products and small triangular systems."""

from __future__ import annotations

import torch
from torch import Tensor


def iterate(matrix: Tensor, start: Tensor, *, first: int, rounds: int) -> Tensor:
    """See the package; never synchronises."""
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
