"""Peak signal-to-noise ratio, by both conventions in use, each under its own name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from videokv.metrics.frames import Frames, unit_pair

CAP_DB = 100.0


@dataclass(frozen=True)
class Psnr:
    """psnr_db: mean over frames of the dB of each; psnr_pooled_db: of the error of all frames.

    Both are capped at 100 dB, so that an identical frame (infinite dB) leaves the mean finite;
    ``identical_frames`` counts those. ``per_frame_db``: one capped figure a frame.
    """

    psnr_db: float
    psnr_pooled_db: float
    identical_frames: int
    per_frame_db: tuple[float, ...]


def psnr(frames: Frames, reference: Frames) -> Psnr:
    """PSNR of ``[T, H, W, 3]`` against a reference of the same shape, peak 1 (uint8: 255).

    The squared error is a mean over height, width and RGB of a frame. Raises ValueError on unequal
    shapes and on values out of range.
    """
    x, y = unit_pair(frames, reference)
    errors = (x - y).square().flatten(1).mean(1)  # [T]
    per_frame = _capped_db(errors)
    return Psnr(
        psnr_db=float(per_frame.mean()),
        psnr_pooled_db=float(_capped_db(errors.mean())),
        identical_frames=int((errors == 0).sum()),
        per_frame_db=tuple(per_frame.tolist()),
    )


def _capped_db(mean_squared_error: Tensor) -> Tensor:
    return (-10 * torch.log10(mean_squared_error)).clamp(max=CAP_DB)
