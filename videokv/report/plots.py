"""Plots as inline SVG: text and axes take the page's colour, so they serve light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from videokv.report.findings import Curves
from videokv.report.style import colour_of, dash_of
from videokv.studies.demo import REFERENCE
from videokv.studies.results import MIN_CASES_FOR_PRINTED_ERROR
from videokv.studies.rollout import CHUNK_FRAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#010203"  # replaced by currentColor in the SVG
SIZE_INCHES = (6.0, 3.9)


def psnr_by_frame(curves: Curves, recipes: Sequence[str]) -> str:
    """SVG of dB against BF16 by generated frame: mean over clips and a band (see band_note)."""

    def draw(axes: Axes) -> None:
        frames = 1
        for recipe in recipes:
            cases = list(curves.get(recipe, {}).values())
            if cases:
                values = np.asarray(cases, dtype=float)  # [clips, frames]
                frames = max(frames, values.shape[1])
                x = np.arange(1, values.shape[1] + 1)
                colour = colour_of(recipe, recipes)
                low, high = _band(values)
                axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
                axes.plot(x, values.mean(0), color=colour, linestyle=dash_of(recipe), label=recipe)
        for edge in range(CHUNK_FRAMES, frames, CHUNK_FRAMES):
            axes.axvline(edge + 0.5, color=INK, alpha=0.10, linewidth=0.8)
        axes.set_xlim(1, max(frames, 2))
        axes.set_xticks(range(CHUNK_FRAMES, frames + 1, CHUNK_FRAMES))
        axes.set_xlabel("generated frame (lines: chunks)")
        axes.set_ylabel("PSNR against BF16, dB")

    return _svg(draw, salt="psnr")


def mass_by_layer(curves: Curves, recipes: Sequence[str]) -> str:
    """SVG of attention mass on cached keys minus that of BF16, percentage points, by layer."""
    reference = curves.get(REFERENCE, {})

    def draw(axes: Axes) -> None:
        axes.axhline(0, color=INK, alpha=0.55, linewidth=1)
        layers = 1
        for recipe in recipes:
            cases = curves.get(recipe, {})
            pairs = [(cases[c], reference[c]) for c in cases if c in reference]
            if recipe != REFERENCE and pairs:
                shift = np.mean([np.subtract(a, b) for a, b in pairs], axis=0) * 100  # [layers]
                layers = max(layers, len(shift))
                axes.plot(
                    range(1, len(shift) + 1), shift, color=colour_of(recipe, recipes),
                    linestyle=dash_of(recipe), marker="o", markersize=3.5, label=recipe,
                )  # fmt: skip
        axes.set_xticks(range(1, layers + 1))
        axes.set_xlabel("layer")
        axes.set_ylabel("cached mass − BF16, points")

    return _svg(draw, salt="mass")


def recipe_plot(
    values: Mapping[str, Sequence[float]], *, unit: str, factor: float, salt: str
) -> str:
    """SVG of one metric: a dot a recipe and its error (see ``_band``), values times ``factor``.

    unit: the axis label.
    """
    names = list(values)

    def draw(axes: Axes) -> None:
        for place, name in enumerate(names):
            found = np.asarray(values[name], dtype=float)[:, None] * factor
            mean = found.mean()
            low, high = (float(x[0]) for x in _band(found))
            axes.errorbar(
                mean, place, xerr=[[max(0.0, mean - low)], [max(0.0, high - mean)]], fmt="o",
                markersize=5, capsize=3, color=colour_of(name, names),
            )  # fmt: skip
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(axis="x", color=INK, alpha=0.10, linewidth=0.8)
        axes.set_xlabel(unit)

    return _svg(draw, salt=salt, size=(4.8, 0.9 + 0.3 * len(names)))


def band_note(clips: int) -> str:
    """What the band of ``psnr_by_frame`` shows."""
    if clips >= MIN_CASES_FOR_PRINTED_ERROR:
        return f"Band: one standard error of the mean over {clips} clips."
    if clips > 1:
        return f"Band: lowest to highest of {clips} clips, too few for a standard error."
    return "One clip: no band."


def _band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(values) < MIN_CASES_FOR_PRINTED_ERROR:
        return values.min(0), values.max(0)
    mean, sem = values.mean(0), values.std(0, ddof=1) / np.sqrt(len(values))
    return mean - sem, mean + sem


def _svg(draw: Any, *, salt: str, size: tuple[float, float] = SIZE_INCHES) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,  # ids of two plots in one page must differ
        "font.size": 11,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "lines.linewidth": 1.9,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        _clean(axes)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside lower center", ncols=2, frameon=False, handlelength=2.4)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True)
    return _inline(buffer.getvalue())


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_alpha(0.35)
    axes.tick_params(length=0)
    axes.grid(axis="y", color=INK, alpha=0.10, linewidth=0.8)
    axes.set_axisbelow(True)


def _inline(svg: str) -> str:
    """From a standalone file to markup for HTML: no prologue, metadata, namespace or own font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace(INK, "currentColor")
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # nothing refers to those, and two plots share them
    return re.sub(r"<svg[^>]*>", _drop_size, svg, count=1)


def _drop_size(tag: re.Match[str]) -> str:
    """Keep the viewBox only: the page's style sheet gives the width."""
    return re.sub(r'\s(?:width|height)="[^"]*"', "", tag.group())
