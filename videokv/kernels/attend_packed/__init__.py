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
from videokv.kernels.attend_packed.call import Current, PackedCall
from videokv.kernels.gpu import checked_refusal, disagreement, machine_refusal
from videokv.kernels.reconstruct.parts import Parts
from videokv.tensors import map_tensors

__all__ = [
    "MAX_CURRENT",
    "MAX_ROWS",
    "Current",
    "PackedCall",
    "attend_all",
    "attend_packed",
    "capturable",
    "current_refusal",
    "kernel_refusal",
]

MAX_ROWS = 64  # queries times the query heads of a KV head
MAX_COLUMNS = 64
MAX_CURRENT = 64  # rows that a merge attends to itself; more are worth a kernel of their own
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


def attend_all(
    calls: Sequence[PackedCall], other: tuple[Tensor, Tensor] | Current
) -> tuple[Tensor, Tensor]:
    """One softmax over the keys of ``calls`` (of one query), and of others: those behind an output
    ``[B, Hq, M, Dv]`` and its natural-log lse, or current rows (ask ``current_refusal`` before).
    The output is in the dtype of that output, or of the query.

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


def current_refusal(call: PackedCall, current: Current) -> str | None:
    """Why ``attend_all`` does not take these current rows, or None; a first use is checked here."""
    key, value, query = current.key, current.value, call.query
    if key.shape[2] > MAX_CURRENT:
        return f"{key.shape[2]} current rows are more than {MAX_CURRENT}"
    if not key.dtype == value.dtype == query.dtype:
        return f"rows are {key.dtype} and {value.dtype}, queries {query.dtype}"
    heads = (query.shape[1], key.shape[1])
    sides = (call.keys.config(), call.values.config(), call.by_steps)
    config = (query.dtype, key.shape[3], value.shape[3], heads, current.causal, call.rows, *sides)
    return checked_refusal(
        "attend_packed to current rows", config, query.device, lambda: _check_current(call, current)
    )


def _check_current(call: PackedCall, current: Current) -> str | None:
    small = _corner(call)
    few = replace(current, key=current.key[:1, :2], value=current.value[:1, :2])
    got, got_lse = _kernel().attend_all([small], few)
    want, want_lse = reference.attend_all([small], few)
    tolerance = _TOLERANCE[call.query.dtype]
    return disagreement(got, want, tolerance=tolerance) or disagreement(
        got_lse, want_lse, tolerance=tolerance, what="the log-sum-exp"
    )


def _self_check(call: PackedCall) -> str | None:
    small = _corner(call)
    got, got_lse = _kernel().attend_packed(small)
    want, want_lse = reference.attend_packed(small)
    tolerance = _TOLERANCE[call.query.dtype]
    return disagreement(got, want, tolerance=tolerance) or disagreement(
        got_lse, want_lse, tolerance=tolerance, what="the log-sum-exp"
    )


def _corner(call: PackedCall) -> PackedCall:
    """The first batch row and two KV heads."""
    heads = 2 * (call.query.shape[1] // call.keys.shape[1])
    extra_q, extra_k = call.extra_query, call.extra_keys
    return replace(
        call,
        query=call.query[:1, :heads],
        keys=_first_heads(call.keys),
        values=_first_heads(call.values),
        extra_query=None if extra_q is None else extra_q[:1, :heads],
        extra_keys=None if extra_k is None else extra_k[:1, :2],
        factors=None if call.factors is None else call.factors[:1, :2].contiguous(),
    )


def _first_heads(parts: Parts) -> Parts:
    return map_tensors(parts, lambda tensor: tensor[:1, :2].contiguous())


def _kernel() -> Any:
    from videokv.kernels.attend_packed import triton

    return triton
