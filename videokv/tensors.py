"""Formats of packed storage, and how bytes are counted.

Packed storage is made of frozen dataclasses whose fields are tensors, plain values or other such
dataclasses. Everything that has to look at *all* tensors of a packed chunk (count bytes, move to a
device, pick batch rows, save) walks those fields, so a new format gets all of it for nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SUPPORTED_BITS = (2, 3, 4, 8)

T = TypeVar("T")


@dataclass(frozen=True)
class GroupFormat:
    """How one tensor ``[B, H, T, D]`` is cut into groups that share a step.

    bits: width of a code: 2, 3, 4 or 8.
    group_size: elements that share one step.
    axis: ``"token"``: every token has its own steps, groups run along the channels (D must be a
        multiple of ``group_size``). ``"channel"``: every channel has its own steps, groups run
        along the tokens of one chunk; the last group may be shorter.
    symmetric: codes around zero, no zero point (2 bits: ternary).
    zero_point: ``"offset"`` stores the group's minimum in ``zero_dtype`` (our default);
        ``"integer"`` stores the integer code of zero in ``zero_dtype`` (paper 1, Eq. 1).
    scale_dtype: dtype of the stored step. ``None`` chooses E4M3 below 8 bits and BF16 at 8 bits,
        where the nearest E4M3 step clips the range badly (ALGORITHMS: 16 steps).
    """

    bits: int
    group_size: int
    axis: Literal["token", "channel"] = "token"
    symmetric: bool = False
    zero_point: Literal["offset", "integer"] = "offset"
    scale_dtype: torch.dtype | None = None
    zero_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.bits not in SUPPORTED_BITS or not isinstance(self.bits, int):
            raise ValueError(f"bits must be one of {SUPPORTED_BITS}, got {self.bits!r}")
        counted = isinstance(self.group_size, int) and not isinstance(self.group_size, bool)
        if not counted or self.group_size < 1:
            raise ValueError(f"group_size must be a positive integer, got {self.group_size!r}")
        if not isinstance(self.symmetric, bool):
            raise ValueError(f"symmetric must be True or False, got {self.symmetric!r}")
        if self.axis not in ("token", "channel"):
            raise ValueError(f"axis must be 'token' or 'channel', got {self.axis!r}")
        if self.zero_point not in ("offset", "integer"):
            raise ValueError(f"zero_point must be 'offset' or 'integer', got {self.zero_point!r}")
        if self.scale_dtype is None:
            default = torch.bfloat16 if self.bits == 8 else E4M3
            object.__setattr__(self, "scale_dtype", default)
        allowed = (E4M3, torch.bfloat16, torch.float16, torch.float32)
        if self.scale_dtype not in allowed:
            raise ValueError(f"scale_dtype must be one of {allowed}, got {self.scale_dtype}")
        if self.bits == 8 and self.scale_dtype == E4M3:
            raise ValueError(
                "8-bit codes with an E4M3 step clip up to 16 steps of the range; "
                "use scale_dtype=torch.bfloat16"
            )

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError where this format cannot hold heads of ``head_dim`` channels."""
        if self.axis == "token" and head_dim % self.group_size:
            divisors = [g for g in (8, 16, 32, 64, 128) if head_dim % g == 0] or [head_dim]
            raise ValueError(
                f"group_size {self.group_size} does not divide head_dim {head_dim}; "
                f"use one of {divisors}"
            )


def walk_tensors(holder: Any) -> Iterator[Tensor]:
    """Every tensor reachable through dataclass fields, tuples, lists and dicts, in field order."""
    if isinstance(holder, Tensor):
        yield holder
        return
    kind: Any = type(holder)
    names = _field_names(kind)
    if names is not None:
        for name in names:
            yield from walk_tensors(getattr(holder, name))
    elif isinstance(holder, (tuple, list)):
        for item in holder:
            yield from walk_tensors(item)
    elif isinstance(holder, dict):
        for item in holder.values():
            yield from walk_tensors(item)


@functools.lru_cache(maxsize=256)
def _field_names(kind: Any) -> tuple[str, ...] | None:
    """Of a dataclass; None of any other class."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


def map_tensors(holder: T, function: Callable[[Tensor], Tensor]) -> T:
    """A copy of ``holder`` with ``function`` applied to each tensor that ``walk_tensors`` finds."""
    if isinstance(holder, Tensor):
        return function(holder)  # type: ignore[return-value]
    if dataclasses.is_dataclass(holder) and not isinstance(holder, type):
        changed = {
            field.name: map_tensors(getattr(holder, field.name), function)
            for field in dataclasses.fields(holder)
            if field.init
        }
        return dataclasses.replace(holder, **changed)  # type: ignore[type-var]
    if isinstance(holder, (tuple, list)):
        return type(holder)(map_tensors(item, function) for item in holder)  # type: ignore
    if isinstance(holder, dict):
        return {k: map_tensors(v, function) for k, v in holder.items()}  # type: ignore
    return holder


def held_bytes(*holders: Any) -> int:
    """Bytes of the distinct storages that the holders keep alive (not of their views)."""
    storages = {}
    for holder in holders:
        for tensor in walk_tensors(holder):
            storage = tensor.untyped_storage()
            storages[(storage.device, storage.data_ptr())] = storage.nbytes()
    return sum(storages.values())


def require_finite(tensor: Tensor, *, what: str, layer: int) -> None:
    """Raise ValueError naming the layer where ``tensor`` holds NaN or infinity. Synchronises."""
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(
            f"{what} of layer {layer} hold NaN or infinity; a cache entry must be finite: "
            "check the model's dtype (overflow in float16?) and its inputs"
        )
