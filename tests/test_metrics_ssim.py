"""SSIM against scikit-image's Gaussian variant and against input that is refused."""

import numpy as np
import pytest
import torch

from videokv.metrics import ssim, ssim_per_frame


def clip(seed: int, height: int = 63, width: int = 80, frames: int = 17) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), np.uint8)


def test_identical_clips_are_one() -> None:
    assert ssim(clip(0), clip(0)) == pytest.approx(1.0, abs=1e-6)


def test_against_an_independent_implementation() -> None:
    skimage = pytest.importorskip("skimage.metrics", reason="scikit-image is not installed")
    a = clip(0, frames=2)
    noise = np.random.default_rng(1).normal(0, 20, a.shape)
    b = np.clip(a + noise, 0, 255).astype(np.uint8)
    expected = [
        skimage.structural_similarity(
            p / 255,
            q / 255,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            data_range=1.0,
            channel_axis=2,
        )
        for p, q in zip(a, b, strict=True)
    ]
    # scikit-image leaves the border out of its mean: a difference by some 1e-4, see below.
    assert ssim_per_frame(b, a).tolist() == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.float64])
def test_inside_the_border_every_pixel_is_that_of_scikit_image(monkeypatch, dtype) -> None:
    skimage = pytest.importorskip("skimage.metrics", reason="scikit-image is not installed")
    functional = pytest.importorskip("torchmetrics.functional.image")
    original, maps = functional.structural_similarity_index_measure, []

    def with_map(*args, **options):
        value, full = original(*args, **options, return_full_image=True)
        maps.append(full)
        return value

    monkeypatch.setattr(functional, "structural_similarity_index_measure", with_map)
    a = torch.from_numpy(clip(0, frames=1))
    b = (a + 20 * torch.randn(a.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 255)
    a, b = (x.byte() if dtype == torch.uint8 else (x / 255).to(dtype) for x in (a, b))
    ours = ssim(b, a)
    p, q = (x[0].double().numpy() / (255 if dtype == torch.uint8 else 1) for x in (a, b))
    _, theirs = skimage.structural_similarity(
        p, q, gaussian_weights=True, sigma=1.5, use_sample_covariance=False, data_range=1.0,
        channel_axis=2, full=True,
    )  # fmt: skip
    found = maps[0][0].permute(1, 2, 0).numpy()
    assert ours == pytest.approx(float(found.mean()), abs=1e-6)
    inside = slice(5, -5)
    assert np.abs(found[inside, inside] - theirs[inside, inside]).max() < 1e-4


def test_batches_of_frames_do_not_change_the_value() -> None:
    a, b = clip(0), clip(1)
    alone = [float(ssim_per_frame(a[i : i + 1], b[i : i + 1])) for i in range(len(a))]
    assert ssim_per_frame(a, b).tolist() == pytest.approx(alone, abs=1e-6)


def test_the_smallest_frame_passes_and_a_smaller_one_is_refused() -> None:
    assert ssim(clip(0, 11, 11, 1), clip(0, 11, 11, 1)) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="10 x 40"):
        ssim(clip(0, 10, 40, 1), clip(0, 10, 40, 1))


def test_range_and_shape_are_checked() -> None:
    with pytest.raises(ValueError, match="same frames"):
        ssim(clip(0), clip(0)[:3])
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        ssim(torch.full((1, 20, 20, 3), -0.5), torch.zeros(1, 20, 20, 3))
