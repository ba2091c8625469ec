"""Attention of the same queries to parts of the keys, merged by log-sum-exp, in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from videokv.kernels.gpu import (
    checked_refusal,
    disagreement,
    machine_refusal,
    say_once,
    wants_kernels,
)
from videokv.kernels.merge_rows import reference

__all__ = ["kernel_refusal", "merge_rows"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_SIZE = 512  # channels
_SMALL = (2, 9)  # heads and rows that a self-check looks at
_TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}


def merge_rows(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """softmax over the union of the parts' keys = sum_p exp(lse_p - lse) out_p.

    parts: outputs ``[P, H, M, Dv]``; lses: natural-log log-sum-exps float32 ``[P, H, M]``, -inf
    where a row saw no key of a part. Returns ``[1, H, M, Dv]`` in the parts' dtype, summed in
    float32, and float32 ``[1, H, M]``: 0 and -inf for rows that saw no key at all.

    By the kernel where ``kernel_refusal`` finds no reason against it, else by PyTorch.
    """
    if parts.dim() != 4 or lses.shape != parts.shape[:3]:
        raise ValueError(
            "merge_rows expects outputs [P, H, M, Dv] with log-sum-exps [P, H, M], got "
            f"{tuple(parts.shape)} and {tuple(lses.shape)}"
        )
    refusal = kernel_refusal(parts, lses)
    if refusal is None:
        merged: tuple[Tensor, Tensor] = _kernel().merge_rows(parts, lses)
        return merged
    if wants_kernels(parts.device):
        say_once(f"parts of attention are merged by PyTorch: {refusal}")
    return reference.merge_rows(parts, lses)


def kernel_refusal(parts: Tensor, lses: Tensor) -> str | None:
    """Why the Triton kernel does not merge these, or None. A first use is checked here."""
    refusal = machine_refusal(parts.device)
    if refusal is not None:
        return refusal
    if parts.dtype not in DTYPES or lses.dtype != torch.float32:
        return f"outputs are one of {DTYPES} with float32 sums, got {parts.dtype}, {lses.dtype}"
    if parts.stride(3) != 1 or parts.shape[3] > MAX_SIZE:
        return f"channels lie side by side, at most {MAX_SIZE}, got strides {parts.stride()}"
    config = (parts.dtype, parts.shape[3])
    return checked_refusal("merge_rows", config, parts.device, lambda: _self_check(parts, lses))


def _self_check(parts: Tensor, lses: Tensor) -> str | None:
    heads, rows = _SMALL
    some = parts[:, :heads, :rows], lses[:, :heads, :rows]
    got, got_lse = _kernel().merge_rows(*some)
    want, want_lse = reference.merge_rows(*some)
    tolerance = _TOLERANCE[parts.dtype]
    return disagreement(got, want, tolerance=tolerance) or disagreement(
        got_lse, want_lse, tolerance=1e-5, what="the log-sum-exp"
    )


def _kernel() -> Any:
    from videokv.kernels.merge_rows import triton

    return triton
