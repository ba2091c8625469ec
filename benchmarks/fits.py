"""Other fits of ``calibrated``'s factors, kept as the record of what was tried.

docs/decisions.md ("The calibrated fit") has their figures. ``calibrated`` won as the simplest that
comes near the best fixed multiplier everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from videokv.corrections.calibrated import FACTOR_RANGE, far_pairs
from videokv.noise import ScoreNoise
from videokv.protocols import Packed

STEPS = 8


class DivergenceFit:
    """Factors that minimise KL(p || p^) of attention over the packed chunk beside its dense self.

    far: packed keys are those a third of the chunk away, as in ``calibrated``; else all.
    groups: one factor a column, pulled together by ``ridge``, instead of one.
    """

    def __init__(self, name: str, *, far: bool, groups: bool, ridge: float = 0.05) -> None:
        self.name, self.far, self.groups, self.ridge = name, far, groups, ridge

    def fit(
        self, packed: Packed, keys: Tensor, queries: Tensor | None, *, scale: float
    ) -> Tensor | None:
        """Factors ``[B, Hkv, F]`` (F = 1 without groups), by damped Newton steps from 0."""
        if not packed.noise() or queries is None:
            return None
        rows, repeats = queries.float(), queries.shape[1] // keys.shape[1]
        b = _features(packed, rows, scale)
        if not self.groups:
            b = b.sum(-1, keepdim=True)

        current = _scores(rows, keys, scale)
        noisy = _scores(rows, packed.decode(torch.float32), scale)
        true = current
        if self.far:
            near = ~far_pairs(rows.shape[2], keys.shape[2]).repeat(repeats, 1).to(keys.device)
            true, noisy = true.masked_fill(near, -1e30), noisy.masked_fill(near, -1e30)
        target = _mean_bias(true, current, b)[0].mean(2)  # [B, Hkv, F]
        factor = torch.zeros_like(target)
        for _ in range(STEPS):
            mean, second = _mean_bias(noisy - (b * factor[:, :, None, None]).sum(-1), current, b)
            covariance = second - mean.mT @ mean / mean.shape[2]
            size = covariance.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
            apart = factor - factor.mean(-1, keepdim=True)
            gap = mean.mean(2) - target - self.ridge * size * apart
            damping = (size * (1e-3 + self.ridge) + 1e-9)[..., None]
            system = covariance + damping * torch.eye(target.shape[-1]).to(gap)
            step = torch.linalg.solve(system, gap[..., None])[..., 0].clamp(-1, 1)
            factor = (factor + step).clamp(*FACTOR_RANGE)
        return factor

    def noise(self, packed: Packed, factors: Tensor | None) -> tuple[ScoreNoise, ...]:
        """The chunk's terms times their factors."""
        if factors is None:
            return ()
        terms = packed.noise()
        widths = [packed.shape[3] // term.query_map.group_size for term in terms]
        parts = factors.split(widths, -1) if self.groups else [factors] * len(terms)
        return tuple(t.scaled(part[:, :, None]) for t, part in zip(terms, parts, strict=True))


def _scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """``[B, Hkv, R, T]``: the rows of all query heads of a KV head side by side."""
    heads, repeats = keys.shape[1], queries.shape[1] // keys.shape[1]
    products = queries @ keys.float().repeat_interleave(repeats, 1).mT * scale
    return products.unflatten(1, (heads, repeats)).flatten(2, 3)


def _features(packed: Packed, queries: Tensor, scale: float) -> Tensor:
    """b of every column: ``[B, Hkv, R, T, F]``."""
    batch, heads, tokens, _ = packed.shape
    parts = []
    for term in packed.noise():
        phi = term.query_map.features(queries, scale=scale)  # [B, Hq, M, F]
        phi = phi.reshape(batch, heads, -1, phi.shape[-1])
        weights = term.weights.float().expand(batch, heads, tokens, phi.shape[-1])
        parts.append(phi[:, :, :, None, :] * weights[:, :, None, :, :])
    return torch.cat(parts, -1)


def _mean_bias(scores: Tensor, current: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Of b under attention: means of each row ``[B, Hkv, R, F]``, mean product ``[.., F, F]``."""
    p = torch.cat([scores, current], -1).softmax(-1)[..., : scores.shape[-1]]
    mean = (p.unsqueeze(-1) * b).sum(3)
    return mean, torch.einsum("bhrt,bhrtf,bhrtg->bhfg", p, b, b) / p.shape[2]


class SquareFit:
    """The factor of least squared error of attention weights over far packed and near dense keys.

    With values that are independent but for a common mean, that is the least error of the output:
    keys that are mostly noise are not only put right on average but listened to less.
    """

    def __init__(self, name: str, *, lattice: int = 25) -> None:
        self.name, self.lattice = name, lattice

    def fit(
        self, packed: Packed, keys: Tensor, queries: Tensor | None, *, scale: float
    ) -> Tensor | None:
        """Factors ``[B, Hkv, 1]``: the best of a lattice over the range, refined by a parabola."""
        if not packed.noise() or queries is None:
            return None
        rows, repeats = queries.float(), queries.shape[1] // keys.shape[1]
        b = _features(packed, rows, scale).sum(-1)

        exact = _scores(rows, keys, scale)
        noisy = _scores(rows, packed.decode(torch.float32), scale)
        far = far_pairs(rows.shape[2], keys.shape[2]).repeat(repeats, 1).to(keys.device)
        target = exact.softmax(-1)
        low, high = FACTOR_RANGE
        tried = torch.linspace(low, high, self.lattice, device=keys.device)
        errors = torch.stack(
            [
                (torch.where(far, noisy - factor * b, exact).softmax(-1) - target)
                .square()
                .sum(-1)
                .mean(-1)
                for factor in tried
            ]
        )
        best = errors.argmin(0).clamp(1, self.lattice - 2)
        before, at, after = (errors.gather(0, (best + i)[None])[0] for i in (-1, 0, 1))
        bend = (before - 2 * at + after).clamp(min=1e-30)
        shift = ((before - after) / (2 * bend)).clamp(-1, 1)
        return (tried[best] + shift * (tried[1] - tried[0]))[..., None]

    noise = DivergenceFit("", far=True, groups=False).noise


FITS = {
    fit.name: fit
    for fit in (
        DivergenceFit("kl", far=False, groups=False),
        DivergenceFit("klg", far=False, groups=True),
        DivergenceFit("klfar", far=True, groups=False),
        SquareFit("square"),
    )
}
