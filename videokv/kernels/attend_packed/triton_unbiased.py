"""Few queries on unbiased chunks, keys and values with one step a token: only codes are unpacked.

    s = scale (Delta (H q) . c + q . mu[z])          o = H^T sum p Delta c + sum_z (sum p) mu[z]

Steps and centroids never meet the channels: a step multiplies a column of scores (of values: the
weights), the scores of the centroids are found once a query, and the weights are summed by label.
What is left to do for each code is to make it an FP16 number, exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from videokv.kernels.attend.tiles import padded
from videokv.kernels.attend_packed.call import PackedCall
from videokv.kernels.attend_packed.splits import (
    BLOCK_TOKENS,
    LOG2_E,
    column_options,
    columns,
    stretch_of,
)
from videokv.kernels.blocks import code_words, in_words, labels_block, odd_block
from videokv.kernels.gpu import on_device, products
from videokv.kernels.numbers import exp2_codes
from videokv.kernels.pack_codes import packed_length
from videokv.kernels.reconstruct.parts import Parts

LABELS = 16  # of a padded table, zero among them
_COUNTS = ["tokens", "stretch"]


def serves(call: PackedCall) -> bool:
    """Whether keys and values are of this form."""
    return all(
        side.centres is not None and side.group_size == side.head_dim
        for side in (call.keys, call.values)
    )


def attend_packed(call: PackedCall) -> tuple[Tensor, Tensor]:
    """See the package."""
    batch, heads, queries, _ = call.query.shape
    kv_heads, tokens = call.keys.shape[1:3]
    rows, value_dim = call.rows, call.values.head_dim
    stretch = stretch_of(tokens, batch * kv_heads)
    splits = triton.cdiv(tokens, stretch)
    device = call.query.device
    sums = torch.empty(splits, batch * kv_heads, rows, value_dim, device=device)
    masses = torch.empty(splits, batch * kv_heads, rows, LABELS, device=device)
    lses = torch.empty(splits, batch * kv_heads, rows, device=device)
    extra_query, extra_keys = columns(call)
    query, query_scale = _operand(_rotated(call), call)
    means, means_scale = _mean_scores(call)
    with on_device(device):
        _kernel[(splits, batch * kv_heads)](
            query,
            query_scale,
            means,
            means_scale,
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
            BM=padded(rows),
            BN=BLOCK_TOKENS,
            **column_options(call),
            BC=means.shape[3],
            PRECISION=products(query.dtype, device),
            num_warps=4,
            num_stages=2,
            enable_fp_fusion=True,
        )
    lse = lses.logsumexp(0)
    shares = (lses - lse).exp().unsqueeze(-1)
    out = _values((sums * shares).sum(0), (masses * shares).sum(0), call)
    rows = batch * heads * queries
    return out.reshape(1, rows, value_dim), lse.reshape(1, rows)


def _rotated(call: PackedCall) -> Tensor:
    assert call.keys.rotation is not None
    return call.keys.rotation.apply(call.query.float())


def _values(sums: Tensor, masses: Tensor, call: PackedCall) -> Tensor:
    """Out of the codes' coordinates, with what the centroids add: ``[B, Hkv, rows, D]``."""
    centres, rotation = call.values.centres, call.values.rotation
    assert centres is not None and rotation is not None
    table = centres.real_table()
    own = masses.unflatten(0, table.shape[:2])[..., 1 : 1 + table.shape[2]]
    return rotation.invert(sums).unflatten(0, table.shape[:2]) + own @ table


def _operand(query: Tensor, call: PackedCall) -> tuple[Tensor, Tensor]:
    """The rotated query as it is multiplied, FP16 for 16-bit queries, and its scale a row."""
    if call.query.dtype == torch.float32:
        return query.contiguous(), torch.ones_like(query[..., 0]).contiguous()
    peak = query.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return (query / peak).half().contiguous(), peak.squeeze(-1).contiguous()


def _mean_scores(call: PackedCall) -> tuple[Tensor, Tensor]:
    """q . mu of every label ``[B, Hkv, rows, 16]``, and a scale a row; as two FP16 halves side by
    side (2^-22) for 16-bit queries."""
    centres = call.keys.centres
    assert centres is not None
    table = centres.real_table()
    query = call.query.float().reshape(*table.shape[:2], -1, table.shape[3])
    scores = pad(query @ table.mT, (1, LABELS - 1 - table.shape[2]))
    if call.query.dtype == torch.float32:
        return scores.contiguous(), torch.ones_like(scores[..., 0]).contiguous()
    peak = scores.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    ratio = scores / peak
    high = ratio.half()
    low = (ratio - high.float()).half()
    return torch.cat([high, low], -1).contiguous(), peak.squeeze(-1).contiguous()


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
    q, q_scale, m, m_scale, e, x,
    k_codes, k_steps, k_scale, k_ids, v_codes, v_steps, v_scale, v_ids,
    sums, masses, lses, scale, tokens, stretch,
    K_D: tl.constexpr, K_BD: tl.constexpr, K_BITS: tl.constexpr, K_BYTES: tl.constexpr,
    K_WORDS: tl.constexpr, K_LABEL: tl.constexpr,
    V_D: tl.constexpr, V_BD: tl.constexpr, V_BITS: tl.constexpr, V_BYTES: tl.constexpr,
    V_WORDS: tl.constexpr, V_LABEL: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    F: tl.constexpr, BF: tl.constexpr, COLUMN_TYPE: tl.constexpr, BC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BM)
    asked = row < ROWS
    line = head * ROWS + row
    channel = tl.arange(0, K_BD)
    place = line[:, None] * K_D + channel[None, :]
    block = tl.load(q + place, mask=asked[:, None] & (channel < K_D)[None, :], other=0.0)
    label = tl.arange(0, BC)
    means = tl.load(m + line[:, None] * BC + label[None, :], mask=asked[:, None], other=0.0)
    # Everything in units of log2; codes are doubled.
    weight = tl.load(q_scale + line, mask=asked, other=0.0) * scale
    weight = weight * (tl.load(k_scale + head) * 0.5)
    mean_weight = tl.load(m_scale + line, mask=asked, other=0.0) * scale
    column = tl.arange(0, 16)
    extra = block
    if BF > 0:
        column = tl.arange(0, BF)
        e_place = line[:, None] * F + column[None, :]
        some = asked[:, None] & (column < F)[None, :]
        extra = tl.load(e + e_place, mask=some, other=0.0).to(COLUMN_TYPE)
    # Wider than the labels: a square product would be laid out over the rows, which are few.
    wide: tl.constexpr = 2 * BM if BM < 64 else 32
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
