"""Attention by the Gluon kernel for Hopper: what it takes, and its launch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from videokv.kernels.attend.call import Call, Rows
from videokv.kernels.attend.gluon_kernel import forward, merge
from videokv.kernels.gpu import on_device
from videokv.kernels.grids import cdiv
from videokv.kernels.launches import alike
from videokv.tensors import E4M3

_LOG2_E = 1.4426950408889634
SIZE = 128  # of heads and of values
COLUMNS = 16
GROUPS = 3  # warpgroups that multiply
QUERIES = 64  # of each
KEYS = 128  # of a block
STAGES = 2  # blocks of keys, and of values, in shared memory
_WARPS = 4 * GROUPS + 4  # the others: two that load and two that fill up their warpgroup
_MULTIPLIER_REGISTERS, _LOADER_REGISTERS, _ALL_REGISTERS = 160, 24, 65536
_SMALLEST_SHARE = 4  # blocks of keys


def refusal(call: Call) -> str | None:
    """Why this kernel does not serve a call, by what it looks like (not by its device), or None."""
    query, past, current = call.query, call.past, call.current
    if query.dtype != torch.bfloat16:
        return f"queries must be BF16, got {query.dtype}"
    if (query.shape[3], call.value_dim) != (SIZE, SIZE):
        return f"head and value sizes must be {SIZE}, got {query.shape[3]} and {call.value_dim}"
    if call.columns > COLUMNS:
        return f"up to {COLUMNS} columns of a correction, got {call.columns}"
    if call.causal:
        return "causal attention is not served"
    if not call.scale > 0:
        return f"the scale must be positive, got {call.scale}"
    for name, tensor in _named(past, current):
        if "values" in name and tensor.dtype == E4M3:
            if not _movable(tensor.mT):
                return f"{name} in E4M3 must lie with tokens side by side, whole 16 bytes apart"
        elif tensor.dtype != torch.bfloat16:
            return f"{name} must be BF16, got {tensor.dtype}"
        elif not _movable(tensor):
            return f"{name} must lie with channels side by side, whole 16 bytes apart"
    if past is not None and past.values.dtype == E4M3 and not _in_fours(past.keys):
        return "beside values in E4M3, keys must lie in whole fours of a dense batch"
    return None


def _named(past: Rows | None, current: Rows | None) -> list[tuple[str, Tensor]]:
    pairs = [("cached", past), ("current", current)]
    return [
        (f"{name} {side}", getattr(rows, side))
        for name, rows in pairs
        if rows is not None
        for side in ("keys", "values")
    ]


def _movable(x: Tensor) -> bool:
    """Whether the copy engine takes these rows: addresses and steps of whole 16 bytes, none 0."""
    steps = [s for s, n in zip(x.stride()[:3], x.shape[:3], strict=True) if n > 1]
    odd = any(step == 0 or step * x.element_size() % 16 for step in steps)
    return not odd and x.data_ptr() % 16 == 0 and x.stride(3) == 1


def _in_fours(keys: Tensor) -> bool:
    """Whether rows can be read four at a time: heads evenly spaced over the batch, and memory
    behind the last row up to a whole four."""
    batch, heads, tokens, size = keys.shape
    if batch > 1 and heads > 1 and keys.stride(0) != heads * keys.stride(1):
        return False
    over = -tokens % 4
    last = keys.storage_offset() + sum(
        (n - 1) * s for n, s in zip(keys.shape, keys.stride(), strict=True)
    )
    end = last + over * keys.stride(2) + 1
    return end * keys.element_size() <= keys.untyped_storage().nbytes()


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """See the package; for calls that ``refusal`` finds no reason against.

    Values in BF16: rows whose weights may not have fitted into float32 have a log-sum-exp that is
    not finite, and no output.
    """
    query, past, current = call.query, call.past, call.current
    if not _movable(query):
        query = query.contiguous()
    batch, heads, rows, _ = query.shape
    extra_query, extra_keys = _columns(call)
    narrow = past is not None and past.values.dtype == E4M3
    held = past if past is not None else current
    assert held is not None
    past_tokens = 0 if past is None else past.keys.shape[2]
    current_tokens = 0 if current is None else current.keys.shape[2]
    key_blocks = cdiv(past_tokens, KEYS) + cdiv(current_tokens, KEYS)
    row_blocks = cdiv(rows, GROUPS * QUERIES)
    blocks = row_blocks * batch * heads
    programs = _programs(query.device)
    first_block = blocks // programs * programs
    rest = (blocks - first_block) * key_blocks
    sharers = min(programs, max(1, rest // _SMALLEST_SHARE))
    out = query.new_empty(batch, heads, rows, SIZE)
    lse = torch.empty(batch, heads, rows, device=query.device, dtype=torch.float32)
    # The first and the last piece of a share may be parts of a block of queries.
    pieces = 2 * sharers if rest else 1
    part = torch.empty(pieces, GROUPS * QUERIES, SIZE, device=query.device, dtype=torch.float32)
    part_lse = torch.empty(pieces, GROUPS * QUERIES, device=query.device, dtype=torch.float32)
    run = alike(
        forward, (programs,), query.device,
        GROUPS=GROUPS, QUERIES=QUERIES, KEYS=KEYS, SIZE=SIZE,
        HAS_PAST=past is not None, HAS_CURRENT=current is not None, NARROW=narrow,
        COLUMNS=0 if extra_query is None else COLUMNS, KEY_STAGES=STAGES, VALUE_STAGES=STAGES,
        REGISTERS=_MULTIPLIER_REGISTERS, LOADER_REGISTERS=_LOADER_REGISTERS,
        num_warps=4, maxnreg=_ALL_REGISTERS // (_WARPS * 32) // 8 * 8,
    )  # fmt: skip
    with on_device(query.device):
        run(
            _described(query, [1, 1, QUERIES, SIZE]),
            None if extra_query is None else _described(extra_query, [1, 1, QUERIES, COLUMNS]),
            *_past_descriptors(past, extra_keys, narrow=narrow),
            None if current is None else _blocks(current.keys),
            None if current is None else _blocks(current.values),
            out, lse, part, part_lse,
            None if past is None or past.value_scale is None else past.value_scale.contiguous(),
            call.scale * _LOG2_E, heads, heads // held.keys.shape[1], rows, row_blocks, blocks,
            sharers, past_tokens, current_tokens,
        )  # fmt: skip
        if rest:
            add_up = alike(
                merge, (blocks - first_block, 2 * GROUPS), query.device,
                QUERIES=GROUPS * QUERIES, SIZE=SIZE, BM=QUERIES // 2, num_warps=4,
            )  # fmt: skip
            add_up(
                out, lse, part, part_lse, rows, row_blocks, first_block, rest, key_blocks, sharers
            )
    return out, lse


def _past_descriptors(
    past: Rows | None, extra_keys: Tensor | None, *, narrow: bool
) -> list[TensorDescriptor | None]:
    """Of cached keys, their columns and values."""
    if past is None:
        return [None, None, None]
    rows_of = _fours if narrow else _blocks
    columns = None if extra_keys is None else rows_of(extra_keys, COLUMNS)
    turned = [1, 1, SIZE, KEYS]
    values = _described(past.values.mT, turned) if narrow else _blocks(past.values, SIZE)
    return [rows_of(past.keys, SIZE), columns, values]


@functools.lru_cache(maxsize=16)
def _programs(device: torch.device) -> int:
    """One a multiprocessor: a program takes most of its shared memory."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _columns(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Columns of queries and of the past's keys in BF16, zero-padded to what one product takes."""
    if call.extra_query is None or call.extra_keys is None:
        return None, None
    return _padded(call.extra_query), _padded(call.extra_keys)


