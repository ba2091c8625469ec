"""Attention maps with the border between cached and current keys, and selected tokens by frame."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from videokv.report.figures.files import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_attention_maps(example: Mapping[str, Any], folder: Path) -> tuple[Path, Path, Path]:
    """A panel for exact attention and for each recipe (2605.26266, Fig. 2).

    example: what ``studies.attention_example.attention_map`` made. Colours are logarithmic and
    shared, the dashed line is the border, titles carry the mass on cached keys.
    """
    from matplotlib.colors import LogNorm

    maps, border = example["maps"], example["cached_bins"]
    arrays = {name: np.asarray(values, dtype=float) for name, values in maps.items()}
    top = max(float(a.max()) for a in arrays.values())
    floor = max(top * 1e-3, 1e-12)

    def draw(figure: Figure) -> None:
        rows = -(-len(arrays) // 4)
        axes = figure.subplots(rows, min(4, len(arrays)), squeeze=False, sharey=True)
        for place in axes.flat[len(arrays) :]:
            place.set_visible(False)
        image = None
        for place, (name, array) in zip(axes.flat, arrays.items(), strict=False):
            image = place.imshow(
                array.clip(floor), aspect="auto", cmap="magma", norm=LogNorm(floor, top),
                interpolation="nearest",
            )  # fmt: skip
            place.axvline(border - 0.5, color="white", linestyle="--", linewidth=1)
            place.set_title(f"{name}\ncached {example['masses'][name]:.1%}", fontsize=9)
            place.set_xticks([]), place.set_yticks([])
        for place in axes[:, 0]:
            place.set_ylabel("queries")
        figure.supxlabel("keys: cached | current (binned)", fontsize=9)
        if image is not None:
            figure.colorbar(image, ax=axes, label="mean attention of a bin", shrink=0.8)

    size = (2.6 * min(4, len(arrays)) + 1, 2.7 * -(-len(arrays) // 4))
    return save_figure(folder, "attention_maps", draw, example, size_inches=size)


def save_token_selection(
    example: Mapping[str, Any], folder: Path, *, rows: int, columns: int, recipe: str
) -> tuple[Path, Path, Path]:
    """Where the first frame's queries look: cached frames and how often each patch is chosen.

    rows, columns: patches of a frame. Upper row: exact; lower: ``recipe``; one panel a cached
    frame (2609.26425, Fig. 3).

    Raises ValueError where the recipe is not in the example or frames do not fit its tokens.
    """
    selected = example["selected"]
    if recipe not in selected:
        raise ValueError(f"the example has {sorted(selected)}, not {recipe!r}")
    frame, cached = rows * columns, example["cached_tokens"]
    if cached % frame:
        raise ValueError(f"{cached} cached tokens are no whole frames of {frame} patches")
    count = cached // frame
    counts = {
        name: np.bincount(selected[name], minlength=cached).reshape(count, rows, columns)
        for name in ("exact", recipe)
    }
    moved = float(np.mean(np.asarray(selected["exact"]) != np.asarray(selected[recipe])))

    def draw(figure: Figure) -> None:
        axes = figure.subplots(2, count, squeeze=False)
        top = max(int(c.max()) for c in counts.values())
        for line, (name, chosen) in zip(axes, counts.items(), strict=True):
            for number, place in enumerate(line):
                place.imshow(chosen[number], vmin=0, vmax=top, cmap="viridis")
                place.set_xticks([]), place.set_yticks([])
                if not number:
                    place.set_ylabel(name, fontsize=8)
        figure.suptitle(f"top-1 cached token of each query: {moved:.0%} select another", fontsize=9)
        figure.supxlabel("cached frames, oldest first", fontsize=9)

    data = {
        "recipe": recipe, "token_shift": moved,
        "counts": {name: c.tolist() for name, c in counts.items()},
    }  # fmt: skip
    size = (1.0 * count + 1, 2.6)
    return save_figure(folder, "token_selection", draw, data, size_inches=size)
