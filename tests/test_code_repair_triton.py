"""PSAC's coefficients: the kernel against the reference, and against float64."""

import pytest
import torch

import videokv.kernels.code_repair as package
from videokv.kernels import gpu
from videokv.kernels.code_repair import code_repair, reference

pytest.importorskip("triton")
from videokv.kernels.code_repair import triton as kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case(size, rank, *, tokens=131, dtype=torch.float16):
    generator = torch.Generator().manual_seed(size)
    keys = torch.randn(2, tokens, 3, size, generator=generator).to(dtype).transpose(1, 2)
    noise = 0.2 * torch.randn(keys.shape, generator=generator)
    query = torch.randn(2, 3, 300, size, generator=generator) * torch.linspace(4, 0.1, size)
    basis = torch.linalg.qr(torch.randn(2, 3, size, rank, generator=generator)).Q
    moment = query.mT @ query / 300
    return [t.to(DEVICE) for t in (keys, keys.float() + noise, basis.bfloat16(), moment)]


@pytest.mark.parametrize(("size", "rank"), [(64, 8), (80, 3), (128, 12)])
def test_the_reference_and_the_float64_oracle(size, rank):
    keys, decoded, basis, moment = case(size, rank)
    basis = basis.float()
    seen = moment @ basis
    got = kernel.code_repair(keys, decoded, basis, seen, basis.mT @ seen)
    error = keys.double() - decoded.double()
    want = reference.code_repair(error.float(), basis, seen, basis.mT @ seen)
    assert (got[2] == want[2]).float().mean() > 0.99 and 0 < float(want[2].float().mean()) < 1
    both = (got[2] & want[2]).unsqueeze(-1)
    assert ((got[0] - want[0]).abs() * both).max() <= 1
    assert not got[0][~got[2]].any() and not got[1][~got[2]].any()
    exact = error @ basis.double()
    off = (got[0].double() * got[1].double() - exact).abs() * got[2].unsqueeze(-1)
    assert (off <= got[1].double() * 0.52 + 1e-6).all()


def test_rows_that_are_all_zero_are_not_kept():
    keys, _, basis, moment = case(64, 8)
    codes, scales, kept = code_repair(keys, keys.float(), basis, moment)
    assert not codes.any() and not scales.any() and not kept.any()


def test_the_package_uses_the_kernel_where_it_agrees(monkeypatch):
    monkeypatch.setattr(gpu, "_verdicts", {})
    monkeypatch.setattr(package, "wants_kernels", lambda device: True)
    monkeypatch.setattr(package, "machine_refusal", lambda device: None)
    keys, decoded, basis, moment = case(64, 8)
    assert package.kernel_refusal(keys, basis.float()) is None
    with pytest.warns(UserWarning, match="coded in PyTorch steps: heads of 512"):
        code_repair(*case(512, 2, tokens=4))
    want = code_repair(keys.cpu(), decoded.cpu().clone(), basis.cpu(), moment.cpu())
    got = code_repair(keys, decoded, basis, moment)
    assert (got[0].cpu() != want[0]).float().mean() < 0.02
