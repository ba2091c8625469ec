"""Oracle and small stand-ins shared by the tests of noise, attention and corrections."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from videokv.noise import QueryMap, ScoreNoise
from videokv.protocols import Segment


@dataclass(frozen=True)
class Orthogonal:
    """A seeded orthogonal map of any size; equal fields mean the same matrix."""

    size: int
    seed: int = 0

    def matrix(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        square = torch.randn(self.size, self.size, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(square)[0]

    def apply(self, x: Tensor) -> Tensor:
        return x @ self.matrix().to(x.device, x.dtype)


@dataclass(frozen=True, eq=False)
class FakePacked:
    """A packed chunk that already knows its reconstruction and its noise."""

    reconstruction: Tensor
    terms: tuple[ScoreNoise, ...] = ()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return tuple(self.reconstruction.shape)

    def decode(self, dtype: torch.dtype) -> Tensor:
        return self.reconstruction.to(dtype)

    def noise(self) -> tuple[ScoreNoise, ...]:
        return self.terms


def round_groups(keys: Tensor, *, group_size: int, levels: int = 3) -> FakePacked:
    """Round-to-nearest with an offset, one float32 step per token and group."""
    groups = keys.float().unflatten(-1, (-1, group_size))
    low = groups.amin(-1, keepdim=True)
    step = (groups.amax(-1, keepdim=True) - low) / levels
    codes = ((groups - low) / step.clamp(min=1e-9)).round().clamp(0, levels)
    weights = step.squeeze(-1).square()
    return FakePacked(
        (low + codes * step).flatten(-2), (ScoreNoise(weights, QueryMap(group_size)),)
    )


@dataclass
class Draw:
    """Seeded tensors."""

    seed: int = 0
    dtype: torch.dtype = torch.float32
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return values.to(self.dtype)

    def weights(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)

    def segment(self, shape, value_dim: int, *terms: ScoreNoise) -> Segment:
        return Segment(self.normal(*shape), self.normal(*shape[:3], value_dim), tuple(terms))

    def term(self, shape, group_size: int, *, exact=False, columns=None, **kwargs) -> ScoreNoise:
        columns = columns or shape[3] // group_size
        query_map = QueryMap(group_size, **kwargs)
        return ScoreNoise(self.weights(*shape[:3], columns), query_map, exact)


def to_numpy(x: Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy()


def oracle_bias(query: np.ndarray, term: ScoreNoise, heads: int, scale: float) -> np.ndarray:
    """b ``[Hq, M, T]`` of one batch entry's query ``[Hq, M, D]``, straight from the formulas.

    ``term`` must hold one batch entry.
    """
    per_kv = query.shape[0] // heads
    query_map, group_size = term.query_map, term.query_map.group_size
    weights = to_numpy(term.weights)[0]
    result = []
    for head in range(query.shape[0]):
        q = query[head]
        if query_map.basis is not None:
            basis = to_numpy(query_map.basis)[0, head // per_kv % query_map.basis.shape[1]]
            q = q - q @ basis @ basis.T
        if query_map.transform is not None:
            q = q @ query_map.transform.matrix().numpy()
        w = weights[head // per_kv % weights.shape[0]]
        w = np.broadcast_to(w, (w.shape[0], q.shape[1] // group_size))
        w = np.repeat(w, group_size, axis=1)  # [T, D]
        if term.exact:
            a = np.abs(q[:, None] * np.sqrt(w)[None]) * scale / 2
            a = np.maximum(a, 1e-12)
            large = a + np.log1p(-np.exp(-2 * a)) - np.log(2 * a)
            b = np.where(a < 1e-3, a**2 / 6, large).sum(-1)
        elif query_map.power == 2:
            b = scale**2 / 24 * (q**2) @ w.T
        else:
            b = -(scale**4) / 2880 * (q**4) @ w.T
        result.append(b)
    return np.stack(result)


def one_batch(term: ScoreNoise, entry: int) -> ScoreNoise:
    weights = term.weights[min(entry, term.weights.shape[0] - 1)][None]
    basis = term.query_map.basis
    basis = None if basis is None else basis[min(entry, basis.shape[0] - 1)][None]
    old = term.query_map
    return ScoreNoise(
        weights, QueryMap(old.group_size, old.transform, basis, old.power), term.exact
    )


def oracle(query: Tensor, segments, *, scale: float, causal: bool = False):
    """Attention in float64 numpy, head by head: output and natural-log lse."""
    outputs, lses = [], []
    for entry in range(query.shape[0]):
        q = to_numpy(query[entry])
        scores, values = [], []
        for number, segment in enumerate(segments):
            k, v = to_numpy(segment.keys[entry]), to_numpy(segment.values[entry])
            per_kv = q.shape[0] // k.shape[0]
            s = scale * np.einsum("hmd,htd->hmt", q, np.repeat(k, per_kv, 0))
            for term in segment.noise:
                s = s - oracle_bias(q, one_batch(term, entry), k.shape[0], scale)
            if causal and number == len(segments) - 1:
                s = np.where(np.tri(s.shape[1], dtype=bool), s, -np.inf)
            scores.append(s)
            values.append(np.repeat(v, per_kv, 0))
        s, v = np.concatenate(scores, -1), np.concatenate(values, 1)
        peak = s.max(-1, keepdims=True)
        total = np.exp(s - peak).sum(-1, keepdims=True)
        outputs.append(np.exp(s - peak) / total @ v)
        lses.append((peak + np.log(total))[..., 0])
    return torch.from_numpy(np.stack(outputs)), torch.from_numpy(np.stack(lses))


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())
