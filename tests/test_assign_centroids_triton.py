"""The k-means kernels against the reference, and QSAC's choice against the written-out one."""

import pytest
import torch

import videokv.kernels.assign_centroids as package
from videokv.kernels import gpu
from videokv.kernels.assign_centroids import choice, cluster, reference

pytest.importorskip("triton")
from videokv.kernels.assign_centroids import triton as kernel  # noqa: E402
from videokv.kernels.assign_centroids import triton_step  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape, seed=0, dtype=torch.float32):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values + 5).to(dtype).to(DEVICE)


@pytest.mark.parametrize("size", [64, 80])
@pytest.mark.parametrize(("tokens", "centroids"), [(1, 1), (127, 8), (130, 70)])
def test_labels_and_means(tokens, centroids, size):
    x = draw(2, 2, tokens, size)
    origin = x.mean(2, keepdim=True)
    table = draw(2, 2, centroids, size, seed=1) - origin
    labels = kernel.nearest_one(x, origin, table)
    want = reference.nearest(x - origin, table, count=1)[..., 0]
    if DEVICE == "cpu":
        assert torch.equal(labels.long(), want)
    got = kernel.means(x, origin, want.to(torch.uint8), table)
    exact = reference.means((x - origin).double(), want, table.double())
    assert float((got - exact).abs().max()) < (1e-5 if DEVICE == "cpu" else 1e-2)


def test_ties_go_to_the_lower_label_and_every_run_is_the_same():
    x = draw(1, 1, 300, 64).round()
    origin = torch.zeros(1, 1, 1, 64, device=DEVICE)
    table = x[:, :, :5].repeat(1, 1, 20, 1)  # every centroid twenty times
    labels = kernel.nearest_one(x, origin, table)
    assert int(labels.max()) < 5
    first, second = (kernel.means(x, origin, labels, table) for _ in range(2))
    assert torch.equal(first, second)


def test_half_precision_tokens_with_strides():
    x = draw(1, 90, 2, 64, dtype=torch.float16).transpose(1, 2)
    origin = x.mean(2, keepdim=True, dtype=torch.float32)
    table = draw(1, 2, 9, 64, seed=1) - origin
    labels = kernel.nearest_one(x, origin, table)
    want = reference.nearest(x.float() - origin, table, count=1)[..., 0]
    assert (labels.long() != want).float().mean() < 0.02


@pytest.mark.parametrize(
    ("tokens", "centroids", "size"), [(1, 1, 64), (300, 150, 80), (1500, 20, 64)]
)
def test_an_iteration_that_reads_the_tokens_once(tokens, centroids, size):
    x = draw(1, tokens, 2, size, dtype=torch.float16).transpose(1, 2)
    start = draw(1, 2, centroids, size, seed=1)
    labels, table = triton_step.cluster(x, start, iterations=2)
    before = triton_step.cluster(x, start, iterations=1)[1]
    distances = (x.double().unsqueeze(3) - before.double().unsqueeze(2)).square().sum(-1)
    chosen = distances.gather(3, labels.long().unsqueeze(3)).sum()
    assert float(chosen / distances.amin(3).sum().clamp(min=1e-9)) < 1.002
    exact = reference.means(x.double(), labels.long(), before.double())
    assert float((table - exact).abs().max()) < 1e-4
    again = triton_step.cluster(x, start, iterations=2)
    assert torch.equal(again[0], labels) and torch.equal(again[1], table)


def test_centroids_in_bfloat16_are_those_of_float32_rounded():
    x, start = draw(1, 2, 200, 64, dtype=torch.float16), draw(1, 2, 12, 64, seed=1)
    labels, table = triton_step.cluster(x, start, iterations=2)
    ids, stored = triton_step.cluster(x, start, iterations=2, dtype=torch.bfloat16)
    assert torch.equal(ids, labels) and torch.equal(stored, table.bfloat16())


def test_an_iteration_in_one_pass_bounds_labels_of_lost_tokens_and_keeps_empty_clusters():
    x = draw(1, 1, 70, 64, dtype=torch.float16)
    start = torch.cat([draw(1, 1, 4, 64), torch.full((1, 1, 1, 64), 400.0, device=DEVICE)], 2)
    table = triton_step.cluster(x, start, iterations=2)[1]
    assert torch.equal(table[:, :, 4], start[:, :, 4])
    x[:, :, 3] = torch.nan
    assert int(triton_step.cluster(x, start, iterations=2)[0].max()) < 5
    assert package.step_refusal(x.float(), start) and triton_step.refusal(
        draw(1, 1, 4, 256, dtype=torch.float16), centroids=256
    )


@pytest.mark.parametrize(("size", "group", "centroids"), [(64, 32, 16), (80, 16, 9), (64, 64, 3)])
def test_choice_by_range(size, group, centroids):
    x = draw(1, 2, 70, size)
    table = draw(1, 2, centroids, size, seed=1)
    weights = torch.rand(1, 2, size, generator=torch.Generator().manual_seed(2)).to(DEVICE) * 3
    moment = weights.diag_embed() + 0.1
    weights = choice.channel_weights(moment)
    options = {"group_size": group, "candidates": min(4, centroids)}
    got = kernel.choose_by_range(x, table, moment, **options)
    want = choice.choose_by_range(x, table, moment, **options)
    assert (got.long() != want).float().mean() < 0.03  # FP16 distances: a candidate may differ
    scores = [
        choice.range_scores(x, table, ids, weights, group).sum() for ids in (got.long(), want)
    ]
    assert float(scores[0]) <= 1.01 * float(scores[1])


def test_the_package_uses_the_kernels_where_they_agree(monkeypatch):
    monkeypatch.setattr(gpu, "_verdicts", {})
    x, start = draw(1, 2, 100, 64), draw(1, 2, 8, 64, seed=3)
    want = reference.cluster(x, start, iterations=2)
    monkeypatch.setattr(package, "wants_kernels", lambda device: True)
    monkeypatch.setattr(package, "machine_refusal", lambda device: None)
    ids, table = cluster(x, start, iterations=2)
    assert (ids != want[0]).float().mean() < 0.02
    assert float((table - want[1]).norm() / want[1].norm()) < 1e-2
    moment = torch.eye(64, device=DEVICE).expand(1, 2, -1, -1)
    chosen = package.choose_by_range(x, table, moment, group_size=32, candidates=4)
    assert chosen is not None and chosen.dtype == torch.uint8

    monkeypatch.setattr(gpu, "_verdicts", {})
    monkeypatch.setattr(kernel, "means", lambda x, origin, labels, fallback: fallback * 0)
    with pytest.warns(UserWarning, match="k-means runs in PyTorch steps: self-check failed"):
        again = cluster(x, start, iterations=2)
    assert torch.equal(again[0], want[0])


@pytest.mark.parametrize("size", [64, 80])
def test_the_self_checks_pass_on_a_corner_of_many_rows_and_heads(monkeypatch, size):
    x, table = draw(3, 5, 90, size), draw(3, 5, 9, size, seed=1)
    assert package._self_check(x) is None
    monkeypatch.setattr(gpu, "_verdicts", {})
    moment = draw(3, 1, size, seed=2).abs().diag_embed().expand(-1, 5, -1, -1)
    assert choice.refusal(x, table, moment, group_size=16, candidates=4) is None
