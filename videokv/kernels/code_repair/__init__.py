"""PSAC's coefficients: C = E U in 8 bits with a scale a token, of the rows that they help.

    scale = FP16(max|e U| / 127),   c = scale clamp(rint(e U / scale), -127, 127)
    kept where  c (U^T M U) c^T - 2 (e M U) c^T < 0                     (2609.26425, Eq. 13-17)

e: rows of E = keys - decoded. On a GPU one kernel reads keys and decoded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from videokv.kernels.code_repair import reference
from videokv.kernels.gpu import (
    CannotCheck,
    checked_refusal,
    machine_refusal,
    say_once,
    wants_kernels,
)
from videokv.kernels.subspace_iteration.layout import Directions

__all__ = ["MAX_RANK", "MAX_SIZE", "RepairCodes", "code_repair", "kernel_refusal"]

MAX_RANK = 16  # columns that are written out one after the other
MAX_SIZE = 256


class RepairCodes(NamedTuple):
    """codes int8 ``[B, H, T, r]`` and scales float16 ``[B, H, T, 1]``, both 0 where a row is not
    kept (and only there is a scale 0); kept: rows of each head, ``B H`` numbers."""

    codes: Tensor
    scales: Tensor
    kept: list[int]


def code_repair(keys: Tensor, decoded: Tensor, directions: Directions) -> RepairCodes:
    """Code what ``decoded`` lacks of the keys in the directions.

    keys ``[B, H, T, D]`` of any floating dtype; decoded float32 like them, may be overwritten.
    Synchronises once.
    """
    if wants_kernels(keys.device):
        refusal = kernel_refusal(keys, directions.basis)
        if refusal is None:
            codes, scales, kept = _by_kernel(keys, decoded, directions)
            return RepairCodes(codes, scales, kept.tolist())
        say_once(f"PSAC's coefficients are coded in PyTorch steps: {refusal}")
    error = torch.sub(keys, decoded, out=decoded)
    codes, scales, kept = reference.code_repair(error, directions)
    return RepairCodes(codes, scales, kept.flatten().tolist())


def kernel_refusal(keys: Tensor, basis: Tensor) -> str | None:
    """Why the Triton kernel does not serve this, or None. Its first use is checked here."""
    size, rank = basis.shape[2:]
    if size > MAX_SIZE or rank > MAX_RANK or keys.shape[0] * keys.shape[1] > 65535:
        return f"heads of {size} channels, rank {rank}, {keys.shape[0]} x {keys.shape[1]} heads"
    refusal = machine_refusal(keys.device)
    if refusal is not None:
        return refusal
    return checked_refusal(
        "code_repair", (size, rank, keys.dtype), keys.device, lambda: _self_check(keys, basis)
    )


def _self_check(keys: Tensor, basis: Tensor) -> str | None:
    """Against the reference on a corner, with keys as their own errors and a moment of ones."""
    corner, basis = keys.detach()[:2, :2, :300], basis[:2, :2]
    size = float(corner.float().std())
    if not 0 < size < float("inf") or not bool(basis.isfinite().all()):
        raise CannotCheck("keys that are all alike or not finite check no kernel")
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(corner.shape, generator=generator).to(keys.device) * 0.1
    error = noise * size
    decoded = corner.float() - error
    basis = basis.to(torch.bfloat16)
    wide = basis.float()
    seen, quadratic = wide + 0.3 * wide.roll(1, 2), wide.mT @ wide
    directions = Directions(basis, seen, quadratic)
    codes, scales, _ = _by_kernel(corner, decoded, directions)
    want_codes, want_scales, _ = reference.code_repair(corner.float() - decoded, directions)
    kept, want_kept = ((each > 0)[..., 0] for each in (scales, want_scales))
    both = (kept & want_kept).unsqueeze(-1)
    unlike = ((codes - want_codes).abs() > 1).float().mean() + (kept != want_kept).float().mean()
    off = ((scales.float() - want_scales.float()).abs() * both).sum() / want_scales.float().sum()
    wrong = float(unlike), float(off)
    if wrong[0] <= 0.02 and wrong[1] <= 1e-3:
        return None
    return f"self-check failed: {wrong[0]:.1%} of the codes, scales by {wrong[1]:.1e}"


def _by_kernel(
    keys: Tensor, decoded: Tensor, directions: Directions
) -> tuple[Tensor, Tensor, Tensor]:
    from videokv.kernels.code_repair import triton

    return triton.code_repair(keys.detach(), decoded, directions)
