"""A stand-in for the world model behind the rollout studies: frames with noise by the recipe."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from videokv.studies import rollout as seam
from videokv.studies import rollouts

SCHEMA = Path(rollouts.__file__).with_name("results.schema.json")


def install(patch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """Put it behind videokv.studies.rollout; ``calls`` collects what was rolled out."""

    def get_clips(count: int, *, seed: int) -> seam.Clips:
        if count > 8:
            raise ValueError(f"{count} clips were asked for and 8 are shipped")
        g = torch.Generator().manual_seed(1)
        frames = torch.randint(60, 190, (count, 36, 24, 32, 3), generator=g).to(torch.uint8)
        return seam.Clips(frames, torch.zeros(count, 36), "fake")

    def run_rollout(model, recipe, *, clips, numbers, chunks, **_):
        calls.append(f"{recipe.name} {numbers[0]}")
        seed = zlib.crc32(f"{recipe.keys} {recipe.values} {recipe.correction}".encode())
        after = [6 + frame % 30 for frame in range(3 * chunks)]  # a long rollout: over again
        real = clips.frames[list(numbers)][:, after].float()
        noise = [torch.randn(real[0].shape, generator=torch.Generator().manual_seed(seed + n))
                 for n in numbers]  # fmt: skip
        level = 0.0 if recipe.keys is None and recipe.values is None else 2.0 + seed % 5
        noisy = (real + level * torch.stack(noise)).round().clamp(0, 255)
        bits = 16.0 if level == 0 else 2.0 + seed % 3
        figures = seam.CacheFigures(16e5, bits * 1e5, 1e3, bits, 16 / bits)
        return seam.Rollout(noisy.to(torch.uint8), figures, ((0.3, 0.4),) * len(numbers), 0.5)

    rollouts._model.cache_clear()
    rollouts._clips.cache_clear()
    patch.setattr(seam, "load_model", lambda device: SimpleNamespace(config=None))
    patch.setattr(seam, "model_digest", lambda model: "0" * 16)
    patch.setattr(seam, "get_clips", get_clips)
    patch.setattr(seam, "run_rollout", run_rollout)


def check_schema(path: Path) -> None:
    """results.json against the published schema."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.validate(json.loads(path.read_text()), json.loads(SCHEMA.read_text()))
