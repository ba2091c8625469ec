"""Few queries on unbiased chunks, keys and values with one step a token: only codes are unpacked.

    s = scale (Delta (H q) . c + q . mu[z])          o = H^T sum p Delta c + sum_z (sum p) mu[z]

Steps and centroids never meet the channels: a step multiplies a column of scores (of values: the
weights), the scores of the centroids are found once a query, and the weights are summed by label.
What is left to do for each code is to make it an FP16 number, exactly.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from videokv.kernels.attend.tiles import padded
from videokv.kernels.attend_packed.call import PackedCall
from videokv.kernels.attend_packed.splits import (
    BLOCK_TOKENS,
    FAST_TOLERANCE,
    LOG2_E,
    column_options,
    columns,
    in_pairs,
    is_hopper,
    joined,
    stretch_of,
)
from videokv.kernels.attend_packed.unbiased_query import LABELS, ready
from videokv.kernels.blocks import code_words, in_words, labels_block, odd_block
from videokv.kernels.gpu import checked_refusal, disagreement, on_device, products, say_once
from videokv.kernels.launches import alike
from videokv.kernels.numbers import exp2_codes
from videokv.kernels.pack_codes import packed_length
from videokv.kernels.reconstruct.parts import Parts

# Of a program. With 64, outputs were off by 7 to 40 times where Triton 3.6 compiled for 9.0; why is
# not known.
MOST_ROWS = 32
_COUNTS = ["tokens", "stretch", "every"]


def serves(call: PackedCall) -> bool:
    """Whether keys and values are of this form."""
    return all(
        side.centres is not None and side.group_size == side.head_dim
        for side in (call.keys, call.values)
    )


class Fast:
    """As ``triton_words.Fast``: programs, tokens of a block, blocks in shared memory, warps, and
    the most registers of a thread."""

    few_rows = 16
    fewest = (1584, 32, 4, 1, 168)
    few = (1056, 32, 4, 1, None)
    many = (264, 64, 3, 4, None)


def split_attention(call: PackedCall, *, fast: bool | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """parts ``[S, rows of all heads, Dv]`` in the coordinates of the values' codes, lses, and the
    weights by label ``[S, rows, 16]``.

    fast: by the kernel in Gluon; None: where it serves.
    """
    batch, heads, queries, _ = call.query.shape
    kv_heads, tokens = call.keys.shape[1:3]
    rows, every, value_dim = call.rows, batch * heads * queries, call.values.head_dim
    fast = _chosen(call) if fast is None else fast
    stretch = stretch_of(tokens, batch * kv_heads)
    if fast:
        stretch = _stretch(tokens, batch * kv_heads, rows)
    splits = triton.cdiv(tokens, stretch)
    device = call.query.device
    sums = torch.empty(splits, every, value_dim, device=device)
    masses = torch.empty(splits, every, LABELS, device=device)
    lses = torch.empty(splits, every, device=device)
    query, means, numbers = ready(call)
    if fast:
        _launch_fast(call, (query, means, numbers), (sums, masses, lses), stretch=stretch)
        return sums, lses, masses
    extra_query, extra_keys = columns(call)
    with on_device(device):
        _kernel[(splits, batch * kv_heads, triton.cdiv(rows, MOST_ROWS))](
            query,
            means,
            numbers,
            every,
            extra_query,
            extra_keys,
            *_tensors(call.keys),
            *_tensors(call.values),
            sums,
            masses,
            lses,
            call.scale * LOG2_E,
            tokens,
            stretch,
            **_options(call.keys, "K"),
            **_options(call.values, "V"),
            ROWS=rows,
            BM=min(MOST_ROWS, padded(rows)),
            BN=BLOCK_TOKENS,
            **column_options(call),
            BY_STEPS=call.by_steps,
            BC=means.shape[1],
            PRECISION=products(query.dtype, device),
            num_warps=4,
            num_stages=2,
            enable_fp_fusion=True,
        )
    return sums, lses, masses


def _tuning(rows: int) -> tuple[int, int, int, int, int | None]:
    if rows <= Fast.few_rows:
        return Fast.fewest if rows <= 8 else Fast.few
    return Fast.many


def _stretch(tokens: int, heads: int, rows: int) -> int:
    programs, block, *_ = _tuning(rows)
    splits = max(1, programs // heads)
    return -(-tokens // splits // block) * block


def _fast_kernel(rows: int) -> Any:
    if rows <= Fast.few_rows:
        from videokv.kernels.attend_packed import gluon_unbiased

        return gluon_unbiased.kernel
    from videokv.kernels.attend_packed import gluon_unbiased_wide

    return gluon_unbiased_wide.kernel


def _launch_fast(
    call: PackedCall, asked: Sequence[Tensor], found: Sequence[Tensor], *, stretch: int
) -> None:
    query, means, numbers = asked
    keys, values = call.keys, call.values
    assert keys.centres is not None and values.centres is not None
    k_codes, *k_rest = _tensors(keys)
    v_codes, *v_rest = _tensors(values)
    splits, heads = found[0].shape[0], keys.shape[0] * keys.shape[1]
    _, block, stages, warps, registers = _tuning(call.rows)
    few = call.rows <= Fast.few_rows
    run = alike(
        _fast_kernel(call.rows),
        (splits, heads),
        call.query.device,
        K_BITS=keys.bits,
        K_LABEL=keys.centres.label_bits,
        V_LABEL=values.centres.label_bits,
        BY_STEPS=call.by_steps,
        ROWS=call.rows,
        BN=block,
        STAGES=stages,
        num_warps=warps,
        maxnreg=registers,
    )
    with on_device(call.query.device):
        run(
            query,
            means,
            numbers,
            numbers.shape[1],
            k_codes.view(torch.int64) if keys.bits == 2 else k_codes,
            *k_rest,
            v_codes.view(torch.int32 if few else torch.int64),
            *v_rest,
            *found,
            call.scale * LOG2_E,
            keys.tokens,
            stretch,
        )


# Of keys: the values beside them, and by which kernel queries of a kind read both.
_choices: weakref.WeakKeyDictionary[Parts, tuple[weakref.ref[Parts], dict[Hashable, bool]]] = (
    weakref.WeakKeyDictionary()
)


def _chosen(call: PackedCall) -> bool:
    """``_is_fast``, found out once for a chunk (not in the capture of a graph)."""
    kept = _choices.get(call.keys)
    if kept is None or kept[0]() is not call.values:
        kept = _choices[call.keys] = (weakref.ref(call.values), {})
    no_columns = call.extra_query is None
    key = (call.query.dtype, call.rows, call.by_steps, no_columns)
    if key not in kept[1]:
        found = _is_fast(call)
        if call.query.is_cuda and torch.cuda.is_current_stream_capturing():
            return found
        kept[1][key] = found
    return kept[1][key]


def _is_fast(call: PackedCall) -> bool:
    """Whether the kernel in Gluon takes this call, and has shown that it is right."""
    rows = call.rows
    fits = (
        in_pairs(call.query)
        and call.extra_query is None
        and (rows <= Fast.few_rows or is_hopper(call.query.device))
        and call.keys.tokens >= _tuning(rows)[1]
        and call.keys.bits in (2, 3)
        and call.values.bits == 2
        and all(map(_fits_fast, (call.keys, call.values)))
    )
    if not fits:
        return False
    config = (call.query.dtype, rows, call.by_steps)
    refusal = checked_refusal(
        "attend_packed in Gluon",
        (*config, call.keys.config(), call.values.config()),
        call.query.device,
        lambda: _fast_disagreement(call),
    )
    if refusal is not None:
        say_once(f"packed chunks are read by the slower kernel: {refusal}")
    return refusal is None


def _fits_fast(parts: Parts) -> bool:
    assert parts.centres is not None
    aligned = parts.codes.is_contiguous() and parts.codes.data_ptr() % 16 == 0
    return aligned and parts.head_dim == 128


def _fast_disagreement(call: PackedCall) -> str | None:
    """What is wrong with the kernel in Gluon; the other one is checked where calls are refused."""
    got, want = (split_attention(call, fast=fast) for fast in (True, False))
    tolerance = FAST_TOLERANCE[call.query.dtype]
    for what, number in (("the output", 0), ("the weights by label", 2)):
        pair = [joined(each[number], each[1])[0] for each in (got, want)]
        reason = disagreement(pair[0], pair[1], tolerance=tolerance, what=what)
        if reason is not None:
            return reason
    sums = [each[1].logsumexp(0) for each in (got, want)]
    return disagreement(sums[0], sums[1], tolerance=tolerance, what="the log-sum-exp")


def _tensors(parts: Parts) -> list[Tensor]:
    assert parts.centres is not None and parts.scale is not None
    return [
        code_words(parts),
        parts.steps.contiguous(),
        parts.scale.contiguous(),
        parts.centres.ids.contiguous(),
    ]


def _options(parts: Parts, prefix: str) -> dict:
    assert parts.centres is not None
    constants = {
        "D": parts.head_dim,
        "BD": padded(parts.head_dim),
        "BITS": parts.bits,
        "BYTES": packed_length(parts.head_dim, bits=parts.bits),
        "WORDS": in_words(parts),
        "LABEL": parts.centres.label_bits,
    }
    return {f"{prefix}_{name}": value for name, value in constants.items()}


@triton.jit(do_not_specialize=_COUNTS)
def _kernel(
    q, m, numbers, every, e, x,
    k_codes, k_steps, k_scale, k_ids, v_codes, v_steps, v_scale, v_ids,
    sums, masses, lses, scale, tokens, stretch,
    K_D: tl.constexpr, K_BD: tl.constexpr, K_BITS: tl.constexpr, K_BYTES: tl.constexpr,
    K_WORDS: tl.constexpr, K_LABEL: tl.constexpr,
    V_D: tl.constexpr, V_BD: tl.constexpr, V_BITS: tl.constexpr, V_BYTES: tl.constexpr,
    V_WORDS: tl.constexpr, V_LABEL: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    F: tl.constexpr, BF: tl.constexpr, COLUMN_TYPE: tl.constexpr, BY_STEPS: tl.constexpr,
    BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) * BM + tl.arange(0, BM)
    asked = row < ROWS
    line = head * ROWS + row
    channel = tl.arange(0, K_BD)
    place = line[:, None] * K_D + channel[None, :]
    block = tl.load(q + place, mask=asked[:, None] & (channel < K_D)[None, :], other=0.0)
    label = tl.arange(0, BC)
    means = tl.load(m + line[:, None] * BC + label[None, :], mask=asked[:, None], other=0.0)
    # Everything in units of log2; codes are doubled.
    largest = tl.load(k_scale + head)
    weight = tl.load(numbers + line, mask=asked, other=0.0) * scale
    weight = weight * (largest * 0.5)
    mean_weight = tl.load(numbers + every + line, mask=asked, other=0.0) * scale
    bias = tl.load(numbers + 2 * every + line, mask=asked, other=0.0) * (scale * largest * largest)
    column = tl.arange(0, 16)
    extra = block
    if BF > 0:
        column = tl.arange(0, BF)
        e_place = line[:, None] * F + column[None, :]
        some = asked[:, None] & (column < F)[None, :]
        extra = tl.load(e + e_place, mask=some, other=0.0).to(COLUMN_TYPE)
    # Wider than the labels: a square product would be laid out over the rows, which are few.
    wide: tl.constexpr = 2 * BM
    v_label = tl.arange(0, wide)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, V_BD], tl.float32)
    mass = tl.zeros([BM, wide], tl.float32)
    begin = tl.program_id(0) * stretch
    for first in range(begin, tl.minimum(begin + stretch, tokens), BN):
        token = first + tl.arange(0, BN)
        live = token < tokens
        at = head * tokens + token
        keys = odd_block(k_codes, at, live, K_BYTES, K_BITS, K_BD, K_WORDS)
        step = exp2_codes(tl.load(k_steps + at, mask=live, other=255))
        scores = tl.dot(block, tl.trans(keys.to(block.dtype)), input_precision=PRECISION)
        scores = scores * weight[:, None] * step[None, :]
        if BY_STEPS:
            scores += bias[:, None] * (step * step)[None, :]
        own = labels_block(k_ids, head, token, live, tokens, K_LABEL)
        own = ((label % 16)[:, None] == own[None, :]).to(block.dtype)
        scores += tl.dot(means, own, input_precision=PRECISION) * mean_weight[:, None]
        if BF > 0:
            x_place = at[None, :] * F + column[:, None]
            held = live[None, :] & (column < F)[:, None]
            weights = tl.load(x + x_place, mask=held, other=0.0).to(COLUMN_TYPE)
            scores += tl.dot(extra, weights, input_precision=PRECISION) * scale
        scores = tl.where(live[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shares = tl.math.exp2(scores - higher[:, None])
        shrink = tl.math.exp2(peak - higher)
        total = total * shrink + tl.sum(shares, 1)
        values = odd_block(v_codes, at, live, V_BYTES, V_BITS, V_BD, V_WORDS)
        step = exp2_codes(tl.load(v_steps + at, mask=live, other=255))
        acc = tl.dot(
            (shares * step[None, :]).to(block.dtype), values.to(block.dtype),
            acc=acc * shrink[:, None], input_precision=PRECISION,
        )  # fmt: skip
        own = labels_block(v_ids, head, token, live, tokens, V_LABEL)
        own = (own[:, None] == v_label[None, :]).to(block.dtype)
        mass = tl.dot(
            shares.to(block.dtype), own, acc=mass * shrink[:, None], input_precision=PRECISION
        )
        peak = higher
    split = (tl.program_id(0) * tl.num_programs(1) + head) * ROWS + row
    tl.store(lses + split, (peak + tl.log2(total)) * 0.6931471805599453, mask=asked)
    share = 1.0 / total
    place = masses + split[:, None] * 16 + v_label[None, :]
    tl.store(place, mass * share[:, None], mask=asked[:, None] & (v_label < 16)[None, :])
    acc = acc * (share * (tl.load(v_scale + head) * 0.5))[:, None]
    channel = tl.arange(0, V_BD)
    target = sums + split[:, None] * V_D + channel[None, :]
    tl.store(target, acc, mask=asked[:, None] & (channel < V_D)[None, :])
