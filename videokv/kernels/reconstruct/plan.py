"""One launch for many chunks: a table on the device says where each one's tensors lie.

A row a chunk: tokens, its first row in the output, which output, then what the kernel is given of
it (``Plan.stored``), tensors as addresses. The table belongs to its chunks alone, so it is made
once; the outputs are plain arguments. Import only where Triton is there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.blocks import as_bytes, row_alignment
from videokv.kernels.gpu import on_device
from videokv.kernels.launches import Launches, alike

WIDEST_LOAD_BYTES = 16
_TYPES = {
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
    torch.int32: tl.int32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


@dataclass(frozen=True, eq=False)
class Plan:
    """What a launch has whatever it writes to.

    rows: tokens of a step of a program; longest: steps of a program. stored: the chunk's tensors,
    counts and None, in the order of the kernel's arguments. scale: a number of the head size.
    options: what it is compiled for. many: launches a batch of such chunks. types: constants of
    that kernel, Triton's types of some of ``stored``. narrow: places of tensors in ``stored`` whose
    elements are loaded one by one, so that it does not matter where they begin.
    """

    rows: int
    longest: int
    stored: list[Tensor | int | None]
    scale: float
    options: dict[str, Any]
    many: Callable[[Batch, Tensor, Tensor, Tensor | None], None]
    types: dict[str, Any]
    narrow: frozenset[int]

    @functools.cached_property
    def kind(self) -> int:
        """Equal for plans that one launch can serve."""
        key = (self.many, self.aligned, *self.types.values(), *self.options.items())
        return _kinds.setdefault(key, len(_kinds))

    @functools.cached_property
    def aligned(self) -> bool:
        """Whether every tensor that is read widely begins where the widest load may."""
        return all(
            x.data_ptr() % WIDEST_LOAD_BYTES == 0
            for place, x in enumerate(self.stored)
            if isinstance(x, Tensor) and place not in self.narrow
        )

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        """``stored`` as a table has it."""
        return tuple(_number(x) for x in self.stored)


_kinds: dict[Hashable, int] = {}


class Job(NamedTuple):
    """A chunk of ``shape`` (B, H, T, D) into the rows from ``row`` of output 0 or 1."""

    plan: Plan
    shape: tuple[int, int, int, int]
    side: int
    row: int


class Batch:
    """Chunks of one kind of plans, with equal batch rows and heads; see ``batches``.

    It holds the tensors that its table points to.
    """

    def __init__(self, jobs: Sequence[Job], table: Tensor) -> None:
        self.plan = plan = jobs[0].plan
        self.aligned = plan.aligned
        self.batch, self.heads, *_ = jobs[0].shape
        lengths = [job.shape[2] for job in jobs]
        self.longest_tokens = max(lengths)
        self.blocks = sum(-(-tokens // plan.rows) for tokens in lengths)
        self.count = len(jobs)
        self._held = [job.plan.stored for job in jobs]
        self.table = table
        self._fitted: tuple[Hashable, Launches, int] | None = None

    def launch(self, a: Tensor, b: Tensor, factor: Tensor | None) -> None:
        """Write all rows. a, b: the outputs ``[B, H, rows, D]`` of jobs of side 0 and 1, of one
        dtype and with equal strides of their channels; factor as ``reconstruct`` takes it."""
        self.plan.many(self, a, b, factor)

    def launch_by(
        self,
        kernel: Any,
        a: Tensor,
        b: Tensor,
        factor: Tensor | None,
        *,
        programs: int,
        loops: bool,
    ) -> None:
        """``launch`` of a kernel for many chunks.

        programs: as many as keep the device busy; with more blocks a program does several.
        loops: whether it is compiled for programs of one block too.
        """
        strides = (*a.stride(), *b.stride()[:3])
        kind = (strides, factor is None, programs)
        if self._fitted is None or self._fitted[0] != kind:
            self._fitted = kind, *self._launches(kernel, a, b, programs=programs, loops=loops)
        _, launches, stretch = self._fitted
        factor = None if factor is None else factor.contiguous()
        with on_device(a.device):
            launches(
                self.table,
                as_bytes(a), *strides[:4],
                as_bytes(b), *strides[4:],
                self.heads, stretch, factor, self.plan.scale,
            )  # fmt: skip

    def _launches(
        self, kernel: Any, a: Tensor, b: Tensor, *, programs: int, loops: bool
    ) -> tuple[Launches, int]:
        """For outputs of these strides, and how many tokens a program does."""
        plan, lines = self.plan, self.batch * self.heads
        stretch = max(1, min(plan.longest, self.blocks * lines // programs)) * plan.rows
        steps = -(-self.longest_tokens // stretch)
        constants = {
            **plan.types,
            **plan.options,
            "ALIGNED": self.aligned,
            "JOB": self.table.shape[1],
            "ALIGN": min(row_alignment(a), row_alignment(b)),  # powers of two
        }
        if loops:
            constants["LOOP"] = steps * plan.rows < self.longest_tokens
        return alike(kernel, (steps, lines, self.count), a.device, **constants), stretch


def batches(groups: Sequence[Sequence[Job]], device: torch.device) -> list[Batch]:
    """A batch for each group of jobs; one copy to the device for all tables."""
    numbers: list[int] = []
    spans = []
    for jobs in groups:
        first = len(numbers)
        for plan, shape, side, row in jobs:
            numbers += (shape[2], row, side)
            numbers += plan.numbers
        spans.append((first, len(numbers)))
        # Kernels are compiled for tables that begin at 16 bytes.
        numbers += [0] * (len(numbers) % 2)
    table = _uploaded(numbers, device)
    return [
        Batch(jobs, table[first:last].view(len(jobs), -1))
        for jobs, (first, last) in zip(groups, spans, strict=True)
    ]


@triton.jit
def pointer(job, COLUMN: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in a column of a job as a pointer to KIND, None where KIND is."""
    found = None
    if KIND is not None:
        found = tl.load(job + COLUMN).to(tl.pointer_type(KIND))
        if ALIGNED:
            found = tl.multiple_of(found, 16)
    return found


@triton.jit
def target_rows(job, a, a_b, a_h, a_t, b, b_b, b_h, b_t):
    """Where the chunk's first row lies, and how far apart batch rows, heads and tokens are."""
    second = tl.load(job + 2) != 0
    out_t = tl.where(second, b_t, a_t)
    out = tl.where(second, b, a) + tl.load(job + 1) * out_t
    return out, tl.where(second, b_b, a_b), tl.where(second, b_h, a_h), out_t


def types_of(tensors: dict[str, Tensor | None]) -> dict[str, Any]:
    """Triton's type of each tensor, E4M3 as bytes; None where there is no such tensor."""
    return {name: None if x is None else _TYPES[as_bytes(x).dtype] for name, x in tensors.items()}


def _number(stored: Tensor | int | None) -> int:
    if isinstance(stored, Tensor):
        return stored.data_ptr()
    return 0 if stored is None else stored


def _uploaded(numbers: list[int], device: torch.device) -> Tensor:
    """On the device without waiting for it."""
    table = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)
