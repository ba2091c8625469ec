"""Two-level codes of the kernels, bit for bit those of the reference."""

import pytest
import torch

import videokv.kernels.quantize_two_level as package
from videokv.kernels import gpu
from videokv.kernels.assign_centroids import Clusters
from videokv.kernels.quantize_two_level import TwoLevelInput, reference

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
    spans = kernel.spans(x, None, group_size=group)
    assert torch.equal(spans, reference.spans(x, group_size=group))
    same(
        kernel.encode(x, None, spans, group_size=group),
        reference.encode(x, spans, group_size=group),
    )


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
    spans = kernel.spans(x, clusters, group_size=32)
    residual = x.float() - clusters.gather()
    same(
        kernel.encode(x, clusters, spans, group_size=32),
        reference.encode(residual, reference.spans(residual, group_size=32), group_size=32),
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_in_the_range(bad):
    x = draw(1, 2, 9, 64)
    x[0, 1, 4, 5] = bad
    assert not torch.isfinite(kernel.spans(x, None, group_size=32)).all()


def test_the_package_uses_the_kernels_where_they_agree(monkeypatch):
    monkeypatch.setattr(gpu, "_verdicts", {})
    monkeypatch.setattr(package, "machine_refusal", lambda device: None)
    x = draw(1, 2, 20, 64)
    found = []
    for wanted in (False, True):
        monkeypatch.setattr(package, "wants_kernels", lambda device, wanted=wanted: wanted)
        ready = TwoLevelInput(x, None, group_size=32)
        assert ready._fused == wanted
        found.append(ready.encode())
    same(*found)


@pytest.mark.parametrize("centroids", [False, True])
@pytest.mark.parametrize(("size", "group"), [(64, 32), (128, 64), (64, 16)])
def test_the_self_check_passes_on_a_corner_of_many_rows_and_heads(size, group, centroids):
    x = draw(3, 5, 33, size, dtype=torch.float16)
    clusters = None
    if centroids:
        ids = torch.arange(3 * 5 * 33).reshape(3, 5, 33).remainder(7).to(torch.uint8).to(DEVICE)
        clusters = Clusters(ids, draw(3, 5, 7, size, seed=1).bfloat16())
    assert package._self_check(x, clusters, group) is None
