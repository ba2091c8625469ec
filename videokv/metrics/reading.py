"""Read a clip from a video file, a folder of frames, .npz or .npy, as uint8 ``[T, H, W, 3]``."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

EIGHT_BIT_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
# What numpy and zipfile raise on .npy and .npz files that are cut, overwritten or of another kind.
DAMAGED_ARRAY = (
    EOFError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)


def read_frames(path: Path) -> NDArray[np.generic]:
    """The frames at ``path``, ``[T, H, W, 3]``: uint8, or whatever an array file holds.

    Raises ValueError naming the path where it is missing, empty, damaged or of an unknown kind.
    """
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise ValueError(f"no such file or folder: {path}")
    if path.suffix in (".npy", ".npz"):
        return _read_array(path)
    return _read_video(path)


def _read_folder(folder: Path) -> NDArray[np.uint8]:
    from PIL import Image

    names = sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
    if not names:
        raise ValueError(
            f"{folder} holds no frames; expected images ({', '.join(sorted(IMAGE_SUFFIXES))}) "
            "whose names sort in the order of time"
        )
    frames = []
    for name in names:
        try:
            with Image.open(name) as image:
                if image.mode not in EIGHT_BIT_MODES:  # Pillow would cut these off at 255
                    raise ValueError(f"its mode is {image.mode}; save frames with 8 bits a channel")
                frames.append(np.asarray(image.convert("RGB")))
        except (OSError, SyntaxError, ValueError) as error:  # Pillow raises all three
            raise ValueError(f"{name} is not a readable image: {error}") from error
        if frames[-1].shape != frames[0].shape:
            raise ValueError(
                f"all frames of a folder must have one size: {names[0].name} is "
                f"{frames[0].shape[:2]}, {name.name} is {frames[-1].shape[:2]}"
            )
    return np.stack(frames)


def _read_array(path: Path) -> NDArray[np.generic]:
    try:
        loaded = np.load(path, allow_pickle=False)
    except (OSError, *DAMAGED_ARRAY) as error:
        raise _unreadable(path, error) from error
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded as archive:
        keys = archive.files
        key = "frames" if "frames" in keys else keys[0] if len(keys) == 1 else None
        if key is None:
            raise ValueError(f"{path} must hold one array or one named 'frames', it has {keys}")
        try:
            return np.asarray(archive[key])
        except (OSError, *DAMAGED_ARRAY) as error:
            raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is not a readable array file ({error}); make or copy it again")


def _read_video(path: Path) -> NDArray[np.uint8]:
    import av

    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ValueError(f"{path} has no video stream")
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    except av.error.FFmpegError as error:
        raise ValueError(f"{path} is not a readable video: {error}") from error
    if not frames:
        raise ValueError(f"{path} holds no frames")
    return np.stack(frames)
