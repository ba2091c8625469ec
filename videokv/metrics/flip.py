"""FLIP (Andersson et al., 2020): the difference seen when flipping between two images, LDR."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np

from videokv.metrics.frames import Frames, unit_pair
from videokv.metrics.unavailable import NotAvailable

PIXELS_PER_DEGREE = 67.0  # the authors' default: a 0.7 m wide 4K screen at 0.7 m


def flip(frames: Frames, reference: Frames) -> float:
    """Mean over frames and pixels of the FLIP error, 0 to 1, of ``[T, H, W, 3]``.

    Raises:
        NotAvailable: flip-evaluator is not installed.
        ValueError: unequal shapes or values out of range.
    """
    if find_spec("flip_evaluator") is None:
        raise NotAvailable("FLIP needs flip-evaluator: pip install 'videokv[metrics]'")
    import flip_evaluator

    x, y = (c.permute(0, 2, 3, 1).float().cpu().numpy() for c in unit_pair(frames, reference))
    errors = [
        flip_evaluator.evaluate(
            np.ascontiguousarray(theirs),
            np.ascontiguousarray(ours),
            "LDR",
            applyMagma=False,
            parameters={"ppd": PIXELS_PER_DEGREE},
        )[1]
        for ours, theirs in zip(x, y, strict=True)
    ]
    return float(np.mean(errors))
