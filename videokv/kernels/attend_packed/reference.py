"""Reconstruct in float32, then attend: the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from videokv.kernels.attend import Call, Rows
from videokv.kernels.attend import reference as dense
from videokv.kernels.attend_packed.call import PackedCall
from videokv.kernels.reconstruct import reference as reconstruction
from videokv.kernels.reconstruct.parts import Parts


def attend_packed(call: PackedCall) -> tuple[Tensor, Tensor]:
    """See the package."""
    rows = Rows(_dense(call.keys), _dense(call.values))
    query = call.query.float()
    return dense.attend(Call(query, rows, None, call.scale, call.extra_query, call.extra_keys))


def _dense(parts: Parts) -> Tensor:
    out = torch.empty(parts.shape, device=parts.codes.device)
    reconstruction.reconstruct(parts, out, factor=None)
    return out
