"""The Triton kernel: a program attends to one stretch of tokens of one KV head.

All query rows of the KV head (its query heads times the queries) are one block, so each code is
read once. Keys and values are unpacked into registers, rounded to the query's dtype and multiplied.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.attend.tiles import padded
from videokv.kernels.attend_packed import triton_unbiased, triton_words
from videokv.kernels.attend_packed.call import Current, PackedCall
from videokv.kernels.attend_packed.splits import (
    BLOCK_TOKENS,
    LOG2_E,
    column_options,
    columns,
    stretch_of,
)
from videokv.kernels.attend_packed.triton_merge import merge
from videokv.kernels.blocks import (
    ZERO_CODES,
    as_bytes,
    centres_block,
    centroids_block,
    dequantize_block,
    reach_of,
    step_kind,
    whole_groups,
)
from videokv.kernels.gpu import on_device, products
from videokv.kernels.pack_codes import packed_length
from videokv.kernels.reconstruct.parts import Parts

Part = tuple[Tensor, Tensor]
_COUNTS = ["tokens", "stretch", "k_groups", "v_groups", "k_centroids", "v_centroids"]


def attend_packed(call: PackedCall) -> Part:
    """See the package."""
    return _merged(call, None, torch.float32)


def attend_all(calls: Sequence[PackedCall], other: Part | Current) -> Part:
    """See the package; calls that agree are one launch, and the last merge takes ``other`` in."""
    dtype = calls[0].query.dtype if isinstance(other, Current) else other[0].dtype
    launches = _launches(calls)
    for number, launch in enumerate(launches):
        kind = dtype if number == len(launches) - 1 else torch.float32
        if isinstance(launch, PackedCall):
            other = _merged(launch, other, kind)
        else:
            parts, lses = triton_words.split_attention(launch)
            rotation = launch[0].values.rotation
            query = launch[0].query
            other = merge(parts, lses, query, other=other, rotation=rotation, dtype=kind)
    assert not isinstance(other, Current)
    return other


def capturable(calls: Sequence[PackedCall]) -> bool:
    """See the package."""
    words = [
        launch if isinstance(launch, list) else [launch]
        for launch in _launches(calls)
        if isinstance(launch, list) or _kind(launch) is not None
    ]
    return all(map(triton_words.has_table, words))


def _launches(calls: Sequence[PackedCall]) -> list[PackedCall | list[PackedCall]]:
    """Calls on their own, and lists of calls for one launch."""
    found: list[PackedCall | list[PackedCall]] = []
    together: list[PackedCall] = []
    wanted: Hashable = None
    for call in calls:
        kind = _kind(call)
        if kind is not None and (not together or kind == wanted):
            wanted = kind
            together.append(call)
        else:
            found.append(call)
    return [together, *found] if together else found


# Keys, and what was found out about them beside their values; those never change either.
_kinds: weakref.WeakKeyDictionary[Parts, tuple[weakref.ref[Parts], Hashable]] = (
    weakref.WeakKeyDictionary()
)


def _kind(call: PackedCall) -> Hashable:
    """What calls of one launch have in common; None where the kernel of words does not serve."""
    if call.extra_query is not None:
        return None
    kept = _kinds.get(call.keys)
    if kept is None or kept[0]() is not call.values:
        fits = triton_words.serves(call) and triton_words.contiguous(call)
        sides = triton_words.launch_config(call) if fits else None
        kept = _kinds[call.keys] = (weakref.ref(call.values), sides)
    return None if kept[1] is None else (kept[1], call.by_steps, call.factors is None)


def _merged(call: PackedCall, other: Part | Current | None, dtype: torch.dtype) -> Part:
    """One chunk by itself, merged with what was found before."""
    labels = None
    if _kind(call) is not None:
        parts, lses = triton_words.split_attention([call])
        rotation = call.values.rotation
    elif triton_unbiased.serves(call):
        parts, lses, masses = triton_unbiased.split_attention(call)
        assert call.values.centres is not None
        labels = masses, call.values.centres
        rotation = call.values.rotation
    else:
        parts, lses = _split_attention(call.with_columns())
        rotation = call.values.rotation
    return merge(
        parts, lses, call.query, other=other, rotation=rotation, labels=labels, dtype=dtype
    )


def _split_attention(call: PackedCall) -> tuple[Tensor, Tensor]:
    """parts ``[S, rows of all heads, Dv]``, in the coordinates of the values' codes, and lses."""
    batch, heads, queries, _ = call.query.shape
    kv_heads, tokens = call.keys.shape[1:3]
    query = call.query
    if call.keys.rotation is not None:
        query = call.keys.rotation.apply(query.float()).to(query.dtype)
    rows, value_dim = call.rows, call.values.head_dim
    extra_query, extra_keys = columns(call)
    stretch = stretch_of(tokens, batch * kv_heads)
    splits = triton.cdiv(tokens, stretch)
    parts = torch.empty(splits, batch * heads * queries, value_dim, device=query.device)
    lses = torch.empty(splits, batch * heads * queries, device=query.device)
    k, v = _side(call.keys), _side(call.values)
    with on_device(query.device):
        _kernel[(splits, batch * kv_heads)](
            query.contiguous(),
            extra_query,
            extra_keys,
            *k.tensors,
            *v.tensors,
            parts,
            lses,
            call.scale * LOG2_E,
            tokens,
            stretch,
            **k.options("K"),
            **v.options("V"),
            ROWS=rows,
            BM=padded(rows),
            BN=BLOCK_TOKENS,
            **column_options(call),
            PRECISION=products(query.dtype, query.device),
            num_warps=4,
            num_stages=2,
            enable_fp_fusion=True,
        )
    return parts, lses


