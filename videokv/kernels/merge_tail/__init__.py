"""Rows that attended to all keys, and behind them rows that attended to parts of the keys, merged
by log-sum-exp, in one launch."""

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
from videokv.kernels.merge_tail import reference

__all__ = ["kernel_refusal", "merge_tail"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_SIZE = 512  # channels
_SMALL = (2, 9)  # heads and rows that a self-check looks at
_TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}


def merge_tail(
    first: Tensor, first_lse: Tensor, parts: Tensor, lses: Tensor
) -> tuple[Tensor, Tensor]:
    """softmax over the union of the parts' keys = sum_p exp(lse_p - lse) out_p, behind ``first``.

    first: outputs ``[1, H, N, Dv]`` with their natural-log log-sum-exps float32 ``[1, H, N]``.
    parts: outputs ``[P, H, M, Dv]`` with theirs ``[P, H, M]``, -inf where a row saw no key of a
    part. Returns ``[1, H, N + M, Dv]`` in their dtype, summed in float32, and float32
    ``[1, H, N + M]``: 0 and -inf for rows of the parts that saw no key at all.

    By the kernel where ``kernel_refusal`` finds no reason against it, else by PyTorch. Raises
    ValueError where shapes or dtypes do not fit.
    """
    _check(first, first_lse, parts, lses)
    refusal = kernel_refusal(first, first_lse, parts, lses)
    if refusal is None:
        merged: tuple[Tensor, Tensor] = _kernel().merge_tail(first, first_lse, parts, lses)
        return merged
    if wants_kernels(parts.device):
        say_once(f"parts of attention are merged by PyTorch: {refusal}")
    return reference.merge_tail(first, first_lse, parts, lses)


def kernel_refusal(first: Tensor, first_lse: Tensor, parts: Tensor, lses: Tensor) -> str | None:
    """Why the Triton kernel does not merge these, or None. A first use is checked here."""
    refusal = machine_refusal(parts.device)
    if refusal is not None:
        return refusal
    if parts.dtype not in DTYPES or lses.dtype != torch.float32:
        return f"outputs are one of {DTYPES} with float32 sums, got {parts.dtype}, {lses.dtype}"
    if first.stride(3) != 1 or parts.stride(3) != 1 or parts.shape[3] > MAX_SIZE:
        return f"channels lie side by side, at most {MAX_SIZE}, got {_words(first, parts)}"
    config = (parts.dtype, parts.shape[3])
    some = (first, first_lse, parts, lses)
    return checked_refusal("merge_tail", config, parts.device, lambda: _self_check(*some))


def _self_check(*given: Tensor) -> str | None:
    heads, rows = _SMALL
    some = [x[:, :heads, :rows] for x in given]
    got, got_lse = _kernel().merge_tail(*some)
    want, want_lse = reference.merge_tail(*some)
    return disagreement(got, want, tolerance=_TOLERANCE[got.dtype]) or disagreement(
        got_lse, want_lse, tolerance=1e-5, what="the log-sum-exp"
    )


def _check(first: Tensor, first_lse: Tensor, parts: Tensor, lses: Tensor) -> None:
    fits = first.dim() == 4 and parts.dim() == 4 and first.shape[0] == 1
    fits = fits and (first.shape[1], first.shape[3]) == (parts.shape[1], parts.shape[3])
    fits = fits and first_lse.shape == first.shape[:3] and lses.shape == parts.shape[:3]
    if not fits or first.dtype != parts.dtype or first_lse.dtype != lses.dtype:
        raise ValueError(
            "merge_tail expects outputs [1, H, N, Dv] and [P, H, M, Dv] of one dtype with "
            f"log-sum-exps of one dtype, got {_words(first, first_lse, parts, lses)}"
        )


def _words(*given: Tensor) -> str:
    return ", ".join(f"{x.dtype} {tuple(x.shape)} with strides {x.stride()}" for x in given)


def _kernel() -> Any:
    from videokv.kernels.merge_tail import triton

    return triton
