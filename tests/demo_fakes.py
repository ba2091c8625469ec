"""A stand-in for the world model and the recipes: frames with known noise, made in milliseconds."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

import pytest
import torch

from videokv.studies import rollout as seam
from videokv.studies.demo import DEFAULT_RECIPES

HEIGHT, WIDTH, LAYERS = 36, 48, 8
# recipe → (noise of a pixel, bits, cached mass)
KNOWN = {
    "bf16": (0.0, 16.0, 0.317),
    "rtn-4bit": (1.2, 4.5, 0.314),
    "rtn-2bit": (9.0, 2.75, 0.354),
    "rtn-2bit+taylor": (5.5, 2.75, 0.305),
    "quarot-2bit": (6.1, 2.75, 0.351),
    "quarot-2bit+taylor": (4.2, 2.75, 0.325),
    "quarot-2bit+calibrated": (3.6, 2.76, 0.3168),
    "videokv-2bit+calibrated": (1.9, 2.65, 0.3171),
}
assert tuple(KNOWN) == DEFAULT_RECIPES


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the stand-in behind videokv.studies.rollout."""
    patch.setattr(seam, "recipe_names", lambda: list(KNOWN))
    patch.setattr(seam, "check_recipe", check_recipe)
    patch.setattr(seam, "count_bits", lambda name, *, tokens, head_dim: bits(name))
    patch.setattr(seam, "load_model", lambda device: None)
    patch.setattr(seam, "model_digest", lambda model: "0" * 16)
    patch.setattr(seam, "get_clips", get_clips)
    patch.setattr(seam, "run_rollout", run_rollout)


def bits(name: str) -> float:
    """Also of the same recipe without its correction, which stores nothing."""
    return {key.partition("+")[0]: row[1] for key, row in reversed(KNOWN.items())}[
        name.partition("+")[0]
    ]


def check_recipe(name: str) -> None:
    if name.endswith("-5bit"):
        raise ValueError(f"{name}: bits must be 2, 3, 4 or 8, got 5")
    if name not in KNOWN:
        near = ", ".join(difflib.get_close_matches(name, KNOWN, n=3))
        raise ValueError(f"unknown recipe {name!r}; the nearest are {near}")


def get_clips(count: int, *, seed: int) -> seam.Clips:
    y, x = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    clips = [torch.stack([_picture(x, y, t, n) for t in range(36)]) for n in range(count)]
    return seam.Clips(torch.stack(clips), torch.zeros(count, 36), source=f"{count} fake clips")


def _picture(x: torch.Tensor, y: torch.Tensor, t: int, n: int) -> torch.Tensor:
    """A corridor of stripes that drifts with t."""
    depth = ((x - 24 + t) ** 2 + (y - 18) ** 2).float().sqrt()
    wall = ((depth + 2 * t + 5 * n) / 5).sin() * 0.25 + 0.45
    rgb = torch.stack([wall, wall * 0.8 + y / 200, 0.9 - wall], -1)
    return (rgb.clamp(0, 1) * 255).to(torch.uint8)


def run_rollout(
    model: object,
    recipe_name: str,
    *,
    clips: seam.Clips,
    numbers: Sequence[int],
    chunks: int,
    seed: int,
    window_chunks: int | None,
    on_chunk: Callable[[], None],
) -> seam.Rollout:
    noise, bits, mass = KNOWN[recipe_name]
    real = clips.frames[list(numbers), 6 : 6 + 3 * chunks].float()
    generator = torch.Generator().manual_seed(seed + len(recipe_name))
    growth = torch.linspace(1, 1.6, 3 * chunks)[None, :, None, None, None]
    blurred = real + noise * growth * torch.randn(real.shape, generator=generator)
    for _ in range(chunks):
        on_chunk()
    dense = 6_000_000.0
    bump = torch.linspace(0.6, 1.4, LAYERS)
    figures = seam.CacheFigures(
        dense_bytes=dense,
        held_bytes=dense * bits / 16,
        workspace_peak_bytes=750_000.0 if bits < 16 else 0.0,
        bits_per_element=bits,
        ratio=16 / bits,
    )
    masses = [tuple((0.317 + 0.001 * n + (mass - 0.317) * bump).tolist()) for n in numbers]
    frames = blurred.round().clamp(0, 255).to(torch.uint8)
    seconds = 1.2 if bits == 16 else 1.5
    return seam.Rollout(frames, figures, tuple(masses), seconds_per_chunk=seconds)
