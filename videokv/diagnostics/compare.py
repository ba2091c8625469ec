"""One attention, exact and from a quantized cache: mass, divergence, outputs, selected tokens.

Teacher-forced: the queries and the current chunk are those of the exact run, so that every
difference is the cache's. Streams over blocks of keys twice (log-sum-exps, then probabilities).
Sources: 2605.26266 (mass shift, JSD, output MSE), 2609.26425 (token selection, keys or values
alone); definitions in full in each field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from videokv.diagnostics.scores import Block, Past, blocks, by_kv_head
from videokv.protocols import Segment

BLOCK_ELEMENTS = 1 << 22  # scores at once: 16 MiB in float32, some ten temporaries of that size
ROWS_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """Figures of each query, ``[B, Hq, M]``; p is exact, q is held (corrected where it is).

    mass, held_mass: attention mass on cached keys, exact and held. Their difference is the shift.
    jsd_nats: Jensen-Shannon divergence of p and q over all keys, 0 to log 2.
    token_shift: 1 where the largest cached score sits on another token; any_token_shift: over all
        keys, the current ones too. Ties go to the earlier token.
    log_partition_error_nats: log of held over exact sum of exponentials of the cached keys.
    effective_tokens: (sum e^s)^2 / sum e^2s of the exact cached scores.
    output_mse, keys_only_mse, values_only_mse: mean over value channels of the squared error of
        the output with both sides held, keys alone, values alone. output_power: mean square of the
        exact output, to divide by.
    """

    mass: Tensor
    held_mass: Tensor
    jsd_nats: Tensor
    token_shift: Tensor
    any_token_shift: Tensor
    log_partition_error_nats: Tensor
    effective_tokens: Tensor
    output_mse: Tensor
    keys_only_mse: Tensor
    values_only_mse: Tensor
    output_power: Tensor

    @property
    def mass_shift(self) -> Tensor:
        """Held minus exact mass, ``[B, Hq, M]``: positive where cached keys steal attention."""
        return self.held_mass - self.mass

    def of_clip(self, place: int) -> Diagnosis:
        """The ``place``-th of the batch alone, ``[1, Hq, M]``."""
        return self._mapped(lambda x: x[place : place + 1])

    def cpu(self) -> Diagnosis:
        """The same in main memory."""
        return self._mapped(Tensor.cpu)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Diagnosis:
        names = [field.name for field in dataclasses.fields(self)]
        return Diagnosis(**{name: function(getattr(self, name)) for name in names})

    def means(self) -> dict[str, float]:
        """Means over batch, heads and queries, by metric name. Relative errors are ratios of
        means: a mean of ratios would be ruled by queries whose output is nearly zero."""
        figures = {
            "cached_mass": self.held_mass,
            "mass_shift": self.mass_shift,
            "jsd_nats": self.jsd_nats,
            "token_shift": self.token_shift,
            "any_token_shift": self.any_token_shift,
            "log_partition_error_nats": self.log_partition_error_nats,
            "effective_tokens": self.effective_tokens,
            "output_mse": self.output_mse,
            "output_mse_keys_only": self.keys_only_mse,
            "output_mse_values_only": self.values_only_mse,
        }
        found = {name: float(x.double().mean()) for name, x in figures.items()}
        power = float(self.output_power.double().mean())
        if power > 0:
            for name in ("output_mse", "output_mse_keys_only", "output_mse_values_only"):
                found[name.replace("mse", "mse_relative", 1)] = found[name] / power
        return found


@torch.no_grad()
def diagnose(query: Tensor, past: Past, current: Segment, *, scale: float) -> Diagnosis:
    """Compare softmax(scale q k^T) v over exact and held past, both followed by the current chunk.

    query ``[B, Hq, M, D]``; current: exact keys ``[B, Hkv, N, D]`` and values, without noise.
    Arithmetic is float32, float64 for float64 queries. Peak memory: a few blocks of scores, and
    outputs of ``[B, Hq, M, Dv]``.

    Raises:
        ValueError: shapes disagree, the current chunk carries noise, there are no queries, or a
            figure is not finite: NaN or infinity in what was given, which ``token_shift`` alone
            would not show.
    """
    _check(query, past, current)
    # A model's autocast would run these products in bfloat16.
    with torch.autocast(query.device.type, enabled=False):
        parts = [
            _diagnose_rows(rows, past, current, scale) for rows in query.split(ROWS_AT_ONCE, dim=2)
        ]
    names = [field.name for field in dataclasses.fields(Diagnosis)]
    found = {n: torch.cat([getattr(part, n) for part in parts], 2) for n in names}
    whole = torch.stack([torch.isfinite(x).all() for x in found.values()]).tolist()
    broken = [n for n, finite in zip(names, whole, strict=True) if not finite]
    if broken:
        raise ValueError(
            f"{', '.join(broken)} came out as NaN or infinity; queries, keys, values and the scale "
            "must be finite"
        )
    return Diagnosis(**found)


def _check(query: Tensor, past: Past, current: Segment) -> None:
    heads, size = past.keys.shape[1], past.keys.shape[3]
    fits = query.ndim == 4 and query.shape[2] > 0 and query.shape[1] % heads == 0
    if not fits or query.shape[3] != size or query.shape[0] != past.keys.shape[0]:
        raise ValueError(
            f"query must be [B, Hq, M, D] with M > 0 and Hq a multiple of {heads}, for keys "
            f"{tuple(past.keys.shape)}; got {tuple(query.shape)}"
        )
    if current.noise:
        raise ValueError("the current chunk is exact; give it noise=()")
    if not query.is_floating_point():
        raise ValueError(f"query must be floating point, got {query.dtype}")
    for name, part in (("current", current), *(("held", part) for part in past.held)):
        outer = (past.keys.shape[0], heads, part.keys.shape[2])
        keys, values = (*outer, size), (*outer, past.values.shape[3])
        if part.keys.shape != keys or part.values.shape != values:
            raise ValueError(
                f"{name} keys and values must be {keys} and {values}, as the exact past is, got "
                f"{tuple(part.keys.shape)} and {tuple(part.values.shape)}"
            )


class _Sums:
    """First pass: log-sum-exps and arg-maxima of one kind of scores."""

    def __init__(self, like: Tensor) -> None:
        self.cached = like.new_full(like.shape[:3], -torch.inf)
        self.current = self.cached.clone()
        self.squares = self.cached.clone()
        self.best = self.cached.clone()
        self.best_any = self.cached.clone()
        self.token = torch.zeros_like(self.cached, dtype=torch.long)
        self.token_any = self.token.clone()

    def add(self, block: Block, scores: Tensor) -> None:
        lse = torch.logsumexp(scores, -1)
        value, place = scores.max(-1)  # the first of equals
        self.token_any = torch.where(value > self.best_any, place + block.start, self.token_any)
        self.best_any = torch.maximum(value, self.best_any)
        if not block.cached:
            self.current = torch.logaddexp(self.current, lse)
            return
        self.cached = torch.logaddexp(self.cached, lse)
        self.squares = torch.logaddexp(self.squares, torch.logsumexp(2 * scores, -1))
        self.token = torch.where(value > self.best, place + block.start, self.token)
        self.best = torch.maximum(value, self.best)

    @property
    def all(self) -> Tensor:
        return torch.logaddexp(self.cached, self.current)


def _diagnose_rows(query: Tensor, past: Past, current: Segment, scale: float) -> Diagnosis:
    query = query.to(torch.promote_types(query.dtype, torch.float32))
    rows = by_kv_head(query, past.keys.shape[1])
    columns = max(1, BLOCK_ELEMENTS // (rows.shape[0] * rows.shape[1] * rows.shape[2]))
    true, held = _Sums(rows), _Sums(rows)
    for block in blocks(query, past, current, scale=scale, columns=columns):
        true.add(block, block.true)
        held.add(block, block.held)
    shape = (*rows.shape[:3], past.values.shape[3])
    exact, both, keys, values = (rows.new_zeros(shape) for _ in range(4))
    jsd = rows.new_zeros(rows.shape[:3])
    for block in blocks(query, past, current, scale=scale, columns=columns):
        log_p, log_q = block.true - true.all[..., None], block.held - held.all[..., None]
        p, q = log_p.exp(), log_q.exp()
        jsd += _divergence(p, q, log_p, log_q)
        exact += p @ block.true_values
        keys += q @ block.true_values
        if block.cached:
            both += q @ block.held_values
            values += p @ block.held_values
        else:
            both += q @ block.true_values
            values += p @ block.true_values
    heads = query.shape[1]

    def out(x: Tensor) -> Tensor:
        """``[B, Hkv, R] -> [B, Hq, M]``."""
        return x.reshape(x.shape[0], heads, -1)

    def error(x: Tensor) -> Tensor:
        return out((x - exact).square().mean(-1))

    return Diagnosis(
        mass=out((true.cached - true.all).exp()),
        held_mass=out((held.cached - held.all).exp()),
        jsd_nats=out(jsd.clamp(min=0)),
        token_shift=out((true.token != held.token).to(rows.dtype)),
        any_token_shift=out((true.token_any != held.token_any).to(rows.dtype)),
        log_partition_error_nats=out(held.cached - true.cached),
        effective_tokens=out((2 * true.cached - true.squares).exp()),
        output_mse=error(both),
        keys_only_mse=error(keys),
        values_only_mse=error(values),
        output_power=out(exact.square().mean(-1)),
    )


def _divergence(p: Tensor, q: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Sum over keys of p log(p/m)/2 + q log(q/m)/2, m = (p + q)/2, from the difference of logs.

    log(p/m) = log 2 - log(1 + e^(log q - log p)): no underflow where both are tiny.
    """
    gap = log_q - log_p
    ours = p * (LOG_2 - torch.nn.functional.softplus(gap))
    theirs = q * (LOG_2 - torch.nn.functional.softplus(-gap))
    return (ours + theirs).sum(-1) / 2


LOG_2 = 0.6931471805599453
