"""Attention of a few queries on one packed chunk, its codes read directly (decode).

The dense rows are never written: the chunk's bytes are all that moves. Tokens are split over many
programs, whose outputs are merged by log-sum-exp. A rotation of the keys is applied to the queries
instead, one of the values to the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from videokv.kernels.attend_packed import reference
from videokv.kernels.attend_packed.call import PackedCall
from videokv.kernels.gpu import checked_refusal, disagreement, machine_refusal
from videokv.kernels.reconstruct.parts import Parts
from videokv.tensors import map_tensors

__all__ = ["MAX_ROWS", "PackedCall", "attend_all", "attend_packed", "capturable", "kernel_refusal"]

MAX_ROWS = 64  # queries times the query heads of a KV head
MAX_COLUMNS = 64
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 3e-3, torch.float32: 1e-5}


def attend_packed(call: PackedCall) -> tuple[Tensor, Tensor]:
    """Output float32 ``[B, Hq, M, Dv]`` and natural-log lse float32 ``[B, Hq, M]``.

    By the kernel where ``kernel_refusal`` finds no reason against it, else by the reference.
    """
    if kernel_refusal(call) is not None:
        return reference.attend_packed(call)
    found: tuple[Tensor, Tensor] = _kernel().attend_packed(call)
    return found


def attend_all(calls: Sequence[PackedCall], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """One softmax over the keys of ``calls`` (of one query), and of those behind ``other``, an
    output ``[B, Hq, M, Dv]`` and its natural-log lse; the output in the dtype of that one.

    By the kernels: ask ``kernel_refusal`` of every call before.
    """
    found: tuple[Tensor, Tensor] = _kernel().attend_all(calls, other)
    return found


def capturable(calls: Sequence[PackedCall]) -> bool:
    """Whether ``attend_all`` of these calls may be captured in a CUDA graph: the tables that their
    kernels follow are there, from a read of the same chunks before."""
    found: bool = _kernel().capturable(calls)
    return found


def kernel_refusal(call: PackedCall) -> str | None:
    """Why the Triton kernel does not serve this call, or None; a first use is checked here."""
    if call.query.dtype not in _DTYPES:
        return f"queries are one of {_DTYPES}, got {call.query.dtype}"
    if call.rows > MAX_ROWS:
        return f"{call.rows} query rows of a KV head are more than {MAX_ROWS}"
    if call.columns > MAX_COLUMNS:
        return f"{call.columns} columns of a correction are more than {MAX_COLUMNS}"
    for side in (call.keys, call.values):
        if side.low_rank is not None or len(side.stages) > 1:
            return "repairs and more than one stage of centroids have to be reconstructed"
        reason = side.kernel_refusal()
        if reason is not None:
            return reason
    refusal = machine_refusal(call.query.device)
    if refusal is not None:
        return refusal
    config = (
        call.query.dtype,
        call.keys.config(),
        call.values.config(),
        call.columns,
        (call.by_steps, call.factors is not None),
        call.rows,
    )
    return checked_refusal("attend_packed", config, call.query.device, lambda: _self_check(call))


def _self_check(call: PackedCall) -> str | None:
    heads = 2 * (call.query.shape[1] // call.keys.shape[1])
    extra_q, extra_k = call.extra_query, call.extra_keys
    small = replace(
        call,
        query=call.query[:1, :heads],
        keys=_first_heads(call.keys),
        values=_first_heads(call.values),
        extra_query=None if extra_q is None else extra_q[:1, :heads],
        extra_keys=None if extra_k is None else extra_k[:1, :2],
        factors=None if call.factors is None else call.factors[:1, :2].contiguous(),
    )
    got, got_lse = _kernel().attend_packed(small)
    want, want_lse = reference.attend_packed(small)
    tolerance = _TOLERANCE[call.query.dtype]
    return disagreement(got, want, tolerance=tolerance) or disagreement(
        got_lse, want_lse, tolerance=tolerance, what="the log-sum-exp"
    )


def _first_heads(parts: Parts) -> Parts:
    return map_tensors(parts, lambda tensor: tensor[:1, :2].contiguous())


def _kernel() -> Any:
    from videokv.kernels.attend_packed import triton

    return triton
