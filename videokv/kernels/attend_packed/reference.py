"""Reconstruct in float32, then attend: the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from videokv.kernels.attend import Call, Rows
from videokv.kernels.attend import reference as dense
from videokv.kernels.attend_packed.call import Current, PackedCall
from videokv.kernels.reconstruct import reference as reconstruction
from videokv.kernels.reconstruct.parts import Parts

Part = tuple[Tensor, Tensor]


def attend_packed(call: PackedCall) -> Part:
    """See the package."""
    call = call.with_columns()
    rows = Rows(_dense(call.keys), _dense(call.values))
    query = call.query.float()
    return dense.attend(Call(query, rows, None, call.scale, call.extra_query, call.extra_keys))


def attend_current(query: Tensor, current: Current) -> Part:
    """Output of the query's dtype and lse float32 of the current rows alone."""
    rows = Rows(current.key, current.value)
    return dense.attend(Call(query, None, rows, current.scale, causal=current.causal))


def attend_all(calls: Sequence[PackedCall], other: Part | Current) -> Part:
    """See the package."""
    if isinstance(other, Current):
        other = attend_current(calls[0].query, other)
    parts = [other, *(attend_packed(call) for call in calls)]
    total = torch.stack([lse.float() for _, lse in parts]).logsumexp(0)
    whole = torch.zeros_like(other[0], dtype=torch.float32)
    for output, lse in parts:
        whole += output.float() * (lse - total).exp().unsqueeze(-1)
    return whole.to(other[0].dtype), total


def _dense(parts: Parts) -> Tensor:
    out = torch.empty(parts.shape, device=parts.codes.device)
    reconstruction.reconstruct(parts, out, factor=None)
    return out
