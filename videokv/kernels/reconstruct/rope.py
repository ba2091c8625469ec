"""Rotary position embedding of keys that were cached before it, as cosines and sines of tokens."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rope:
    """(a, b) becomes (a cos - b sin, b cos + a sin) for P pairs of channels of each token.

    cos, sin: float32 ``[T, P]``, or ``[B, T, P]`` where batch rows have positions of their own.
    interleaved: pairs are channels (2i, 2i + 1); False: (i, i + P). The first 2 P channels turn,
    those after them stay as they are.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = True

    def __post_init__(self) -> None:
        shape = tuple(self.cos.shape)
        fits = self.cos.ndim in (2, 3) and self.sin.shape == self.cos.shape and 0 not in shape[-1:]
        if not fits or {self.cos.dtype, self.sin.dtype} != {torch.float32}:
            raise ValueError(
                "rope needs float32 cos and sin of one shape, [T, P] or [B, T, P] with P >= 1, got "
                f"{self.cos.dtype} {shape} and {self.sin.dtype} {tuple(self.sin.shape)}"
            )

    @property
    def pairs(self) -> int:
        """Pairs of channels that turn."""
        return self.cos.shape[-1]

    def config(self) -> tuple[Hashable, ...]:
        """What a kernel is compiled for."""
        return (self.interleaved, self.pairs)

    def check(self, shape: tuple[int, int, int, int], device: torch.device) -> None:
        """Raise ValueError where it does not turn keys ``[B, H, T, D]`` on ``device``."""
        batch, _, tokens, size = shape
        rows = tuple(self.cos.shape[:-1])
        if rows not in ((tokens,), (batch, tokens)) or 2 * self.pairs > size:
            raise ValueError(
                f"keys {shape} need cos and sin [{tokens}, P] or [{batch}, {tokens}, P] with P <= "
                f"{size // 2}, got {tuple(self.cos.shape)}"
            )
        if self.cos.device != device or self.sin.device != device:
            raise ValueError(f"cos and sin are on {self.cos.device}, keys on {device}; move one")

    def rows(self, first: int, last: int) -> Rope:
        """Of the tokens first..last."""
        return Rope(self.cos[..., first:last, :], self.sin[..., first:last, :], self.interleaved)

    def corner(self, batch: int) -> Rope:
        """Of the first batch rows."""
        if self.cos.ndim == 2:
            return self
        return Rope(self.cos[:batch], self.sin[:batch], self.interleaved)

    def turn(self, keys: Tensor) -> Tensor:
        """``[B, H, T, D]`` turned, in the keys' dtype (the arithmetic is at least float32)."""
        dtype = torch.promote_types(keys.dtype, torch.float32)
        cos, sin = (x.to(dtype).unsqueeze(-3) for x in (self.cos, self.sin))  # [(B,) 1, T, P]
        turning, rest = keys[..., : 2 * self.pairs].to(dtype), keys[..., 2 * self.pairs :]
        axis = -1 if self.interleaved else -2
        parts = turning.unflatten(-1, (-1, 2) if self.interleaved else (2, -1))
        a, b = parts.unbind(axis)
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], axis).flatten(-2)
        return torch.cat([turned.to(keys.dtype), rest], -1)