class _side:
    """Arguments of keys or values."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        ids, table = _centroids(parts)
        self.tensors = [
            parts.codes.contiguous(),
            as_bytes(parts.steps.contiguous()),
            None if parts.scale is None else parts.scale.contiguous(),
            None if parts.zeros is None else parts.zeros.contiguous(),
            ids,
            table,
            1 if table is None else table.shape[2],
            parts.steps.shape[2],
        ]

    def options(self, prefix: str) -> dict:
        """Constants of the kernel."""
        parts = self._parts
        block = padded(parts.head_dim)
        constants = {
            "D": parts.head_dim,
            "BD": block,
            "BITS": parts.bits,
            "REACH": reach_of(parts),
            "BYTES": packed_length(parts.head_dim, bits=parts.bits),
            "GROUP": parts.group_size,
            "TOKEN": parts.axis == "token",
            "WHOLE": whole_groups(parts, block),
            "ZERO": ZERO_CODES[parts.zero],
            "STEP": step_kind(parts),
            "LABEL": 0 if parts.centres is None else parts.centres.label_bits,
        }
        return {f"{prefix}_{name}": value for name, value in constants.items()}


def _centroids(parts: Parts) -> tuple[Tensor | None, Tensor | None]:
    """Labels, and a table in the coordinates in which the codes are."""
    if parts.centres is not None:
        assert parts.rotation is not None
        table = parts.rotation.apply(parts.centres.real_table())
        return parts.centres.ids.contiguous(), table
    if not parts.stages:
        return None, None
    return parts.stages[0].ids.contiguous(), parts.stages[0].table.contiguous()


@triton.jit(do_not_specialize=_COUNTS)
def _kernel(
    q, e, x,
    k_codes, k_steps, k_scale, k_zeros, k_ids, k_table, k_centroids, k_groups,
    v_codes, v_steps, v_scale, v_zeros, v_ids, v_table, v_centroids, v_groups,
    parts, lses, scale, tokens, stretch,
    K_D: tl.constexpr, K_BD: tl.constexpr, K_BITS: tl.constexpr, K_REACH: tl.constexpr,
    K_BYTES: tl.constexpr, K_GROUP: tl.constexpr, K_TOKEN: tl.constexpr, K_WHOLE: tl.constexpr,
    K_ZERO: tl.constexpr, K_STEP: tl.constexpr, K_LABEL: tl.constexpr,
    V_D: tl.constexpr, V_BD: tl.constexpr, V_BITS: tl.constexpr, V_REACH: tl.constexpr,
    V_BYTES: tl.constexpr, V_GROUP: tl.constexpr, V_TOKEN: tl.constexpr, V_WHOLE: tl.constexpr,
    V_ZERO: tl.constexpr, V_STEP: tl.constexpr, V_LABEL: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    F: tl.constexpr, BF: tl.constexpr, COLUMN_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BM)
    asked = row < ROWS
    k_channel = tl.arange(0, K_BD)
    v_channel = tl.arange(0, V_BD)
    place = (head * ROWS + row)[:, None] * K_D + k_channel[None, :]
    block = tl.load(q + place, mask=asked[:, None] & (k_channel < K_D)[None, :], other=0.0)
    column = tl.arange(0, 16)
    extra = block
    if BF > 0:
        column = tl.arange(0, BF)
        e_place = (head * ROWS + row)[:, None] * F + column[None, :]
        some = asked[:, None] & (column < F)[None, :]
        extra = tl.load(e + e_place, mask=some, other=0.0).to(COLUMN_TYPE)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, V_BD], tl.float32)
    begin = tl.program_id(0) * stretch
    for first in range(begin, tl.minimum(begin + stretch, tokens), BN):
        token = first + tl.arange(0, BN)
        live = token < tokens
        line = head * tokens + token
        keys = dequantize_block(
            k_codes, k_steps, k_scale, k_zeros, head, token, live, tokens, k_groups,
            K_D, K_BD, BN, K_BITS, K_REACH, K_BYTES, K_GROUP, K_TOKEN, K_WHOLE, K_ZERO, K_STEP,
        )  # fmt: skip
        if K_LABEL > 0:
            keys += centres_block(
                k_ids, k_table, k_centroids, head, token, live, tokens, k_channel, K_D, K_LABEL
            )
        elif k_table is not None:
            inside = live[:, None] & (k_channel < K_D)[None, :]
            keys += centroids_block(
                k_ids, k_table, k_centroids, head, line, live, inside, k_channel, K_D
            )
        scores = tl.dot(block, tl.trans(keys.to(block.dtype)), input_precision=PRECISION)
        if BF > 0:
            x_place = line[None, :] * F + column[:, None]
            held = live[None, :] & (column < F)[:, None]
            weights = tl.load(x + x_place, mask=held, other=0.0).to(COLUMN_TYPE)
            scores = tl.dot(extra, weights, acc=scores, input_precision=PRECISION)
        scores = tl.where(live[None, :], scores * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shares = tl.math.exp2(scores - higher[:, None])
        shrink = tl.math.exp2(peak - higher)
        total = total * shrink + tl.sum(shares, 1)
        values = dequantize_block(
            v_codes, v_steps, v_scale, v_zeros, head, token, live, tokens, v_groups,
            V_D, V_BD, BN, V_BITS, V_REACH, V_BYTES, V_GROUP, V_TOKEN, V_WHOLE, V_ZERO, V_STEP,
        )  # fmt: skip
        if V_LABEL > 0:
            values += centres_block(
                v_ids, v_table, v_centroids, head, token, live, tokens, v_channel, V_D, V_LABEL
            )
        elif v_table is not None:
            inside = live[:, None] & (v_channel < V_D)[None, :]
            values += centroids_block(
                v_ids, v_table, v_centroids, head, line, live, inside, v_channel, V_D
            )
        acc = acc * shrink[:, None]
        acc = tl.dot(
            shares.to(block.dtype), values.to(block.dtype), acc=acc, input_precision=PRECISION
        )
        peak = higher
    split = (tl.program_id(0) * tl.num_programs(1) + head) * ROWS + row
    tl.store(lses + split, (peak + tl.log2(total)) * 0.6931471805599453, mask=asked)
    target = parts + split[:, None] * V_D + v_channel[None, :]
    tl.store(target, acc / total[:, None], mask=asked[:, None] & (v_channel < V_D)[None, :])
