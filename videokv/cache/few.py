"""Few queries (decode): packed chunks are attended to as they are, without dense rows.

Each packed chunk gives an output and a log-sum-exp, the dense chunks and the current rows another,
and they are merged. Taken only where every packed chunk of the layer can be read so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from videokv.kernels.attend_packed import MAX_ROWS, PackedCall, attend_packed, kernel_refusal
from videokv.kernels.gpu import say_once
from videokv.kernels.reconstruct import inner_parts
from videokv.noise import ScoreNoise
from videokv.protocols import Packed

MOST_PACKED_QUERIES = 16

Read = tuple[Packed, Packed, tuple[ScoreNoise, ...]]


def packed_parts(
    query: Tensor, chunks: Sequence[Read], *, scale: float
) -> list[tuple[Tensor, Tensor]] | None:
    """(output float32 ``[B, Hq, M, Dv]``, lse) of every chunk, None where one has to be decoded.

    chunks: keys, values and the noise to correct, of each.
    """
    if not chunks or query.shape[1] // chunks[0][0].shape[1] * query.shape[2] > MAX_ROWS:
        return None
    calls = []
    for keys, values, noise in chunks:
        call = _call(query, keys, values, noise, scale=scale)
        reason = call if isinstance(call, str) else kernel_refusal(call)
        if isinstance(call, str) or reason is not None:
            say_once(f"few queries read decoded chunks: {reason}")
            return None
        calls.append(call)
    return [attend_packed(call) for call in calls]


def _call(
    query: Tensor, keys: Packed, values: Packed, noise: tuple[ScoreNoise, ...], *, scale: float
) -> PackedCall | str:
    key_parts, value_parts = inner_parts(keys), inner_parts(values)
    if key_parts is None or value_parts is None:
        return f"{type(keys).__name__} cannot be read packed"
    if any(term.exact for term in noise):
        return "the exact correction is no product"
    extra_query = extra_keys = None
    if noise:
        extra_query, extra_keys = _columns(query, noise, tokens=keys.shape[2], scale=scale)
    return PackedCall(query, key_parts, value_parts, scale, extra_query, extra_keys)


def _columns(
    query: Tensor, noise: tuple[ScoreNoise, ...], *, tokens: int, scale: float
) -> tuple[Tensor, Tensor]:
    """-phi / scale ``[B, Hq, M, F]`` and omega ``[B, Hkv, T, F]``, all terms side by side."""
    phis, omegas = [], []
    for term in noise:
        phi = term.query_map.features(query, scale=scale) * (-1 / scale)
        omega = term.weights.float()
        phis.append(phi)
        omegas.append(omega.expand(*omega.shape[:2], tokens, phi.shape[3]))
    return torch.cat(phis, -1), torch.cat(omegas, -1)
