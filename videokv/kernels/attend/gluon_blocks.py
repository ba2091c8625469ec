"""Pieces of the Gluon kernel: products of a block of keys and values, and the softmax between them.

An E4M3 product takes the weights of four keys side by side from one thread, while a score product
leaves every thread two keys and two keys eight further on. Instead of moving weights between
threads, rows of cached keys lie in shared memory in such an order that each thread's weights are of
four neighbouring keys (``hopper._fours``).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

# Newer releases of Triton have another name for it.
PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

_FOUR_E4M3 = gl.constexpr("""
{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}
""")
_SAME = gl.constexpr("mov.b32 $0, $1;")


@gluon.jit
def own_sums(w):
    """Sums of what each thread holds of a row (a row is spread over four threads)."""
    ROWS: gl.constexpr = w.shape[0]
    COUNT: gl.constexpr = w.shape[1]
    return gl.sum(gl.sum(gl.reshape(w, [ROWS, COUNT // 8, 4, 2]), 3), 1)


@gluon.jit
def weights_of(
    s, peak, total, unit, SHIFT: gl.constexpr, LV: gl.constexpr
):  # fmt: skip
    """Weights of a block's scores, the new largest score and sums of weights, and what earlier ones
    shrink by (for the accumulator, whose layout is LV)."""
    higher = gl.maximum(peak, gl.max(s, 1))
    base = higher * unit - SHIFT
    w = gl.exp2(s * unit - base[:, None])
    shrink = gl.exp2((peak - higher) * unit)
    of_sums = gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))
    total = total * of_sums[:, None] + own_sums(w)
    return w, higher, total, gl.convert_layout(shrink, gl.SliceLayout(1, LV))


@gluon.jit
def packed_weights(w, NARROW: gl.constexpr):
    """Weights rounded to the type of the values; in E4M3 four keys in one number, which puts the
    columns in the order of their keys (see the module) and moves nothing between threads."""
    if NARROW:
        QUERIES: gl.constexpr = w.shape[0]
        FOURS: gl.constexpr = w.shape[1] // 4
        even, odd = gl.split(gl.reshape(w, [QUERIES, 2, FOURS, 2]))
        a, c = gl.split(gl.permute(even, [0, 2, 1]))
        b, d = gl.split(gl.permute(odd, [0, 2, 1]))
        p = gl.inline_asm_elementwise(
            _FOUR_E4M3, "=r,r,r,r,r", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        p = w.to(gl.bfloat16)
    return p


@gluon.jit
def _operand(p, NARROW: gl.constexpr, L: gl.constexpr):
    """Packed weights as the left side of the product with values."""
    if NARROW:
        # Each number four times, of which the assembly takes one: four elements in its place.
        p = gl.join(p, p)
        p = gl.join(p, p)
        p = gl.reshape(p, [p.shape[0], p.shape[1] * 4])
        p = gl.convert_layout(p, gl.DotOperandLayout(0, L, 4))
        operand = gl.inline_asm_elementwise(
            _SAME, "=r,r,r,r,r", [p], dtype=gl.float8e4nv, is_pure=True, pack=4
        )
    else:
        operand = gl.convert_layout(p, gl.DotOperandLayout(0, L, 2))
    return operand


@gluon.jit
def add_values(p, v_ring, slot, acc, NARROW: gl.constexpr, L: gl.constexpr):
    """The product with a block of values, begun: in E4M3 a sum of its own, else added to acc."""
    KEYS: gl.constexpr = v_ring.shape[1]
    left = _operand(p, NARROW, L)
    if NARROW:
        added = warpgroup_mma(
            left, value_block(v_ring, slot, NARROW), acc, use_acc=False, is_async=True,
            max_num_imprecise_acc=KEYS,
        )  # fmt: skip
    else:
        added = warpgroup_mma(left, value_block(v_ring, slot, NARROW), acc, is_async=True)
    return added


@gluon.jit
def score(q, e, k_ring, x_ring, slot, L: gl.constexpr, COLUMNS: gl.constexpr):
    """Scores of a block of keys, begun."""
    QUERIES: gl.constexpr = q.shape[0]
    KEYS: gl.constexpr = k_ring.shape[1]
    zeros = gl.zeros([QUERIES, KEYS], gl.float32, layout=L)
    s = warpgroup_mma(q, k_ring.index(slot).permute([1, 0]), zeros, use_acc=False, is_async=True)
    if COLUMNS:
        s = warpgroup_mma(e, x_ring.index(slot).permute([1, 0]), s, is_async=True)
    return s


@gluon.jit
def value_block(v_ring, slot, NARROW: gl.constexpr):
    """The block of values in a slot, keys x channels."""
    KEYS: gl.constexpr = v_ring.shape[1]
    SIZE: gl.constexpr = v_ring.shape[2]
    value = v_ring.index(slot)
    if NARROW:
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
        if value.dtype == gl.float8e4nv:
            narrow = value
        else:
            if PUBLIC:
                both = value.reinterpret(gl.float8e4nv, [2, SIZE, KEYS], layout)
            else:
                both = value._reinterpret(gl.float8e4nv, [2, SIZE, KEYS], layout)
            narrow = both.index(0)
        block = narrow.permute([1, 0])
    else:
        block = value
    return block


@gluon.jit
def hidden(s, left, NARROW: gl.constexpr, L: gl.constexpr):
    """-inf for the scores of keys from the left-th on."""
    KEYS: gl.constexpr = s.shape[1]
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, L))
    if NARROW:
        HALF: gl.constexpr = KEYS // 2
        key = (column % HALF) // 2 * 4 + column // HALF * 2 + column % 2
    else:
        key = column
    return gl.where((key < left)[None, :], s, float("-inf"))
