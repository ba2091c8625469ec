"""Two-level codes of the kernels, bit for bit those of the reference."""

import pytest
import torch

import videokv.kernels.quantize_two_level as package
from videokv.kernels import gpu
from videokv.kernels.assign_centroids import Clusters
from videokv.kernels.code_repair import reference as repairing
from videokv.kernels.quantize_two_level import quantize_two_level, reference
from videokv.kernels.subspace_iteration import operands

pytest.importorskip("triton")
from videokv.kernels.quantize_two_level import triton as kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape, seed=0, dtype=torch.float32):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    values[..., ::7] += 3
    return values.to(dtype).to(DEVICE)


def same(got, want):
    for name in ("packed", "zeros", "steps", "scale"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("tokens", [1, 31, 67])
@pytest.mark.parametrize(("size", "group"), [(64, 32), (128, 64), (64, 64), (64, 16)])
def test_the_same_bits_as_the_reference(size, group, tokens):
    x = draw(2, 2, tokens, size)
    x[:, :, :1, :group] = 0.0  # a group without a range
    codes, repair, facts = kernel.encode(x, None, group_size=group)
    spans = reference.spans(x, group_size=group)
    assert repair is None and torch.equal(facts[0].view(torch.float32), spans.flatten())
    assert kernel.read_facts(facts) == (float(spans.amax()), [0] * 4)
    same(codes, reference.encode(x, spans, group_size=group))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_the_reference_gives_the_bits_of_the_cpu_on_a_gpu():
    x = draw(2, 3, 500, 128)
    spans = reference.spans(x, group_size=32)
    got = reference.encode(x, spans, group_size=32)
    want = reference.encode(x.cpu(), spans.cpu(), group_size=32)
    for name in ("packed", "zeros", "steps", "scale"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name


def test_centroids_strides_and_half_precision():
    x = draw(1, 50, 2, 64, dtype=torch.float16).transpose(1, 2)
    ids = (torch.arange(50) % 3).to(torch.uint8).expand(1, 2, -1).contiguous().to(DEVICE)
    clusters = Clusters(ids, draw(1, 2, 3, 64, seed=1).bfloat16())
    residual = x.float() - clusters.gather()
    same(
        kernel.encode(x, clusters, group_size=32)[0],
        reference.encode(residual, reference.spans(residual, group_size=32), group_size=32),
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_in_the_range(bad):
    x = draw(1, 2, 9, 64)
    x[0, 1, 4, 5] = bad
    widest, _ = kernel.read_facts(kernel.encode(x, None, group_size=32)[2])
    assert widest == float("inf")
    for device in (x.device, torch.device("cpu")):
        found = quantize_two_level(x.to(device), None, group_size=32, most=1e9)
        assert found.codes is None and not found.widest <= 1e9


def directions(size, rank):
    """Of queries that look at some directions, [2, 2, ...]."""
    generator = torch.Generator().manual_seed(rank)
    query = torch.randn(2, 2, 300, size, generator=generator) * torch.linspace(4, 0.1, size)
    basis = torch.linalg.qr(torch.randn(2, 2, size, rank, generator=generator)).Q
    return operands(basis.bfloat16().to(DEVICE), (query.mT @ query / 300).to(DEVICE))


@pytest.mark.parametrize(("size", "group", "rank"), [(64, 32, 8), (128, 64, 3), (64, 64, 12)])
def test_what_the_codes_lack_is_coded_with_them(size, group, rank):
    x = draw(2, 2, 67, size, dtype=torch.float16)
    x[:, :, :1, :group] = 0.0
    ids = (torch.arange(67) % 3).to(torch.uint8).expand(2, 2, -1).contiguous().to(DEVICE)
    clusters = Clusters(ids, draw(2, 2, 3, size, seed=1).bfloat16())
    known = directions(size, rank)
    got, repair, facts = kernel.encode(x, clusters, group_size=group, directions=known)
    residual = x.float() - clusters.gather()
    want = reference.encode(residual, reference.spans(residual, group_size=group), group_size=group)
    same(got, want)
    error = reference.error(residual, want, group_size=group)
    exact = residual.double() - (residual - error).double()
    codes, scales, counts = repairing.code_repair(error, known)
    kept, want_kept = repair[1] > 0, scales > 0
    assert kernel.read_facts(facts)[1] == kept.sum((2, 3)).flatten().tolist()
    assert (kept == want_kept).float().mean() > 0.99 and 0 < int(counts.sum()) < kept.numel()
    assert ((repair[0] - codes).abs() * (kept & want_kept)).max() <= 1
    off = (repair[0].double() * repair[1].double() - exact @ known.basis.double()).abs() * kept
    assert (off <= repair[1].double() * 0.52 + 1e-5).all()


def test_the_package_uses_the_kernels_where_they_agree(monkeypatch):
    monkeypatch.setattr(gpu, "_verdicts", {})
    monkeypatch.setattr(package, "machine_refusal", lambda device: None)
    x = draw(1, 2, 20, 64)
    found = []
    known = directions(64, 4)
    known = type(known)(*(operand[:1] for operand in known))
    for wanted in (False, True):
        monkeypatch.setattr(package, "wants_kernels", lambda device, wanted=wanted: wanted)
        found.append(quantize_two_level(x, None, group_size=32, most=100.0, directions=known))
    same(*(each.codes for each in found))
    assert found[0].widest == found[1].widest and found[0].repair.kept == found[1].repair.kept
    assert (found[0].repair.codes != found[1].repair.codes).float().mean() < 0.02
    assert package.kernel_refusal(x, None, group_size=32, directions=directions(64, 20))


@pytest.mark.parametrize("centroids", [False, True])
@pytest.mark.parametrize(("size", "group"), [(64, 32), (128, 64), (64, 16)])
def test_the_self_check_passes_on_a_corner_of_many_rows_and_heads(size, group, centroids):
    x = draw(3, 5, 33, size, dtype=torch.float16)
    clusters = None
    if centroids:
        ids = torch.arange(3 * 5 * 33).reshape(3, 5, 33).remainder(7).to(torch.uint8).to(DEVICE)
        clusters = Clusters(ids, draw(3, 5, 7, size, seed=1).bfloat16())
    assert package._self_check(x, clusters, group) is None
    known = directions(size, 5)
    assert package._self_check(x[:2, :2], None, group, known) is None
