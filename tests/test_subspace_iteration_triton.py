"""The kernel of subspace iteration finds the subspace of the reference and of eigh."""

import pytest
import torch

from videokv.kernels.subspace_iteration import _self_check, reference

pytest.importorskip("triton")
from videokv.kernels.subspace_iteration import triton as kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("size", "rank"), [(64, 8), (80, 5), (16, 1)])
def test_the_subspace_of_the_largest_eigenvalues(size, rank):
    turn = torch.linalg.qr(draw(1, 2, size, size)).Q
    values = 0.5 ** torch.arange(size, dtype=torch.float64).clamp(max=20)
    matrix, start = ((turn * values) @ turn.mT).to(DEVICE), draw(size, rank, seed=1).to(DEVICE)
    got = kernel.iterate(matrix, start, first=3, rounds=12)
    want = reference.iterate(matrix, start, first=3, rounds=12)
    eye = torch.eye(rank, dtype=torch.float64, device=DEVICE)
    assert got.shape == want.shape
    assert float((got.mT @ got - eye).abs().max()) < 1e-12
    assert float((got @ got.mT - want @ want.mT).abs().max()) < 1e-9
    exact = turn[..., :rank].to(DEVICE)
    assert float((got @ got.mT - exact @ exact.mT).abs().max()) < 1e-6


def test_the_self_check_passes():
    assert _self_check(draw(64, 8).to(DEVICE), 3, 12) is None
