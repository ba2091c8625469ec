"""PyTorch body: the oracle of the kernel, and the CPU path."""

from __future__ import annotations

import torch
from torch import Tensor

from videokv.kernels.subspace_iteration.layout import Directions

CODE_TOP = 127
HALF_TOP = 65504.0


def code_repair(error: Tensor, directions: Directions) -> tuple[Tensor, Tensor, Tensor]:
    """See the package; error float32 ``[B, H, T, D]``. Kept rows: int64 ``[B, H]``."""
    basis, seen, quadratic = directions
    exact = error @ basis.float()
    largest = exact.abs().amax(-1, keepdim=True)
    scales = (largest / CODE_TOP).clamp(max=HALF_TOP).half()
    divisor = torch.where(scales > 0, scales.float(), torch.inf)
    codes = (exact / divisor).round_().clamp_(-CODE_TOP, CODE_TOP)
    coefficients = codes * scales.float()
    # Exact for any basis; for true eigenvectors it is the paper's sum of lambda (C - sCq)^2.
    change = coefficients @ quadratic - 2 * (error @ seen)
    kept = (change * coefficients).sum(-1) < 0
    rows = kept.unsqueeze(-1)
    return codes.mul_(rows).to(torch.int8), scales * rows, kept.sum(-1)
