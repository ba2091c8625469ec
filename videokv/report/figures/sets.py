"""All figures of a study at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from videokv.report.figures.attention import save_attention_maps, save_token_selection
from videokv.report.figures.convexity import save_convexity
from videokv.report.figures.curves import save_query_energy, save_tradeoff_curve
from videokv.report.figures.distributions import LABELS, save_distribution
from videokv.report.figures.memory import save_memory_bars
from videokv.studies.results import Results
from videokv.worldmodel.config import WorldModelConfig


def save_diagnostics(details: Mapping[str, Any], folder: Path) -> list[Path]:
    """From diagnostics.json: maps, distributions, selected tokens, query energy, convexity."""
    made = [save_convexity(folder), save_query_energy(details["query_energy"], folder)]
    for metric in LABELS:
        values = {name: found[metric] for name, found in details["by_head"].items()}
        made.append(save_distribution(values, metric, folder))
    example, config = details["example"], WorldModelConfig()
    if example is not None:
        made.append(save_attention_maps(example, folder))
        recipe = next(name for name in example["maps"] if name != "exact")
        made.append(
            save_token_selection(
                example, folder, rows=config.rows, columns=config.columns, recipe=recipe
            )
        )
    return [path for paths in made for path in paths]


def save_tradeoff(results: Results, folder: Path) -> list[Path]:
    """PSNR and SSIM against bits."""
    made = [save_tradeoff_curve(results, folder, metric=metric) for metric in ("psnr_db", "ssim")]
    return [path for paths in made for path in paths]


def save_memory(
    held_bytes: Mapping[str, Mapping[str, float]], folder: Path, *, title: str
) -> list[Path]:
    """Bars of bytes."""
    return list(save_memory_bars(held_bytes, folder, title=title))
