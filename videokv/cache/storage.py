"""A cache in a safetensors file: tensors as they are held, everything else as JSON beside them.

Frozen dataclasses are written field by field, under the names of an allow-list that the caller
gives; nothing is pickled, and a name outside the list is refused when writing and when reading.
The JSON has a checksum beside it, and holds those of the tensors, their dtypes and shapes included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import secrets
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

import videokv
from videokv.cache.cache import KVCache
from videokv.cache.state import LayerState

FORMAT = 3
HEADER = "videokv"
HEADER_CHECKSUM = "videokv_checksum"
Classes = Mapping[str, type]


def class_names(classes: Iterable[type]) -> dict[str, type]:
    """The allow-list: module and name of each dataclass."""
    return {f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes}


def save(cache: KVCache, path: str | os.PathLike, *, classes: Classes) -> None:
    """Write the whole state of a cache, whole or not at all (a temporary file, then a rename).

    Raises:
        ValueError: it holds an object whose class is not in ``classes``.
        OSError: the file cannot be written; what was at ``path`` before is untouched.
    """
    target = Path(path)
    writer = _Writer(classes)
    states = cache.layer_states()
    header = {
        "format": FORMAT,
        "versions": _versions(),
        "recipe": writer.plain(cache.recipe),
        "options": writer.plain(cache.options()),
        "length": cache.length,
        "chunks": _chunk_table(states),
        "layers": {str(index): writer.plain(state) for index, state in states.items()},
        "checksums": {name: _checksum(t) for name, t in writer.tensors.items()},
    }
    _write_whole(target, writer.tensors, json.dumps(header))


def load(path: str | os.PathLike, *, classes: Classes) -> SavedCache:
    """Read what ``save`` wrote, header and tensors checked against their checksums.

    Raises:
        ValueError: the file is no cache, is damaged, or was written by another format, saying why.
        OSError: it cannot be read.
    """
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"no file {source}")
    try:
        with safetensors.safe_open(source, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a damaged dtype or shape raises whatever torch makes of it
        raise ValueError(f"{source} is damaged or no safetensors file: {error}") from error
    text = metadata.get(HEADER)
    if text is None:
        raise ValueError(f"{source} is a safetensors file, but not a saved cache of videokv")
    if metadata.get(HEADER_CHECKSUM) != header_checksum(text):
        raise ValueError(
            f"{source} is damaged, or was written by another version of videokv (the checksum of "
            "its header is missing or differs)"
        )
    try:
        return _read(json.loads(text), tensors, classes)
    except MemoryError:
        raise
    except Exception as error:  # an edited header may make any constructor raise anything
        raise ValueError(f"{source} cannot be read as a cache: {error}") from error


@dataclasses.dataclass(frozen=True, eq=False)
class SavedCache:
    """recipe, options (arguments of the cache), length in tokens, and each layer's state."""

    recipe: Any
    options: dict[str, Any]
    length: int
    states: dict[int, LayerState]


def _read(header: dict[str, Any], tensors: dict[str, Tensor], classes: Classes) -> SavedCache:
    if header["format"] != FORMAT:
        raise ValueError(
            f"format {header['format']}, this version reads {FORMAT} "
            f"(written by {header['versions']})"
        )
    for name in sorted({*header["checksums"], *tensors}):
        if name not in tensors or _checksum(tensors[name]) != header["checksums"].get(name):
            raise ValueError(f"tensor {name} is missing or damaged (its checksum differs)")
    reader = _Reader(classes, tensors)
    states = {int(index): reader.made(plain) for index, plain in header["layers"].items()}
    length = header["length"]
    for index, state in states.items():
        if not isinstance(state, LayerState) or state.length != length:
            raise ValueError(f"layer {index} does not hold the {length!r} tokens of the cache")
    return SavedCache(
        recipe=reader.made(header["recipe"]),
        options=reader.made(header["options"]),
        length=length,
        states=states,
    )


