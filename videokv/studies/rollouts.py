"""Paired rollouts of the shipped world model: any recipes, the same clips, actions and noise.

Studies say which variants to run; this runs them, measures every one against the rollout with the
BF16 cache, and keeps a journal. A unit is one variant and one clip. A GPU rolls many clips at once:
it waits for launches, not for arithmetic. All variants of one batch come before the next batch, so
that a run which is cut short has fewer clips of everything.

    out/rows.jsonl, out/results.json, out/frames/<label>/<clip>.npz
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import videokv
from videokv.devices import resolve_device as resolve_device
from videokv.metrics import NotAvailable, flicker, flip, lpips, psnr, sharpness, ssim
from videokv.outputs import check_folder
from videokv.studies import rollout as seam
from videokv.studies.demo import (
    batch_name,
    case_name,
    frames_path,
    load_frames,
    save_frames,
)
from videokv.studies.journal import Journal
from videokv.studies.late_quality import RealPlay, early_quality, late_quality, real_play
from videokv.studies.results import Results, Row, versions, write_json
from videokv.studies.variants import REFERENCE, Variant, checked
from videokv.studies.workers import run_units

OnUnit = Callable[[str, int, int], None]
Batch = tuple[Variant, tuple[int, ...]]
BATCH_CLIPS = {"cpu": 1, "cuda": 32}
PERCEPTUAL: dict[str, Callable[[Any, Any], float]] = {
    "lpips_alex": lambda x, y: lpips(x, y, net="alex"),
    "lpips_vgg": lambda x, y: lpips(x, y, net="vgg"),
    "flip": flip,
}


@dataclass(frozen=True)
class RolloutPlan:
    """What to run; checked here, before any work. The reference is put first.

    long: any number of chunks, the clips' actions over again where they end, and the figures of
        ``late_quality`` for every chunk.
    also: names of ``PERCEPTUAL``, which need weights or packages of their own. One that cannot be
        had is left out, and the results say why; so that it can be had later it needs a new folder.
    workers, ray: see ``workers.run_units``.
    """

    study: str
    variants: tuple[Variant, ...]
    out: Path
    command: str = ""
    clips: int = 8
    chunks: int = 2
    seed: int = 0
    device: str = "auto"
    window: int | None = None
    long: bool = False
    also: tuple[str, ...] = ()
    workers: int = 1
    ray: str | None = None

    def __post_init__(self) -> None:
        if self.clips < 1:
            raise ValueError(f"clips must be at least 1, got {self.clips}")
        most = seam.LONGEST_CHUNKS if self.long else seam.MAX_CHUNKS
        if not 1 <= self.chunks <= most:
            hint = "" if self.long else " (longrun takes more)"
            raise ValueError(f"chunks must be 1 to {most}{hint}, got {self.chunks}")
        if self.window is not None and not 1 <= self.window <= seam.MAX_WINDOW_CHUNKS:
            raise ValueError(
                f"window must be 1 to {seam.MAX_WINDOW_CHUNKS} chunks, got {self.window}"
            )
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more, got {self.seed}")
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        unknown = [name for name in self.also if name not in PERCEPTUAL]
        if unknown:
            raise ValueError(f"also takes some of {tuple(PERCEPTUAL)}, got {unknown}")
        object.__setattr__(self, "variants", checked(self.variants))


def run_rollouts(
    plan: RolloutPlan, *, on_unit: OnUnit | None = None, deadline: float | None = None
) -> Results:
    """Run what is not in the folder yet and write ``results.json``.

    on_unit: called with (label and clip, units done, units) after each.
    deadline: of ``time.monotonic``; nothing is begun after it, what is under way is dropped, and
        the results are those of the units that are done. The same plan goes on from there.

    Raises:
        ValueError: another study's folder, a device that is not here, too many clips.
        OSError: the folder cannot be written.
    """
    device = resolve_device(plan.device)
    check_folder(plan.out)
    seam.get_clips(plan.clips, seed=plan.seed)  # refuses before any work
    missing = not_available(plan.also)
    plan = replace(plan, also=tuple(name for name in plan.also if name not in missing))
    size = min(plan.clips, BATCH_CLIPS[device.type])
    with Journal(plan.out, _fingerprint(plan, device, batch=size), check=unit_rows) as journal:
        for stage in _stages(plan, size):
            _run_stage(plan, stage, journal, device, on_unit, deadline)
        rows = [
            row
            for item in plan.variants
            for number in range(plan.clips)
            for row in unit_rows(journal.done.get(_key(item, number), {"rows": ()}))
        ]
    told = {**versions(), **(_length(plan.chunks) if plan.long else {})}
    results = Results(
        plan.study, plan.command, plan.seed, str(device), told, tuple(rows), "all", missing
    )
    write_json(plan.out / "results.json", results.as_json())
    return results


def _length(chunks: int) -> dict[str, str]:
    """How long a long rollout is, for the record."""
    frames = chunks * seam.CHUNK_FRAMES
    length = {
        "length": f"{chunks} chunks, {frames} frames, {frames / seam.FRAMES_PER_SECOND:.1f} s at "
        f"{seam.FRAMES_PER_SECOND:.2f} frames a second"
    }
    return length | ({"actions": seam.REPEATED_ACTIONS} if chunks > seam.MAX_CHUNKS else {})


def not_available(names: Sequence[str]) -> dict[str, str]:
    """Those of ``PERCEPTUAL`` that cannot be had here, and why."""
    probe, found = np.zeros((1, 64, 64, 3), np.uint8), {}
    for name in names:
        try:
            PERCEPTUAL[name](probe, probe)
        except NotAvailable as reason:
            found[name] = str(reason)
    return found


def _run_stage(
    plan: RolloutPlan,
    stage: Mapping[str, Batch],
    journal: Journal,
    device: torch.device,
    on_unit: OnUnit | None,
    deadline: float | None,
) -> None:
    # A batch of which a unit is missing is run whole: figures depend on who is in a batch.
    arguments = {
        key: (item, numbers, plan.clips, plan.chunks, plan.seed, plan.window, str(device))
        for key, (item, numbers) in stage.items()
        if any(_key(item, number) not in journal.done for number in numbers)
    }
    if is_over(deadline):
        return
    rolled_batches = run_units(roll_unit, arguments, workers=plan.workers, ray=plan.ray)
    with closing(rolled_batches):
        for key, rolled in rolled_batches:
            item, numbers = stage[key]
            for place, number in enumerate(numbers):
                if _key(item, number) not in journal.done:
                    journal.append(_key(item, number), _measured(plan, item, place, number, rolled))
                    if on_unit is not None:
                        total = len(plan.variants) * plan.clips
                        on_unit(_key(item, number), _count_done(plan, journal), total)
            if is_over(deadline):
                return


def _count_done(plan: RolloutPlan, journal: Journal) -> int:
    """Of this plan: the folder may hold variants of others."""
    return sum(
        _key(item, number) in journal.done for item in plan.variants for number in range(plan.clips)
    )


def is_over(deadline: float | None) -> bool:
    """Whether a time of ``time.monotonic`` is over; None never is."""
    return deadline is not None and time.monotonic() >= deadline


def unit_rows(unit: Mapping[str, Any]) -> list[Row]:
    """The rows of a journal's unit; KeyError, TypeError or ValueError where it has none."""
    return [Row(*row) for row in unit["rows"]]


