"""Attention over cached and current keys in one softmax, the correction as a second small product.

    s = scale (q . k + extra_q . extra_k)   cached keys;        s = scale q . k   current keys
    out = softmax(s) v,   lse = log sum exp(s)   (natural)

extra_q = -phi / scale and extra_k = omega are the columns of a correction. Cached keys, values or
both may be E4M3 with a scale a head: the products with them are then E4M3 products (the query, or
the softmax weights, are rounded too), while the current chunk stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from videokv.kernels.attend import reference
from videokv.kernels.attend.call import Call, Rows
from videokv.kernels.attend.tiles import Tile, choose_tile
from videokv.kernels.gpu import checked_refusal, disagreement, machine_refusal, say_once
from videokv.tensors import E4M3, E4M3_MAX

__all__ = [
    "MAX_COLUMNS",
    "MAX_HEAD_DIM",
    "Call",
    "Rows",
    "Tile",
    "attempt",
    "attend",
    "gluon_refusal",
    "kernel_refusal",
    "served_by",
    "to_e4m3",
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
MAX_COLUMNS = 256
FP8_CAPABILITY = (8, 9)
_HOPPER = 9
_FEW_ROWS = 64  # queries up to which small blocks of the Triton kernel do less for nothing
_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
_FP8_TOLERANCE = 5e-2
_AGAIN = Tile(64, 32, 4, 2, descriptors=False)  # small: most of its programs end at once


def attend(call: Call, *, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Output ``[B, Hq, M, Dv]`` in the query's dtype and lse float32 ``[B, Hq, M]``.

    By the Gluon kernel on Hopper where ``gluon_refusal`` finds no reason against it, else by the
    Triton kernel, else by the reference. tile: of the Triton kernel, which then serves the call;
    None takes the largest that the device's shared memory holds.
    """
    if tile is not None:
        out: tuple[Tensor, Tensor] = _kernel().attend(call, tile=tile)
        return out
    found = attempt(call)
    return reference.attend(call) if isinstance(found, str) else found


def attempt(call: Call) -> tuple[Tensor, Tensor] | str:
    """``attend`` by a kernel, or why neither serves the call; looked at once for both."""
    kernel = served_by(call)
    if kernel not in ("gluon", "triton"):
        return kernel
    found: tuple[Tensor, Tensor]
    found = _by_gluon(call) if kernel == "gluon" else _kernel().attend(call, tile=device_tile(call))
    return found


def _by_gluon(call: Call) -> tuple[Tensor, Tensor]:
    """The Gluon kernel marks rows whose weights may have left float32 by a log-sum-exp that is not
    finite; the Triton kernel does their blocks again (all others end at once)."""
    found: tuple[Tensor, Tensor] = _hopper().attend(call)
    if call.past is None or call.past.values.dtype != E4M3:
        _kernel().attend(call, tile=_AGAIN, into=found)
    return found


def served_by(call: Call) -> str:
    """``gluon``, ``triton``, or why neither kernel serves the call."""
    reason = _unfit(call)
    if reason is not None:
        return reason
    if gluon_refusal(call) is None:
        return "gluon"
    return _triton_refusal(call) or "triton"


def gluon_refusal(call: Call) -> str | None:
    """Why the Gluon kernel does not serve this call, or None; a first use is checked here.

    Said once where a Hopper GPU lacks it: Gluon is an experimental part of Triton.
    """
    query = call.query
    reason = machine_refusal(query.device)
    if reason is not None:
        return reason
    if _capability(query.device)[0] != _HOPPER:
        return f"it is made for compute capability {_HOPPER}, not {_capability(query.device)}"
    if query.shape[2] <= _FEW_ROWS:
        return f"it is made for more than {_FEW_ROWS} queries, got {query.shape[2]}"
    reason = _gluon_missing()
    if reason is None:
        reason = _hopper().refusal(call)
        if reason is not None:
            return str(reason)
        check = functools.partial(_self_check, call, by_gluon=True)
        reason = checked_refusal("attend by gluon", _config(call), query.device, check)
    if reason is not None:
        say_once(f"attention runs on the slower Triton kernel: {reason}")
    return reason


def kernel_refusal(call: Call) -> str | None:
    """Why no kernel serves this call, or None; a first use is checked here."""
    kernel = served_by(call)
    return None if kernel in ("gluon", "triton") else kernel