class _Writer:
    """Turns objects into JSON values, and collects their tensors under names."""

    def __init__(self, classes: Classes) -> None:
        self.names = {cls: name for name, cls in classes.items()}
        self.tensors: dict[str, Tensor] = {}
        self.known: dict[int, str] = {}

    def plain(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Tensor):
            return {"tensor": self._name(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": "cpu"}  # tensors are read onto the CPU
        if isinstance(value, (tuple, list)):
            return {type(value).__name__: [self.plain(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[self.plain(k), self.plain(v)] for k, v in value.items()]}
        return self._dataclass(value)

    def _dataclass(self, value: Any) -> Any:
        if type(value) not in self.names:
            raise ValueError(
                f"cannot save a {type(value).__module__}.{type(value).__qualname__}: it is not in "
                "the list of classes; pass classes=[...] with your own dataclasses"
            )
        fields = {
            field.name: self.plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.init
        }
        return {"class": self.names[type(value)], "fields": fields}

    def _name(self, tensor: Tensor) -> str:
        """Tensors that several objects share are written once."""
        if id(tensor) not in self.known:
            name = f"t{len(self.tensors)}"
            self.known[id(tensor)] = name
            self.tensors[name] = tensor.detach().to("cpu").clone().contiguous()
        return self.known[id(tensor)]


class _Reader:
    """The way back."""

    def __init__(self, classes: Classes, tensors: dict[str, Tensor]) -> None:
        self.classes = classes
        self.tensors = tensors

    def made(self, plain: Any) -> Any:
        if not isinstance(plain, dict):
            return plain
        if "class" in plain:
            return self._dataclass(plain["class"], plain["fields"])
        ((kind, content),) = plain.items()
        if kind == "tensor":
            return self.tensors[content]
        if kind == "dtype":
            return getattr(torch, content)
        if kind == "device":
            return torch.device(content)
        if kind in ("tuple", "list"):
            items = [self.made(item) for item in content]
            return tuple(items) if kind == "tuple" else items
        if kind == "dict":
            return {self.made(key): self.made(value) for key, value in content}
        raise ValueError(f"unknown kind of value {kind!r}")

    def _dataclass(self, name: str, fields: dict[str, Any]) -> Any:
        if name not in self.classes:
            raise ValueError(f"it holds a {name}, which is not in the list of classes")
        cls = self.classes[name]
        known = {field.name for field in dataclasses.fields(cls) if field.init}
        if set(fields) != known:
            raise ValueError(
                f"{name} has fields {sorted(fields)} there and {sorted(known)} in this version"
            )
        return cls(**{key: self.made(value) for key, value in fields.items()})


def _write_whole(target: Path, tensors: dict[str, Tensor], header: str) -> None:
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        metadata = {HEADER: header, HEADER_CHECKSUM: header_checksum(header)}
        safetensors.torch.save_file(tensors, temporary, metadata=metadata)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except safetensors.SafetensorError as error:
        raise OSError(f"cannot write {target}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def header_checksum(text: str) -> str:
    """CRC-32 of the header, in hexadecimal digits."""
    return f"{zlib.crc32(text.encode()):08x}"


def _checksum(tensor: Tensor) -> int:
    """CRC-32 of dtype, shape and bytes: the same bytes in another dtype are another tensor."""
    layout = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(raw.numpy().data, layout) if raw.numel() else layout


def _versions() -> dict[str, str]:
    return {
        "videokv": videokv.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _chunk_table(states: dict[int, LayerState]) -> list[dict[str, Any]]:
    """Which tokens each chunk holds and whether it is packed, for whoever looks into the file."""
    return [
        {
            "layer": index,
            "ordinal": chunk.ordinal,
            "start": chunk.start,
            "tokens": chunk.tokens,
            "held": type(chunk).__name__,
        }
        for index, state in states.items()
        for chunk in state.chunks
    ]
