"""Curves: bits against quality, figures by chunk, cumulative query energy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from videokv.report.figures.files import bare, save_figure
from videokv.report.style import colour_of
from videokv.studies.prefill import chunk_number
from videokv.studies.results import Results
from videokv.studies.variants import REFERENCE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {
    "psnr_db": "PSNR against BF16, dB",
    "ssim": "SSIM against BF16",
    "nll": "NLL, nats a token",
    "sharpness": "mean luminance gradient a pixel",
    "saturation": "max - min of RGB, peak 1",
    "motion": "change from frame to frame, peak 1",
    "drift": "distance of pixel values from real ones",
    "flicker": "error of changes, to BF16, peak 1",
}


@dataclass(frozen=True)
class Point:
    """One recipe of the trade-off; sem: None where it is not shown."""

    recipe: str
    bits: float
    mean: float
    sem: float | None
    on_front: bool

    @property
    def corrected(self) -> bool:
        return "+" in self.recipe


def save_tradeoff_curve(
    results: Results, folder: Path, *, metric: str = "psnr_db"
) -> tuple[Path, Path, Path]:
    """Bits per element against a metric; recipes on the Pareto front have a ring.

    Whiskers: standard errors, from eight cases up (2605.26266, Fig. 5, A7).
    """
    points = []
    for name in results.recipes:
        bits, found = results.find(name, "bits_per_element"), results.find(name, metric)
        if name == REFERENCE or bits is None or found is None:
            continue
        front = results.find(name, "on_pareto_front")
        on_front = front is not None and front.mean == 1
        points.append(Point(name, bits.mean, found.mean, found.printed_sem, on_front))
    if not points:
        raise ValueError(f"no recipe has both bits_per_element and {metric}")

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for corrected, colour, label in (
            (False, "tab:purple", "without correction"),
            (True, "tab:orange", "with correction"),
        ):
            chosen = sorted((p for p in points if p.corrected == corrected), key=lambda p: p.bits)
            if chosen:
                x, y = [p.bits for p in chosen], [p.mean for p in chosen]
                errors = [p.sem or 0.0 for p in chosen]
                axes.errorbar(x, y, yerr=errors, marker="o", color=colour, label=label, capsize=2)
        front = [p for p in points if p.on_front]
        axes.scatter(
            [p.bits for p in front], [p.mean for p in front], s=110, facecolors="none",
            edgecolors="k", linewidths=1, label="Pareto front",
        )  # fmt: skip
        axes.set_xlabel("bits per element, counted")
        axes.set_ylabel(NAMES.get(metric, metric))
        axes.legend(frameon=False)
        bare(axes)

    data = {"metric": metric, "points": [asdict(p) for p in points]}
    return save_figure(folder, f"tradeoff_{metric}", draw, data)


def save_by_chunk(
    values: Mapping[str, Sequence[float]],
    folder: Path,
    *,
    metric: str,
    first_chunk: int = 1,
    errors: Mapping[str, Sequence[float]] | None = None,
) -> tuple[Path, Path, Path]:
    """recipe → one value a chunk, as lines (NLL of a prefill, PSNR of a long rollout).

    errors: recipe → one standard error a chunk, drawn as bars; recipes may be missing.
    """
    errors = {} if errors is None else errors
    lengths = {len(found) for found in values.values()}
    if len(lengths) != 1 or not lengths.pop():
        raise ValueError("every recipe needs the same number of chunks, at least one")

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for name, found in values.items():
            x = range(first_chunk, first_chunk + len(found))
            bars = errors.get(name)
            axes.errorbar(
                x, found, yerr=bars, marker="o", markersize=3, capsize=2, linewidth=1, label=name,
                color=colour_of(name, list(values)),
            )  # fmt: skip
        axes.set_xlabel("chunk")
        axes.set_ylabel(NAMES.get(metric, metric))
        axes.legend(frameon=False, fontsize=8)
        bare(axes)

    data: dict[str, object] = {"metric": metric, "first_chunk": first_chunk}
    data["values"] = {name: list(found) for name, found in values.items()}
    if errors:
        data["errors"] = {name: list(found) for name, found in errors.items()}
    return save_figure(folder, f"{metric}_by_chunk", draw, data)


def nll_by_chunk(results: Results) -> dict[str, list[float]]:
    """recipe → NLL of each chunk position, mean over documents, from a prefill study."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in results.rows:
        if row.metric == "nll":
            chunks = found.setdefault(row.recipe, {})
            chunks.setdefault(chunk_number(row.case), []).append(row.value)
    return {
        name: [float(np.mean(chunks[number])) for number in sorted(chunks)]
        for name, chunks in found.items()
    }


def by_chunk(
    results: Results, metric: str
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """recipe → mean of ``metric`` ("psnr_db", "sharpness", ...) in each generated chunk of a
    long run, and recipe → its standard errors, where enough clips stand behind them."""
    stem, _, unit = metric.partition("_")
    pattern = rf"{stem}_chunk_\d+" + (f"_{unit}" if unit else "")
    means: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    for line in results.summary:
        if re.fullmatch(pattern, line.metric):
            means.setdefault(line.recipe, []).append(line.mean)
            if line.printed_sem is not None:
                errors.setdefault(line.recipe, []).append(line.printed_sem)
    return means, {name: found for name, found in errors.items() if len(found) == len(means[name])}


def save_query_energy(
    energy: Mapping[str, Sequence[Sequence[float]]], folder: Path
) -> tuple[Path, Path, Path]:
    """layer → curves of its heads: share of the energy in the top 1, 2, ... directions.

    2609.26425, Fig. 4 and 8.
    """
    if not energy:
        raise ValueError("no layer has query energy to draw")

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for layer, heads in energy.items():
            mean = np.mean(np.asarray(heads, dtype=float), axis=0)
            axes.plot(range(1, len(mean) + 1), mean, label=f"layer {layer}")
        axes.axvline(8, color="k", alpha=0.4, linewidth=1, linestyle="--")
        axes.set_xlabel("directions (line: 8)")
        axes.set_ylabel("share of query energy")
        axes.set_ylim(0, 1)
        axes.legend(frameon=False, fontsize=8, ncols=2)
        bare(axes)

    return save_figure(folder, "query_energy", draw, {"cumulative": dict(energy)})
