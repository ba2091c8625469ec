"""The figures that a study's folder has data for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from videokv.report.figures.curves import by_chunk, nll_by_chunk, save_by_chunk
from videokv.report.figures.frames import save_difference_video, save_frames_side_by_side
from videokv.report.figures.sets import save_diagnostics, save_memory, save_tradeoff
from videokv.studies.demo import load_frames
from videokv.studies.results import Results, read_results
from videokv.studies.variants import REFERENCE, path_name

BY_CHUNK = ("psnr_db", "sharpness", "saturation", "motion", "drift", "flicker")
SHOWN_FRAMES = 6
SHOWN_CLIPS = 8
VIDEO_FRAMES = 120  # longer rollouts are shown in fast motion, or the report would grow too large


def read_folder(folder: Path) -> Results:
    """results.json of a folder; ValueError where it is missing or is not one."""
    path = folder / "results.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no results.json; run a study into it first")
    return read_results(path)


def save_figures(folder: Path, *, clip: str = "clip-000") -> list[Path]:
    """Everything that can be drawn, into ``folder/figures``.

    Raises ValueError where nothing can: no results, no data of a figure, no frames of ``clip``.
    """
    results, out = read_folder(folder), folder / "figures"
    if results.study == "diagnose":
        return save_diagnostics(json.loads((folder / "diagnostics.json").read_text()), out)
    if results.study == "memory":
        return save_memory(held_by_model(results), out, title="KV cache at 480p")
    made: list[Path] = []
    if results.study == "prefill":
        made += save_by_chunk(nll_by_chunk(results), out, metric="nll")
    if results.study == "tradeoff":
        made += save_tradeoff(results, out)
    if results.study == "longrun":
        for metric in BY_CHUNK:
            means, errors = by_chunk(results, metric)
            if means:
                made += save_by_chunk(means, out, metric=metric, errors=errors)
    if (folder / "frames").is_dir():
        made += save_frames(folder, out, clip=clip)
    if not made:
        raise ValueError(f"{folder} ({results.study}) has no data that a figure is made of")
    return made


def save_frames(folder: Path, out: Path, *, clip: str) -> list[Path]:
    """Frames side by side and a difference video of up to eight rollouts, the reference first."""
    found = frames_of(folder, clip)
    if REFERENCE not in found:
        raise ValueError(f"{folder / 'frames' / REFERENCE} has no {clip}; name another --clip")
    length = len(found[REFERENCE])
    numbers = np.unique(np.linspace(0, length - 1, min(SHOWN_FRAMES, length)).round().astype(int))
    out.mkdir(parents=True, exist_ok=True)
    made = list(save_frames_side_by_side(found, out, frames=numbers.tolist()))
    return [*made, save_difference_video(thinned(found)[0], out / "differences.mp4")]


def thinned(found: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Every n-th frame of rollouts of one length, so that at most ``VIDEO_FRAMES`` stay; and n."""
    longest = max(len(frames) for frames in found.values())
    step = -(-longest // VIDEO_FRAMES)
    return {label: frames[::step] for label, frames in found.items()}, step


def frames_of(folder: Path, clip: str) -> dict[str, Any]:
    """label → frames ``[T, H, W, 3]`` of a clip: the first eight rollouts of the results, the
    reference first. What an earlier command left in the folder and the results lack is not shown.
    """
    found: dict[str, Any] = {}
    for label in sorted(read_folder(folder).recipes, key=lambda name: name != REFERENCE):
        path = folder / "frames" / path_name(label) / f"{clip}.npz"
        if path.is_file() and len(found) < SHOWN_CLIPS:
            found[label] = load_frames(path)
    return found


def held_by_model(results: Results) -> dict[str, dict[str, float]]:
    """model → recipe → bytes held at 480p, from a memory study."""
    sizes: dict[str, dict[str, float]] = {}
    for row in results.rows:
        if row.metric == "held_bytes" and row.case.endswith(" 480p"):
            sizes.setdefault(row.case.removesuffix(" 480p"), {})[row.recipe] = row.value
    return sizes
