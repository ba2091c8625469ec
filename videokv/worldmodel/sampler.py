"""Rolling the world model out: a few Euler steps a chunk, then one pass that writes the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from videokv.worldmodel.config import WorldModelConfig
from videokv.worldmodel.model import KeyValueCache, WorldModel

__all__ = ["chunk_noise", "from_uint8", "rollout", "time_steps", "to_uint8"]


def from_uint8(frames: Tensor) -> Tensor:
    """uint8 pixels → float32 in -1..1."""
    return frames.float() / 127.5 - 1


def to_uint8(frames: Tensor) -> Tensor:
    """Float pixels in -1..1 → uint8, rounded."""
    return ((frames.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def time_steps(*, steps: int, shift: float) -> list[float]:
    """Noise levels 1 = t₀ > t₁ > ... > t_steps = 0; a larger shift spends more of them near 1.

    t = s u / (1 + (s - 1) u) for u from 1 to 0 in equal steps.
    """
    if steps < 1 or not shift > 0:
        raise ValueError(f"steps and shift must be positive, got {steps} and {shift}")
    levels = [1 - step / steps for step in range(steps + 1)]
    return [shift * u / (1 + (shift - 1) * u) for u in levels]


def chunk_noise(config: WorldModelConfig, *, seed: int, clips: Sequence[int], chunk: int) -> Tensor:
    """Gaussian noise [len(clips), chunk_frames, height, width, 3], float32, on the CPU.

    A clip's noise depends on (seed, clip, chunk) alone: not on the batch, recipe or device.
    """
    size = (config.chunk_frames, config.height, config.width_px, 3)
    draws = []
    for clip in clips:
        digest = hashlib.blake2b(f"{seed}/{clip}/{chunk}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        draws.append(torch.randn(size, generator=generator))
    return torch.stack(draws)


@torch.no_grad()
def rollout(
    model: WorldModel,
    context_frames: Tensor,
    actions: Tensor,
    cache: KeyValueCache | None = None,
    *,
    chunks: int,
    seed: int = 0,
    clips: Sequence[int] | None = None,
    steps: int | None = None,
    shift: float | None = None,
    autocast: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Generate ``chunks`` chunks after the context.

    Args:
        model: its parameters' device is where everything runs.
        context_frames: uint8 [B, C, height, width, 3], C a positive multiple of chunk_frames.
        actions: int [B, T], T >= C + chunks * chunk_frames; actions[:, f] leads to frame f.
        cache: empty; the context's chunks are written to it first. None takes a new one from
            ``model.cache_factory``: dense, unless ``videokv.compress`` has changed it.
        seed: of the noise, 0 or more.
        clips: the clips' numbers, which their noise is drawn from; 0, 1, ... unless given.
        steps, shift: of the time steps; the model's configuration unless given.
        autocast: dtype of matrix products, for example torch.bfloat16; None runs in the
            parameters' own dtype.
        progress: called with (chunks generated, chunks) after each.

    Returns:
        The generated frames, uint8 [B, chunks * chunk_frames, height, width, 3], on the CPU.

    Raises:
        ValueError: the context is no whole number of chunks, an action is missing or unknown,
            chunks is not positive, or the seed is negative.
    """
    config = model.config
    clips = range(context_frames.shape[0]) if clips is None else clips
    _check(config, context_frames, actions, chunks=chunks, seed=seed, clips=clips)
    cache = model.cache_factory() if cache is None else cache
    device = next(model.parameters()).device
    actions = actions.to(device=device, dtype=torch.long)
    context = from_uint8(context_frames.to(device))
    levels = time_steps(
        steps=config.sample_steps if steps is None else steps,
        shift=config.sample_shift if shift is None else shift,
    )
    first, size = context.shape[1], config.chunk_frames
    made = []
    with torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None):
        for start in range(0, first, size):
            frames = slice(start, start + size)
            _write(model, context[:, frames], actions[:, frames], start, cache)
        for chunk in range(chunks):
            start = first + chunk * size
            noise = chunk_noise(config, seed=seed, clips=clips, chunk=start // size).to(device)
            step_actions = actions[:, start : start + size]
            clean = _denoise(model, noise, step_actions, start, cache, levels)
            _write(model, clean, step_actions, start, cache)
            made.append(to_uint8(clean).cpu())
            if progress is not None:
                progress(chunk + 1, chunks)
    return torch.cat(made, 1)


def _denoise(
    model: WorldModel,
    z: Tensor,
    actions: Tensor,
    start: int,
    cache: KeyValueCache,
    levels: list[float],
) -> Tensor:
    """Euler steps along dz/dt = (z - x̂) / t, from noise to a clean chunk in -1..1."""
    for t, after in zip(levels, levels[1:], strict=False):
        times = torch.full((z.shape[0],), t, device=z.device)
        clean = model(z, times, actions, start_frame=start, cache=cache).to(z.dtype)
        z = clean + (z - clean) * (after / t)
    return z.clamp(-1, 1)


def _write(
    model: WorldModel, clean: Tensor, actions: Tensor, start: int, cache: KeyValueCache
) -> None:
    times = torch.zeros(clean.shape[0], device=clean.device)
    model(clean, times, actions, start_frame=start, cache=cache, write=True)
    cache.commit((start + clean.shape[1]) * model.config.frame_tokens)


def _check(
    config: WorldModelConfig,
    context: Tensor,
    actions: Tensor,
    *,
    chunks: int,
    seed: int,
    clips: Sequence[int],
) -> None:
    size = (config.height, config.width_px, 3)
    if context.ndim != 5 or context.dtype != torch.uint8 or context.shape[2:] != size:
        raise ValueError(
            f"context_frames must be uint8 [B, C, {size[0]}, {size[1]}, 3], got "
            f"{context.dtype} {tuple(context.shape)}"
        )
    if chunks < 1:
        raise ValueError(f"chunks must be positive, got {chunks}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, got {seed!r}")
    if context.shape[1] == 0 or context.shape[1] % config.chunk_frames:
        raise ValueError(
            f"context_frames must be whole chunks of {config.chunk_frames} frames, got "
            f"{context.shape[1]} frames"
        )
    needed = context.shape[1] + chunks * config.chunk_frames
    if actions.ndim != 2 or actions.shape[0] != context.shape[0] or actions.shape[1] < needed:
        raise ValueError(
            f"actions must be [{context.shape[0]}, {needed} or more] for {chunks} chunks after "
            f"{context.shape[1]} context frames, got {tuple(actions.shape)}; give more actions "
            "or ask for fewer chunks"
        )
    if int(actions.min()) < 0 or int(actions.max()) >= config.actions:
        raise ValueError(
            f"actions must be within 0..{config.actions - 1}, got {int(actions.min())}.."
            f"{int(actions.max())}"
        )
    if len(clips) != context.shape[0]:
        raise ValueError(f"clips must name {context.shape[0]} clips, got {len(clips)}")
