"""Columns of a correction by the kernels (through the interpreter on a CPU) against float64."""

import pytest
import torch

from videokv.kernels.score_columns import (
    kernel_refusal,
    reference,
    stacked_bases,
    widen_query,
)
from videokv.noise import QueryMap
from videokv.rotation import Rotation

pytest.importorskip("triton")
from videokv.kernels.score_columns import triton as kernel  # noqa: E402
from videokv.kernels.score_columns import triton_energies, triton_sums  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def basis(size, *, seed, batch=2, heads=2, rank=5):
    found = torch.linalg.qr(draw(batch, heads, size, rank, seed=seed).double())[0]
    return found.to(torch.bfloat16)


def maps(kind, size):
    turn = Rotation(size, 3)
    return {
        "plain": [QueryMap(16)],
        "rotated": [QueryMap(16, turn)],
        "projected": [QueryMap(16), *(QueryMap(16, None, basis(size, seed=n)) for n in (1, 2))],
        "both, two powers": [QueryMap(16, turn, basis(size, seed=4), 4), QueryMap(16, turn)],
        "a column a channel": [QueryMap(1)],
    }[kind]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80])
@pytest.mark.parametrize(
    "kind", ["plain", "rotated", "projected", "both, two powers", "a column a channel"]
)
def test_queries(kind, size, dtype):
    query = draw(2, 4, 70, size, seed=9).to(dtype)[:, :, :67]
    used = maps(kind, size)
    width = size + sum(size // m.group_size for m in used) + 3
    bases = stacked_bases(used, batch=2, heads=2)
    got = kernel.widen_query(query, used, scale=0.11, width=width, bases=bases)
    want = reference.widen_query(query.double(), used, scale=0.11, width=width)
    assert got.dtype == dtype and got.shape == (2, 4, 67, width)
    assert torch.equal(got[..., :size], query) and not got[..., -3:].any()
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    error = (got.double() - want)[..., size:].norm() / want[..., size:].norm()
    assert float(error) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turn", [None, Rotation(128, 3)])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_sums_of_groups(group, turn, dtype):
    query = draw(2, 4, 3, 70, 128, seed=9).to(dtype)[:, :, 1, :67]
    used = [QueryMap(group, turn)]
    assert triton_sums.serves(query, used)
    assert not triton_sums.serves(query, [QueryMap(group, turn, None, 4)])
    assert not triton_sums.serves(query, [QueryMap(8, turn)])
    got = kernel.widen_query(query, used, scale=0.11, width=144)
    want = reference.widen_query(query.double(), used, scale=0.11, width=144)
    columns = 128 + 128 // group
    assert torch.equal(got[..., :128], query) and not got[..., columns:].any()
    error = (got.double() - want)[..., 128:columns].abs() / want[..., 128:columns].abs()
    assert float(error.max()) < (1e-5 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("tokens", [1, 130])
def test_keys(tokens):
    rows = torch.full((2, 3, tokens, 64 + 16), torch.nan, device=DEVICE)
    one = draw(2, 3, tokens, 2, seed=1)
    shared = draw(2, 3, 1, 1, seed=2).expand(2, 3, 1, 4)
    want = torch.zeros(2, 3, tokens, 16, device=DEVICE)
    want[..., 1:3] = one
    want[..., 5:9] = shared
    for fill in (kernel.fill_key_columns, reference.fill_key_columns):
        rows.fill_(torch.nan)
        fill(rows[..., 64:], [(1, one), (5, shared)])
        assert torch.equal(rows[..., 64:], want)
        assert rows[..., :64].isnan().all()
        fill(rows[..., 64:], [])
        assert not rows[..., 64:].any()


@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(
    "count, rank, size, group",
    [(1, 1, 64, 16), (2, 13, 80, 16), (3, 8, 128, 64), (6, 8, 128, 64), (2, 64, 128, 32),
     (1, 8, 256, 64)],
)  # fmt: skip
def test_projected_queries(count, rank, size, group, rotated, power):
    """Four query heads a KV head; ranks that differ; float64 is the oracle."""
    if rotated and size > 128 and DEVICE == "cuda":
        pytest.skip("the rotation of a head of 256 does not fit into shared memory: refused")
    turn = Rotation(size, 1) if rotated else None
    used = [QueryMap(group, turn, None, power)] if count == 2 else []
    for n in range(count):
        found = basis(size, seed=20 + n, batch=1, heads=1, rank=max(1, rank - n))
        used.append(QueryMap(group, turn, found, power))
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    query = draw(1, 4, 70 if count * rank < 30 else 9, size, seed=8).to(dtype)
    query[..., :3] *= 30  # outliers, most of which the projection takes off
    width = size + sum(size // m.group_size for m in used) + 5
    bases = stacked_bases(used, batch=1, heads=1)
    got = kernel.widen_query(query, used, scale=0.11, width=width, bases=bases)
    want = reference.widen_query(query.double(), used, scale=0.11, width=width)
    error = (got.double() - want)[..., size:].norm() / want[..., size:].norm()
    assert float(error) < (1e-5 if dtype == torch.float32 else 8e-3)
    assert not got[..., -5:].any() and torch.equal(got[..., :size], query)


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("bare", [0, 1, 3])
def test_a_map_without_a_basis_among_projected_ones(bare, group):
    """Tokens without repair; by the kernel of energies, wherever the map stands."""
    used = [QueryMap(group, None, basis(128, seed=30 + n, rank=8 - n)) for n in range(3)]
    used.insert(bare, QueryMap(group))
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    query = draw(2, 4, 70, 128, seed=8).to(dtype)
    query[..., :3] *= 30
    bases = stacked_bases(used, batch=2, heads=2)
    assert triton_energies.serves(query, used, bases)
    got = kernel.widen_query(query, used, scale=0.11, width=144, bases=bases)
    want = reference.widen_query(query.double(), used, scale=0.11, width=144)
    error = (got.double() - want)[..., 128:].norm(dim=2) / want[..., 128:].norm(dim=2).clamp(1e-9)
    assert float(error.max()) < (1e-5 if dtype == torch.float32 else 8e-3)
    assert torch.equal(got[..., :128], query)
    assert not triton_energies.serves(query, [*used, QueryMap(group)], bases)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("rotated", [False, True])
def test_the_kernel_serves_projected_queries_on_a_gpu(rotated):
    turn = Rotation(128) if rotated else None
    used = [QueryMap(64, turn, basis(128, seed=n, rank=8)) for n in range(6)]
    query = draw(2, 8, 300, 128, seed=1).to(torch.bfloat16)
    assert kernel_refusal(query, used, scale=0.1, width=144, kv_heads=2) is None
    got = widen_query(query, used, scale=0.1, width=144, kv_heads=2)
    want = reference.widen_query(query.double(), used, scale=0.1, width=144)
    assert float((got - want)[..., 128:].norm() / want[..., 128:].norm()) < 8e-3
