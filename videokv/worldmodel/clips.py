"""Held-out clips of the real game: shipped ones, new ones from ViZDoom, ones of a split."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from videokv.worldmodel.data import HELDOUT_SEED, SplitData, play_episodes

__all__ = [
    "CLIP_FRAMES",
    "CONTEXT_FRAMES",
    "VIEW_CHANGE_DB",
    "Clips",
    "changes_view",
    "clips_from_split",
    "load_clips",
    "make_clips",
    "psnr_db",
    "repeat_psnr_db",
    "save_clips",
]

CONTEXT_FRAMES, CLIP_FRAMES = 6, 36
VIEW_CHANGE_DB = 18.0
"""Below this PSNR of repeating the last real frame over the next three, the view changes."""

_EPISODE_FRAMES = 120
_CLIP_SEED = HELDOUT_SEED + 500_000_000  # above every seed of a held-out split


@dataclasses.dataclass(frozen=True)
class Clips:
    """Real clips: frames uint8 [N, T, 72, 96, 3], actions uint8 [N, T], and where from.

    ``source`` says in words where the clips come from.
    """

    frames: Tensor
    actions: Tensor
    source: str

    def __post_init__(self) -> None:
        if self.frames.ndim != 5 or self.frames.dtype != torch.uint8 or not len(self.frames):
            raise ValueError(
                "frames must be uint8 [N, T, H, W, 3] with N > 0, got "
                f"{self.frames.dtype} {tuple(self.frames.shape)}"
            )
        if self.actions.shape != self.frames.shape[:2]:
            raise ValueError(
                f"actions must be {tuple(self.frames.shape[:2])}, got {tuple(self.actions.shape)}"
            )

    def __len__(self) -> int:
        return len(self.frames)

    def joined(self, other: Clips) -> Clips:
        """These clips, then the other ones."""
        return Clips(
            torch.cat((self.frames, other.frames)),
            torch.cat((self.actions, other.actions)),
            f"{self.source}; {other.source}",
        )


def psnr_db(a: Tensor, b: Tensor) -> Tensor:
    """PSNR of uint8 frames [..., H, W, 3] → float64 [...]; equal frames count as 100 dB."""
    error = (a.double() - b.double()).square().mean((-3, -2, -1))
    return 10 * torch.log10(255.0**2 / error.clamp_min(255.0**2 * 1e-10))


def repeat_psnr_db(frames: Tensor, *, context_frames: int = CONTEXT_FRAMES) -> Tensor:
    """PSNR of repeating the last context frame, per later frame: [N, T] → [N, T - context]."""
    last = frames[:, context_frames - 1 : context_frames]
    return psnr_db(last, frames[:, context_frames:])


def load_clips(n: int | None = None) -> Clips:
    """The first n shipped clips (all unless given).

    Raises:
        ValueError: there are fewer than n, or a file is missing or damaged.
    """
    folder = Path(str(resources.files("videokv.worldmodel") / "clips"))
    clips = _read_clips(folder)
    if n is not None and not 1 <= n <= len(clips):
        raise ValueError(f"n must be within 1..{len(clips)} shipped clips, got {n}")
    return Clips(clips.frames[:n], clips.actions[:n], f"{len(clips.frames[:n])} shipped clips")


def _read_clips(folder: Path) -> Clips:
    from PIL import Image, UnidentifiedImageError

    index = folder / "index.json"
    try:
        entries = json.loads(index.read_text())
        frames = []
        for entry in entries:
            with Image.open(folder / entry["file"]) as image:
                pixels = np.array(image.convert("RGB"))
            frames.append(pixels.reshape(len(entry["actions"]), -1, pixels.shape[1], 3))
        actions = np.array([entry["actions"] for entry in entries], np.uint8)
    except (OSError, KeyError, ValueError, UnidentifiedImageError) as error:
        raise ValueError(
            f"{folder}: the clips are missing or damaged ({error}); reinstall videokv"
        ) from error
    return Clips(
        torch.from_numpy(np.stack(frames)), torch.from_numpy(actions), f"clips in {folder}"
    )


def save_clips(folder: str | Path, clips: Clips) -> int:
    """Write each clip as one lossless WebP (frames below each other); returns the bytes."""
    from PIL import Image

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    entries, total = [], 0
    for number in range(len(clips)):
        sheet = clips.frames[number].numpy()
        data = io.BytesIO()
        image = Image.fromarray(sheet.reshape(-1, sheet.shape[2], 3))
        image.save(data, "WEBP", lossless=True, quality=100, method=6)
        name = f"{number:02d}.webp"
        (folder / name).write_bytes(data.getvalue())
        total += len(data.getvalue())
        entries.append({"file": name, "actions": clips.actions[number].tolist()})
    (folder / "index.json").write_text(json.dumps(entries) + "\n")
    return total


def make_clips(
    n: int, seed: int = 0, *, frames: int = CLIP_FRAMES, view_changes: bool = True
) -> Clips:
    """Play n new held-out clips with ViZDoom, one a walk.

    Args:
        seed: clips of different seeds are different.
        frames: frames a clip, context included.
        view_changes: take only clips where the view changes (see VIEW_CHANGE_DB).

    Raises:
        ValueError: n or frames is too small, or seed is negative.
        ImportError: ViZDoom is not installed.
    """
    if n < 1 or frames <= CONTEXT_FRAMES or seed < 0:
        raise ValueError(
            f"n must be positive, frames above {CONTEXT_FRAMES} and seed not negative, got "
            f"{n}, {frames} and {seed}"
        )
    first = _CLIP_SEED + 100_000 * seed
    length = max(_EPISODE_FRAMES, frames)
    walks = play_episodes(list(range(first, first + 100_000)), frames=length)
    rng = np.random.default_rng([seed, 7])
    picked = _pick(walks, n=n, frames=frames, view_changes=view_changes, rng=rng)
    return _clips(picked, f"{n} clips played now with ViZDoom (seed {seed})")


def clips_from_split(
    split: SplitData, n: int, *, seed: int = 0, view_changes: bool = True
) -> Clips:
    """n clips of a held-out split, one a walk; ValueError if it has too few."""
    walks = iter(zip(split.frames, split.actions, strict=True))
    rng = np.random.default_rng([seed, 8])
    picked = _pick(walks, n=n, frames=CLIP_FRAMES, view_changes=view_changes, rng=rng)
    return _clips(picked, f"{n} clips of a held-out split of {len(split.seeds)} walks")


def _pick(
    walks: Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]],
    *,
    n: int,
    frames: int,
    view_changes: bool,
    rng: np.random.Generator,
) -> list[tuple[Tensor, Tensor]]:
    """One window of each walk, at a random place among those that fit, until there are n."""
    picked: list[tuple[Tensor, Tensor]] = []
    for walk, actions in walks:
        if len(walk) < frames:
            raise ValueError(f"walks must have {frames} frames or more, got {len(walk)}")
        for start in rng.permutation(len(walk) - frames + 1)[:20]:
            window = torch.from_numpy(np.array(walk[start : start + frames]))
            if view_changes and not bool(changes_view(window[None])[0]):
                continue
            steps = torch.from_numpy(np.array(actions[start : start + frames]))
            picked.append((window, steps))
            break
        if len(picked) == n:
            return picked
    raise ValueError(f"expected {n} clips, found {len(picked)}; give more walks or ask for fewer")


def changes_view(frames: Tensor) -> Tensor:
    """Whether repeating the last context frame scores below VIEW_CHANGE_DB, [N, T...] → [N]."""
    return repeat_psnr_db(frames)[:, :3].mean(1) < VIEW_CHANGE_DB


def _clips(picked: list[tuple[Tensor, Tensor]], source: str) -> Clips:
    return Clips(torch.stack([p[0] for p in picked]), torch.stack([p[1] for p in picked]), source)
