"""Few queries (decode): packed chunks are attended to as they are, without dense rows.

All packed chunks give an output and a log-sum-exp, merged with what the dense chunks and the
current rows give. Taken only where every packed chunk of the layer can be read so.

A correction that is factors times the chunk's squared steps needs no columns: the kernels find
them from the packed steps. What does not depend on the query is found out once for a set of chunks.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from videokv.cache.chunks import Chunk, PackedChunk
from videokv.kernels.attend_packed import (
    MAX_CURRENT,
    MAX_ROWS,
    Current,
    PackedCall,
    attend_all,
    capturable,
    current_refusal,
    kernel_refusal,
)
from videokv.kernels.attend_packed.call import key_steps
from videokv.kernels.gpu import checked_refusal, disagreement, say_once
from videokv.kernels.reconstruct import Parts, inner_parts
from videokv.noise import QueryMap, ScoreNoise
from videokv.protocols import Correction, Packed, Segment

__all__ = ["MOST_PACKED_QUERIES", "attend_all", "current_rows", "packed_calls"]

MOST_PACKED_QUERIES = 16
_LINEAR = ("taylor", "calibrated", "measured")  # weights: factors times squared steps
_STEPS_TOLERANCE = 1e-5

Noise = tuple[ScoreNoise, ...]


@dataclass(frozen=True, eq=False)
class _Reading:
    """One chunk as it is read; noise: what is not a matter of its steps and ``factors``."""

    keys: Parts
    values: Parts
    noise: Noise
    by_steps: bool
    factors: Tensor | None

    def call(self, query: Tensor, *, scale: float) -> PackedCall:
        extra: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.noise:
            extra = _columns(query, self.noise, tokens=self.keys.tokens, scale=scale)
        return PackedCall(query, self.keys, self.values, scale, *extra, self.by_steps, self.factors)


# Chunks never change: how one is read holds as long as it lives. With it a call whose query is of
# no memory: what is kept must not hold a caller's tensors.
_readings: weakref.WeakKeyDictionary[PackedChunk, dict[Hashable, PackedCall]] = (
    weakref.WeakKeyDictionary()
)


def packed_calls(
    query: Tensor,
    chunks: Sequence[Chunk],
    correction: Correction | None,
    *,
    first: int,
    scale: float,
) -> list[PackedCall] | None:
    """A call for each packed chunk among ``chunks``; None where one has to be decoded, or there is
    none. first: the oldest token that may be read.

    In the capture of a CUDA graph nothing is kept, whose memory is the graph's own, and chunks that
    were not read before it are decoded.
    """
    packed = [chunk for chunk in chunks if isinstance(chunk, PackedChunk)]
    if not packed or query.shape[2] > MOST_PACKED_QUERIES:
        return None
    if packed[0].start < first:
        say_once("few queries read decoded chunks: rows of the first were forgotten")
        return None
    if query.shape[1] // packed[0].keys.shape[1] * query.shape[2] > MAX_ROWS:
        say_once(f"few queries read decoded chunks: a KV head has more than {MAX_ROWS} query rows")
        return None
    key = (query.dtype, query.shape[:3], correction)
    capturing = _capturing(query.device)
    calls = []
    for chunk in packed:
        known = _readings.get(chunk)
        kept = None if known is None else known.get(key)
        if kept is not None:
            calls.append(kept.asked(query, scale=scale))
            continue
        found = _reading(chunk, correction)
        call = found if isinstance(found, str) else found.call(query, scale=scale)
        reason = _refusal(call)
        if isinstance(call, str) or isinstance(found, str) or reason is not None:
            say_once(f"few queries read decoded chunks: {reason}")
            return None
        if not found.noise and not capturing:  # columns are as large as the codes: not kept
            empty = torch.empty(query.shape, dtype=query.dtype, device="meta")
            _readings.setdefault(chunk, {})[key] = call.asked(empty, scale=scale)
        calls.append(call)
    if capturing and not capturable(calls):
        say_once("few queries read decoded chunks in this graph: read once before capturing")
        return None
    return calls


# Of keys of the first chunk of a read: kinds of current rows that the kernels take, or do not.
_taken: weakref.WeakKeyDictionary[Parts, dict[Hashable, bool]] = weakref.WeakKeyDictionary()


def current_rows(
    calls: Sequence[PackedCall], current: Segment, *, scale: float, causal: bool
) -> Current | None:
    """The current rows for ``attend_all`` where its kernels attend to them, beside no other dense
    rows; None where another kernel does it first."""
    call, key = calls[0], current.keys
    if key.shape[2] > MAX_CURRENT:
        return None
    rows = Current(key, current.values, scale, causal and key.shape[2] > 1)
    kinds = _taken.setdefault(call.keys, {})
    kind = (call.query.dtype, call.query.shape[1:3], key.dtype, key.shape[2], rows.causal)
    if kind not in kinds:
        taken = current_refusal(call, rows) is None
        if _capturing(call.query.device):
            return rows if taken else None
        kinds[kind] = taken
    return rows if kinds[kind] else None


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _refusal(call: PackedCall | str) -> str | None:
    return call if isinstance(call, str) else kernel_refusal(call)


def _reading(chunk: PackedChunk, correction: Correction | None) -> _Reading | str:
    keys, values = chunk.keys, chunk.values
    if isinstance(keys, Tensor) or isinstance(values, Tensor):
        return "one side of a chunk is dense"
    key_parts, value_parts = inner_parts(keys), inner_parts(values)
    if key_parts is None or value_parts is None:
        return f"{type(keys).__name__} cannot be read packed"
    if correction is None:
        return _Reading(key_parts, value_parts, (), False, None)
    noise = correction.noise(keys, chunk.factors)
    if correction.name in _LINEAR and _of_steps(noise, key_parts):
        factors = _factors(keys, key_parts, correction, chunk.factors)
        if _agrees(noise[0], keys, key_parts, correction, factors):
            return _Reading(key_parts, value_parts, (), True, factors)
    if any(term.exact for term in noise):
        return "the exact correction is no product"
    return _Reading(key_parts, value_parts, noise, False, None)


def _of_steps(noise: Noise, parts: Parts) -> bool:
    """Whether the noise has the form of the chunk's squared steps, as the kernels find them."""
    if len(noise) != 1 or noise[0].exact or parts.axis != "token" or parts.low_rank is not None:
        return False
    same = noise[0].query_map.same_as(QueryMap(parts.group_size, parts.rotation))
    return same and noise[0].weights.shape == (*parts.shape[:3], parts.steps.shape[3])


