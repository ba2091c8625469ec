"""Devices that a command can name."""

from __future__ import annotations

import torch


def resolve_device(name: str) -> torch.device:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:<index>`` as a device that is there, or ValueError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {name!r}; expected auto, cpu, cuda or cuda:<index>")
    if device.type == "cpu" and device.index is not None:
        raise ValueError(f"device {name!r} is not here: there is one CPU device; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {name!r} is not here: torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices; use --device cpu"
        )
    return device
