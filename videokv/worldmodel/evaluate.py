"""How well the world model foresees the real game, on held-out clips, with a plain cache."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from videokv.worldmodel.clips import (
    CONTEXT_FRAMES,
    Clips,
    changes_view,
    psnr_db,
    repeat_psnr_db,
)
from videokv.worldmodel.model import WorldModel
from videokv.worldmodel.plain import PlainCache
from videokv.worldmodel.sampler import rollout

__all__ = ["Evaluation", "Target", "evaluate", "gradient_magnitude", "print_table", "save_sheet"]

_LUMA = (0.299, 0.587, 0.114)


@dataclasses.dataclass(frozen=True)
class Target:
    """One threshold: its figure, what it must reach, and whether it does."""

    name: str
    value: float
    wanted: str
    met: bool


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Rows (one per clip and chunk), summary rows, targets, and the frames that were generated.

    A row has clip, chunk (1 is the first generated one), view_changes, psnr_db (mean over the
    chunk's frames), psnr_frames_db, repeat_psnr_db, sharpness, sharpness_real, cached_mass.
    """

    rows: list[dict[str, Any]]
    summary: list[dict[str, Any]]
    targets: list[Target]
    source: str
    generated: Tensor

    def to_json(self) -> str:
        """Everything but the frames."""
        content = {
            "study": "worldmodel evaluate",
            "clips": self.source,
            "rows": self.rows,
            "summary": self.summary,
            "targets": [dataclasses.asdict(target) for target in self.targets],
        }
        return json.dumps(content, indent=1)


def gradient_magnitude(frames: Tensor) -> Tensor:
    """Mean size of the luminance gradient (differences of neighbours) of uint8 frames.

    [..., H, W, 3] → float64 [...], in grey levels a pixel.
    """
    luma = (frames.double() * torch.tensor(_LUMA, dtype=torch.float64)).sum(-1)
    down = luma[..., 1:, :-1] - luma[..., :-1, :-1]
    across = luma[..., :-1, 1:] - luma[..., :-1, :-1]
    return torch.hypot(down, across).mean((-2, -1))


