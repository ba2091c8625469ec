"""Rotations: any head size, scores kept, outliers spread, noise met by rotated queries."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from videokv.noise import QueryMap, ScoreNoise
from videokv.protocols import EncodeContext, Packed
from videokv.quantizers import families
from videokv.quantizers.groupwise import GroupedChunk, Groupwise
from videokv.quantizers.rotated import Rotated, RotatedChunk
from videokv.rotation import Rotation
from videokv.tensors import GroupFormat, held_bytes, map_tensors

KEY = EncodeContext(layer=3, role="key", seed=17)
HEAD_DIMS = [63, 64, 72, 80, 96, 128, 256]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotated(bits: int, group_size: int) -> Rotated:
    return Rotated(Groupwise(GroupFormat(bits, group_size)))


def snr_db(x: Tensor, back: Tensor) -> float:
    return 10 * torch.log10(x.square().sum() / (back - x).square().sum()).item()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_any_head_size(head_dim: int):
    x = randn(1, 2, 37, head_dim)
    group_size = next(g for g in (32, 16, 8, head_dim) if head_dim % g == 0)
    chunk = rotated(8, group_size).encode(x, KEY)
    assert isinstance(chunk, Packed) and chunk.shape == x.shape
    assert snr_db(x, chunk.decode(torch.float32)) > 42


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_rotation_keeps_scores(head_dim: int):
    rotation = Rotation(head_dim, 17)
    q, k = randn(1, 1, 5, head_dim).double(), randn(1, 1, 9, head_dim, seed=1).double()
    assert torch.allclose(rotation.apply(q) @ rotation.apply(k).mT, q @ k.mT, atol=1e-10)
    assert torch.allclose(rotation.invert(rotation.apply(k)), k, atol=1e-12)


def test_codes_are_those_of_the_rotated_tensor():
    x = randn(1, 2, 20, 128)
    matrix = Rotation(128, 17).matrix(dtype=torch.float64)
    inner = rotated(4, 32).encode(x, KEY).inner
    plain = Groupwise(GroupFormat(4, 32)).encode((x.double() @ matrix.T).float(), KEY)
    assert isinstance(inner, GroupedChunk)
    assert (inner.codes() != plain.codes()).float().mean() < 1e-3
    back = rotated(4, 32).encode(x, KEY).decode(torch.float32)
    assert torch.allclose(back.double(), inner.decode(torch.float32).double() @ matrix, atol=1e-5)


def test_outlier_channels_are_spread():
    """With a channel 30 times larger, the other channels keep far more after rotation."""
    x = randn(1, 1, 256, 128)
    x[..., 7] *= 30
    others = [channel for channel in range(128) if channel != 7]
    plain = Groupwise(GroupFormat(2, 128)).encode(x, KEY).decode(torch.float32)
    spread = rotated(2, 128).encode(x, KEY).decode(torch.float32)
    assert snr_db(x[..., others], spread[..., others]) > snr_db(x[..., others], plain[..., others])
    assert (spread - x).square().mean() < 0.5 * (plain - x).square().mean()


def test_one_rotation_for_all_layers_and_chunks():
    first = rotated(2, 32).encode(randn(1, 1, 8, 64), KEY)
    other_layer = dataclasses.replace(KEY, layer=9, previous=None)
    second = rotated(2, 32).encode(randn(1, 1, 8, 64, seed=4), other_layer)
    assert first.noise()[0].query_map.same_as(second.noise()[0].query_map)
    other_seed = rotated(2, 32).encode(randn(1, 1, 8, 64), dataclasses.replace(KEY, seed=18))
    assert not first.noise()[0].query_map.same_as(other_seed.noise()[0].query_map)


def test_noise_predicts_the_variance_of_scores():
    keys, queries = randn(1, 1, 2048, 128), randn(1, 1, 8, 128, seed=2)
    keys[..., 3] *= 20
    queries[..., 40] *= 10
    chunk = rotated(2, 32).encode(keys, KEY)
    term = chunk.noise()[0]
    scale = 128**-0.5
    predicted = (term.query_map.features(queries, scale=scale) @ term.weights.mT).mean(-1)
    error = (chunk.decode(torch.float32) - keys).double()
    measured = (queries.double() @ error.mT * scale).var(-1) / 2
    assert torch.allclose(predicted.double(), measured, rtol=0.15)


def test_rotated_bytes_are_those_of_the_inner_quantizer():
    chunk = rotated(2, 32).encode(randn(1, 2, 64, 128), KEY)
    assert held_bytes(chunk) * 8 == 2.75 * 2 * 64 * 128
    moved = map_tensors(chunk, torch.clone)
    assert torch.equal(moved.decode(torch.float32), chunk.decode(torch.float32))


@dataclasses.dataclass(frozen=True)
class Spy:
    """A quantizer that keeps what it was given."""

    seen: list[tuple[Tensor, EncodeContext]]

    def check(self, head_dim: int) -> None:
        pass

    def encode(self, x: Tensor, context: EncodeContext) -> Packed:
        self.seen.append((x, context))
        return Groupwise(GroupFormat(8, 32)).encode(x, context)


def test_the_context_is_rotated_along():
    seen: list[tuple[Tensor, EncodeContext]] = []
    queries = randn(1, 2, 50, 64)
    moment = queries.mT @ queries / 50
    first = Rotated(Spy(seen)).encode(randn(1, 2, 8, 64), KEY)
    context = dataclasses.replace(KEY, query_moment=moment, query_count=50, previous=first)
    Rotated(Spy(seen)).encode(randn(1, 2, 8, 64), context)
    turned = first.rotation.apply(queries)
    given = seen[1][1]
    assert given.query_moment is not None
    assert torch.allclose(given.query_moment, turned.mT @ turned / 50, atol=1e-5)
    assert given.previous is first.inner and given.query_count == 50


def test_a_previous_chunk_of_another_basis_is_refused():
    first = rotated(2, 32).encode(randn(1, 1, 8, 64), KEY)
    for previous in (
        first.inner,
        rotated(2, 32).encode(randn(1, 1, 8, 64), EncodeContext(3, "key")),
    ):
        with pytest.raises(ValueError, match="layer 3"):
            rotated(2, 32).encode(randn(1, 1, 8, 64), dataclasses.replace(KEY, previous=previous))


@dataclasses.dataclass(frozen=True, eq=False)
class Noisy:
    """A chunk with a given noise."""

    query_map: QueryMap

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 1, 1, 2, 64

    def decode(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(1, 1, 2, 64, dtype=dtype)

    def noise(self) -> tuple[ScoreNoise, ...]:
        return (ScoreNoise(torch.ones(1, 1, 2, 2), self.query_map),)


@pytest.mark.parametrize(
    "query_map",
    [QueryMap(32, transform=Rotation(64)), QueryMap(32, basis=torch.eye(64)[None, None, :, :4])],
    ids=["rotation", "basis"],
)
def test_noise_with_its_own_basis_is_refused(query_map: QueryMap):
    chunk = RotatedChunk(Noisy(query_map), Rotation(64))
    with pytest.raises(ValueError, match="project, then rotate"):
        chunk.noise()


def test_other_refusals():
    with pytest.raises(ValueError, match="group_size 32 does not divide head_dim 80"):
        rotated(2, 32).check(80)
    with pytest.raises(ValueError, match="group_size 32 does not divide head_dim 80"):
        rotated(2, 32).encode(randn(1, 1, 4, 80), KEY)
    with pytest.raises(ValueError, match="one rotation"):
        Rotated(rotated(2, 32))
    bad = randn(1, 1, 4, 64)
    bad[0, 0, 2, 1] = float("nan")
    with pytest.raises(ValueError, match="keys of layer 3"):
        rotated(2, 32).encode(bad, KEY)


def test_family_rotates_values_only_on_request():
    keys, values = families()["quarot"].build(2)
    assert keys == rotated(2, 32) and values == Groupwise(GroupFormat(2, 32))
    keys, values = families()["quarot"].build(4, group_size=16, rotate_v=True)
    assert keys == values == rotated(4, 16)
