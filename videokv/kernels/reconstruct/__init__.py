"""Packed chunks back to dense rows: one pass over the codes, one write of the result.

    x^ = Delta q + offset  (+ centroids of every stage)  (rotated back)  (+ C U^T)  (RoPE)

in this order; ``Parts`` says which of them a chunk has. On a GPU one Triton kernel does all of it,
writing into rows of a buffer that several chunks share; elsewhere, and for what the kernel does not
take, PyTorch does the same steps one after the other.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from videokv.kernels.gpu import (
    checked_refusal,
    disagreement,
    machine_refusal,
    say_once,
    wants_kernels,
)
from videokv.kernels.reconstruct import reference
from videokv.kernels.reconstruct.parts import LowRank, Parts
from videokv.kernels.reconstruct.reference import saturated
from videokv.kernels.reconstruct.rope import Rope
from videokv.tensors import E4M3

__all__ = [
    "OUTPUTS",
    "LowRank",
    "Parts",
    "Rope",
    "decode_into",
    "fused",
    "inner_parts",
    "kernel_refusal",
    "reconstruct",
    "saturated",
]

OUTPUTS = (torch.bfloat16, torch.float16, torch.float32, E4M3)
# Relative norm between kernel and reference: one rounding each, the rotation in FP16 operands.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3, E4M3: 5e-2}
# Chunks and their parts never change: what is found out about them once holds as long as they live.
_parts: WeakKeyDictionary[Any, Parts] = WeakKeyDictionary()
_known: WeakKeyDictionary[Parts, tuple[str | None, tuple[Hashable, ...]]] = WeakKeyDictionary()
SMALL = 2  # batch rows and heads that a self-check looks at


def reconstruct(
    parts: Parts,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    row: int = 0,
    factor: Tensor | None = None,
    rope: Rope | None = None,
) -> Tensor:
    """Write the chunk's ``[B, H, T, D]`` into ``out[:, :, row : row + T]``; returns that view.

    dtype: of a new tensor, where ``out`` is None. out: ``[B, H, rows, D]`` of any strides, one of
    ``OUTPUTS``; the arithmetic is float32, FP16 and E4M3 saturate. factor: float32
    ``[B, H, 1, 1]`` multiplied last (to fill the range of E4M3). rope: turns keys that were packed
    before rotary embedding.

    Never synchronises, but for the first use of a configuration on a GPU. Raises ValueError where
    ``out`` does not fit.
    """
    target = _target(parts, dtype, out, row)
    _check_factor(parts, factor)
    if rope is not None:
        rope.check(parts.shape, target.device)
    refusal = kernel_refusal(parts, target.dtype, target.device, rope=rope)
    if refusal is None:
        _kernel().reconstruct(parts, target, factor=factor, rope=rope)
    else:
        if wants_kernels(target.device):
            say_once(f"reconstruct runs in PyTorch steps: {refusal}")
        reference.reconstruct(parts, target, factor=factor, rope=rope)
    return target


def fused(chunk: Any, dtype: torch.dtype) -> Tensor | None:
    """The chunk decoded by the kernel, or None where its own PyTorch ``decode`` has to do it.

    chunk: a packed chunk; those with a method ``parts() -> Parts | None`` can be fused. On a GPU
    the reason of a None is said once.
    """
    device = _device(chunk)
    if not wants_kernels(device):
        return None
    parts = inner_parts(chunk)
    if parts is None:
        refusal: str | None = f"{type(chunk).__name__} holds a format that the kernel does not know"
    else:
        refusal = kernel_refusal(parts, dtype, device)
        if refusal is None:
            out = torch.empty(parts.shape, dtype=dtype, device=device)
            _kernel().reconstruct(parts, out, factor=None)
            return out
    say_once(f"{type(chunk).__name__}.decode runs in PyTorch steps: {refusal}")
    return None


def decode_into(
    chunk: Any, out: Tensor, *, rope: Rope | None = None, factor: Tensor | None = None
) -> None:
    """Write a packed chunk's rows into ``out`` ``[B, H, T, D]`` of any strides.

    By the kernel where it can, else through the chunk's own ``decode``. rope: turns keys that were
    packed before rotary embedding. factor: float32 ``[B, H, 1, 1]`` multiplied last; FP16 and E4M3
    saturate.
    """
    if rope is not None:
        rope.check(chunk.shape, out.device)
    if wants_kernels(out.device):
        parts = inner_parts(chunk)
        if parts is not None and kernel_refusal(parts, out.dtype, out.device, rope=rope) is None:
            _kernel().reconstruct(parts, out, factor=factor, rope=rope)
            return
    if rope is None and factor is None and out.dtype != E4M3:
        out.copy_(chunk.decode(out.dtype))
        return
    values = chunk.decode(torch.float32)
    values = values if rope is None else rope.turn(values)
    out.copy_(saturated(values if factor is None else values * factor, out.dtype))


def inner_parts(chunk: Any) -> Parts | None:
    """The parts of a chunk inside another, None where its format is not known here."""
    kept = _parts.get(chunk) if type(chunk).__hash__ is object.__hash__ else None
    if kept is not None:
        return kept
    parts = getattr(chunk, "parts", None)
    found: Parts | None = None if parts is None else parts()
    if found is not None and type(chunk).__hash__ is object.__hash__:
        _parts[chunk] = found
    return found


def kernel_refusal(
    parts: Parts, dtype: torch.dtype, device: torch.device, *, rope: Rope | None = None
) -> str | None:
    """Why the Triton kernel does not serve this, or None. Its first use is checked here."""
    if dtype not in OUTPUTS:
        return f"outputs are one of {OUTPUTS}, got {dtype}"
    known = _known.get(parts)
    if known is None:
        known = _known[parts] = (parts.kernel_refusal(), parts.config())
    refusal = machine_refusal(device) or known[0]
    if refusal is not None:
        return refusal
    config = (known[1], dtype, None if rope is None else rope.config())
    return checked_refusal("reconstruct", config, device, lambda: _self_check(parts, dtype, rope))


def _self_check(parts: Parts, dtype: torch.dtype, rope: Rope | None) -> str | None:
    """A block a program, and as many as one may do: with a rotation that is another kernel."""
    small = parts.corner(SMALL)
    turn = None if rope is None else rope.corner(SMALL)
    want = torch.empty(small.shape, device=small.codes.device, dtype=dtype)
    reference.reconstruct(small, want, factor=None, rope=turn)
    for programs in (None, 1):
        got = torch.full(small.shape, torch.nan, device=small.codes.device).to(dtype)
        _kernel().reconstruct(small, got, factor=None, rope=turn, programs=programs)
        off = disagreement(got.float(), want.float(), tolerance=TOLERANCE[dtype])
        if off is not None:
            return off
    return None


def _kernel() -> Any:
    from videokv.kernels.reconstruct import triton

    return triton


def _target(parts: Parts, dtype: torch.dtype | None, out: Tensor | None, row: int) -> Tensor:
    if (dtype is None) == (out is None):
        raise ValueError("reconstruct expects either dtype or out, not both")
    if out is None:
        return torch.empty(parts.shape, dtype=dtype, device=parts.codes.device)
    batch, heads, tokens, size = parts.shape
    fits = out.ndim == 4 and out.shape[:2] == (batch, heads) and out.shape[3] == size
    if not fits or row < 0 or row + tokens > out.shape[2] or out.dtype not in OUTPUTS:
        raise ValueError(
            f"a chunk {parts.shape} at row {row} needs an output [{batch}, {heads}, >= "
            f"{row + tokens}, {size}] of {OUTPUTS}, got {out.dtype} of shape {tuple(out.shape)}"
        )
    if out.device != parts.codes.device:
        raise ValueError(f"out is on {out.device}, the chunk on {parts.codes.device}; move one")
    return out[:, :, row : row + tokens]


def _check_factor(parts: Parts, factor: Tensor | None) -> None:
    expected = (*parts.shape[:2], 1, 1)
    if factor is not None and (factor.shape != expected or factor.dtype != torch.float32):
        raise ValueError(
            f"factor must be float32 {expected}, got {factor.dtype} {tuple(factor.shape)}"
        )


def _device(chunk: Any) -> torch.device:
    """Of the chunk's first tensor."""
    from videokv.tensors import walk_tensors

    return next(walk_tensors(chunk)).device
