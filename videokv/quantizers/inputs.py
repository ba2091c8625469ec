"""What every quantizer refuses before it looks at a number."""

from __future__ import annotations

from torch import Tensor

from videokv.kernels.quantize_groups import DTYPES


def require_count(value: int, what: str) -> None:
    """ValueError unless ``value`` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} must be an integer of at least 1, got {value!r}")


def checked(x: Tensor) -> Tensor:
    """``x`` without its gradient; ValueError unless a non-empty ``[B, H, T, D]`` of DTYPES."""
    if x.ndim != 4 or x.dtype not in DTYPES or 0 in x.shape:
        raise ValueError(
            f"expected a non-empty tensor [B, H, T, D] of {DTYPES}, got {x.dtype} of shape "
            f"{tuple(x.shape)}"
        )
    return x.detach()
