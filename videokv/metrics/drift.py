"""Where long rollouts go wrong without a reference: colours fade, motion stops, pixels wander off.

A rollout of a minute has no frame-by-frame truth. These figures are compared with those of real
frames instead.
"""

from __future__ import annotations

import torch

from videokv.metrics.frames import Frames, unit_frames

LEVELS = 256  # quantiles that two distributions of pixel values are compared at


def saturation(frames: Frames) -> float:
    """Mean over frames and pixels of max - min of RGB in [0, 1]; grey has 0.

    frames: ``[T, H, W, 3]``. Raises ValueError on values out of range.
    """
    x = unit_frames(frames)
    return float((x.amax(1) - x.amin(1)).mean())


def motion(frames: Frames) -> float:
    """Mean of |x_t+1 - x_t| over frames, pixels and RGB in [0, 1]: a frozen picture has 0.

    Raises ValueError on clips of one frame and on values out of range.
    """
    x = unit_frames(frames)
    if x.shape[0] < 2:
        raise ValueError("motion compares consecutive frames; give at least two, got one")
    return float((x[1:] - x[:-1]).abs().mean())


def drift(frames: Frames, real: Frames) -> float:
    """How far the pixel values have moved from those of real frames, in 0..1.

    1-Wasserstein distance between the two distributions, mean over R, G and B: the mean
    difference of 256 quantiles. The numbers of frames and their sizes may differ.
    """
    return drift_from(frames, value_quantiles(real))


def drift_from(frames: Frames, quantiles: torch.Tensor) -> float:
    """``drift`` from real frames that ``value_quantiles`` has seen once for many calls."""
    return float((value_quantiles(frames) - quantiles).abs().mean())


def value_quantiles(frames: Frames) -> torch.Tensor:
    """float64 ``[3, 256]``: quantiles of R, G and B over frames and pixels, in the middle of equal
    shares. By sorting: torch.quantile refuses more than 2^24 values."""
    values = unit_frames(frames).transpose(0, 1).flatten(1).cpu().sort(1).values  # [3, T * H * W]
    places = (torch.arange(LEVELS, dtype=torch.float64) + 0.5) / LEVELS * values.shape[1]
    return values[:, places.long()]
