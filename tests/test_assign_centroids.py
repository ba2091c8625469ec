"""k-means: against a float64 oracle, on degenerate tokens, the same on every run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from videokv.kernels import assign_centroids
from videokv.kernels.assign_centroids import (
    cluster,
    draw_tokens,
    label_means,
    nearest,
    reference,
    spread_tokens,
)


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def oracle_distances(x: torch.Tensor, centroids: torch.Tensor) -> np.ndarray:
    a, b = x.double().numpy(), centroids.double().numpy()
    return ((a[..., :, None, :] - b[..., None, :, :]) ** 2).sum(-1)


def oracle_means(x: torch.Tensor, ids: np.ndarray, fallback: np.ndarray) -> np.ndarray:
    out = fallback.copy()
    for b, h, k in np.ndindex(out.shape[:3]):
        chosen = x.double().numpy()[b, h][ids[b, h] == k]
        if len(chosen):
            out[b, h, k] = chosen.mean(0)
    return out


@pytest.mark.parametrize("offset", [0.0, 600.0], ids=["centred", "biased"])
@pytest.mark.parametrize("shape", [(2, 3, 63, 80), (1, 2, 1000, 64)], ids=str)
def test_nearest_is_nearest_in_float64(shape, offset):
    x = tokens(*shape) + offset
    centroids = tokens(shape[0], shape[1], 16, shape[3], seed=1) + offset
    distances = oracle_distances(x, centroids)
    found = nearest(x, centroids, count=4).numpy()
    chosen = np.take_along_axis(distances, found, -1)
    np.testing.assert_allclose(chosen, np.sort(distances, -1)[..., :4], rtol=1e-4)


def test_ties_go_to_the_lower_label():
    x = torch.zeros(1, 1, 5, 8)
    found = nearest(x, torch.ones(1, 1, 6, 8), count=3)
    assert found.tolist() == [[[[0, 1, 2]] * 5]]


def test_two_iterations_match_the_oracle():
    x = tokens(1, 2, 257, 24)
    start = draw_tokens(x, count=8, seed=3)
    ids, centroids = cluster(x, start, iterations=2)
    expected = start.double().numpy()
    for _ in range(2):
        labels = oracle_distances(x, torch.from_numpy(expected)).argmin(-1)
        expected = oracle_means(x, labels, expected)
    np.testing.assert_array_equal(ids.numpy(), labels)
    np.testing.assert_allclose(centroids.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_residuals_of_a_cluster_sum_to_zero():
    x = tokens(1, 3, 324, 128)
    ids, centroids = cluster(x, spread_tokens(x, count=8, seed=0), iterations=3)
    residual = x - centroids.gather(2, ids.long()[..., None].expand(-1, -1, -1, 128))
    sums = label_means(residual, ids, fallback=torch.zeros_like(centroids))
    assert sums.abs().max() < 1e-5


def test_blocks_change_nothing(monkeypatch):
    x = tokens(1, 2, 1000, 16)
    centroids = tokens(1, 2, 16, 16, seed=1)
    whole = nearest(x, centroids, count=2)
    monkeypatch.setattr(reference, "BLOCK_SCORES", 2 * 16 * 7)
    assert torch.equal(nearest(x, centroids, count=2), whole)


def test_segments_equal_index_add():
    """The sorted sums that a GPU uses add up as those of the CPU do."""
    rows, groups = tokens(500, 12), torch.randint(0, 7, (500,), generator=torch.Generator())
    groups[groups == 3] = 4  # one empty group
    ordered, order = torch.sort(groups, stable=True)
    edges = torch.searchsorted(ordered, torch.arange(8))
    sums = torch.segment_reduce(rows[order], "sum", lengths=edges.diff(), unsafe=True, initial=0.0)
    assert torch.equal(sums, reference._sums(rows, groups, 7))


@pytest.mark.parametrize("draw", [draw_tokens, spread_tokens])
def test_starts_are_tokens_seeded_and_leave_the_global_generator(draw):
    x = tokens(2, 3, 100, 16)
    before = torch.get_rng_state()
    first, again, other = (draw(x, count=8, seed=s) for s in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert bool((oracle_distances(first, x).min(-1) == 0).all())
    assert torch.equal(draw(x[1:], count=8, seed=5), first[1:])  # a row alone


def test_spread_tokens_find_every_far_group():
    centres = torch.eye(8)[None, None] * 100
    x = (centres.repeat(1, 1, 25, 1) + tokens(1, 1, 200, 8))[
        :, :, torch.randperm(200, generator=torch.Generator())
    ]
    ids = nearest(spread_tokens(x, count=8, seed=0), centres)
    assert len(ids.unique()) == 8


def test_labels_of_before_are_a_start():
    x = tokens(1, 2, 50, 8)
    ids = (torch.arange(50) % 3).to(torch.uint8).expand(1, 2, 50)
    fallback = tokens(1, 2, 4, 8, seed=2)
    got = label_means(x, ids, fallback=fallback)
    expected = oracle_means(x, ids.numpy(), fallback.double().numpy())
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="do not match"):
        label_means(x[:, :, :49], ids, fallback=fallback)


def degenerate() -> dict[str, torch.Tensor]:
    two = tokens(2, 8).index_select(0, torch.arange(16) % 2)[None, None]
    outlier = two.clone()
    outlier[..., 5, 3] = 1e4
    return {
        "two distinct": two,
        "outlier": outlier,
        "fewer tokens": tokens(1, 1, 3, 8),
        "one token": tokens(1, 1, 1, 8),
        "zeros": torch.zeros(1, 1, 16, 8),
    }


@pytest.mark.parametrize("name", degenerate())
@pytest.mark.parametrize("draw", [draw_tokens, spread_tokens])
def test_degenerate_tokens(name, draw):
    """R06: repeated values, an outlier, fewer tokens than centroids."""
    x = degenerate()[name]
    runs = [cluster(x, draw(x, count=4, seed=0), iterations=4) for _ in range(2)]
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    ids, centroids = runs[0]
    assert bool(centroids.isfinite().all())
    if draw is spread_tokens:  # k-means++ draws every distinct token before any twice
        found = centroids.gather(2, ids.long()[..., None].expand(-1, -1, -1, 8))
        torch.testing.assert_close(found, x, rtol=1e-6, atol=2e-3 if name == "outlier" else 1e-6)


def test_threads_change_nothing():
    x = tokens(1, 3, 5000, 128, dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    runs = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            runs.append(cluster(x, spread_tokens(x, count=64, seed=0), iterations=2))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_repeats_itself_and_chooses_as_well_as_the_cpu():
    """TF32 distances: two iterations leave 99.5 % of the labels as they are in float32, so what is
    asked is that each choice is as near as the nearest, and the clusters as tight."""
    x = tokens(1, 3, 5000, 128)
    start = spread_tokens(x, count=64, seed=0)
    assert torch.equal(spread_tokens(x.cuda(), count=64, seed=0).cpu(), start)
    runs = [cluster(x.cuda(), start.cuda(), iterations=2) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    tight, want = (
        _inertia(x, *(t.cpu() for t in run)) for run in (runs[0], cluster(x, start, iterations=2))
    )
    assert abs(tight / want - 1) < 1e-3

    ids, centroids = (t.cpu() for t in cluster(x.cuda(), start.cuda(), iterations=1))
    _assert_choices_are_near(x, start, ids)
    exact = oracle_means(x, ids.numpy(), start.double().numpy())
    np.testing.assert_allclose(centroids.numpy(), exact, rtol=0, atol=5e-3)


def test_labels_of_truncated_operands_are_as_near():
    """What TF32 does to the operands of the GPU's distances, on the CPU."""
    x = tokens(1, 2, 2000, 128)
    start = spread_tokens(x, count=64, seed=0)
    origin = x.mean(2, keepdim=True)

    def tf32(y):
        return (y.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    table = start - origin
    scores = table.square().sum(-1)[:, :, None] / 2 - tf32(x - origin) @ tf32(table).mT
    _assert_choices_are_near(x, start, scores.argmin(-1))


def _assert_choices_are_near(x, table, ids):
    """Within 1e-3 of the smallest squared distance, a token at a time."""
    distances = torch.cdist(x.double(), table.double()).square()
    chosen = distances.gather(-1, ids.long()[..., None])[..., 0]
    assert bool((chosen <= 1.001 * distances.amin(-1) + 1e-6).all())


def _inertia(x, ids, centroids):
    index = ids.long()[..., None].expand(-1, -1, -1, x.shape[3])
    return float((x.double() - centroids.double().gather(2, index)).square().sum())


def test_refusals_say_what_came():
    x = tokens(1, 1, 10, 8)
    with pytest.raises(ValueError, match="1..256"):
        cluster(x, torch.zeros(1, 1, 257, 8), iterations=1)
    with pytest.raises(ValueError, match="iterations"):
        cluster(x, x[:, :, :4], iterations=0)
    with pytest.raises(ValueError, match="agree"):
        cluster(x, torch.zeros(1, 2, 4, 8), iterations=1)
    with pytest.raises(ValueError, match="count"):
        nearest(x, x[:, :, :2], count=3)
    with pytest.raises(ValueError, match="T >= 1"):
        nearest(x[:, :, :0], x[:, :, :2])
    assert assign_centroids.MAX_CENTROIDS == 256
