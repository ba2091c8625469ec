"""A long rollout chunk by chunk: close to BF16 early, and late as good as real frames or not.

Two rollouts that differ by anything part after some chunks: PSNR late says only that they have.
Late quality is measured without a reference, against real frames of all the study's clips.

    <figure>_chunk_NN       of every chunk: sharpness, saturation, motion, drift
    psnr_chunk_NN_db        to BF16; flicker_chunk_NN likewise
    psnr_early_db           mean over the first quarter of the chunks
    <figure>_late_to_real   last quarter of the chunks over real frames: 1 is as real
    drift_late              last quarter; 0 is as real
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from videokv.metrics import Frames, flicker, sharpness
from videokv.metrics.drift import drift_from, motion, saturation, value_quantiles

OF_FRAMES: dict[str, Callable[[Frames], float]] = {
    "sharpness": sharpness,
    "saturation": saturation,
    "motion": motion,
}


@dataclass(frozen=True)
class RealPlay:
    """Statistics of real frames: means over clips; quantiles: of pixel values, ``[3, 256]``."""

    means: dict[str, float]
    quantiles: torch.Tensor


def real_play(frames: torch.Tensor) -> RealPlay:
    """Of clips ``[N, T, H, W, 3]``."""
    means = {
        name: float(np.mean([measure(clip) for clip in frames]))
        for name, measure in OF_FRAMES.items()
    }
    return RealPlay(means, value_quantiles(frames.flatten(0, 1)))


def late_quality(
    frames: NDArray[np.uint8], real: RealPlay, *, chunk_frames: int
) -> dict[str, float]:
    """Figures of one rollout ``[T, H, W, 3]``, without a reference."""
    starts = range(0, len(frames), chunk_frames)
    found: dict[str, float] = {}
    for name, measure in OF_FRAMES.items():
        # Motion and flicker also see the step from the chunk before.
        before = 1 if name == "motion" else 0
        values = [measure(frames[max(0, s - before) : s + chunk_frames]) for s in starts]
        found |= {_name(name, number): value for number, value in enumerate(values, 1)}
        found[f"{name}_late_to_real"] = _ratio(_late(values), real.means[name])
    drifts = [drift_from(frames[s : s + chunk_frames], real.quantiles) for s in starts]
    found |= {_name("drift", number): value for number, value in enumerate(drifts, 1)}
    found["drift_late"] = _late(drifts)
    return found


def early_quality(
    frames: NDArray[np.uint8],
    reference: NDArray[np.uint8],
    frame_db: NDArray[np.float64],
    *,
    chunk_frames: int,
) -> dict[str, float]:
    """Figures of one rollout against the BF16 one. frame_db: PSNR of each frame."""
    starts = range(0, len(frames), chunk_frames)
    values = [float(np.mean(frame_db[s : s + chunk_frames])) for s in starts]
    found = {f"{_name('psnr', number)}_db": value for number, value in enumerate(values, 1)}
    found["psnr_early_db"] = float(np.mean(values[: _quarter(len(values))]))
    for number, s in enumerate(starts, 1):
        part = slice(max(0, s - 1), s + chunk_frames)
        found[_name("flicker", number)] = flicker(frames[part], reference[part])
    return found


def _name(figure: str, chunk: int) -> str:
    return f"{figure}_chunk_{chunk:02d}"


def _quarter(chunks: int) -> int:
    return math.ceil(chunks / 4)


def _late(values: list[float]) -> float:
    return float(np.mean(values[-_quarter(len(values)) :]))


def _ratio(value: float, real: float) -> float:
    if real == 0:
        raise ValueError("real frames are flat or still, so that nothing can be compared with them")
    return value / real
