"""Strided rows into rows of a buffer: keys and values in one launch.

A model's keys and values come as ``[B, T, H, D]`` seen as ``[B, H, T, D]``. PyTorch copies such
tensors element by element; the kernel moves 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from videokv.kernels.copy_rows import reference
from videokv.kernels.gpu import checked_refusal, machine_refusal, say_once, wants_kernels

__all__ = ["MOST_PAIRS", "Pair", "copy_rows", "kernel_refusal"]

Pair = tuple[Tensor, Tensor]
"""What is copied, and where to: both ``[B, H, T, D]``, of one dtype."""

MOST_PAIRS = 4  # of a launch
MAX_SIZE = 1024  # channels
_LARGEST_GRID = 65535  # programs of its second axis
_SMALL = (2, 2, 130)  # batch rows, heads and tokens that a self-check looks at


def copy_rows(pairs: Sequence[Pair]) -> None:
    """Copy each tensor to its rows; all pairs have equal batch rows, heads and dtype.

    By one launch of the kernel for every ``MOST_PAIRS`` where ``kernel_refusal`` finds no reason
    against it, else by PyTorch. Raises ValueError where a pair's shapes or dtypes differ.
    """
    _check(pairs)
    pairs = [pair for pair in pairs if pair[0].numel()]
    for first in range(0, len(pairs), MOST_PAIRS):
        some = pairs[first : first + MOST_PAIRS]
        refusal = kernel_refusal(some)
        if refusal is None:
            _kernel().copy_rows(some)
            continue
        if wants_kernels(some[0][0].device):
            say_once(f"rows are copied by PyTorch: {refusal}")
        reference.copy_rows(some)


def kernel_refusal(pairs: Sequence[Pair]) -> str | None:
    """Why the Triton kernel does not copy these, or None. A first use is checked here."""
    source = pairs[0][0]
    refusal = machine_refusal(source.device)
    if refusal is not None:
        return refusal
    for pair in pairs:
        for tensor in pair:
            if tensor.stride(3) != 1 or tensor.shape[3] > MAX_SIZE:
                return f"channels lie side by side, at most {MAX_SIZE}, got {_words(tensor)}"
    if source.shape[0] * source.shape[1] > _LARGEST_GRID:
        return f"{source.shape[0]} x {source.shape[1]} heads are more than {_LARGEST_GRID}"
    config = (source.dtype, tuple(pair[0].shape[3] for pair in pairs))
    return checked_refusal("copy_rows", config, source.device, lambda: _self_check(pairs))


def _self_check(pairs: Sequence[Pair]) -> str | None:
    batch, heads, tokens = _SMALL
    sources = [source[:batch, :heads, :tokens] for source, _ in pairs]
    got = [torch.zeros_like(source, memory_format=torch.contiguous_format) for source in sources]
    _kernel().copy_rows(list(zip(sources, got, strict=True)))
    same = (torch.equal(_bytes(a), _bytes(b)) for a, b in zip(got, sources, strict=True))
    if all(same):
        return None
    return "self-check failed: the copy differs"


def _check(pairs: Sequence[Pair]) -> None:
    if not pairs:
        return
    first = pairs[0][0]
    kind, lines = (first.dtype, first.device), first.shape[:2]
    for source, out in pairs:
        shape, alike = source.shape, kind == (source.dtype, source.device)
        alike = alike and kind == (out.dtype, out.device)
        if len(shape) != 4 or shape != out.shape or shape[:2] != lines or not alike:
            raise ValueError(
                "copy_rows expects pairs of [B, H, T, D] of one shape, with equal B, H, dtype and "
                f"device in all, got {_words(source)} for {_words(out)} beside {_words(first)}"
            )


def _bytes(x: Tensor) -> Tensor:
    """What is compared: NaN equals itself."""
    return x.view(torch.uint8)


def _words(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} with strides {x.stride()} on {x.device}"


def _kernel() -> Any:
    from videokv.kernels.copy_rows import triton

    return triton
