"""From a finished demo to what a person looks at: comparison.mp4 and report.html."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from videokv.report.page import write_page
from videokv.report.video import Panel, Scene, encode_video
from videokv.studies.demo import GAME, REFERENCE, DemoRun
from videokv.studies.results import write_bytes
from videokv.studies.rollout import CONTEXT_FRAMES

MAX_VIDEO_CLIPS = 4
PHONE_COLUMNS = 2


@dataclass(frozen=True)
class Report:
    page: Path
    video: Path


def write_report(run: DemoRun) -> Report:
    """Write comparison.mp4 (the first four clips) and report.html beside results.json."""
    out = run.settings.out
    report = Report(page=out / "report.html", video=out / "comparison.mp4")
    scenes = [scene_of(run, case) for case in run.cases[:MAX_VIDEO_CLIPS]]
    video = encode_video(scenes)
    write_bytes(report.video, video)
    narrow = encode_video(scenes, columns=PHONE_COLUMNS)
    write_page(report.page, run, video=video, narrow_video=narrow)
    return report


def scene_of(run: DemoRun, case: str) -> Scene:
    """The panels of one clip; what was generated follows the real context frames."""
    length = CONTEXT_FRAMES + len(run.frames(REFERENCE, case))
    game = run.frames(GAME, case)[:length]
    panels = [Panel("the real game", "", game)]
    for recipe in run.settings.recipes:
        frames = np.concatenate([game[:CONTEXT_FRAMES], run.frames(recipe, case)])
        panels.append(Panel(recipe, _note(run, recipe, case), frames))
    return Scene(tuple(panels), context=CONTEXT_FRAMES)


def _note(run: DemoRun, recipe: str, case: str) -> str:
    if recipe == REFERENCE:
        return "reference"
    values = [
        row.value
        for row in run.results.rows
        if (row.case, row.recipe, row.metric) == (case, recipe, "psnr_db")
    ]
    return f"{values[0]:.1f} dB"
