"""PSNR: fixed peak, both conventions, identical frames, and input that is refused."""

import json
import math

import numpy as np
import pytest
import torch

from videokv.metrics import psnr, read_frames, sharpness


def clip(seed: int = 0, frames: int = 3, height: int = 15, width: int = 21) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), np.uint8)


def with_errors(*mean_squared: float) -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.full((len(mean_squared), 16, 16, 3), 0.25, dtype=torch.float64)
    step = torch.tensor(mean_squared, dtype=torch.float64).sqrt()[:, None, None, None]
    return base + step, base


def test_the_two_conventions_differ_as_they_should() -> None:
    measured = psnr(*with_errors(1e-4, 1e-2))
    assert measured.psnr_db == pytest.approx(30.0, abs=1e-6)
    assert measured.psnr_pooled_db == pytest.approx(22.967, abs=1e-3)
    assert measured.per_frame_db == pytest.approx((40.0, 20.0), abs=1e-6)


def test_an_identical_frame_is_counted_and_capped() -> None:
    measured = psnr(*with_errors(0.0, 1e-4, 1e-2))
    assert measured.identical_frames == 1
    assert measured.psnr_db == pytest.approx((100 + 40 + 20) / 3, abs=1e-6)
    same = psnr(clip(), clip())
    assert (same.psnr_db, same.psnr_pooled_db, same.identical_frames) == (100.0, 100.0, 3)
    json.dumps(same.__dict__, allow_nan=False)


def test_peak_is_fixed_and_not_the_maximum_of_the_clip() -> None:
    frames, base = with_errors(1e-2)
    assert float(frames.max()) < 0.8
    assert psnr(frames, base).psnr_db == pytest.approx(20.0, abs=1e-6)


def test_uint8_and_unit_floats_give_one_value() -> None:
    a, b = clip(1), clip(2)
    expected = 10 * math.log10(255**2 / ((a[0].astype(float) - b[0]) ** 2).mean())
    assert psnr(a, b).per_frame_db[0] == pytest.approx(expected, rel=1e-9)
    floats = psnr(a.astype(np.float32) / 255, b.astype(np.float32) / 255)
    assert floats.psnr_db == pytest.approx(psnr(a, b).psnr_db, rel=1e-6)


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (clip(frames=3), clip(frames=2), "same frames"),
        (clip(), clip(width=20), "same frames"),
        (clip()[0], clip()[0], r"\[T, H, W, 3\]"),
        (clip().astype(np.int64), clip().astype(np.int64), "uint8"),
        (clip() / 127.5 - 1, clip() / 127.5 - 1, r"\(x \+ 1\) / 2"),
        (clip().astype(np.float32), clip().astype(np.float32), "pass uint8"),
        (clip() * np.nan, clip() / 255, "finite"),
        (clip()[:0], clip()[:0], "at least one"),
    ],
)
def test_bad_input_is_refused(a: np.ndarray, b: np.ndarray, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        psnr(a, b)


def test_against_torchmetrics() -> None:
    functional = pytest.importorskip("torchmetrics.functional.image")
    a, b = (torch.from_numpy(clip(seed)).double() / 255 for seed in (1, 2))
    pooled = functional.peak_signal_noise_ratio(a, b, data_range=1.0)
    assert psnr(a, b).psnr_pooled_db == pytest.approx(float(pooled), rel=1e-6)


def test_sharpness_against_a_ramp_and_a_flat_frame() -> None:
    ramp = torch.linspace(0, 1, 11, dtype=torch.float64)[None, None, :, None].expand(2, 7, 11, 3)
    assert sharpness(ramp) == pytest.approx(0.1, abs=1e-9)
    assert sharpness(torch.full((1, 5, 5, 3), 0.3)) == pytest.approx(0.0, abs=1e-7)


def test_reading_arrays_and_folders(tmp_path) -> None:
    from PIL import Image

    frames = clip(3)
    np.savez_compressed(tmp_path / "a.npz", frames=frames)
    np.save(tmp_path / "b.npy", frames)
    (tmp_path / "c").mkdir()
    for i, frame in enumerate(frames):
        Image.fromarray(frame).save(tmp_path / "c" / f"{i:03d}.png")
    for name in ("a.npz", "b.npy", "c"):
        assert np.array_equal(read_frames(tmp_path / name), frames)


def test_unreadable_paths_are_named(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.mp4").write_bytes(b"not a video")
    (tmp_path / "broken.npz").write_bytes(b"PK")
    for name in ("empty", "broken.mp4", "broken.npz", "missing.mp4"):
        with pytest.raises(ValueError, match=name):
            read_frames(tmp_path / name)


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((2, 0, 5, 3), np.uint8),
        torch.zeros(2, 5, 0, 3),
        np.full((1, 2, 2, 3), "a"),
        np.empty((1, 2, 2, 3), object),
        [[[[0.0, 0.0, 0.0]]]],
        torch.zeros(1, 2, 2, 3, dtype=torch.float8_e4m3fn),
    ],
    ids=["no rows", "no columns", "text", "objects", "list", "float8"],
)
def test_what_is_no_clip_is_refused_in_words(frames) -> None:
    for measure in (lambda: psnr(frames, frames), lambda: sharpness(frames)):
        with pytest.raises(ValueError, match="expected"):
            measure()


def test_any_strides_and_byte_order_are_read() -> None:
    a, b = clip(), clip(1)
    expected = psnr(a, b).psnr_pooled_db
    assert psnr(a[::-1], b[::-1]).psnr_pooled_db == pytest.approx(expected)
    unit = [(x / 255).astype(">f8") for x in (a, b)]
    assert psnr(*unit).psnr_pooled_db == pytest.approx(expected)


def test_images_of_more_than_8_bits_are_refused(tmp_path) -> None:
    from PIL import Image

    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(tmp_path / "0.png")
    with pytest.raises(ValueError, match="8 bits a channel"):
        read_frames(tmp_path)
