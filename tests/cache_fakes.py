"""A quantizer, a correction, a recipe and an attention of a few lines, for tests of the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from videokv.cache import CachePolicy
from videokv.noise import QueryMap, ScoreNoise


@dataclass(frozen=True, eq=False)
class FakePacked:
    """int8 codes and one step a token."""

    codes: Tensor
    steps: Tensor

    @property
    def shape(self):
        return tuple(self.codes.shape)

    def decode(self, dtype):
        return (self.codes.float() * self.steps).to(dtype)

    def noise(self):
        return (ScoreNoise(self.steps.square(), QueryMap(self.codes.shape[-1])),)


@dataclass(frozen=True)
class FakeQuantizer:
    """levels: codes run from -levels to levels. seen: every context it was given."""

    levels: int = 127
    seen: list = field(default_factory=list, compare=False, repr=False)
    fail_layer: int | None = None

    def check(self, head_dim):
        if head_dim % 2:
            raise ValueError(f"fake heads are even, got head_dim {head_dim}")

    def encode(self, x, context):
        if context.layer == self.fail_layer:
            raise ValueError(f"layer {context.layer} fails")
        self.seen.append(context)
        x = x.float()
        steps = x.abs().amax(-1, keepdim=True) / self.levels
        codes = (x / steps.clamp(min=1e-30)).round().to(torch.int8)
        return FakePacked(codes, steps)


class FakeCorrection:
    """Stores a number a head, the mean of the queries it was given, and remembers its arguments."""

    name = "fake"

    def __init__(self):
        self.fits = []

    def fit(self, packed, keys, queries, *, scale):
        self.fits.append((keys.clone(), queries, scale))
        return torch.ones(keys.shape[:2])

    def noise(self, packed, factors):
        return tuple(term.scaled(factors[:, :, None, None]) for term in packed.noise())


def fake_attend(query, segments, *, scale, causal=False, need_lse=False):
    """Eager softmax in float64, corrections subtracted."""
    heads = query.shape[1]
    scores, values = [], []
    for segment in segments:
        repeats = heads // segment.keys.shape[1]
        keys = segment.keys.double().repeat_interleave(repeats, 1)
        s = query.double() @ keys.mT * scale
        for term in segment.noise:
            phi = term.query_map.features(query, scale=scale)
            omega = term.weights.to(phi.dtype).repeat_interleave(repeats, 1)
            s = s - (phi @ omega.mT).double()
        scores.append(s)
        values.append(segment.values.double().repeat_interleave(repeats, 1))
    if causal:
        size = scores[-1].shape[-2:]
        scores[-1] = scores[-1].masked_fill(torch.ones(size).triu(1).bool(), -torch.inf)
    s = torch.cat(scores, -1)
    out = (s.softmax(-1) @ torch.cat(values, 2)).to(query.dtype)
    return out, torch.logsumexp(s, -1).float() if need_lse else None


@dataclass(frozen=True)
class FakeRecipe:
    name: str = "fake"
    keys: object = field(default_factory=FakeQuantizer)
    values: object = field(default_factory=FakeQuantizer)
    policy: CachePolicy = field(default_factory=CachePolicy)
    seed: int = 0
    correction: object = field(default=None, compare=False)

    def correction_method(self):
        return self.correction

    def attend(self, query, segments, **options):
        return fake_attend(query, segments, **options)


def dense_recipe(**policy):
    return FakeRecipe(keys=None, values=None, policy=CachePolicy(**policy))


def rows(tokens, *, seed=0, batch=1, heads=2, size=16, value_size=None, groups=2, dtype=None):
    """(query, key, value) of a chunk."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (batch, heads * groups, tokens, size),
        (batch, heads, tokens, size),
        (batch, heads, tokens, value_size or size),
    ]
    dtype = dtype or torch.float32
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def fill(cache, chunks, *, layers=2, start=0, **shape):
    """Write and commit chunks of the given lengths; the rows by chunk and layer."""
    written, seed = [], 1000 * start
    for number, tokens in enumerate(chunks):
        for layer in range(layers):
            q, k, v = rows(tokens, seed=seed + 10 * number + layer, **shape)
            cache.write(layer, start, k, v, q)
            written.append((q, k, v))
        start += tokens
        cache.commit(start)
    return written
