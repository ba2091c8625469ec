"""Randomized Hadamard rotations of any head size (QuaRot).

H = (Hadamard / sqrt d) diag(signs): orthogonal, so (H q) . (H k) = q . k, while outlier channels of
a key are spread over all channels before it is quantized.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """One seeded rotation of ``head_dim`` channels; equal fields mean the same matrix."""

    head_dim: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.head_dim < 1:
            raise ValueError(f"head_dim must be positive, got {self.head_dim}")

    def matrix(self, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32):
        """H ``[D, D]``, rows are the new channels."""
        return _matrix(self.head_dim, self.seed, torch.device(device), dtype)

    def apply(self, x: Tensor) -> Tensor:
        """Rotate the last dimension of ``x`` (float32 or float64), any leading shape."""
        return x @ self.matrix(device=x.device, dtype=x.dtype).T

    def invert(self, x: Tensor) -> Tensor:
        """Undo ``apply``."""
        return x @ self.matrix(device=x.device, dtype=x.dtype)


@functools.lru_cache(maxsize=64)
def signs(rotation: Rotation, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """H sqrt(D) ``[D, D]``: for powers of two 1 and -1, exact in every dtype."""
    exact = rotation.matrix(dtype=torch.float64) * rotation.head_dim**0.5
    return exact.to(device, dtype).contiguous()


@functools.lru_cache(maxsize=64)
def _matrix(head_dim: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (head_dim,), generator=generator).double() * 2 - 1
    return (_orthogonal(head_dim, generator) * signs).to(device=device, dtype=dtype)


def _orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """Sylvester's Hadamard for powers of two; else (odd part: seeded QR) kron Hadamard."""
    odd = size
    while odd % 2 == 0:
        odd //= 2
    power = torch.ones(1, 1, dtype=torch.float64)
    while power.shape[0] < size // odd:
        power = torch.cat([torch.cat([power, power], 1), torch.cat([power, -power], 1)])
    power = power / power.shape[0] ** 0.5
    if odd == 1:
        return power
    q, r = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64))
    return torch.kron((q * torch.sign(torch.diagonal(r))).contiguous(), power)