def _unfit(call: Call) -> str | None:
    """What neither kernel takes, or None."""
    query = call.query
    if query.dtype not in DTYPES:
        return f"queries are one of {DTYPES}, got {query.dtype}"
    if max(query.shape[3], call.value_dim) > MAX_HEAD_DIM:
        return f"head sizes up to {MAX_HEAD_DIM}, got {query.shape[3]} and {call.value_dim}"
    if call.columns > MAX_COLUMNS:
        return f"up to {MAX_COLUMNS} columns of a correction, got {call.columns}"
    if query.shape[0] * query.shape[1] > 65535:
        return f"{query.shape[0]} x {query.shape[1]} heads are more than 65535"
    refusal = machine_refusal(query.device)
    if refusal is not None:
        return refusal
    if call.fp8 and _capability(query.device) < FP8_CAPABILITY:
        return f"E4M3 products need compute capability {FP8_CAPABILITY}"
    return None


def _triton_refusal(call: Call) -> str | None:
    device = call.query.device
    if device_tile(call) is None:
        return f"no tile fits into {shared_bytes(device)} bytes of shared memory"
    return checked_refusal("attend", _config(call), device, lambda: _self_check(call))


def device_tile(call: Call) -> Tile | None:
    """The tile for this call on its device."""
    return choose_tile(
        limit_bytes=shared_bytes(call.query.device),
        item_bytes=call.query.dtype.itemsize,
        head_dim=call.query.shape[3],
        value_dim=call.value_dim,
        columns=call.columns,
        rows=call.query.shape[2],
        value_bytes=None if call.past is None else call.past.values.element_size(),
    )


@functools.lru_cache(maxsize=16)
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may use (99 KiB on the smallest GPUs from SM80 on)."""
    if device.type != "cuda":
        return 99 << 10
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def _capability(device: torch.device) -> tuple[int, int]:
    """(0, 0) where Triton's interpreter stands in for a GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def to_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` ``[B, H, T, D]`` in E4M3, and the scale float32 ``[B, H]`` to multiply it by."""
    largest = x.abs().amax((2, 3), keepdim=True).float()
    scale = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
    small = (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return small, scale[..., 0, 0].contiguous()


def _config(call: Call) -> Hashable:
    return (
        call.query.dtype,
        call.query.shape[3],
        call.value_dim,
        call.columns,
        call.query.shape[2] <= 16,
        call.query.shape[1] > _rows(call).keys.shape[1],
        call.past is not None,
        call.current is not None,
        None if call.past is None else (call.past.keys.dtype, call.past.values.dtype),
        call.causal,
    )


def _rows(call: Call) -> Rows:
    rows = call.past if call.past is not None else call.current
    assert rows is not None
    return rows


def _self_check(call: Call, *, by_gluon: bool = False) -> str | None:
    """Kernel against reference in float32 on the first heads and tokens of the call."""
    small = _corner(call)
    if by_gluon:
        got, got_lse = _by_gluon(small)
        if not bool(_hopper().attend(small)[1].isfinite().any()):
            return "it leaves every row of queries to the Triton kernel"
    else:
        got, got_lse = _kernel().attend(small, tile=device_tile(call))
    want, want_lse = reference.attend(small)
    tolerance = _FP8_TOLERANCE if call.fp8 else _TOLERANCE[call.query.dtype]
    return disagreement(got, want, tolerance=tolerance) or disagreement(
        got_lse, want_lse, tolerance=tolerance, what="the log-sum-exp"
    )


def _corner(call: Call, *, kv_heads: int = 2, tokens: int = 333, rows: int = 77) -> Call:
    group = call.query.shape[1] // _rows(call).keys.shape[1]
    heads = kv_heads * group
    if call.causal:
        tokens = rows

    def cut(part: Rows | None) -> Rows | None:
        if part is None:
            return None
        scales = [
            s if s is None else s[:1, :kv_heads].contiguous()
            for s in (part.key_scale, part.value_scale)
        ]
        keys, values = (x[:1, :kv_heads, :tokens] for x in (part.keys, part.values))
        return Rows(keys, values, *scales)

    extra_q, extra_k = call.extra_query, call.extra_keys
    return replace(
        call,
        query=call.query[:1, :heads, :rows],
        past=cut(call.past),
        current=cut(call.current),
        extra_query=None if extra_q is None else extra_q[:1, :heads, :rows],
        extra_keys=None if extra_k is None else extra_k[:1, :kv_heads, :tokens],
    )


def _kernel() -> Any:
    from videokv.kernels.attend import triton

    return triton


@functools.lru_cache(maxsize=1)
def _gluon_missing() -> str | None:
    """Why Gluon cannot be had, or None. Its names change between releases of Triton."""
    try:
        _hopper()
    except Exception as error:  # noqa: BLE001 - whatever it is, the Triton kernel serves
        return f"this Triton's Gluon is not as expected ({error!r:.200})"
    return None


def _hopper() -> Any:
    from videokv.kernels.attend import hopper

    return hopper