def evaluate(
    model: WorldModel,
    clips: Clips,
    *,
    chunks: int = 10,
    steps: int | None = None,
    shift: float | None = None,
    seed: int = 0,
    batch: int = 16,
    autocast: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Roll every clip out from its six real context frames and compare with the real game.

    Args:
        model: on the device to run on.
        clips: real clips of at least 6 + 3 * chunks frames.
        chunks: chunks to generate.
        steps, shift, seed, autocast: of the rollout.
        batch: clips at a time; no figure depends on it beyond rounding.
        progress: called with (chunks generated, chunks to generate) over all clips.

    Raises:
        ValueError: the clips are too short, or batch is not positive.
    """
    if batch < 1:
        raise ValueError(f"batch must be positive, got {batch}")
    size = model.config.chunk_frames
    needed = CONTEXT_FRAMES + chunks * size
    if clips.frames.shape[1] < needed:
        raise ValueError(
            f"{chunks} chunks need clips of {needed} frames, got {clips.frames.shape[1]}; "
            "ask for fewer chunks or give longer clips"
        )
    made, masses = [], []
    for start in range(0, len(clips), batch):
        numbers = range(start, min(start + batch, len(clips)))
        cache = PlainCache(
            layers=model.config.blocks,
            window_chunks=model.config.window_chunks,
            record_mass=True,
        )
        frames = rollout(
            model,
            clips.frames[start : numbers.stop, :CONTEXT_FRAMES],
            clips.actions[start : numbers.stop],
            cache,
            chunks=chunks,
            seed=seed,
            clips=numbers,
            steps=steps,
            shift=shift,
            autocast=autocast,
            progress=_shifted(progress, start * chunks, len(numbers), len(clips) * chunks),
        )
        made.append(frames)
        masses.append(_chunk_masses(cache))
    generated = torch.cat(made)
    rows = _rows(clips.frames[:, :needed], generated, torch.cat(masses), size)
    summary = _summary(rows, chunks)
    return Evaluation(rows, summary, _targets(rows, chunks), clips.source, generated)


def _shifted(
    progress: Callable[[int, int], None] | None, done: int, clips: int, total: int
) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda chunk, _: progress(done + chunk * clips, total)


def _chunk_masses(cache: PlainCache) -> Tensor:
    """Mean over layers and steps of the recorded masses: [B, chunks]."""
    by_chunk: dict[int, list[Tensor]] = {}
    for start, _, mass in cache.masses():
        by_chunk.setdefault(start, []).append(mass.double().cpu())
    return torch.stack([torch.stack(by_chunk[start]).mean(0) for start in sorted(by_chunk)], 1)


def _rows(real: Tensor, generated: Tensor, masses: Tensor, size: int) -> list[dict[str, Any]]:
    after = real[:, CONTEXT_FRAMES:]
    psnr, repeat = psnr_db(generated, after), repeat_psnr_db(real)
    sharp, sharp_real = gradient_magnitude(generated), gradient_magnitude(after)
    changes = changes_view(real)
    rows = []
    for clip in range(len(real)):
        for chunk in range(masses.shape[1]):
            here = slice(chunk * size, (chunk + 1) * size)
            row = {
                "clip": clip,
                "chunk": chunk + 1,
                "view_changes": bool(changes[clip]),
                "psnr_db": float(psnr[clip, here].mean()),
                "psnr_frames_db": [round(float(x), 3) for x in psnr[clip, here]],
                "repeat_psnr_db": float(repeat[clip, here].mean()),
                "sharpness": float(sharp[clip, here].mean()),
                "sharpness_real": float(sharp_real[clip, here].mean()),
                "cached_mass": float(masses[clip, chunk]),
            }
            rows.append(row)
    return rows


_METRICS = ("psnr_db", "repeat_psnr_db", "sharpness", "sharpness_real", "cached_mass")


def _summary(rows: list[dict[str, Any]], chunks: int) -> list[dict[str, Any]]:
    """Mean and standard error over clips, by chunk and metric, of all and of changing clips."""
    summary = []
    for group in ("all", "view changes"):
        inside = [row for row in rows if group == "all" or row["view_changes"]]
        for chunk in range(1, chunks + 1):
            here = [row for row in inside if row["chunk"] == chunk]
            for metric in _METRICS:
                mean, sem, count = _mean([row[metric] for row in here])
                entry = {"clips": group, "chunk": chunk, "metric": metric}
                summary.append({**entry, "mean": mean, "sem": sem, "n": count})
    return summary


def _mean(values: Iterable[float]) -> tuple[float | None, float | None, int]:
    """Mean, standard error and count; None where there are too few values."""
    numbers = list(values)
    count = len(numbers)
    if not count:
        return None, None, 0
    mean = sum(numbers) / count
    if count == 1:
        return mean, None, 1
    spread = sum((x - mean) ** 2 for x in numbers) / (count - 1)
    return mean, math.sqrt(spread / count), count


def _targets(rows: list[dict[str, Any]], chunks: int) -> list[Target]:
    """What a shipped model must reach; those of view-changing clips where there are any."""
    changing = [row for row in rows if row["view_changes"]]
    targets = []

    def mean(metric: str, chunk: int, of: list[dict[str, Any]]) -> float:
        values = [row[metric] for row in of if row["chunk"] == chunk]
        return sum(values) / len(values)

    if changing:
        first = mean("psnr_db", 1, changing)
        targets.append(Target("first chunk, PSNR (dB)", first, ">= 19.5", first >= 19.5))
        for chunk in range(1, min(4, chunks) + 1):
            gain = mean("psnr_db", chunk, changing) - mean("repeat_psnr_db", chunk, changing)
            targets.append(Target(f"chunk {chunk}, gain on repeat (dB)", gain, "> 0", gain > 0))
    mass = sum(row["cached_mass"] for row in rows) / len(rows)
    targets.append(Target("cached attention mass", mass, ">= 0.25", mass >= 0.25))
    ratio = mean("sharpness", chunks, rows) / mean("sharpness_real", chunks, rows)
    met = 0.5 <= ratio <= 1.5
    targets.append(Target(f"chunk {chunks}, sharpness / real", ratio, "0.5 .. 1.5", met))
    return targets


def print_table(evaluation: Evaluation, *, out: Any = None) -> None:
    """Chunk by chunk on the terminal (or a file ``out``), then the targets."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=out)
    for group in ("all", "view changes"):
        entries = [e for e in evaluation.summary if e["clips"] == group]
        if not entries[0]["n"]:
            console.print("No clip changes its view.")
            continue
        title = f"{group}: {entries[0]['n']} clips ({evaluation.source})"
        table = Table("chunk", *_METRICS, title=title)
        for chunk in sorted({e["chunk"] for e in entries}):
            cells = [_cell(e) for e in entries if e["chunk"] == chunk]
            table.add_row(str(chunk), *cells)
        console.print(table)
    table = Table("target", "value", "wanted", "met")
    for target in evaluation.targets:
        table.add_row(
            target.name, f"{target.value:.3f}", target.wanted, "yes" if target.met else "NO"
        )
    console.print(table)


def _cell(entry: dict[str, Any]) -> str:
    spread = "" if entry["sem"] is None else f" ± {entry['sem']:.2f}"
    return f"{entry['mean']:.2f}{spread}"


def save_sheet(path: str | Path, clips: Clips, generated: Tensor, *, rows: int = 16) -> None:
    """A PNG of real frames over generated ones: last context frame, then each chunk's last.

    Args:
        generated: uint8 [N, chunks * 3, height, width, 3].
        rows: clips to show.
    """
    from PIL import Image

    lines = []
    for clip in range(min(rows, len(clips))):
        real = clips.frames[clip, CONTEXT_FRAMES : CONTEXT_FRAMES + generated.shape[1]]
        last = clips.frames[clip, CONTEXT_FRAMES - 1]
        for frames in (real, generated[clip]):
            lines.append(torch.cat([last, *frames[2::3]], 1))
        lines.append(torch.full_like(lines[-1][:4], 255))
    Image.fromarray(torch.cat(lines).numpy()).save(path, "PNG")
