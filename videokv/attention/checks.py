"""What every attention call must satisfy, whatever backend serves it (shapes only, no sync)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from videokv.noise import ScoreNoise
from videokv.protocols import Segment
from videokv.tensors import E4M3

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_call(query: Tensor, segments: Sequence[Segment], *, scale: float, causal: bool) -> None:
    """Raise ValueError saying what was expected, what came and what to do."""
    if query.ndim != 4:
        raise ValueError(f"query must be [B, Hq, M, D], got shape {tuple(query.shape)}")
    if query.dtype not in _DTYPES:
        raise ValueError(f"query must be one of {_DTYPES}, got {query.dtype}")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be a positive finite number, got {scale!r}")
    if not segments:
        raise ValueError("attend expects at least one segment, got none")
    for number, segment in enumerate(segments):
        _check_segment(query, segment, number)
    heads = {(s.keys.shape[1], s.values.shape[3]) for s in segments}
    if len(heads) > 1:
        raise ValueError(
            "all segments must have the same number of KV heads and the same value head size, "
            f"got (Hkv, Dv) = {sorted(heads)}"
        )
    if causal:
        _check_causal(query, segments[-1])


def _check_segment(query: Tensor, segment: Segment, number: int) -> None:
    keys, values = segment.keys, segment.values
    reason = _shapes_refusal(query.shape, keys.shape, values.shape)
    if reason is not None:
        raise ValueError(
            f"segment {number}: {reason}; got query {tuple(query.shape)}, keys "
            f"{tuple(keys.shape)}, values {tuple(values.shape)}"
        )
    if segment.narrow:
        _check_scales(segment, where=f"segment {number}")
    for name, tensor, scale in (
        ("keys", keys, segment.key_scale),
        ("values", values, segment.value_scale),
    ):
        dtype = query.dtype if scale is None else E4M3
        if tensor.dtype != dtype:
            raise ValueError(
                f"segment {number}: {name} are {tensor.dtype} but the query is {query.dtype}: "
                f"expected {dtype} {'without' if scale is None else 'with'} a scale; cast one"
            )
        if tensor.device != query.device:
            raise ValueError(
                f"segment {number}: {name} are on {tensor.device} but the query is on "
                f"{query.device}; move one"
            )
    for term in segment.noise:
        _check_noise(keys, term, number)


def _shapes_refusal(query: tuple, keys: tuple, values: tuple) -> str | None:
    """What is wrong with the shapes of a segment."""
    if len(keys) != 4 or len(values) != 4:
        return "keys and values must be [B, Hkv, T, D]"
    if keys[:3] != values[:3]:
        return "keys and values must agree in B, Hkv and T"
    if keys[0] != query[0]:
        return "batch must be that of the query"
    if keys[3] != query[3]:
        return "key head size must be that of the query"
    if keys[1] < 1 or query[1] % keys[1]:
        return "Hq must be a multiple of Hkv"
    return None


def _check_scales(segment: Segment, *, where: str) -> None:
    expected = segment.keys.shape[:2]
    for name, scale in (("key", segment.key_scale), ("value", segment.value_scale)):
        if scale is not None and (scale.shape != expected or scale.dtype != torch.float32):
            got = (scale.dtype, tuple(scale.shape))
            raise ValueError(
                f"{where}: {name}_scale of E4M3 rows must be float32 {tuple(expected)}, got {got}"
            )


def _check_noise(keys: Tensor, term: ScoreNoise, number: int) -> None:
    where = f"segment {number}"
    batch, heads, tokens, head_dim = keys.shape
    group_size = term.query_map.group_size
    if group_size < 1 or head_dim % group_size:
        raise ValueError(
            f"{where}: noise groups of {group_size} channels do not divide head size {head_dim}"
        )
    full = (batch, heads, tokens, head_dim // group_size)
    shape = tuple(term.weights.shape)
    if shape != full and any(got not in (1, want) for got, want in zip(shape, full, strict=True)):
        raise ValueError(
            f"{where}: noise weights must broadcast to [B, Hkv, T, F] = {full}, got {shape}"
        )
    if term.weights.device != keys.device:
        raise ValueError(
            f"{where}: noise weights are on {term.weights.device}, keys on {keys.device}; move one"
        )
    if term.exact and term.query_map.power != 2:
        raise ValueError(
            f"{where}: exact noise takes squared steps (power 2), got power {term.query_map.power}"
        )


def _check_causal(query: Tensor, last: Segment) -> None:
    if last.keys.shape[2] != query.shape[2]:
        raise ValueError(
            "causal=True expects the last segment to hold the queries' own "
            f"{query.shape[2]} tokens, got {last.keys.shape[2]}"
        )
    if last.noise:
        raise ValueError(
            "causal=True: the last segment holds the current chunk, whose scores no correction "
            "may touch, but it carries noise; give it noise=()"
        )
