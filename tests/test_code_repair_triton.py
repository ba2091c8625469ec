"""PSAC's coefficients: the kernel against the reference, and against float64."""

import pytest
import torch

import videokv.kernels.code_repair as package
from videokv.kernels import gpu
from videokv.kernels.code_repair import code_repair, reference
from videokv.kernels.subspace_iteration import operands

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
    found = [t.to(DEVICE) for t in (keys, keys.float() + noise, basis.bfloat16(), moment)]
    return *found[:2], operands(*found[2:])


@pytest.mark.parametrize(("size", "rank"), [(64, 8), (80, 3), (128, 12)])
def test_the_reference_and_the_float64_oracle(size, rank):
    keys, decoded, directions = case(size, rank)
    codes, scales, counts = kernel.code_repair(keys, decoded, directions)
    error = keys.double() - decoded.double()
    want_codes, want_scales, _ = reference.code_repair(error.float(), directions)
    kept, want_kept = scales > 0, want_scales > 0
    assert counts.tolist() == kept.sum((2, 3)).flatten().tolist()
    assert (kept == want_kept).float().mean() > 0.99 and 0 < float(want_kept.float().mean()) < 1
    assert ((codes - want_codes).abs() * (kept & want_kept)).max() <= 1
    assert not (codes * ~kept).any()
    exact = error @ directions.basis.double()
    off = (codes.double() * scales.double() - exact).abs() * kept
    assert (off <= scales.double() * 0.52 + 1e-6).all()


def test_rows_that_are_all_zero_are_not_kept():
    keys, _, directions = case(64, 8)
    found = code_repair(keys, keys.float(), directions)
    assert not found.codes.any() and not found.scales.any() and not any(found.kept)


def test_the_package_uses_the_kernel_where_it_agrees(monkeypatch):
    monkeypatch.setattr(gpu, "_verdicts", {})
    keys, decoded, directions = case(64, 8)
    want = code_repair(keys, decoded.clone(), directions)
    monkeypatch.setattr(package, "wants_kernels", lambda device: True)
    monkeypatch.setattr(package, "machine_refusal", lambda device: None)
    assert package.kernel_refusal(keys, directions.basis) is None
    with pytest.warns(UserWarning, match="coded in PyTorch steps: heads of 512"):
        code_repair(*case(512, 2, tokens=4))
    got = code_repair(keys, decoded, directions)
    assert (got.codes != want.codes).float().mean() < 0.02
    assert sum(abs(a - b) for a, b in zip(got.kept, want.kept, strict=True)) < 0.02 * sum(want.kept)
