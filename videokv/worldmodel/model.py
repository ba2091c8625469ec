"""A chunk-causal diffusion transformer in pixel space, and the seam where a KV cache plugs in.

Frames are float [B, F, height, width, 3] in -1..1. Tokens are 8x8 patches, ordered by frame, row
and column. z = (1 - t) x + t noise; the model predicts x (Li and He 2025, "Back to Basics"),
modulation is adaLN with one MLP shared by all blocks (PixArt-alpha's adaLN-single).
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from videokv.worldmodel.config import WorldModelConfig
from videokv.worldmodel.plain import PlainCache

__all__ = ["KeyValueCache", "WorldModel", "count_parameters", "teacher_forcing_mask"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class KeyValueCache(Protocol):
    """What the model asks of a cache. Tensors are [B, H, M, D], keys after RoPE."""

    def write(
        self, layer: int, start_token: int, key: Tensor, value: Tensor, query: Tensor
    ) -> None:
        """Take the clean keys and values of the tokens start_token...; not yet attended to."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of the current chunk over committed chunks and itself, once each."""

    def commit(self, end_token: int) -> None:
        """All layers have written every token before end_token: they are final now."""


def rms_normalize(x: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """x over its root mean square along the last axis, in float32 (float64 stays float64)."""
    x = x if x.dtype == torch.float64 else x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


def rope_angles(config: WorldModelConfig, positions: Tensor) -> Tensor:
    """Angles [N, head_dim / 2], float32, of positions [N, 3] (frame, row, column).

    The channel pairs are shared out as Wan 2.1 does: a third each to row and column, the rest
    to time.
    """
    pairs = config.head_dim // 2
    shares = (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)
    parts = []
    for axis, share in enumerate(shares):
        exponent = torch.arange(share, device=positions.device, dtype=torch.float32) / share
        rates = config.rope_theta**-exponent
        parts.append(positions[:, axis, None].float() * rates)
    return torch.cat(parts, -1)


def rope_factors(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [N, D] for :func:`rotate_pairs`, from angles [N, D / 2]."""
    sine = angles.sin()
    return angles.cos().repeat_interleave(2, -1), torch.stack((-sine, sine), -1).flatten(-2)


def rotate_pairs(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """RoPE on interleaved pairs of x [..., N, D]: (a, b) → (a cos - b sin, b cos + a sin).

    Swapping by a flip, not by a stack, lets the compiler fuse it into one elementwise kernel.
    """
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x * cosine + swapped * sine


def time_features(t: Tensor, *, channels: int) -> Tensor:
    """Sines and cosines [..., channels] of noise levels t [...] in 0..1."""
    half = channels // 2
    steps = torch.arange(half, device=t.device, dtype=torch.float32)
    rates = 1000.0 * torch.exp(-math.log(10000.0) * steps / half)
    angles = t.float()[..., None] * rates
    return torch.cat((angles.cos(), angles.sin()), -1)


class Block(nn.Module):
    """Attention and MLP, each modulated by (scale, shift, gate) of the frame's condition."""

    def __init__(self, config: WorldModelConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.width * config.mlp_ratio
        self.heads = config.heads
        self.offset = nn.Parameter(torch.zeros(6, width))
        self.query_scale = nn.Parameter(torch.ones(config.head_dim))
        self.key_scale = nn.Parameter(torch.ones(config.head_dim))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(
        self, x: Tensor, modulation: Tensor, rope: tuple[Tensor, Tensor], attend: Callable
    ) -> Tensor:
        """x [B, F, P, C] and modulation [B, F, 6, C] → [B, F, P, C]."""
        parts = (modulation + self.offset).unsqueeze(-2).unbind(2)  # six of [B, F, 1, C]
        inner = rms_normalize(x) * (1 + parts[0]) + parts[1]
        x = x + parts[2] * self.out(self._attention(inner, rope, attend))
        inner = rms_normalize(x) * (1 + parts[3]) + parts[4]
        return x + parts[5] * self.down(F.gelu(self.up(inner), approximate="tanh"))

    def _attention(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Callable) -> Tensor:
        frames = x.shape[1:3]
        qkv = self.qkv(x).flatten(1, 2).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, D]
        query = rotate_pairs(rms_normalize(query) * self.query_scale, *rope).to(value.dtype)
        key = rotate_pairs(rms_normalize(key) * self.key_scale, *rope).to(value.dtype)
        out = attend(query, key, value)
        return out.transpose(1, 2).flatten(2).unflatten(1, frames)


class WorldModel(nn.Module):
    """Predicts clean frames from noisy ones, the actions that lead to them and a KV cache.

    ``cache_factory()`` makes the cache of a rollout that brings none: a dense one, of the model's
    own window; ``videokv.compress`` replaces it.
    """

    def __init__(self, config: WorldModelConfig) -> None:
        super().__init__()
        self.config = config
        self.cache_factory: Callable[[], KeyValueCache] = functools.partial(
            PlainCache, layers=config.blocks, window_chunks=config.window_chunks
        )
        width = config.width
        self.patch_in = nn.Linear(config.patch_values, width)
        self.time_in = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.action_in = nn.Embedding(config.actions, width)
        self.modulation = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.final_modulation = nn.Linear(width, 2 * width)
        self.patch_out = nn.Linear(width, config.patch_values)

    @torch.no_grad()
    def initialize(self, *, seed: int) -> WorldModel:
        """Fresh weights from a generator of their own; gates and the output start at zero."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                fan_out, fan_in = module.weight.shape
                bound = math.sqrt(6 / (fan_in + fan_out))
                draw = torch.rand(module.weight.shape, generator=generator) * 2 - 1
                module.weight.copy_(draw * bound)
                module.bias.zero_()
        draw = torch.randn(self.action_in.weight.shape, generator=generator)
        self.action_in.weight.copy_(draw * 0.5)
        for module in (self.modulation, self.final_modulation, self.patch_out):
            module.weight.zero_()
        return self

    def forward(
        self,
        noisy_chunk: Tensor,
        t: Tensor,
        actions: Tensor,
        *,
        start_frame: int,
        cache: KeyValueCache,
        write: bool = False,
    ) -> Tensor:
        """The clean frames of one chunk.

        Args:
            noisy_chunk: [B, F, height, width, 3], float, pixels in -1..1 when clean.
            t: noise level [B] in 0..1; 0 is clean, 1 is pure noise.
            actions: int [B, F], actions[:, f] led to frame f.
            start_frame: the chunk's first frame, counted from the clip's first.
            cache: holds the chunks before; see :class:`KeyValueCache`.
            write: also hand the chunk's keys and values to the cache (give t = 0).

        Raises:
            ValueError: shapes do not fit the configuration, or start_frame is negative.
        """
        self._check(noisy_chunk, t, actions, start_frame)
        frames = noisy_chunk.shape[1]
        start_token = start_frame * self.config.frame_tokens

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if write:
                cache.write(layer, start_token, key, value, query)
            return cache.attend(layer, query, key, value)

        numbers = torch.arange(start_frame, start_frame + frames, device=noisy_chunk.device)
        return self.denoise(noisy_chunk, t[:, None].expand(-1, frames), actions, numbers, attend)

    def denoise(
        self, frames: Tensor, t: Tensor, actions: Tensor, numbers: Tensor, attend: Attend
    ) -> Tensor:
        """The network without checks: t and actions [B, F], frame numbers [F]; see forward."""
        config = self.config
        x = self.patch_in(self.to_patches(frames))
        condition = self.time_in(time_features(t, channels=256).to(x.dtype))
        condition = F.silu(condition + self.action_in(actions))
        modulation = self.modulation(condition).unflatten(-1, (6, config.width))
        rope = self._rope(numbers)
        for layer, block in enumerate(self.blocks):
            x = block(x, modulation, rope, _bind(attend, layer))
        scale, shift = self.final_modulation(condition).unsqueeze(-2).chunk(2, -1)
        return self.to_frames(self.patch_out(rms_normalize(x) * (1 + scale) + shift))

    def forward_training(
        self,
        history: Tensor,
        noisy: Tensor,
        history_t: Tensor,
        noisy_t: Tensor,
        actions: Tensor,
        mask: Any,
    ) -> Tensor:
        """Teacher forcing: every noisy chunk of a clip at once, over a lightly noised history.

        Args:
            history: chunks 0..clip_chunks-2 of a clip, [B, Fh, height, width, 3].
            noisy: chunks context_chunks..clip_chunks-1, [B, Fn, height, width, 3].
            history_t, noisy_t: noise level of each frame, [B, Fh] and [B, Fn].
            actions: [B, clip_frames].
            mask: what :func:`teacher_forcing_mask` gave for the device.

        Returns:
            The clean frames of the noisy half, [B, Fn, height, width, 3].
        """
        past, first = history.shape[1], self.config.context_chunks * self.config.chunk_frames
        numbers = torch.arange(self.config.clip_frames, device=history.device)
        attend = _masked_attention(mask)
        out = self.denoise(
            torch.cat((history, noisy), 1),
            torch.cat((history_t, noisy_t), 1),
            torch.cat((actions[:, :past], actions[:, first:]), 1),
            torch.cat((numbers[:past], numbers[first:])),
            attend,
        )
        return out[:, past:]

    def to_patches(self, frames: Tensor) -> Tensor:
        """[B, F, height, width, 3] → [B, F, tokens, 3 patch²]."""
        config = self.config
        batch, count = frames.shape[:2]
        size = (batch, count, config.rows, config.patch, config.columns, config.patch, 3)
        return frames.reshape(size).permute(0, 1, 2, 4, 3, 5, 6).flatten(4).flatten(2, 3)

    def to_frames(self, patches: Tensor) -> Tensor:
        """The inverse of :meth:`to_patches`."""
        config = self.config
        batch, count = patches.shape[:2]
        size = (batch, count, config.rows, config.columns, config.patch, config.patch, 3)
        frames = patches.reshape(size).permute(0, 1, 2, 4, 3, 5, 6)
        return frames.reshape(batch, count, config.height, config.width_px, 3)

    def _rope(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        rows = torch.arange(config.rows, device=numbers.device)
        columns = torch.arange(config.columns, device=numbers.device)
        grid = torch.meshgrid(numbers, rows, columns, indexing="ij")
        angles = rope_angles(config, torch.stack([part.flatten() for part in grid], -1))
        return rope_factors(angles)

    def _check(self, frames: Tensor, t: Tensor, actions: Tensor, start_frame: int) -> None:
        config = self.config
        size = (config.height, config.width_px, 3)
        if frames.ndim != 5 or frames.shape[2:] != size or not frames.is_floating_point():
            raise ValueError(
                f"noisy_chunk must be float [B, F, {size[0]}, {size[1]}, 3], got "
                f"{frames.dtype} {tuple(frames.shape)}"
            )
        if t.shape != frames.shape[:1]:
            raise ValueError(f"t must be [{frames.shape[0]}], got {tuple(t.shape)}")
        if actions.shape != frames.shape[:2]:
            raise ValueError(
                f"actions must be {tuple(frames.shape[:2])}, got {tuple(actions.shape)}"
            )
        if start_frame < 0:
            raise ValueError(f"start_frame must be 0 or more, got {start_frame}")


def _bind(attend: Attend, layer: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda query, key, value: attend(layer, query, key, value)


def count_parameters(model: nn.Module) -> int:
    """Numbers in all the model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def _visible(config: WorldModelConfig) -> Callable[..., Tensor]:
    """mask_mod of [history | noisy]: chunk i sees history i - window..i - 1 and itself."""
    length, window, first = config.chunk_tokens, config.window_chunks, config.context_chunks
    history = config.clip_chunks - 1

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        query, key = q // length, k // length
        noisy = query >= history
        chunk = torch.where(noisy, query - history + first, query)
        past = (key < history) & (key < chunk) & (key >= chunk - window)
        return past | (query == key)

    return visible


def teacher_forcing_mask(config: WorldModelConfig, device: torch.device | str) -> Any:
    """The training mask: a FlexAttention BlockMask on CUDA, a boolean matrix elsewhere."""
    device = torch.device(device)
    chunks = 2 * config.clip_chunks - 1 - config.context_chunks
    tokens = chunks * config.chunk_tokens
    visible = _visible(config)
    if device.type == "cuda":
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(visible, None, None, tokens, tokens, device=device)
    warnings.warn(
        f"training on {device.type}: dense masked attention instead of FlexAttention, "
        "which is slow and meant for small sizes",
        stacklevel=2,
    )
    index = torch.arange(tokens, device=device)
    return visible(index, index, index[:, None], index[None, :])


def _masked_attention(mask: Any) -> Attend:
    if isinstance(mask, Tensor):
        return lambda layer, q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    from torch.nn.attention.flex_attention import flex_attention

    # Contiguous: compiled FlexAttention gave wrong results on a CPU (torch 2.13) for computed
    # queries and keys in a permuted layout; the copies fuse with the rotation before them.
    return lambda layer, q, k, v: flex_attention(
        q.contiguous(), k.contiguous(), v.contiguous(), block_mask=mask
    )
