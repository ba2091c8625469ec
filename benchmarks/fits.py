"""Other ways to fit the factors of ``calibrated``, tried against fixed multipliers."""

from __future__ import annotations

import torch
from torch import Tensor

from videokv.noise import ScoreNoise
from videokv.protocols import Packed


def _features(packed: Packed, queries: Tensor, scale: float) -> Tensor:
    """b of every column: [B, Hkv, R, T, F]."""
    batch, heads, tokens, _ = packed.shape
    repeats = queries.shape[1] // heads
    parts = []
    for term in packed.noise():
        phi = term.query_map.features(queries, scale=scale)  # [B, Hq, M, F]
        width = phi.shape[-1]
        phi = phi.reshape(batch, heads, -1, width)
        weights = term.weights.float().expand(batch, heads, tokens, width)
        parts.append(phi[:, :, :, None, :] * weights[:, :, None, :, :])
    del repeats
    return torch.cat(parts, -1)


class DivergenceFit:
    """Factors that minimise KL(p || p_hat) over the packed chunk beside dense keys.

    where: "double": the dense keys are the chunk itself; "split": the first two thirds are packed,
    the last third is dense and asks; "chunk": no dense keys.
    groups: one factor a column instead of one.
    """

    def __init__(self, name: str, where: str, groups: bool, ridge: float = 0.0) -> None:
        self.name, self.where, self.groups, self.ridge = name, where, groups, ridge

    def fit(self, packed: Packed, keys: Tensor, queries: Tensor | None, *, scale: float):
        if not packed.noise() or queries is None:
            return None
        rows = queries.float()
        batch, heads, tokens, _ = packed.shape
        b = _features(packed, rows, scale)
        if not self.groups:
            b = b.sum(-1, keepdim=True)

        def score(k: Tensor) -> Tensor:
            k = k.float().repeat_interleave(rows.shape[1] // heads, 1)
            return (rows @ k.transpose(-1, -2) * scale).reshape(batch, heads, -1, k.shape[2])

        true, noisy = score(keys), score(packed.decode(torch.float32))
        if self.where == "split":
            cut = 2 * tokens // 3
            count = rows.shape[2]
            ask = torch.arange(count, device=rows.device) >= 2 * count // 3
            ask = ask.repeat(rows.shape[1] // heads)
            true, noisy, b = true[:, :, ask], noisy[:, :, ask], b[:, :, ask]
            current, true, noisy, b = (
                true[..., cut:],
                true[..., :cut],
                noisy[..., :cut],
                b[..., :cut, :],
            )
        elif self.where == "double":
            current = true
        else:
            current = true[..., :0]
        p = torch.cat([true, current], -1).softmax(-1)[..., : true.shape[-1]]
        target = (p.unsqueeze(-1) * b).sum(3).mean(2)  # [B, Hkv, F]
        factor = torch.ones_like(target)
        eye = torch.eye(target.shape[-1], device=target.device)
        for _ in range(8):
            lowered = noisy - (b * factor[:, :, None, None, :]).sum(-1)
            ph = torch.cat([lowered, current], -1).softmax(-1)[..., : lowered.shape[-1]]
            mean = (ph.unsqueeze(-1) * b).sum(3)  # [B, Hkv, R, F]
            second = torch.einsum("bhrt,bhrtf,bhrtg->bhfg", ph, b, b) / ph.shape[2]
            cov = second - torch.einsum("bhrf,bhrg->bhfg", mean, mean) / ph.shape[2]
            gap = mean.mean(2) - target
            trace = cov.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
            pull = self.ridge * trace
            gap = gap - (pull * (factor - factor.mean(-1, keepdim=True))[..., None]).squeeze(-1)
            step = torch.linalg.solve(cov + eye * (trace * (1e-3 + self.ridge) + 1e-9), gap)
            factor = (factor + step.clamp(-1, 1)).clamp(-1, 3)
        return factor

    def noise(self, packed: Packed, factors: Tensor | None) -> tuple[ScoreNoise, ...]:
        if factors is None:
            return ()
        terms, out, start = packed.noise(), [], 0
        for term in terms:
            width = packed.shape[3] // term.query_map.group_size
            part = factors
            if factors.shape[-1] > 1:
                part = factors[..., start : start + width]
                start += width
            out.append(term.scaled(part[:, :, None, :]))
        return tuple(out)


FITS = {
    "kl": DivergenceFit("kl", "double", False),
    "klg": DivergenceFit("klg", "double", True, 0.05),
    "kls": DivergenceFit("kls", "split", False),
    "klsg": DivergenceFit("klsg", "split", True, 0.05),
    "klc": DivergenceFit("klc", "chunk", False),
}
