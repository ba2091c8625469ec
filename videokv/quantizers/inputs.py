"""What every quantizer refuses before it looks at a number: options and tensors of wrong kinds."""

from __future__ import annotations

from torch import Tensor

from videokv.kernels.quantize_groups import DTYPES


def check_count(name: str, value: object, *, least: int = 1) -> None:
    """Raise ValueError unless the option ``name`` is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raise ValueError unless the option ``name`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def checked(x: Tensor) -> Tensor:
    """``x`` without its gradient; ValueError unless a non-empty ``[B, H, T, D]`` of DTYPES."""
    if not isinstance(x, Tensor):
        raise ValueError(f"expected a tensor [B, H, T, D], got {type(x).__name__}")
    if x.ndim != 4 or x.dtype not in DTYPES or 0 in x.shape:
        raise ValueError(
            f"expected a non-empty tensor [B, H, T, D] of {DTYPES}, got {x.dtype} of shape "
            f"{tuple(x.shape)}"
        )
    return x.detach()