def roll_unit(
    item: Variant,
    numbers: tuple[int, ...],
    clips: int,
    chunks: int,
    seed: int,
    window: int | None,
    device: str,
) -> seam.Rollout:
    """Some clips under one variant; runs in this process or in another."""
    found = _clips(clips, seed)
    return seam.run_rollout(
        _model(device), item.recipe(), clips=found, numbers=numbers, chunks=chunks, seed=seed,
        window_chunks=window, on_chunk=lambda: None,
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def _model(device: str) -> Any:
    return seam.load_model(torch.device(device))


@functools.lru_cache(maxsize=1)
def _clips(count: int, seed: int) -> seam.Clips:
    return seam.get_clips(count, seed=seed)


@functools.lru_cache(maxsize=1)
def _real_play(count: int, seed: int) -> RealPlay:
    return real_play(_clips(count, seed).frames)


def with_rows(results: Results, rows: list[Row], out: Path) -> Results:
    """The results with rows added that follow from them, written again."""
    fuller = replace(results, rows=(*results.rows, *rows))
    write_json(out / "results.json", fuller.as_json())
    return fuller


def _stages(plan: RolloutPlan, size: int) -> list[dict[str, Batch]]:
    """The reference's batches, which the others are measured against, then theirs."""
    batches = {
        f"{item.label} | {batch_name(numbers)}": (item, numbers)
        for numbers in batches_of(plan.clips, size)
        for item in plan.variants
    }
    first = {key: unit for key, unit in batches.items() if unit[0].label == REFERENCE}
    return [first, {key: unit for key, unit in batches.items() if key not in first}]


def batches_of(clips: int, size: int) -> list[tuple[int, ...]]:
    """The numbers of all clips, ``size`` at a time."""
    return [tuple(range(n, min(n + size, clips))) for n in range(0, clips, size)]


def _key(item: Variant, number: int) -> str:
    return f"{item.label} | {case_name(number)}"


def _fingerprint(plan: RolloutPlan, device: torch.device, *, batch: int) -> dict[str, Any]:
    """Variants are left out: more of them may be run in the same folder later."""
    return {
        "study": plan.study,
        "clips": plan.clips,
        "chunks": plan.chunks,
        "seed": plan.seed,
        "window": plan.window,
        "device": device.type,
        "chunk_rows": plan.long,
        **({"actions": seam.REPEATED_ACTIONS} if plan.long else {}),
        **({"also": list(plan.also)} if plan.also else {}),
        **({"batch": batch} if batch > 1 else {}),
        "model": seam.model_digest(_model(str(device))),
        "videokv": videokv.__version__,
    }


def _measured(
    plan: RolloutPlan, item: Variant, place: int, number: int, rolled: seam.Rollout
) -> Mapping[str, Any]:
    """The journal's payload of clip ``number``, which is the batch's ``place``-th."""
    case, frames = case_name(number), rolled.frames[place].numpy()
    save_frames(frames_path(plan.out, item.path_name, case), frames)
    figures: dict[str, float] = {
        "cached_mass": float(np.mean(rolled.mass_by_layer[place])),
        "sharpness": sharpness(frames),
        "bits_per_element": rolled.cache.bits_per_element,
        "held_bytes": rolled.cache.held_bytes,
        "dense_bytes": rolled.cache.dense_bytes,
        "ratio": rolled.cache.ratio,
        "seconds_per_chunk": rolled.seconds_per_chunk,
    }
    if plan.long:
        figures |= late_quality(
            frames, _real_play(plan.clips, plan.seed), chunk_frames=seam.CHUNK_FRAMES
        )
    if item.label != REFERENCE:
        reference = load_frames(frames_path(plan.out, REFERENCE, case))
        figures |= _distances(frames, reference, long=plan.long)
        figures |= {name: PERCEPTUAL[name](frames, reference) for name in plan.also}
    return {"rows": [(case, item.label, name, value) for name, value in figures.items()]}


def _distances(frames: Any, reference: Any, *, long: bool) -> dict[str, float]:
    distance = psnr(frames, reference)
    by_frame = np.asarray(distance.per_frame_db)
    figures = {
        "psnr_db": distance.psnr_db,
        "psnr_pooled_db": distance.psnr_pooled_db,
        "psnr_first_chunk_db": float(np.mean(by_frame[: seam.CHUNK_FRAMES])),
        "identical_frames": float(distance.identical_frames),
        "ssim": ssim(frames, reference),
        "flicker": flicker(frames, reference),
    }
    if long:
        figures |= early_quality(frames, reference, by_frame, chunk_frames=seam.CHUNK_FRAMES)
    return figures
