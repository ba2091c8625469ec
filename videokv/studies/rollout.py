"""The one place where the studies touch the recipes and the shipped world model.

Everything is imported inside the functions: naming a study loads no model and touches no device.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from videokv.recipes import Recipe

CONTEXT_FRAMES = 6
CHUNK_FRAMES = 3
MAX_CHUNKS = 10  # what the actions of a clip reach for
LONGEST_CHUNKS = 10_000  # 43 minutes; all frames of a clip are held until its end
FRAMES_PER_SECOND = 35 / 3  # Doom runs at 35 tics a second, a frame is 3 of them
REPEATED_ACTIONS = "the clip's 30 actions after its context, over again"
MAX_WINDOW_CHUNKS = 8


@dataclass(frozen=True)
class Clips:
    """Real play. frames: uint8 ``[N, 36, H, W, 3]``; actions: ``[N, 36]``; source: in words."""

    frames: Tensor
    actions: Tensor
    source: str


@dataclass(frozen=True)
class CacheFigures:
    """What a rollout's cache held at its end, for one clip of the batch."""

    dense_bytes: float
    held_bytes: float
    workspace_peak_bytes: float
    bits_per_element: float
    ratio: float


@dataclass(frozen=True)
class Rollout:
    """frames: uint8 ``[B, 3 * chunks, H, W, 3]``; mass_by_layer: for each clip, the mean attention
    mass on cached keys of each layer over queries, heads and denoising steps; seconds_per_chunk:
    wall time of one chunk of one clip.
    """

    frames: Tensor
    cache: CacheFigures
    mass_by_layer: tuple[tuple[float, ...], ...]
    seconds_per_chunk: float


def recipe_names() -> list[str]:
    """The usual recipes, in the order of the table."""
    from videokv.recipes import recipes

    return recipes()


def check_recipe(name: str) -> None:
    """Raise ValueError with the nearest names where there is no such recipe, or naming the option
    where it cannot encode the heads of the shipped model."""
    from videokv.recipes import recipe
    from videokv.worldmodel.config import WorldModelConfig

    try:
        recipe(name).check(WorldModelConfig().head_dim)
    except ValueError as error:
        raise ValueError(f"recipe {name!r}: {error}") from error


def count_bits(name: str, *, tokens: int, head_dim: int) -> float:
    """Bits per element of chunks of ``tokens``, counted from really encoded ones."""
    from videokv.recipes import bits_per_element

    return float(bits_per_element(name, tokens=tokens, head_dim=head_dim))


def load_model(device: torch.device) -> Any:
    """The shipped world model on ``device``, ready to roll out."""
    from videokv.worldmodel.weights import load_weights

    return load_weights(device=str(device))


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
    from videokv.worldmodel.clips import load_clips, make_clips

    have = len(load_clips())
    clips = load_clips(min(count, have))
    if count > have:
        if find_spec("vizdoom") is None:
            raise ValueError(
                f"{count} clips were asked for and {have} are shipped; ask for at most {have} or "
                "install ViZDoom to play more: pip install 'videokv[worldmodel-train]'"
            )
        clips = clips.joined(make_clips(count - have, seed))
    return Clips(clips.frames, clips.actions, clips.source)


def run_rollout(
    model: Any,
    recipe_name: str | Recipe,
    *,
    clips: Clips,
    numbers: Sequence[int],
    chunks: int,
    seed: int,
    window_chunks: int | None,
    on_chunk: Callable[[], None],
) -> Rollout:
    """Roll out the clips ``numbers`` in one batch with the recipe's cache.

    window_chunks: chunks that the cache keeps; None: as many as the model was trained with.
    The noise of a clip depends on (seed, number, chunk) alone: every recipe gets the same. Matrix
    products and cached rows are BF16 on every device, so that the dense cache is a BF16 cache.
    """
    from videokv.recipes import recipe
    from videokv.worldmodel.sampler import rollout

    device = next(model.parameters()).device
    window = model.config.window_chunks if window_chunks is None else window_chunks
    cache = recipe(recipe_name).new_cache(record_mass=True, window_chunks=window)
    index = list(numbers)
    began = time.perf_counter()
    frames = rollout(
        model,
        clips.frames[index, :CONTEXT_FRAMES],
        continued(clips.actions[index], CONTEXT_FRAMES + chunks * CHUNK_FRAMES),
        cache,
        chunks=chunks,
        seed=seed,
        clips=index,
        autocast=torch.bfloat16,
        progress=lambda done, total: on_chunk(),
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    return Rollout(
        frames=frames,
        cache=_cache_figures(cache.memory(), clips=len(index)),
        mass_by_layer=_mass_by_layer(cache.masses()),
        seconds_per_chunk=seconds / (chunks * len(index)),
    )


def continued(actions: Tensor, frames: int) -> Tensor:
    """Actions ``[B, 36]`` → ``[B, max(36, frames)]``: those after the context over again.

    The model's positions do not end: RoPE is relative, and the window bounds what it spans.
    """
    after = actions[:, CONTEXT_FRAMES:]
    missing = max(0, frames - actions.shape[1])
    repeats = -(-missing // after.shape[1])
    return torch.cat([actions, *[after] * repeats], 1)[:, : actions.shape[1] + missing]


def chunks_for(seconds: float) -> int:
    """Chunks of at least that many seconds; ValueError where they are not above 0."""
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be above 0 and finite, got {seconds}")
    return math.ceil(seconds * FRAMES_PER_SECOND / CHUNK_FRAMES)


def _cache_figures(memory: Any, *, clips: int) -> CacheFigures:
    return CacheFigures(
        dense_bytes=memory.dense_bytes / clips,
        held_bytes=memory.held_bytes / clips,
        workspace_peak_bytes=memory.workspace_peak_bytes / clips,
        bits_per_element=float(memory.bits_per_element),
        ratio=float(memory.ratio),
    )


def _mass_by_layer(calls: Sequence[tuple[int, int, Tensor]]) -> tuple[tuple[float, ...], ...]:
    """From (start token, layer, mass ``[B]``) of every denoising attention: clip → layer → mean."""
    layers: dict[int, list[Tensor]] = {}
    for _, layer, mass in calls:
        layers.setdefault(layer, []).append(mass)
    means = torch.stack([torch.stack(layers[i]).mean(0) for i in sorted(layers)], 1)  # [B, layers]
    return tuple(tuple(clip) for clip in means.cpu().tolist())
