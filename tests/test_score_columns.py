"""Columns of a correction by the kernels (through the interpreter on a CPU) against float64."""

import pytest
import torch

from videokv.kernels.score_columns import reference, stacked_bases
from videokv.noise import QueryMap
from videokv.rotation import Rotation

pytest.importorskip("triton")
from videokv.kernels.score_columns import triton as kernel  # noqa: E402

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
