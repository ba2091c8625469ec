"""Run VBench-Long over exported videos, where its package and its weights are here."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from videokv.metrics.unavailable import NotAvailable
from videokv.metrics.vbench import Score, from_prompts
from videokv.metrics.vbench_files import Export, read_prompts

PACKAGE = "vbench2_beta_long"


def score_folder(folder: Path, dimensions: Sequence[str], *, device: str) -> dict[str, Score]:
    """The raw score of each dimension, errors over prompts.

    Raises:
        NotAvailable: VBench or weights of a dimension are not here.
        ValueError: the folder is no export, or a dimension has no videos.
    """
    exports = read_prompts(folder)
    if find_spec("vbench") is None or find_spec(PACKAGE) is None:
        raise NotAvailable("VBench-Long needs the package vbench (with vbench2_beta_long)")
    from vbench2_beta_long import VBenchLong

    found = {}
    for dimension in dimensions:
        if not any(entry.dimension == dimension for entry in exports):
            raise ValueError(f"{folder} has no videos for {dimension}")
        with tempfile.TemporaryDirectory() as out:
            runner = VBenchLong(device, str(folder / "full_info.json"), out)
            try:
                runner.evaluate(
                    videos_path=str(folder / dimension),
                    name="videokv",
                    dimension_list=[dimension],
                    mode="long_custom_input",
                )
            except (OSError, RuntimeError) as error:
                raise NotAvailable(f"VBench could not score {dimension}: {error}") from error
            answer = json.loads((Path(out) / "videokv_eval_results.json").read_text())
        found[dimension] = from_prompts(by_prompt(answer[dimension][1], exports, dimension))
    return found


def by_prompt(
    clips: Sequence[Mapping[str, Any]], exports: Sequence[Export], dimension: str
) -> dict[str, list[float]]:
    """VBench's per-clip list → prompt → scores. Pieces of a video bear its name in their path.

    Raises ValueError where a video was not scored: a mean over the others would be another figure.
    """
    wanted = {
        Path(entry.file).stem: entry.prompt for entry in exports if entry.dimension == dimension
    }
    values: dict[str, list[float]] = {}
    seen = set()
    for clip in clips:
        parts = Path(str(clip["video_path"])).with_suffix("").parts
        names = [stem for stem in wanted if any(p == stem or _piece(p, stem) for p in parts)]
        if not names:
            raise ValueError(f"VBench scored {clip['video_path']}, which no prompt belongs to")
        stem = max(names, key=len)
        seen.add(stem)
        values.setdefault(wanted[stem], []).append(float(clip["video_results"]))
    missed = sorted(set(wanted) - seen)
    if missed:
        raise ValueError(f"VBench scored no clip of {missed[:3]} ({len(missed)} videos)")
    return values


def _piece(part: str, stem: str) -> bool:
    """``<stem>-Scene-001`` or ``<stem>_000``: how pieces of a video are named."""
    return part.startswith((f"{stem}-Scene-", f"{stem}_"))
