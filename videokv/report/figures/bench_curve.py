"""Time of one attention call over the number of cached keys, from ``videokv bench``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videokv.report.figures.files import bare, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DENSE = "dense_"


def save_bench_curve(
    rows: Sequence[Mapping[str, float]], folder: Path, *, name: str = "bench_curve"
) -> tuple[Path, Path, Path]:
    """rows: ``cached_tokens`` and milliseconds by the names of kernels and backends (``x_ms``).

    Left the times, right the same over the fastest dense kernel's. Stock kernels on dense keys are
    dashed, what reads a packed cache is not. Raises ValueError without rows.
    """
    if not rows:
        raise ValueError("there is no point to draw; run the section curve of videokv bench")
    names = sorted({key for row in rows for key in row if key.endswith("_ms")})

    def draw(figure: Figure) -> None:
        times, shares = figure.subplots(1, 2)
        for key in names:
            found = [row for row in rows if key in row]
            _line(times, key, found, [row[key] for row in found])
            over = [row for row in found if _fastest_dense(row) is not None]
            _line(shares, key, over, [row[key] / (_fastest_dense(row) or 1.0) for row in over])
        times.set_yscale("log")
        times.set_ylabel("milliseconds a call of one layer")
        shares.set_ylim(bottom=0)
        shares.set_ylabel("times the fastest dense kernel")
        for axes in (times, shares):
            axes.set_xscale("log")
            ticks = [row["cached_tokens"] for row in rows]
            axes.set_xticks(ticks, [f"{tick / 1e3:.0f}k" for tick in ticks])
            axes.minorticks_off()
            axes.set_xlabel("cached keys")
            bare(axes)
        times.legend(frameon=False, fontsize=8)

    data = {"points": [dict(row) for row in rows]}
    return save_figure(folder, name, draw, data, size_inches=(9.6, 4.2))


def _line(
    axes: Any, key: str, rows: Sequence[Mapping[str, float]], values: Sequence[float]
) -> None:
    dense = key.startswith(DENSE)
    label = key.removeprefix(DENSE).removesuffix("_ms") + (", dense keys" if dense else "")
    style = "--" if dense else "-"
    places = [row["cached_tokens"] for row in rows]
    axes.plot(places, values, marker="o", linestyle=style, label=label)


def _fastest_dense(row: Mapping[str, float]) -> float | None:
    return min((value for key, value in row.items() if key.startswith(DENSE)), default=None)
