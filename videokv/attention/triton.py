"""Our own kernel: cached and current keys in one softmax, the correction as a second product.

It takes what stock kernels do not: any number of columns up to 256 (a step for every channel, as
KIVI's keys have), unequal head sizes, grouped heads, and E4M3 keys and values. Cached chunks are
read where they lie if they are consecutive rows of one buffer; the current chunk always is.

Precision: the columns are of the query's dtype, an error of at most 2^-7 of the correction in BF16
and 2^-10 in FP16.
``triton-fp8`` rounds cached values and their softmax weights to E4M3, values with a scale a head
(relative error of the output below 4e-2); keys and the current chunk stay exact. Segments whose
keys are E4M3 too are served, with an error of 5e-2 on Gaussian scores and more where attention is
concentrated. A cache on a GPU gives values in E4M3 already, written so by ``kernels.reconstruct``
with their tokens side by side; other rows are converted here, which takes two more passes.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from videokv.attention.adjacent import joined
from videokv.attention.columns import (
    ColumnCall,
    balance,
    plan_calls,
    query_with_columns,
    score_columns,
    spare_columns,
    write_key_columns,
)
from videokv.kernels.attend import (
    MAX_COLUMNS,
    Call,
    Rows,
    attempt,
    kernel_refusal,
    served_by,
    to_e4m3,
)
from videokv.kernels.attend.tiles import padded
from videokv.protocols import Segment
from videokv.tensors import E4M3


class TritonBackend:
    """See the module. fp8: whether products with cached rows are E4M3 products."""

    def __init__(self, *, fp8: bool = False) -> None:
        self.fp8 = fp8
        self.name = "triton-fp8" if fp8 else "triton"
        self._no_exact = (
            f"{self.name} serves corrections that are columns; correction 'exact' is not: use "
            "backend='eager', or correction 'taylor' or 'cumulant'"
        )
        self._verdicts: dict[Hashable, str | None] = {}
        self._kernels: dict[Hashable, str] = {}

    def refusal(self, query: Tensor, segments: Sequence[Segment]) -> str | None:
        """Exact terms, what the kernel does not take, and a kernel that failed its check here."""
        if any(term.exact for s in segments for term in s.noise):
            return self._no_exact
        columns = _column_call(segments).columns
        if columns > MAX_COLUMNS:
            return f"{self.name}: {columns} columns of the correction are more than {MAX_COLUMNS}"
        key = _shape_key(query, segments, columns)
        if self._verdicts.get(key, "unknown") is not None:
            call = self._call(query, _first_rows(segments), scale=1.0, causal=False)
            self._verdicts[key] = kernel_refusal(call)
        reason = self._verdicts[key]
        return None if reason is None else f"{self.name}: {reason}"

    def kernel(self, query: Tensor, segments: Sequence[Segment]) -> str:
        """Which kernel runs a call: 'gluon' (Hopper's own), 'triton', or why neither does."""
        key = _shape_key(query, segments, _column_call(segments).columns)
        if key not in self._kernels:
            found = served_by(self._call(query, _first_rows(segments), scale=1.0, causal=False))
            if query.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return found  # what was not checked before a capture may be checked after it
            self._kernels[key] = found
        return self._kernels[key]

    def attend(
        self,
        query: Tensor,
        segments: Sequence[Segment],
        *,
        scale: float,
        causal: bool = False,
        need_lse: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """See ``AttentionBackend.attend``; the lse is float32 (float64 is refused).

        Raises ValueError with the reason where the kernel cannot serve the call.
        """
        found = self.attempt(query, segments, scale=scale, causal=causal, need_lse=need_lse)
        if isinstance(found, str):
            raise ValueError(f"backend {found}; use backend='auto'")
        return found

    def attempt(
        self,
        query: Tensor,
        segments: Sequence[Segment],
        *,
        scale: float,
        causal: bool = False,
        need_lse: bool = True,
    ) -> tuple[Tensor, Tensor | None] | str:
        """``attend``, or the reason of a ``refusal``; planned once for both."""
        if any([term.exact for s in segments for term in s.noise]):
            return self._no_exact
        found = attempt(self._call(query, segments, scale=scale, causal=causal))
        if isinstance(found, str):
            return f"{self.name}: {found}"
        return found[0], found[1] if need_lse else None

    def _call(
        self, query: Tensor, segments: Sequence[Segment], *, scale: float, causal: bool
    ) -> Call:
        last = segments[-1]
        current = None if last.noise or last.narrow else last
        past = segments if current is None else segments[:-1]
        extra_query = extra_keys = None
        columns = _column_call(past)
        if past and columns.columns:
            if query.dtype in (torch.bfloat16, torch.float32):
                query, extra_query, extra_keys = _with_columns(query, columns, scale=scale)
            else:
                extra_query, extra_keys = balance(*score_columns(query, columns, scale=scale))
        return Call(
            query,
            self._past(past) if past else None,
            None if current is None else Rows(current.keys, current.values),
            scale,
            extra_query,
            extra_keys,
            causal=causal and query.shape[2] > 1,
        )

    def _past(self, segments: Sequence[Segment]) -> Rows:
        if any(s.narrow for s in segments):
            return _narrow_rows(segments)
        keys, values = joined([s.keys for s in segments]), joined([s.values for s in segments])
        if not self.fp8:
            return Rows(keys, values)
        values, value_scale = to_e4m3(values)
        return Rows(keys, values.mT.contiguous().mT, None, value_scale)


def _narrow_rows(segments: Sequence[Segment]) -> Rows:
    """Rows with values in E4M3 already, all with the same scales."""
    first = segments[0]
    if any(
        s.key_scale is not first.key_scale or s.value_scale is not first.value_scale
        for s in segments
    ):
        raise ValueError(
            "cached segments in E4M3 must share one key_scale and one value_scale; gather them in "
            "one buffer, or give all in the query's dtype"
        )
    keys, values = (
        _joined_bytes(side) for side in ([s.keys for s in segments], [s.values for s in segments])
    )
    return Rows(keys, values, first.key_scale, first.value_scale)


def _joined_bytes(parts: Sequence[Tensor]) -> Tensor:
    """``joined``, E4M3 as bytes: not every device joins it."""
    if parts[0].dtype != E4M3:
        return joined(parts)
    return joined([rows.view(torch.uint8) for rows in parts]).view(E4M3)


def _with_columns(
    query: Tensor, call: ColumnCall, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The query and its columns, side by side in one tensor, and the columns of the keys."""
    head_dim, room = query.shape[3], padded(call.columns)
    wide = query_with_columns(query, call, scale=scale, width=head_dim + room)
    extra_keys = spare_columns(call.segments, room, dtype=query.dtype)
    write_key_columns(extra_keys, call)
    return wide[..., :head_dim], wide[..., head_dim:], extra_keys


def _column_call(segments: Sequence[Segment]) -> ColumnCall:
    """All segments in one call, however many columns they need."""
    calls = plan_calls(segments, budget=sys.maxsize)
    return calls[0] if calls else ColumnCall(())


def _shape_key(query: Tensor, segments: Sequence[Segment], columns: int) -> Hashable:
    """Calls of one key are served alike: what was served once is not looked at again."""
    last = segments[-1]
    sizes = (query.shape[0], query.shape[1], last.keys.shape[1], query.shape[3])
    kinds = (len(segments) > 1, bool(last.noise), last.narrow, query.shape[2] <= 16, columns)
    return (query.dtype, query.device, sizes, last.values.shape[3], kinds)


def _first_rows(segments: Sequence[Segment], *, tokens: int = 384) -> list[Segment]:
    """The first rows of each segment: enough to know whether a call can be served, and for a
    kernel's check to go through several blocks of keys."""
    return [
        replace(
            s,
            keys=s.keys[:, :, :tokens],
            values=s.values[:, :, :tokens],
            noise=tuple(type(t)(t.weights[:, :, :tokens], t.query_map, t.exact) for t in s.noise),
        )
        for s in segments
    ]


BACKEND = TritonBackend()
FP8_BACKEND = TritonBackend(fp8=True)
