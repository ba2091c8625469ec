"""One figure = three files: <name>.png, <name>.svg and <name>.json with what was drawn."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from videokv.studies.results import write_bytes, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PNG_DPI = 160
Draw = Callable[["Figure"], None]


def save_figure(
    folder: Path,
    name: str,
    draw: Draw,
    data: Mapping[str, Any],
    *,
    size_inches: tuple[float, float] = (6.4, 4.2),
) -> tuple[Path, Path, Path]:
    """Draw on a white page without touching matplotlib's global state; returns the three paths.

    data: JSON values only; NaN and infinity are refused.
    """
    import matplotlib
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / f"{name}.{ending}" for ending in ("png", "svg", "json"))
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=size_inches, layout="constrained")
        draw(figure)
        for path in paths[:2]:
            kind = path.suffix[1:]
            # Without dates and versions the same data give the same bytes.
            metadata: Any = {"Date": None} if kind == "svg" else {"Software": None}
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=PNG_DPI, metadata=metadata)
            write_bytes(path, buffer.getvalue())
    write_json(paths[2], dict(data))
    return paths[0], paths[1], paths[2]


def bare(axes: Any) -> None:
    """No frame above and to the right, a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.2, linewidth=0.8)
    axes.set_axisbelow(True)
