"""Which backend serves a call, and why."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from videokv.attention.checks import check_call
from videokv.protocols import NARROW_BACKEND, AttentionBackend, Segment

# Module and name of each backend; imported when first needed.
_BACKENDS = {
    "sdpa": ("videokv.attention.sdpa", "BACKEND"),
    "triton": ("videokv.attention.triton", "BACKEND"),
    "triton-fp8": ("videokv.attention.triton", "FP8_BACKEND"),
    "flex": ("videokv.attention.flex", "BACKEND"),
    "eager": ("videokv.attention.eager", "BACKEND"),
}
# What "auto" tries, in this order: the others round more, or are there to be compared with.
_AUTO = ("sdpa", "triton", "eager")
_MANY_ROWS = 128  # queries from which on our kernel for Hopper fills its blocks


@dataclass(frozen=True)
class Choice:
    """A backend's name and the reason it was taken."""

    backend: str
    why: str


def backend_names() -> tuple[str, ...]:
    """Backends that can be asked for by name."""
    return tuple(_BACKENDS)


def load_backend(name: str) -> AttentionBackend:
    """The backend called ``name``; ValueError where there is none."""
    if name not in _BACKENDS:
        raise ValueError(f"unknown backend {name!r}; use 'auto' or one of {backend_names()}")
    module, attribute = _BACKENDS[name]
    found: AttentionBackend = getattr(importlib.import_module(module), attribute)
    return found


def explain_choice(
    query: Tensor, segments: Sequence[Segment], *, backend: str = "auto", causal: bool = False
) -> Choice:
    """The backend that ``attend`` would use, and why; for sdpa, its kernel too.

    Raises ValueError with the backend's own words where one asked for by name refuses.
    """
    filled = [s for s in segments if s.keys.shape[2]]
    own = own_first(query, filled) if backend == "auto" and not causal else None
    choice = _chosen(query, filled, backend=backend, own=own)
    if choice.backend != "sdpa":
        return choice
    from videokv.attention.sdpa import BACKEND

    return Choice("sdpa", f"{choice.why}; {BACKEND.kernels(query, filled)}")


def _chosen(query: Tensor, filled: Sequence[Segment], *, backend: str, own: str | None) -> Choice:
    """The backend for segments that are not empty; own: why "auto" takes our own kernel first."""
    if backend != NARROW_BACKEND and any(s.narrow for s in filled):
        raise ValueError(
            f"backend {backend!r} does not read keys and values in E4M3; use {NARROW_BACKEND!r}, "
            "or give them in the query's dtype"
        )
    if backend != "auto":
        reason = load_backend(backend).refusal(query, filled)
        if reason is not None:
            raise ValueError(f"backend {backend!r} cannot serve this call: {reason}")
        return Choice(backend, "asked for")
    if own is not None:
        return Choice("triton", own)
    refusals: list[str] = []
    for name in _AUTO:
        reason = load_backend(name).refusal(query, filled)
        if reason is None:
            return Choice(name, "; ".join(refusals) or "the fastest that serves the call")
        refusals.append(f"{name} refused: {reason}")
    raise ValueError("no attention backend serves this call: " + "; ".join(refusals))


def own_first(query: Tensor, filled: Sequence[Segment]) -> str | None:
    """Why "auto" takes our own kernel before stock ones for a call that is not causal, or None.

    On Hopper, with packed rows: one H200 took 1.38 to 1.55 ms, decoding and correction included,
    where FlashAttention-4 takes 1.47 and cuDNN 1.87 on dense keys (12 heads, 4,680 queries,
    32,760 keys; docs/bench.md).
    """
    if query.device.type != "cuda" or query.shape[2] < _MANY_ROWS:
        return None
    if torch.cuda.get_device_capability(query.device)[0] != 9:
        return None
    if not any(s.packed for s in filled) or any(s.narrow for s in filled):
        return None
    if any(t.exact for s in filled for t in s.noise):
        return None
    from videokv.attention import triton

    if triton.BACKEND.kernel(query, filled) != "gluon":
        return None
    return "its kernel for Hopper is faster than stock ones"


def attend(
    query: Tensor,
    segments: Sequence[Segment],
    *,
    scale: float | None = None,
    backend: str = "auto",
    causal: bool = False,
    need_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """softmax(scale q k^T - b) v, one softmax over all segments.

    query: ``[B, Hq, M, D]``. segments: the chunks in order, then the current one; empty ones are
    skipped. b corrects the scores of segments that carry noise, and of no other. scale: softmax
    scale, 1/sqrt(D) by default. causal: the last segment holds the queries' own M tokens; query m
    sees all earlier segments and the rows <= m of the last. backend: "auto" or one of
    ``backend_names()``.

    Returns the output ``[B, Hq, M, Dv]`` in the query's dtype and, where ``need_lse``, the
    natural-log log-sum-exp of the corrected scores ``[B, Hq, M]`` in float32 (float64 for float64
    inputs), else None. Without a single key the output is 0 and the log-sum-exp -inf.

    Raises ValueError for shapes, dtypes or devices that do not fit, and where a backend asked for
    by name cannot serve the call.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    check_call(query, segments, scale=scale, causal=causal)
    filled = [s for s in segments if s.keys.shape[2]]
    if not filled or not query.shape[2]:
        return _nothing_seen(query, segments[0].values.shape[3], need_lse=need_lse)
    narrow = any([s.narrow for s in filled])
    own = own_first(query, filled) if backend == "auto" and not causal else None
    if not causal and not narrow and own is None and backend in ("auto", "sdpa"):
        from videokv.attention.sdpa import BACKEND

        found = BACKEND.attempt(query, filled, scale=scale, need_lse=need_lse)
        if not isinstance(found, str):
            return found
    elif own is not None or backend == NARROW_BACKEND or (backend == "triton" and not narrow):
        from videokv.attention import triton

        ours = triton.FP8_BACKEND if backend == NARROW_BACKEND else triton.BACKEND
        found = ours.attempt(query, filled, scale=scale, causal=causal, need_lse=need_lse)
        if not isinstance(found, str):
            return found
        own = None
    choice = _chosen(query, filled, backend=backend, own=own)
    if backend == "auto" and choice.backend != _AUTO[0] and own is None:
        _say_once(f"attention runs on backend {choice.backend!r}: {choice.why}")
    return load_backend(choice.backend).attend(
        query, filled, scale=scale, causal=causal, need_lse=need_lse
    )


def _nothing_seen(query: Tensor, value_dim: int, *, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    out = query.new_zeros(*query.shape[:3], value_dim)
    dtype = torch.promote_types(query.dtype, torch.float32)
    return out, out.new_full(out.shape[:3], -torch.inf, dtype=dtype) if need_lse else None


@functools.lru_cache(maxsize=256)
def _say_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)
