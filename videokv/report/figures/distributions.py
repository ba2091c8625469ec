"""How a figure is spread over layers, heads, steps and clips, one box a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from videokv.report.figures.files import bare, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    "mass_shift": "attention mass shift to cached keys",
    "jsd_nats": "Jensen-Shannon divergence, nats",
    "output_mse": "MSE of the attention output",
}
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def save_distribution(
    values: Mapping[str, Sequence[float]], metric: str, folder: Path
) -> tuple[Path, Path, Path]:
    """Boxes (quartiles, whiskers at 5 and 95 %) of recipe → values (2605.26266, Fig. 4, A5, A6).

    JSD and MSE are drawn on a logarithmic axis. Raises ValueError on an unknown metric or an empty
    recipe.
    """
    if metric not in LABELS:
        raise ValueError(f"metric must be one of {tuple(LABELS)}, got {metric!r}")
    empty = [name for name, found in values.items() if not len(found)]
    if not values or empty:
        raise ValueError(f"no values to draw for {empty or 'any recipe'}")
    arrays = [np.asarray(found, dtype=float) for found in values.values()]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.boxplot(arrays, whis=(5, 95), showfliers=False, tick_labels=list(values))
        if metric == "mass_shift":
            axes.axhline(0, color="k", alpha=0.5, linewidth=1)
        elif all((a > 0).all() for a in arrays):
            axes.set_yscale("log")
        axes.set_ylabel(LABELS[metric])
        axes.tick_params(axis="x", rotation=25)
        bare(axes)

    data = {
        name: dict(zip(map(str, QUANTILES), np.quantile(a, QUANTILES).tolist(), strict=True))
        | {"n": len(a)}
        for name, a in zip(values, arrays, strict=True)
    }
    return save_figure(folder, metric, draw, {"metric": metric, "quantiles": data})
