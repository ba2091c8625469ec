"""Frames as metrics take them: one range, one layout, nothing guessed.

A clip is ``[T, H, W, 3]``, uint8 in 0..255 or floating point in [0, 1]. The peak is fixed: it is
never inferred from the data, which would shift the value of a dark clip.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Frames = Tensor | NDArray[np.generic]


def unit_frames(frames: Frames, *, name: str = "frames") -> Tensor:
    """Check a clip ``[T, H, W, 3]`` and return it as float64 ``[T, 3, H, W]`` in [0, 1].

    Raises ValueError where the kind, the shape, the dtype or the range is another one.
    """
    x = _as_tensor(frames, name)
    if x.ndim != 4 or x.shape[-1] != 3 or not x.numel():
        raise ValueError(
            f"{name}: expected at least one RGB frame as [T, H, W, 3] with pixels in it, got shape "
            f"{tuple(x.shape)}"
        )
    if x.dtype == torch.uint8:
        unit = x.to(torch.float64) / 255
    elif x.is_floating_point() and x.element_size() > 1:  # float8 cannot even be compared
        unit = _checked_range(x, name).to(torch.float64)
    else:
        raise ValueError(
            f"{name}: expected uint8 (0..255) or floating point in [0, 1], got {x.dtype}; "
            "convert it to uint8"
        )
    return unit.permute(0, 3, 1, 2)


def unit_pair(a: Frames, b: Frames) -> tuple[Tensor, Tensor]:
    """Two clips of equal shape as float64 ``[T, 3, H, W]`` on one device; ValueError if unequal."""
    first, second = _as_tensor(a, "first clip"), _as_tensor(b, "second clip")
    if first.shape != second.shape:
        raise ValueError(
            f"the two clips must have the same frames and size, got {tuple(first.shape)} and "
            f"{tuple(second.shape)}; cut or scale one of them first"
        )
    x, y = unit_frames(first, name="first clip"), unit_frames(second, name="second clip")
    return x, y.to(x.device)


def _as_tensor(frames: Frames, name: str) -> Tensor:
    """Any strides and byte order; ValueError where ``frames`` is no array of numbers."""
    if isinstance(frames, Tensor):
        return frames
    if not isinstance(frames, np.ndarray):
        raise ValueError(f"{name}: expected a tensor or a numpy array, got {type(frames).__name__}")
    native = frames.astype(frames.dtype.newbyteorder("="), copy=False)
    try:
        return torch.as_tensor(np.ascontiguousarray(native))
    except TypeError as error:
        raise ValueError(
            f"{name}: expected uint8 (0..255) or floating point in [0, 1], got {frames.dtype}"
        ) from error


def _checked_range(x: Tensor, name: str) -> Tensor:
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"{name}: expected finite values in [0, 1], got NaN or infinity")
    low, high = float(x.min()), float(x.max())
    if low < 0 or high > 1:
        raise ValueError(
            f"{name}: floating point frames must lie in [0, 1], got {low:.4g} to {high:.4g}; "
            "rescale them (from [-1, 1]: (x + 1) / 2; from 0..255: pass uint8)"
        )
    return x
