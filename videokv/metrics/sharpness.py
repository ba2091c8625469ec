"""Sharpness: the mean gradient magnitude of luminance. A rollout that drifts to grey loses it."""

from __future__ import annotations

import torch

from videokv.metrics.frames import Frames, unit_frames

LUMA = (0.299, 0.587, 0.114)  # Rec. 601


def sharpness(frames: Frames) -> float:
    """Mean over frames and pixels of |gradient| of ``[T, H, W, 3]``, luminance in [0, 1] a pixel.

    Forward differences, on the pixels that have a right and a lower neighbour. Raises ValueError
    on frames under 2 pixels a side and on values out of range.
    """
    x = unit_frames(frames)
    if min(x.shape[-2:]) < 2:
        raise ValueError(f"a gradient needs frames of at least 2 x 2, got {tuple(x.shape[-2:])}")
    luma = torch.einsum("tchw,c->thw", x, torch.tensor(LUMA, dtype=x.dtype, device=x.device))
    right = luma[:, :-1, 1:] - luma[:, :-1, :-1]
    down = luma[:, 1:, :-1] - luma[:, :-1, :-1]
    return float(torch.hypot(right, down).mean())
