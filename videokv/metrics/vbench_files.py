"""Prompts and files for VBench-Long: which prompts, under which names, how long.

out/<dimension>/<file name>-<index>.mp4   one video a prompt and sample
out/prompts.json                          file name → prompt, dimension, frames, seconds
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from videokv.metrics.vbench import DIMENSIONS, clip_seconds

LONGEST_NAME = 120  # characters before "-<index>.mp4"; file systems end at 255 bytes
DIGEST_CHARACTERS = 10


@dataclass(frozen=True)
class Export:
    """One video to be scored."""

    file: str
    prompt: str
    dimension: str
    frames: int
    seconds: float

    def __post_init__(self) -> None:
        for name in ("file", "prompt", "dimension"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be text, got {getattr(self, name)!r}")


def first_share(prompts: Mapping[str, Sequence[str]], *, share: float) -> dict[str, list[str]]:
    """The first ``share`` of each dimension's prompts, at least one (2605.26266 takes 0.3).

    Rounded up, so that a short list does not become an empty one.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    chosen = {}
    for dimension, listed in prompts.items():
        if dimension not in DIMENSIONS:
            raise ValueError(f"unknown dimension {dimension!r}; expected one of {DIMENSIONS}")
        if not listed:
            raise ValueError(f"{dimension} has no prompts")
        chosen[dimension] = list(listed[: math.ceil(share * len(listed))])
    return chosen


def file_stem(prompt: str) -> str:
    """A name for any prompt: VBench's own (the prompt itself) where that is a safe file name.

    Otherwise letters, digits and spaces stay, and a digest tells apart what became alike. No
    underscore: VBench takes what stands before the first one for the name of the video.
    """
    if not prompt.strip():
        raise ValueError("a prompt must not be empty")
    safe = re.sub(r"[^\w ,.()'-]|_", " ", prompt).strip(" .")
    if safe == prompt and len(prompt.encode()) <= LONGEST_NAME:
        return prompt
    digest = hashlib.sha256(prompt.encode()).hexdigest()[:DIGEST_CHARACTERS]
    kept = safe.encode()[: LONGEST_NAME - DIGEST_CHARACTERS - 1].decode(errors="ignore").strip()
    return f"{kept} {digest}".strip()


def file_name(prompt: str, index: int) -> str:
    """``<stem>-<index>.mp4``, the pattern VBench matches prompts by."""
    if index < 0:
        raise ValueError(f"index must be 0 or more, got {index}")
    return f"{file_stem(prompt)}-{index}.mp4"


def export(prompt: str, dimension: str, index: int, *, frames: int, fps: float) -> Export:
    """The entry of one video; ValueError where it is shorter than the clips of its dimension.

    VBench-Long would silently score shorter pieces, whose figures are others.
    """
    if frames < 1 or not fps > 0:
        raise ValueError(f"frames and fps must be positive, got {frames} and {fps}")
    seconds, needed = frames / fps, clip_seconds(dimension)
    if seconds < needed:
        raise ValueError(
            f"{prompt!r}: {dimension} is scored on clips of {needed:g} s, the video lasts "
            f"{seconds:.2f} s ({frames} frames at {fps:g} a second); generate a longer one"
        )
    name = file_name(prompt, index)
    return Export(f"{dimension}/{name}", prompt, dimension, frames, seconds)


def write_prompts(folder: Path, exports: Sequence[Export]) -> Path:
    """``prompts.json``; ValueError where two videos would share a file."""
    if not exports:
        raise ValueError("no videos to export; give at least one prompt")
    names = [entry.file for entry in exports]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two videos would be written to {sorted(twice)[0]}; give other indices")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "prompts.json"
    path.write_text(json.dumps([asdict(entry) for entry in exports], indent=1) + "\n")
    return path


def read_prompts(folder: Path) -> tuple[Export, ...]:
    """What ``write_prompts`` wrote; ValueError where the list or a video is missing."""
    path = folder / "prompts.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no prompts.json; export the videos first")
    try:
        entries = tuple(Export(**entry) for entry in json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a list of exported videos: {error}") from error
    if not entries:
        raise ValueError(f"{path} lists no videos; export the videos again")
    absent = [entry.file for entry in entries if not (folder / entry.file).is_file()]
    if absent:
        raise ValueError(f"{folder} lacks {len(absent)} of {len(entries)} videos: {absent[:3]}")
    return entries
