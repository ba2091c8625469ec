"""k-means++ of many centroids: the kernel draws what float64 would draw."""

import pytest
import torch

import videokv.kernels.assign_centroids as package
from videokv.kernels import gpu
from videokv.kernels.assign_centroids import spread_tokens, starts

pytest.importorskip("triton")
from videokv.kernels.assign_centroids import triton_spread as kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape, seed=0, dtype=torch.float32):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values + 5).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "count", "size"), [(400, 18, 16), (300, 7, 80), (63, 5, 16)])
def test_each_draw_is_that_of_float64_after_those_before_it(tokens, count, size, dtype):
    x = draw(2, tokens, 2, size, dtype=dtype).transpose(1, 2)
    got = kernel.spread(x, count=count, seed=3)
    assert starts.draw_error(x, got, seed=3) < 1e-6
    assert starts.draw_error(x, starts.spread_tokens(x, count=count, seed=3), seed=3) < 1e-6
    assert torch.equal(kernel.spread(x, count=count, seed=3), got)
    alone = kernel.spread(x[1:, 1:], count=count, seed=3)
    assert torch.equal(alone, got[1:, 1:])


def test_what_it_draws_on_whole_numbers_is_bit_for_bit_the_reference():
    x = draw(1, 3, 500, 24).mul(4).round()  # distances are exact in any order
    got = kernel.spread(x, count=24, seed=0)
    assert torch.equal(got, starts.spread_tokens(x, count=24, seed=0))


def test_a_draw_that_is_off_is_seen():
    x = draw(1, 2, 400, 32)
    rows = starts.spread_tokens(x, count=16, seed=0)
    assert starts.draw_error(x, rows.flip(2), seed=0) > 1e-3
    assert starts.draw_error(x, rows + 1, seed=0) == float("inf")


def test_fewer_different_tokens_than_centroids():
    x = draw(1, 2, 2, 32).repeat(1, 1, 20, 1)
    got = kernel.spread(x, count=9, seed=0)
    assert torch.equal(got, starts.spread_tokens(x, count=9, seed=0))
    one = draw(1, 2, 1, 32)
    assert torch.equal(kernel.spread(one, count=4, seed=0), one.expand(1, 2, 4, 32))


def test_tokens_that_are_not_finite_do_no_harm():
    x = draw(1, 2, 90, 32)
    x[0, 1, 7, 5] = torch.nan
    x[0, 0, 8, 5] = torch.inf
    assert kernel.spread(x, count=8, seed=0).shape == (1, 2, 8, 32)


def test_the_package_uses_the_kernel_where_it_agrees(monkeypatch):
    monkeypatch.setattr(gpu, "_verdicts", {})
    x = draw(1, 2, 200, 32)
    want = spread_tokens(x.cpu(), count=12, seed=0).to(DEVICE)
    monkeypatch.setattr(package, "wants_kernels", lambda device: True)
    monkeypatch.setattr(package, "machine_refusal", lambda device: None)
    assert package.spread_refusal(x, count=12) is None
    assert torch.equal(spread_tokens(x, count=12, seed=0), want)
    with pytest.raises(ValueError, match="count must be 1..256, got 257"):
        spread_tokens(x, count=257, seed=0)

    monkeypatch.setattr(gpu, "_verdicts", {})
    monkeypatch.setattr(kernel, "spread", lambda x, count, seed: x[:, :, :count].float())
    with pytest.warns(UserWarning, match=r"k-means\+\+ runs in PyTorch steps: self-check failed"):
        again = spread_tokens(x, count=12, seed=0)
    assert torch.equal(again, starts.spread_tokens(x, count=12, seed=0))
