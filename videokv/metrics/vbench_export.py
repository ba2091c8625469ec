"""Videos for VBench-Long from a folder of generated ones, or from a study of the world model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from videokv.metrics.reading import read_frames
from videokv.metrics.vbench import DIMENSIONS, WORLD_MODEL_DIMENSIONS
from videokv.metrics.vbench_files import Export, export, file_name, write_prompts
from videokv.metrics.vbench_run import PROMPT_FREE

WORLD_MODEL_FPS = Fraction(35, 3)  # Doom's 35 tics a second, 3 a frame
NAMED = 3  # missing videos that an error names


def read_prompt_list(path: Path | None) -> dict[str, list[str]]:
    """dimension → prompts, in VBench's order of dimensions.

    path: JSON, either such an object or VBench's own list of ``{"prompt_en", "dimension"}``; None:
    the list of the installed package. ValueError where there is none or it is another thing.
    """
    if path is None:
        spec = find_spec("vbench")
        if spec is None or spec.origin is None:
            raise ValueError(
                "the package vbench, which brings the prompts, is not installed; give --prompts "
                'with a JSON file like {"color": ["a red bird", ...], ...}'
            )
        path = Path(spec.origin).parent / "VBench_full_info.json"
    try:
        read = json.loads(path.read_text())
        found = read if isinstance(read, dict) else _by_dimension(read)
        whole = {
            name: [_text(prompt) for prompt in prompts]
            for name, prompts in found.items()
            if isinstance(prompts, list)
        }
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} must map dimensions to lists of prompts, or be VBench's list: {error!r}"
        ) from error
    unknown = [name for name in found if name not in DIMENSIONS or name not in whole]
    if unknown or not whole:
        raise ValueError(
            f"{path}: expected lists of prompts for some of {DIMENSIONS}, got {unknown or 'none'}"
        )
    return {name: whole[name] for name in DIMENSIONS if name in whole}


def _text(prompt: object) -> str:
    if not isinstance(prompt, str) or not prompt.strip():
        raise TypeError(f"prompts must be text, got {prompt!r}")
    return prompt


def export_videos(
    videos: Path, prompts: Mapping[str, Sequence[str]], out: Path
) -> tuple[Export, ...]:
    """Copy ``<name of the prompt>-<index>.mp4`` from ``videos`` to ``out/<dimension>/``.

    Indices from 0 without a gap; those there are. A prompt of two dimensions is copied twice.
    Everything is checked before anything is copied: ValueError names the missing videos and the
    first that is too short.
    """
    if not videos.is_dir():
        raise ValueError(f"--videos must be a folder of videos, got {videos}")
    missing, found = [], []
    for dimension, listed in prompts.items():
        for prompt in dict.fromkeys(listed):
            paths = _samples(videos, prompt)
            if not paths:
                missing.append(file_name(prompt, 0))
            found += [(dimension, prompt, index, path) for index, path in enumerate(paths)]
    if missing:
        wanted = sum(len(dict.fromkeys(listed)) for listed in prompts.values())
        raise ValueError(
            f"{videos} lacks videos of {len(missing)} of {wanted} prompts: "
            f"{', '.join(map(repr, missing[:NAMED]))}{', ...' * (len(missing) > NAMED)}; generate "
            "them, or export a smaller --share or fewer --dimensions"
        )
    lengths = {path: _length(path) for path in {item[-1] for item in found}}
    exports = tuple(
        export(prompt, dimension, index, frames=lengths[path][0], fps=lengths[path][1])
        for dimension, prompt, index, path in found
    )
    write_prompts(out, exports)
    for entry, (*_, path) in zip(exports, found, strict=True):
        (out / entry.file).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, out / entry.file)
    return exports


def export_study(
    folder: Path, out: Path, *, dimensions: Sequence[str] | None = None
) -> tuple[Export, ...]:
    """The clips in ``folder`` (clip-000.npz, ...; a recipe's frames in a study of the world model),
    a video a clip and dimension, at the game's speed.

    dimensions: of those that look at the video alone; None: those that suit a world model.
    """
    names = WORLD_MODEL_DIMENSIONS if dimensions is None else tuple(dimensions)
    wrong = [name for name in names if name not in PROMPT_FREE]
    if wrong:
        raise ValueError(
            f"{wrong[0]} compares a video with its prompt, and the world model has none; choose "
            f"from {', '.join(sorted(PROMPT_FREE))}"
        )
    clips = sorted(folder.glob("clip-*.npz"))
    if not clips:
        there = sorted(p.name for p in folder.parent.glob("*") if p.is_dir())
        raise ValueError(
            f"{folder} holds no frames; beside it there are those of {', '.join(there) or 'none'}"
        )
    frames = {clip.stem: read_frames(clip) for clip in clips}
    fps = float(WORLD_MODEL_FPS)
    exports = tuple(
        export(f"a walk through a maze {clip}", name, 0, frames=len(made), fps=fps)
        for name in names
        for clip, made in frames.items()
    )
    write_prompts(out, exports)
    for number, entry in enumerate(exports):
        path = out / entry.file
        path.parent.mkdir(exist_ok=True)
        _write_video(path, np.asarray(frames[clips[number % len(clips)].stem]))
    return exports


def _by_dimension(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entry in entries:
        for dimension in entry["dimension"]:
            found.setdefault(dimension, []).append(entry["prompt_en"])
    return found


def _samples(videos: Path, prompt: str) -> list[Path]:
    paths: list[Path] = []
    while (path := videos / file_name(prompt, len(paths))).is_file():
        paths.append(path)
    return paths


def _length(path: Path) -> tuple[int, float]:
    """Frames and frames a second; ValueError where it is no video."""
    import av

    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            rate = stream.average_rate
            frames = stream.frames or sum(1 for _ in container.decode(stream))
    except (av.FFmpegError, IndexError) as error:
        raise ValueError(f"{path} is not a readable video: {error}") from error
    if not rate or not frames:
        raise ValueError(f"{path} has no frames or no frame rate")
    return frames, float(rate)


def _write_video(path: Path, frames: NDArray[np.uint8]) -> None:
    """H.264 that loses next to nothing: what is scored should be the model's, not the codec's."""
    import av

    if "libx264" not in av.codecs_available:
        raise ValueError("this build of the av package has no H.264 encoder (libx264)")
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=WORLD_MODEL_FPS)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.options = "yuv444p", {"crf": "1", "preset": "veryfast"}
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
