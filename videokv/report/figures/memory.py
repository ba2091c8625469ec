"""Bars of cache bytes: model by model, recipe by recipe (2609.26425, Fig. 6)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from videokv.report.figures.files import bare, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 2**30


def save_memory_bars(
    held_bytes: Mapping[str, Mapping[str, float]], folder: Path, *, title: str
) -> tuple[Path, Path, Path]:
    """model → recipe → bytes. Raises ValueError where models have different recipes."""
    recipes = [tuple(found) for found in held_bytes.values()]
    if not recipes or len(set(recipes)) != 1 or not recipes[0]:
        raise ValueError("every model needs bytes of the same recipes, at least one")

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        places, width = np.arange(len(held_bytes)), 0.8 / len(recipes[0])
        for number, recipe in enumerate(recipes[0]):
            sizes = [found[recipe] / GIB for found in held_bytes.values()]
            axes.bar(places + number * width, sizes, width, label=recipe)
        axes.set_xticks(places + 0.4 - width / 2, list(held_bytes), rotation=25, ha="right")
        axes.set_ylabel("KV cache, GiB")
        axes.set_title(title, fontsize=9)
        axes.legend(frameon=False, fontsize=8)
        bare(axes)

    data = {"unit": "bytes", "held": {m: dict(f) for m, f in held_bytes.items()}}
    return save_figure(folder, "memory", draw, data, size_inches=(8, 4.2))
