"""The demo: the shipped world model plays on from real frames, once for each way to keep its cache.

Every recipe starts from the same six frames of the real game and gets the same actions and the
same noise, so that all that differs is the cache. Quality is measured against the rollout with the
BF16 cache; context frames enter no metric.

    out/rows.jsonl                    journal: one line a recipe and batch (journal.py)
    out/frames/<recipe>/<case>.npz    generated frames, lossless; game/: the real ones with context
    out/curves.json                   PSNR by frame and attention mass by layer
    out/results.json                  rows and summary
"""

from __future__ import annotations

import io
import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import videokv
from videokv.devices import resolve_device as resolve_device
from videokv.metrics import psnr, sharpness, ssim
from videokv.metrics.reading import DAMAGED_ARRAY
from videokv.outputs import check_folder as check_folder
from videokv.studies import rollout as seam
from videokv.studies.journal import Journal
from videokv.studies.results import Results, Row, versions, write_bytes, write_json

REFERENCE = "bf16"
GAME = "game"
DEFAULT_RECIPES = (
    REFERENCE,
    "rtn-4bit",
    "rtn-2bit",
    "rtn-2bit+taylor",
    "quarot-2bit",
    "quarot-2bit+taylor",
    "quarot-2bit+calibrated",
    "videokv-2bit+calibrated",
)
MAX_CLIPS = 256
BATCH_CLIPS = {"cpu": 4, "cuda": 16}

CURVES = ("psnr_db_by_frame", "cached_mass_by_layer")

Frames = NDArray[np.uint8]


@dataclass(frozen=True)
class DemoSettings:
    """What the demo runs; checked here, before any work.

    recipes: names; the reference ``bf16`` is put first whether named or not.
    window: chunks that the cache keeps; None: the model's own window.
    device: ``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:<index>``.
    """

    out: Path
    clips: int = 2
    chunks: int = 6
    seed: int = 0
    device: str = "auto"
    window: int | None = None
    recipes: tuple[str, ...] = DEFAULT_RECIPES

    def __post_init__(self) -> None:
        if not 1 <= self.clips <= MAX_CLIPS:
            raise ValueError(f"clips must be 1 to {MAX_CLIPS}, got {self.clips}")
        if not 1 <= self.chunks <= seam.MAX_CHUNKS:
            raise ValueError(
                f"chunks must be 1 to {seam.MAX_CHUNKS} (as long as the clips last), got "
                f"{self.chunks}"
            )
        if self.window is not None and not 1 <= self.window <= seam.MAX_WINDOW_CHUNKS:
            raise ValueError(
                f"window must be 1 to {seam.MAX_WINDOW_CHUNKS} chunks, got {self.window}"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be 0 or more (below 2**63), got {self.seed}")
        ordered = tuple(dict.fromkeys((REFERENCE, *self.recipes)))
        object.__setattr__(self, "recipes", ordered)

    @property
    def command(self) -> str:
        """The command that makes these results again."""
        window = "" if self.window is None else f" --window {self.window}"
        return (
            f"videokv demo --clips {self.clips} --chunks {self.chunks} --seed {self.seed} "
            f"--device {self.device}{window} --recipes {','.join(self.recipes)} "
            f"--out {shlex.quote(str(self.out))}"
        )


@dataclass(frozen=True)
class Progress:
    """done of total generated chunks (all clips of a batch count as one), and what is running.

    finished: the last report of a recipe and batch, now in the journal; resumed: it was before.
    """

    done: int
    total: int
    recipe: str
    cases: tuple[str, ...]
    finished: bool = False
    resumed: bool = False


@dataclass(frozen=True)
class DemoRun:
    """A finished demo. curves: metric → recipe → case → list, for the plots."""

    settings: DemoSettings
    results: Results
    curves: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]
    clips_source: str

    @property
    def cases(self) -> tuple[str, ...]:
        return tuple(case_name(i) for i in range(self.settings.clips))

    def frames(self, recipe: str, case: str) -> Frames:
        """Generated frames ``[T, H, W, 3]``; of ``game``: the real ones, six of context first."""
        return load_frames(frames_path(self.settings.out, recipe, case))


def run_demo(
    settings: DemoSettings, *, on_progress: Callable[[Progress], None] = lambda _: None
) -> DemoRun:
    """Run or resume the demo in ``settings.out`` and write results.json and curves.json."""
    device = resolve_device(settings.device)
    for name in settings.recipes:
        seam.check_recipe(name)
    check_folder(settings.out)
    model = seam.load_model(device)
    batch = min(settings.clips, BATCH_CLIPS[device.type])
    fingerprint = _fingerprint(settings, device, batch=batch, model=seam.model_digest(model))
    clips = seam.get_clips(settings.clips, seed=settings.seed)
    with Journal(settings.out, fingerprint, check=_check_unit) as journal:
        _save_game(settings.out, clips)
        _run_units(settings, journal, model, clips, batch=batch, on_progress=on_progress)
        run = _collect(settings, journal, clips, device)
        write_json(settings.out / "curves.json", run.curves)
        write_json(settings.out / "results.json", run.results.as_json())
    return run


def case_name(number: int) -> str:
    return f"clip-{number:03d}"


def batch_name(numbers: Sequence[int]) -> str:
    """The case of a figure that belongs to a whole batch."""
    first, last = case_name(numbers[0]), f"{numbers[-1]:03d}"
    return first if len(numbers) == 1 else f"{first}..{last}"


def frames_path(out: Path, recipe: str, case: str) -> Path:
    return out / "frames" / recipe / f"{case}.npz"


