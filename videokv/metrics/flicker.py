"""Flicker: how wrong the changes from frame to frame are, whatever a still error is."""

from __future__ import annotations

from videokv.metrics.frames import Frames, unit_pair


def flicker(frames: Frames, reference: Frames) -> float:
    """Mean of |(x_t+1 - x_t) - (y_t+1 - y_t)| over frames, pixels and RGB, in 0..2 (peak 1).

    0 where every change is that of the reference; a constant offset does not count. Raises
    ValueError on clips of one frame, unequal shapes, and values out of range.
    """
    x, y = unit_pair(frames, reference)
    if x.shape[0] < 2:
        raise ValueError("flicker compares consecutive frames; give at least two, got one")
    error = x - y
    return float((error[1:] - error[:-1]).abs().mean())
