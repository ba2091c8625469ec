"""How few directions hold the queries' energy (2609.26425, Fig. 4 and 8)."""

from __future__ import annotations

import torch
from torch import Tensor


def cumulative_energy(moment: Tensor) -> Tensor:
    """Share of the energy in the strongest 1, 2, ..., D directions, float64 ``[..., D]``.

    moment: ``[..., D, D]``, mean of q q^T. Raises ValueError where it is not square or has no
    energy.
    """
    if moment.ndim < 2 or moment.shape[-1] != moment.shape[-2]:
        raise ValueError(f"moment must be [..., D, D], got {tuple(moment.shape)}")
    values = torch.linalg.eigvalsh(moment.double()).clamp(min=0).flip(-1)
    total = values.sum(-1, keepdim=True)
    if not bool((total > 0).all()):
        raise ValueError("the queries have no energy: their second moment is zero")
    return values.cumsum(-1) / total