def load_frames(path: Path) -> Frames:
    """What ``save_frames`` wrote; ValueError where the file is damaged, OSError where missing."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return np.asarray(archive["frames"])
    except DAMAGED_ARRAY as error:
        raise ValueError(
            f"{path} is damaged ({error}); delete the study's folder and run again, or choose "
            "another --out"
        ) from error


def save_frames(path: Path, frames: Frames) -> None:
    """Losslessly, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, frames=frames)
    write_bytes(path, buffer.getvalue())


def _fingerprint(
    settings: DemoSettings, device: torch.device, *, batch: int, model: str
) -> dict[str, Any]:
    return {
        "study": "demo",
        "clips": settings.clips,
        "chunks": settings.chunks,
        "seed": settings.seed,
        "window": settings.window,
        "device": device.type,
        "recipes": list(settings.recipes),
        "batch": batch,
        "model": model,
        "videokv": videokv.__version__,
    }


def _save_game(out: Path, clips: seam.Clips) -> None:
    for number, frames in enumerate(clips.frames):
        path = frames_path(out, GAME, case_name(number))
        if path.exists():
            load_frames(path)  # refuses damage
        else:
            save_frames(path, np.asarray(frames))


def _run_units(
    settings: DemoSettings,
    journal: Journal,
    model: Any,
    clips: seam.Clips,
    *,
    batch: int,
    on_progress: Callable[[Progress], None],
) -> None:
    batches = [
        list(range(start, min(start + batch, settings.clips)))
        for start in range(0, settings.clips, batch)
    ]
    total, done = len(batches) * len(settings.recipes) * settings.chunks, 0
    for numbers in batches:
        cases = tuple(case_name(i) for i in numbers)
        for recipe in settings.recipes:
            key = f"{recipe} {batch_name(numbers)}"
            resumed = key in journal.done
            if resumed:
                _check_frames(settings.out, recipe, cases)
            else:
                ticks = _ticker(done, total, recipe, cases, on_progress)
                rolled = seam.run_rollout(
                    model, recipe, clips=clips, numbers=numbers, chunks=settings.chunks,
                    seed=settings.seed, window_chunks=settings.window, on_chunk=ticks,
                )  # fmt: skip
                journal.append(key, _measure(settings.out, recipe, numbers, rolled))
            done += settings.chunks
            on_progress(Progress(done, total, recipe, cases, finished=True, resumed=resumed))


def _ticker(
    done: int,
    total: int,
    recipe: str,
    cases: tuple[str, ...],
    on_progress: Callable[[Progress], None],
) -> Callable[[], None]:
    chunks = itertools.count(done + 1)
    return lambda: on_progress(Progress(next(chunks), total, recipe, cases))


def _check_frames(out: Path, recipe: str, cases: Sequence[str]) -> None:
    for case in cases:
        path = frames_path(out, recipe, case)
        if not path.is_file():
            raise ValueError(
                f"{path} is missing though the journal lists it; put it back, or delete "
                f"{out} and run again"
            )
        load_frames(path)  # refuses damage before hours of work on other units


def _measure(
    out: Path, recipe: str, numbers: Sequence[int], rolled: seam.Rollout
) -> dict[str, Any]:
    """Save the frames, then the journal's payload: rows and curves of one recipe and batch."""
    rows, psnr_by_frame, mass_by_layer = [], {}, {}
    clips = zip(rolled.frames.numpy(), rolled.mass_by_layer, numbers, strict=True)
    for frames, masses, number in clips:
        case = case_name(number)
        save_frames(frames_path(out, recipe, case), frames)
        mass_by_layer[case] = list(masses)
        rows.append((case, "cached_mass", float(np.mean(masses))))
        rows.append((case, "sharpness", sharpness(frames)))
        if recipe != REFERENCE:
            reference = load_frames(frames_path(out, REFERENCE, case))
            distance = psnr(frames, reference)
            rows.append((case, "psnr_db", distance.psnr_db))
            rows.append((case, "psnr_pooled_db", distance.psnr_pooled_db))
            rows.append((case, "ssim", ssim(frames, reference)))
            psnr_by_frame[case] = list(distance.per_frame_db)
    rows += [(batch_name(numbers), metric, value) for metric, value in _cache_metrics(rolled)]
    return {
        "recipe": recipe,
        "rows": rows,
        "psnr_db_by_frame": psnr_by_frame,
        "cached_mass_by_layer": mass_by_layer,
    }


def _cache_metrics(rolled: seam.Rollout) -> list[tuple[str, float]]:
    cache = rolled.cache
    return [
        ("bits_per_element", cache.bits_per_element),
        ("held_bytes", cache.held_bytes),
        ("dense_bytes", cache.dense_bytes),
        ("ratio", cache.ratio),
        ("workspace_peak_bytes", cache.workspace_peak_bytes),
        ("seconds_per_chunk", rolled.seconds_per_chunk),
    ]


def _collect(
    settings: DemoSettings, journal: Journal, clips: seam.Clips, device: torch.device
) -> DemoRun:
    rows: list[Row] = []
    curves: dict[str, dict[str, dict[str, list[float]]]] = {name: {} for name in CURVES}
    for unit in journal.done.values():
        rows += _unit_rows(unit)
        for name, by_recipe in curves.items():
            by_recipe.setdefault(unit["recipe"], {}).update(unit[name])
    results = Results(
        "demo", settings.command, settings.seed, _device_name(device), versions(), tuple(rows)
    )
    return DemoRun(settings, results, curves, clips.source)


def _unit_rows(unit: Mapping[str, Any]) -> list[Row]:
    return [Row(case, unit["recipe"], metric, value) for case, metric, value in unit["rows"]]


def _check_unit(unit: Mapping[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError where a journal's unit is not one of the demo."""
    _unit_rows(unit)
    for name in CURVES:
        for values in dict(unit[name]).values():
            [float(value) for value in values]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads > 1)}"
