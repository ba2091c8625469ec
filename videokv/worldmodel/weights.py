"""The shipped weights: half precision on disk, checked by digest, float32 in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from videokv.worldmodel.config import WorldModelConfig
from videokv.worldmodel.model import WorldModel

__all__ = ["LARGEST_FILE_BYTES", "load_weights", "save_weights", "shipped_weights_path"]

LARGEST_FILE_BYTES = 32_000_000
_FORMAT = "videokv-worldmodel-1"


def shipped_weights_path() -> Path:
    """Where the package keeps its weights."""
    return Path(str(resources.files("videokv.worldmodel") / "weights.safetensors"))


def save_weights(path: str | Path, state: Mapping[str, Tensor], config: WorldModelConfig) -> Path:
    """Write a model's state dict in half precision, with its shape and a digest.

    Raises:
        ValueError: a weight is not finite in half precision, or a name or shape is not the
            model's.
    """
    path = Path(path)
    halves = {
        name: value.detach().to("cpu", torch.float16).contiguous() for name, value in state.items()
    }
    _match(path, {name: tuple(value.shape) for name, value in halves.items()}, config)
    for name, value in halves.items():
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"{path}: {name} must be finite in float16, got NaN or infinity")
    metadata = {"format": _FORMAT, "config": config.to_json(), "sha256": _digest(halves)}
    part = path.with_name(path.name + ".part")
    save_file(halves, part, metadata=metadata)
    part.replace(path)
    return path


def load_weights(path: str | Path | None = None, *, device: str = "cpu") -> WorldModel:
    """The world model in ``path`` (the shipped one unless given), float32, ready to roll out.

    Raises:
        ValueError: the file is missing, damaged, or not a world model; it names the file and
            says what is wrong.
    """
    path = shipped_weights_path() if path is None else Path(path)
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file; name a weights file, reinstall videokv, or train one with: "
            "videokv worldmodel train"
        )
    metadata, halves = _read(path)
    if metadata.get("format") != _FORMAT:
        raise ValueError(
            f"{path}: expected a file of format {_FORMAT}, got {metadata.get('format')!r}"
        )
    try:
        config = WorldModelConfig.from_json(metadata.get("config", ""))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    _match(path, {name: tuple(value.shape) for name, value in halves.items()}, config)
    if metadata.get("sha256") != _digest(halves):
        raise ValueError(
            f"{path}: the weights do not match their digest, so the file is damaged; get it again"
        )
    with torch.device("meta"):
        model = WorldModel(config)
    floats = {name: value.float() for name, value in halves.items()}
    model.load_state_dict(floats, assign=True)
    return model.requires_grad_(False).eval().to(device)


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return file.metadata() or {}, {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error}); get it again") from error


def _match(path: Path, shapes: dict[str, tuple[int, ...]], config: WorldModelConfig) -> None:
    """Refuse names and shapes that are not those of ``config``'s model."""
    with torch.device("meta"):
        expected = {n: tuple(v.shape) for n, v in WorldModel(config).state_dict().items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise ValueError(
                f"{path}: {name} must have shape {expected.get(name)}, got {shapes.get(name)}; "
                "the file is of another model"
            )


def _digest(halves: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(halves):
        digest.update(name.encode())
        digest.update(halves[name].contiguous().numpy().tobytes())
    return digest.hexdigest()