def _padded(x: Tensor) -> Tensor:
    if x.shape[3] < COLUMNS:
        x = torch.nn.functional.pad(x, (0, COLUMNS - x.shape[3]))
    x = x.to(torch.bfloat16)
    if _movable(x) and _in_fours(x):
        return x
    # Where nothing is padded, a copy keeps the order of strides that it came with.
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % 4)).contiguous()


_LAYOUTS = {
    (item_bytes, rank, width): gl.NVMMASharedLayout(width, 8 * item_bytes, rank)
    for item_bytes in (1, 2)
    for rank in (4, 5)
    for width in (32, 128)
}


def _described(x: Tensor, block: list[int]) -> TensorDescriptor:
    """A descriptor of ``x``. Steps of dimensions of one element may be anything; the copy engine
    wants whole 16 bytes."""
    unit = 16 // x.element_size()
    steps = [
        s if n > 1 else -(-s // unit) * unit or unit
        for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True)
    ]
    width = min(128, block[-1] * x.element_size())
    layout = _LAYOUTS[x.element_size(), len(block), width]
    return TensorDescriptor(x, list(x.shape), [*steps, 1], block, layout)


def _blocks(x: Tensor, size: int = SIZE) -> TensorDescriptor:
    """Of rows as they lie, a block of keys at a time."""
    return _described(x, [1, 1, KEYS, size])


def _fours(x: Tensor, size: int) -> TensorDescriptor:
    """Of rows such that a block comes as the first two of every four rows, then the last two."""
    batch, heads, tokens, _ = x.shape
    head, row = x.stride(1), x.stride(2)
    if heads == 1:
        head = x.stride(0)
    shape = [batch * heads, 2, -(-tokens // 4), 2, size]
    view = x.as_strided(shape, [head, 2 * row, 4 * row, row, 1], x.storage_offset())
    return _described(view, [1, 2, KEYS // 4, 2, size])
