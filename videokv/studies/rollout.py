"""The one place where the studies touch the recipes and the shipped world model.

Everything is imported inside the functions: naming a study loads no model and touches no device.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CONTEXT_FRAMES = 6
CHUNK_FRAMES = 3
MAX_CHUNKS = 10
BF16_BITS = 16.0


@dataclass(frozen=True)
class Clips:
    """Real play. frames: uint8 ``[N, 36, H, W, 3]``; actions: ``[N, 36]``; shipped: how many of
    them come with the package (the rest was played for this run)."""

    frames: Tensor
    actions: Tensor
    shipped: int


@dataclass(frozen=True)
class CacheFigures:
    """What a rollout's cache held at its end, for one clip, and where attention looked.

    mass_by_layer: mean attention mass on cached keys in the rollout, over queries, heads and
    denoising steps, of each layer.
    """

    dense_bytes: float
    held_bytes: float
    workspace_peak_bytes: float
    bits_per_element: float
    ratio: float
    mass_by_layer: tuple[float, ...]
    cached_mass: float


@dataclass(frozen=True)
class Rollout:
    """frames: uint8 ``[B, 3 * chunks, H, W, 3]``; seconds_per_chunk: wall time of one clip."""

    frames: Tensor
    cache: CacheFigures
    seconds_per_chunk: float


def recipe_names() -> list[str]:
    """The usual recipes, in the order of the table."""
    from videokv.recipes import recipes

    return [str(getattr(entry, "name", entry)) for entry in recipes()]


def check_recipe(name: str) -> None:
    """Raise ValueError with the nearest names where there is no such recipe."""
    from videokv.recipes import recipe

    recipe(name)


def count_bits(name: str, *, tokens: int, head_dim: int) -> float:
    """Bits per element of chunks of ``tokens``, counted from really encoded ones."""
    from videokv.recipes import bits_per_element, recipe

    return float(bits_per_element(recipe(name), tokens=tokens, head_dim=head_dim))


def load_model(device: torch.device) -> Any:
    """The shipped world model on ``device``, ready to roll out."""
    from videokv.worldmodel.weights import load_model

    return load_model().to(device).eval()


def model_digest(model: Any) -> str:
    """Sixteen hexadecimal digits that change when a weight does."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def get_clips(count: int, *, seed: int) -> Clips:
    """The first ``count`` shipped clips; where that is not enough, ViZDoom plays the others.

    Raises ValueError saying how many are shipped where ViZDoom is not installed.
    """
    from videokv.worldmodel.weights import load_clips

    shipped = load_clips()
    have = len(shipped.frames)
    if count <= have:
        return Clips(shipped.frames[:count], shipped.actions[:count], shipped=count)
    made = _play(count - have, have=have, seed=seed)
    frames = torch.cat([torch.as_tensor(shipped.frames), torch.as_tensor(made.frames)])
    actions = torch.cat([torch.as_tensor(shipped.actions), torch.as_tensor(made.actions)])
    return Clips(frames, actions, shipped=have)


def _play(count: int, *, have: int, seed: int) -> Any:
    from importlib.util import find_spec

    if find_spec("vizdoom") is None:
        raise ValueError(
            f"{have + count} clips were asked for and {have} are shipped; ask for at most {have} "
            "or install ViZDoom to play more: pip install 'videokv[worldmodel-train]'"
        )
    from videokv.worldmodel.weights import make_clips

    return make_clips(count, seed)


def run_rollout(
    model: Any,
    recipe_name: str,
    *,
    clips: Clips,
    numbers: Sequence[int],
    chunks: int,
    seed: int,
    on_chunk: Callable[[], None],
) -> Rollout:
    """Roll out the clips ``numbers`` in one batch with the recipe's cache.

    The noise of a clip depends on (seed, number, chunk) alone: every recipe gets the same.
    """
    from videokv.recipes import recipe
    from videokv.worldmodel.sampler import rollout

    device = next(model.parameters()).device
    cache = recipe(recipe_name).new_cache(record_mass=True)
    index = list(numbers)
    began = time.perf_counter()
    with torch.inference_mode():
        frames = rollout(
            model,
            torch.as_tensor(clips.frames)[index, :CONTEXT_FRAMES],
            torch.as_tensor(clips.actions)[index],
            cache=cache,
            chunks=chunks,
            seed=seed,
            clips=index,
            autocast=torch.bfloat16 if device.type == "cuda" else None,
            progress=lambda *_: on_chunk(),
        )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    return Rollout(
        frames=frames.cpu(),
        cache=_cache_figures(cache, clips=len(index)),
        seconds_per_chunk=seconds / (chunks * len(index)),
    )


def _cache_figures(cache: Any, *, clips: int) -> CacheFigures:
    memory, mass = cache.memory(), cache.mass()
    layers = tuple(float(value) for value in mass.by_layer)
    bits = memory.bits_per_element  # None where nothing is packed: the cache is dense
    return CacheFigures(
        dense_bytes=memory.dense_bytes / clips,
        held_bytes=memory.held_bytes / clips,
        workspace_peak_bytes=memory.workspace_peak_bytes / clips,
        bits_per_element=BF16_BITS if not bits else float(bits),
        ratio=float(memory.ratio),
        mass_by_layer=layers,
        cached_mass=float(mass.mean),
    )
