"""Many chunks of keys and values into the rows of two buffers, in as few launches as formats.

What a launch reads of the chunks lies in a table on the device (``plan.Batch``). It depends on the
chunks alone, so that a read after the first copies nothing from the host: keep a ``Decoding`` as
long as the chunks stay. What was found out about a chunk serves the next one too. A CUDA graph that
was captured with it follows the table's addresses: it must not be replayed once the chunks are
gone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from videokv.kernels import reconstruct as package
from videokv.kernels.gpu import checked_refusal, disagreement, say_once, wants_kernels
from videokv.kernels.reconstruct import reference
from videokv.kernels.reconstruct.parts import Parts
from videokv.protocols import Packed

KEYS, VALUES = 0, 1
_LARGEST_GRID = 65535  # programs of its second and third axes


class Source(NamedTuple):
    """A packed chunk, whether it is of KEYS or VALUES, and the first of its rows."""

    chunk: Packed
    side: int
    row: int


class _Need(NamedTuple):
    """What the chunks of a side take of its output: kernels write where no tensor ends."""

    side: int
    batch: int
    heads: int
    rows: int
    size: int

    def check(self, out: Tensor) -> None:
        batch, heads, rows, size = out.shape
        if (batch, heads, size) == (self.batch, self.heads, self.size) and rows >= self.rows:
            return
        what = "values" if self.side == VALUES else "keys"
        raise ValueError(
            f"chunks of {what} need an output [{self.batch}, {self.heads}, >= {self.rows}, "
            f"{self.size}], got {tuple(out.shape)}"
        )


class _Ready(NamedTuple):
    """For one kind of output: batches with the side of their factor, and chunks one by one."""

    batches: list[tuple[Any, int]]
    rest: list[Source]


class Decoding:
    """Holds the chunks' tensors, and those that only a kernel needs, until it is dropped."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        self._needs = tuple(_need(self.sources, side) for side in (KEYS, VALUES))
        self._ready: dict[Hashable, _Ready] = {}

    def serves(self, sources: Sequence[Source]) -> bool:
        """Whether these are the very chunks, in the same rows."""
        return sources is self.sources or (
            len(sources) == len(self.sources)
            and all(
                a.chunk is b.chunk and a.side == b.side and a.row == b.row
                for a, b in zip(self.sources, sources, strict=True)
            )
        )

    def write(self, keys: Tensor, values: Tensor, *, value_factor: Tensor | None = None) -> None:
        """All chunks into their rows of ``keys`` and ``values`` ``[B, H, rows, D]``.

        Strides are free. value_factor: float32 ``[B, H, 1, 1]`` that values are multiplied by last;
        FP16 and E4M3 saturate. By one launch for each format where the kernel serves it, else chunk
        by chunk. Only a first call with outputs of a dtype copies to the device (without waiting);
        in a CUDA graph's capture it decodes chunk by chunk instead.

        Raises:
            ValueError: chunks do not fit into an output: other batch rows, heads or head size, or
                fewer rows.
        """
        outputs, factors = (keys, values), (None, value_factor)
        for need, out in zip(self._needs, outputs, strict=True):
            if need is not None:
                need.check(out)
        ready = self._prepared(outputs, factors)
        for batch, side in ready.batches:
            batch.launch(*_outputs(outputs, side), factors[max(side, 0)])
        for chunk, side, row in ready.rest:
            rows = outputs[side][:, :, row : row + chunk.shape[2]]
            package.decode_into(chunk, rows, factor=factors[side])

    def _prepared(self, outputs: Sequence[Tensor], factors: Sequence[Tensor | None]) -> _Ready:
        device = outputs[0].device
        if not self.sources or not wants_kernels(device):
            return _Ready([], list(self.sources))
        kinds = tuple(
            (out.dtype, out.stride(3) == 1, factor is None)
            for out, factor in zip(outputs, factors, strict=True)
        )
        ready = self._ready.get((device, kinds))
        if ready is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                say_once("chunks are decoded one by one in this graph: read once before capturing")
                return _Ready([], list(self.sources))
            ready = self._ready[device, kinds] = self._grouped(outputs, kinds)
        return ready

    def _grouped(self, outputs: Sequence[Tensor], kinds: Sequence[tuple]) -> _Ready:
        from videokv.kernels.reconstruct import plan as plans

        device, together = outputs[0].device, kinds[KEYS] == kinds[VALUES]
        groups: dict[Hashable, list[plans.Job]] = {}
        rest: list[Source] = []
        dtypes = [out.dtype for out in outputs]
        for source in self.sources:
            chunk, side, row = source
            found = _planned(chunk, dtypes[side], device)
            if found is None:
                rest.append(source)
                continue
            plan, shape = found
            # -1: of a batch that writes to both
            key = (-1 if together else side, plan.kind, shape[0], shape[1])
            groups.setdefault(key, []).append(plans.Job(plan, shape, side, row))
        sides, jobs = [], []
        for (side, *_), members in groups.items():  # type: ignore[misc]
            for first in range(0, len(members), _LARGEST_GRID):
                sides.append(side)
                jobs.append(members[first : first + _LARGEST_GRID])
        made = plans.batches(jobs, device) if jobs else []
        return _Ready(list(zip(made, sides, strict=True)), rest)