def _agrees(
    term: ScoreNoise, keys: Packed, parts: Parts, correction: Correction, factors: Tensor | None
) -> bool:
    """Whether its numbers are the steps' too: compared once for every kind of chunk, which
    synchronises."""

    def check() -> str | None:
        found = key_steps(parts.corner(2)).square()
        if factors is not None:
            found = found * factors[:2, :2].unsqueeze(2)
        return disagreement(found, term.weights[:2, :2], tolerance=_STEPS_TOLERANCE)

    config = (type(keys), parts.config(), correction)
    return checked_refusal("steps as noise", config, term.weights.device, check) is None


def _factors(
    keys: Packed, parts: Parts, correction: Correction, factors: Tensor | None
) -> Tensor | None:
    """What the correction multiplies squared steps by: float32 ``[B, Hkv, G]``, None for 1."""
    if correction.name == _LINEAR[0]:
        return None
    (term,) = correction.noise(_Ones(keys, parts), factors)
    batch, heads = parts.shape[:2]
    return term.weights[:, :, 0].expand(batch, heads, parts.steps.shape[3]).float().contiguous()


class _Ones:
    """A chunk whose steps are 1: what a correction makes of it are its factors."""

    def __init__(self, keys: Packed, parts: Parts) -> None:
        self._keys = keys
        self._parts = parts

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._parts.shape

    def decode(self, dtype: torch.dtype) -> Tensor:
        return self._keys.decode(dtype)

    def noise(self) -> Noise:
        batch, heads = self._parts.shape[:2]
        ones = torch.ones(
            batch, heads, 1, self._parts.steps.shape[3], device=self._parts.codes.device
        )
        (term,) = self._keys.noise()
        return (replace(term, weights=ones),)


def _columns(query: Tensor, noise: Noise, *, tokens: int, scale: float) -> tuple[Tensor, Tensor]:
    """-phi / scale ``[B, Hq, M, F]`` and omega ``[B, Hkv, T, F]``, all terms side by side."""
    phis, omegas = [], []
    for term in noise:
        phi = term.query_map.features(query, scale=scale) * (-1 / scale)
        omega = term.weights.float()
        phis.append(phi)
        omegas.append(omega.expand(*omega.shape[:2], tokens, phi.shape[3]))
    return torch.cat(phis, -1), torch.cat(omegas, -1)
