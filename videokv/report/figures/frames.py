"""Frames of several rollouts side by side, and a video of their differences from the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from videokv.report.figures.files import save_figure
from videokv.report.video import Panel, Scene, write_video

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Frames = NDArray[np.uint8]
GAIN = 4.0


def save_frames_side_by_side(
    clips: Mapping[str, Frames], folder: Path, *, frames: Sequence[int]
) -> tuple[Path, Path, Path]:
    """A row a recipe, a column a frame number. clips: uint8 ``[T, H, W, 3]`` of one shape."""
    first = _checked(clips)
    wrong = [number for number in frames if not 0 <= number < len(first)]
    if wrong or not frames:
        raise ValueError(f"frames must be 0 to {len(first) - 1}, got {list(frames)}")

    def draw(figure: Figure) -> None:
        axes = figure.subplots(len(clips), len(frames), squeeze=False)
        for line, (name, clip) in zip(axes, clips.items(), strict=True):
            for place, number in zip(line, frames, strict=True):
                place.imshow(clip[number])
                place.set_xticks([]), place.set_yticks([])
            line[0].set_ylabel(name, fontsize=8)
        for place, number in zip(axes[0], frames, strict=True):
            place.set_title(f"frame {number}", fontsize=8)

    data = {"recipes": list(clips), "frames": list(frames)}
    size = (1.7 * len(frames), 1.4 * len(clips))
    return save_figure(folder, "frames", draw, data, size_inches=size)


def difference(frames: Frames, reference: Frames, *, gain: float = GAIN) -> Frames:
    """Grey where equal: 128 + gain × (frame - reference), clipped to 0..255."""
    if frames.shape != reference.shape:
        raise ValueError(f"clips must have one shape, got {frames.shape} and {reference.shape}")
    error = frames.astype(np.float32) - reference.astype(np.float32)
    return np.clip(np.rint(128 + gain * error), 0, 255).astype(np.uint8)


def save_difference_video(clips: Mapping[str, Frames], path: Path, *, gain: float = GAIN) -> Path:
    """The first clip as it is, then every other's difference from it, in one grid."""
    reference = _checked(clips)
    names = list(clips)
    panels = [Panel(names[0], "reference", reference)]
    panels += [
        Panel(name, f"difference ×{gain:g}", difference(clips[name], reference, gain=gain))
        for name in names[1:]
    ]
    write_video(path, [Scene(tuple(panels), context=0)])
    return path


def _checked(clips: Mapping[str, Frames]) -> Frames:
    shapes = {clip.shape for clip in clips.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 4:
        raise ValueError(f"clips must share one shape [T, H, W, 3], got {sorted(shapes)}")
    return next(iter(clips.values()))