def _need(sources: Sequence[Source], side: int) -> _Need | None:
    """Of the chunks of a side, which are alike but for their tokens; None without any."""
    found = [source for source in sources if source.side == side]
    if not found:
        return None
    kinds = {(*chunk.shape[:2], chunk.shape[3]) for chunk, *_ in found}
    if len(kinds) > 1 or any(row < 0 for *_, row in found):
        raise ValueError(
            "chunks of one output must agree in batch rows, heads and head size and lie at rows "
            f"from 0 on, got {sorted(kinds)} at rows {[row for *_, row in found]}"
        )
    ((batch, heads, size),) = kinds
    return _Need(side, batch, heads, max(row + c.shape[2] for c, _, row in found), size)


_Planned = tuple[Any, tuple[int, int, int, int]]  # ``plan.Plan``, and the chunk's shape
# Kept as long as the chunk. They may hold what only a kernel needs.
_plans: WeakKeyDictionary[Any, dict[torch.dtype, _Planned]] = WeakKeyDictionary()


def _planned(chunk: Packed, dtype: torch.dtype, device: torch.device) -> _Planned | None:
    """How a chunk is decoded among others, None where chunks of its format are not."""
    lasting = type(chunk).__hash__ is object.__hash__
    kept = _plans.get(chunk) if lasting else None
    found = None if kept is None else kept.get(dtype)
    if found is not None:
        return found
    parts = package.inner_parts(chunk)
    if parts is None or _refusal(parts, dtype, device) is not None:
        return None
    from videokv.kernels.reconstruct import triton

    found = (triton.planned(parts, dtype, device), parts.shape)
    if lasting:
        _plans.setdefault(chunk, {})[dtype] = found
    return found


def _outputs(outputs: tuple[Tensor, Tensor], side: int) -> tuple[Tensor, Tensor]:
    """What a batch of one side writes to: that side's output, twice."""
    return outputs if side < 0 else (outputs[side], outputs[side])


def _refusal(parts: Parts, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why chunks of this format are decoded one by one, or None."""
    refusal = package.kernel_refusal(parts, dtype, device)
    if refusal is not None:
        return refusal
    config = (parts.config(), dtype)
    refusal = checked_refusal("reconstruct many", config, device, lambda: _self_check(parts, dtype))
    if refusal is not None:
        say_once(f"packed chunks are decoded one by one: {refusal}")
    return refusal


def _self_check(parts: Parts, dtype: torch.dtype) -> str | None:
    """A corner of the chunk twice in a batch, into rows of two buffers."""
    from videokv.kernels.reconstruct import triton
    from videokv.kernels.reconstruct.plan import Job, batches

    small = parts.corner(package.SMALL)
    rows, heads, tokens, size = small.shape
    device = small.codes.device
    want = torch.empty(small.shape, device=device, dtype=dtype)
    reference.reconstruct(small, want, factor=None)
    outputs = [
        torch.full((rows, heads, tokens + 1, size), torch.nan, device=device).to(dtype)
        for _ in (KEYS, VALUES)
    ]
    plan = triton.planned(small, dtype, device)
    jobs = [Job(plan, small.shape, side, side) for side in (KEYS, VALUES)]
    (batch,) = batches([jobs], device)
    batch.launch(outputs[KEYS], outputs[VALUES], None)
    got = torch.stack([out[:, :, side : side + tokens] for side, out in enumerate(outputs)])
    return disagreement(
        got.float(), want.float().expand(got.shape), tolerance=package.TOLERANCE[dtype]
    )
