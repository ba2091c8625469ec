"""Why noise without bias still steals attention: exp is convex (2605.26266, Fig. 3)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from videokv.report.figures.files import bare, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORE, WIDTH, POINTS = 0.0, 3.0, 400


def save_convexity(folder: Path) -> tuple[Path, Path, Path]:
    """Uniform score noise, its exponential with the two means, and after the correction."""
    noise = np.linspace(-WIDTH / 2, WIDTH / 2, POINTS)
    half = WIDTH / 2
    bias = float(np.log(np.sinh(half) / half))
    means = {"true": float(np.exp(SCORE)), "noisy": float(np.exp(SCORE + bias)), "corrected": 1.0}

    def draw(figure: Figure) -> None:
        left, middle, right = figure.subplots(1, 3)
        left.fill_between(SCORE + noise, 1 / WIDTH, alpha=0.3, step="mid")
        left.axvline(SCORE, color="k", linewidth=1)
        left.set_title("noisy score: mean unchanged", fontsize=9)
        left.set_xlabel("score"), left.set_ylabel("density")
        for axes, shift, title in (
            (middle, 0.0, "exponential: mean too large"),
            (right, bias, f"less b = {bias:.3f}: mean restored"),
        ):
            values = np.exp(SCORE + noise - shift)
            axes.plot(values, 1 / (WIDTH * values))  # density of exp of a uniform variable
            axes.fill_between(values, 1 / (WIDTH * values), alpha=0.3)
            axes.axvline(means["true"], color="k", linewidth=1, label="e^s")
            mean = means["noisy"] * np.exp(-shift)
            axes.axvline(mean, color="tab:red", linestyle="--", linewidth=1.2, label="mean")
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("contribution to the softmax sum"), axes.legend(frameon=False)
        for axes in (left, middle, right):
            bare(axes)

    data = {"score": SCORE, "noise_width": WIDTH, "bias": bias, "means": means}
    return save_figure(folder, "convexity", draw, data, size_inches=(10, 3.2))
