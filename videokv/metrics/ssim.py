"""Structural similarity: Gaussian window of 11 pixels, sigma 1.5, K1 = .01, K2 = .03, range 1."""

from __future__ import annotations

import torch
from torch import Tensor

from videokv.metrics.frames import Frames, unit_pair

WINDOW_PIXELS = 11
SIGMA_PIXELS = 1.5
BATCH_FRAMES = 16


def ssim(frames: Frames, reference: Frames) -> float:
    """Mean over frames of the SSIM of ``[T, H, W, 3]`` against a reference of the same shape."""
    return float(ssim_per_frame(frames, reference).mean())


def ssim_per_frame(frames: Frames, reference: Frames) -> Tensor:
    """SSIM of each frame, float64 ``[T]``: the mean over RGB and pixels (Wang et al., 2004).

    Raises ValueError on unequal shapes, values out of range, and frames under 11 pixels a side.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    x, y = unit_pair(frames, reference)
    height, width = x.shape[-2:]
    if min(height, width) < WINDOW_PIXELS:
        raise ValueError(
            f"SSIM looks through a window of {WINDOW_PIXELS} x {WINDOW_PIXELS} pixels, the frames "
            f"are {height} x {width}; give larger frames"
        )
    parts = [
        structural_similarity_index_measure(
            p, q, sigma=SIGMA_PIXELS, kernel_size=WINDOW_PIXELS, data_range=1.0, reduction="none"
        ).reshape(-1)
        for p, q in zip(x.split(BATCH_FRAMES), y.split(BATCH_FRAMES), strict=True)
    ]
    return torch.cat(parts)
