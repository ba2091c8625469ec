"""Structural similarity, K1 = .01, K2 = .03, range 1: a window of 11 pixels, Gaussian or uniform.

``gaussian``: sigma 1.5 (Wang et al., 2004). ``qvg``: uniform, zero padding of 5 that counts, as
in Quant VideoGen's metric.py; higher or lower than the other by some hundredths, never to be mixed.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from videokv.metrics.frames import Frames, unit_pair

WINDOW_PIXELS = 11
SIGMA_PIXELS = 1.5
BATCH_FRAMES = 16
C1, C2 = 0.01**2, 0.03**2

Variant = Literal["gaussian", "qvg"]


def ssim(frames: Frames, reference: Frames, *, variant: Variant = "gaussian") -> float:
    """Mean over frames of the SSIM of ``[T, H, W, 3]`` against a reference of the same shape."""
    return float(ssim_per_frame(frames, reference, variant=variant).mean())


def ssim_per_frame(frames: Frames, reference: Frames, *, variant: Variant = "gaussian") -> Tensor:
    """SSIM of each frame ``[T]``: the mean over RGB and pixels.

    Pixels at the border count, looked at through a mirror (Gaussian) or with zeros beyond it
    (qvg), as torchmetrics has it. scikit-image leaves out the 5 pixels next to the border: its
    mean is another one by some 1e-4, its values at the other pixels are the same.

    Raises ValueError on unequal shapes, values out of range, and frames under 11 pixels a side.
    """
    if variant not in ("gaussian", "qvg"):
        raise ValueError(f"variant must be 'gaussian' or 'qvg', got {variant!r}")
    # float32 errs by 1e-6 here and is an order of magnitude faster than float64 on a CPU
    x, y = (clip.float() for clip in unit_pair(frames, reference))
    height, width = x.shape[-2:]
    if min(height, width) < WINDOW_PIXELS:
        raise ValueError(
            f"SSIM looks through a window of {WINDOW_PIXELS} x {WINDOW_PIXELS} pixels, the frames "
            f"are {height} x {width}; give larger frames"
        )
    similarity = _gaussian if variant == "gaussian" else _uniform
    parts = [
        similarity(p, q) for p, q in zip(x.split(BATCH_FRAMES), y.split(BATCH_FRAMES), strict=True)
    ]
    return torch.cat(parts)


def _gaussian(x: Tensor, y: Tensor) -> Tensor:
    from torchmetrics.functional.image import structural_similarity_index_measure

    value = structural_similarity_index_measure(
        x, y, sigma=SIGMA_PIXELS, kernel_size=WINDOW_PIXELS, data_range=1.0, reduction="none"
    )
    if not isinstance(value, Tensor):
        raise TypeError(f"expected one value a frame, got {type(value)}")
    return value.reshape(-1)


def _uniform(x: Tensor, y: Tensor) -> Tensor:
    # Variances are differences of means of squares: in float32 they lose half their digits.
    x, y = x.double(), y.double()
    mean_x, mean_y, xx, yy, xy = (
        torch.nn.functional.avg_pool2d(z, WINDOW_PIXELS, 1, WINDOW_PIXELS // 2)
        for z in (x, y, x * x, y * y, x * y)
    )
    covariance = xy - mean_x * mean_y
    variances = xx - mean_x.square() + yy - mean_y.square()
    light = (2 * mean_x * mean_y + C1) / (mean_x.square() + mean_y.square() + C1)
    return (light * (2 * covariance + C2) / (variances + C2)).mean((1, 2, 3))
