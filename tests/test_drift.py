"""Saturation, motion and drift: closed forms and refusals."""

import numpy as np
import pytest
import torch

from videokv.metrics.drift import drift, motion, saturation


def test_closed_forms() -> None:
    grey = np.full((3, 5, 7, 3), 0.25)
    assert saturation(grey) == 0 and motion(grey) == 0
    red = np.zeros((2, 5, 7, 3))
    red[..., 0] = [[[0.5]], [[1.0]]]
    assert saturation(red) == pytest.approx(0.75)
    assert motion(red) == pytest.approx(0.5 / 3)
    assert drift(grey, grey) == 0
    assert drift(grey, grey[:1, :3] + 0.5) == pytest.approx(0.5)  # other frames, another size
    assert drift(red[:1], red[1:]) == pytest.approx(0.5 / 3)
    flat = torch.arange(256, dtype=torch.uint8).repeat_interleave(3).reshape(1, 16, 16, 3)
    assert drift(flat, flat.flip(1)) == 0  # only the values count, not where they are


def test_wrong_frames_are_refused() -> None:
    with pytest.raises(ValueError, match="at least two"):
        motion(np.zeros((1, 5, 7, 3)))
    with pytest.raises(ValueError, match="0, 1"):
        drift(np.zeros((1, 5, 7, 3)), np.full((1, 5, 7, 3), 2.0))
