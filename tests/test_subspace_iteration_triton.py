"""The kernel of subspace iteration finds the subspace of the reference and of eigh."""

import pytest
import torch

import videokv.kernels.subspace_iteration as package
from videokv.kernels import gpu
from videokv.kernels.subspace_iteration import _self_check, principal, reference, start

pytest.importorskip("triton")
from videokv.kernels.subspace_iteration import triton as kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def falling(size, dtype):
    """Matrices whose eigenvalues fall by halves, and their eigenvectors."""
    turn = torch.linalg.qr(draw(1, 2, size, size)).Q
    values = 0.5 ** torch.arange(size, dtype=torch.float64).clamp(max=20)
    return ((turn * values) @ turn.mT).to(DEVICE, dtype), turn.to(DEVICE)


@pytest.mark.parametrize(("size", "rank"), [(64, 8), (40, 5), (16, 1)])
def test_the_subspace_of_the_largest_eigenvalues(size, rank):
    moment, turn = falling(size, torch.float32)
    got = kernel.principal(moment, start(size, rank, moment.device))
    want = reference.principal(moment, start(size, rank, moment.device))
    assert got.basis.dtype == torch.bfloat16 and got.seen.dtype == torch.float32
    # BF16 of the same numbers: those that differ lay between two.
    assert float((got.basis - want.basis).abs().max()) < 8e-3
    if DEVICE == "cuda":  # the interpreter truncates to BF16
        assert float((got.basis != want.basis).float().mean()) < 0.01
    basis = got.basis.double()
    exact = turn[..., :rank]
    assert float((basis @ basis.mT - exact @ exact.mT).abs().max()) < 1e-2
    seen = moment.double() @ basis
    assert float((got.seen - seen).abs().max() / seen.abs().max()) < 1e-6
    assert float((got.quadratic - basis.mT @ seen).abs().max() / seen.abs().max()) < 1e-6
    assert (got.basis.gather(2, got.basis.abs().argmax(2, keepdim=True)) > 0).all()


def test_the_operands_of_a_known_basis():
    moment, _ = falling(48, torch.float32)
    found = reference.principal(moment, start(48, 4, moment.device))
    for one, other in zip(found, reference.operands(found.basis, moment), strict=True):
        assert torch.equal(one, other)


def test_the_package_uses_the_kernel_where_it_agrees(monkeypatch):
    monkeypatch.setattr(gpu, "_verdicts", {})
    moment, _ = falling(32, torch.float32)
    assert _self_check(moment, 4) is None
    monkeypatch.setattr(package, "wants_kernels", lambda device: True)
    monkeypatch.setattr(package, "machine_refusal", lambda device: None)
    found = []
    monkeypatch.setattr(kernel, "principal", lambda *a: found.append(a) or "kernel")
    assert package.kernel_refusal(moment, rank=4) is not None  # of a kernel that gives a word
    monkeypatch.setattr(gpu, "_verdicts", {})
    monkeypatch.setattr(package, "_self_check", lambda moment, rank: None)
    assert principal(moment, rank=4) == "kernel"
    with pytest.warns(UserWarning, match="runs in PyTorch steps: matrices of 130"):
        principal(torch.eye(130, device=DEVICE).expand(1, 1, -1, -1), rank=2)
