"""Words of eight 2-bit codes in registers; import only where Triton is there."""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from videokv.kernels.numbers import decode_e4m3

CODES = 8  # of a word


def _asm(slot: int, reach: int, *, half: bool) -> str:
    """Two words in a register to the values of one slot: (code - reach) * step + zero."""
    free = 10 if half else 7
    bit = 2 * slot
    shift = 0
    if bit + 2 > free:
        shift = 8 if half else (6 if bit < 12 else 12)
    bit -= shift
    kind, base = ("f16x2", 1 << 10) if half else ("bf16x2", 1 << 7)
    mask, one = 0x00010001 * (3 << bit), 0x00010001 * _bits(base, half)
    factor = 0x00010001 * _bits(2.0**-bit, half)
    offset = 0x00010001 * _bits(-(base * 2.0**-bit) - reach, half)
    return f"""{{
    .reg .b32 w, f, o;
    shr.u32 w, $1, {shift};
    lop3.b32 w, w, {mask:#x}, {one:#x}, 0xEA;
    mov.b32 f, {factor:#x};
    mov.b32 o, {offset:#x};
    fma.rn.{kind} w, w, f, o;
    fma.rn.{kind} $0, w, $2, $3;
    }}"""


def _bits(number: float, half: bool) -> int:
    if half:
        return int.from_bytes(struct.pack("<e", number), "little")
    return int.from_bytes(struct.pack("<f", number), "little") >> 16


ASM_BF16 = tl.constexpr([[_asm(s, r, half=False) for s in range(CODES)] for r in range(2)])
ASM_FP16 = tl.constexpr([[_asm(s, r, half=True) for s in range(CODES)] for r in range(2)])


@triton.jit
def slot_of(word, step, zero, SLOT: tl.constexpr, REACH: tl.constexpr, FAST: tl.constexpr):
    """The values of one slot of words (int16), in the dtype of step and zero."""
    if FAST:
        if step.dtype == tl.bfloat16:
            found = tl.inline_asm_elementwise(
                ASM_BF16[REACH][SLOT], "=r,r,r,r", [word, step, zero],
                dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            found = tl.inline_asm_elementwise(
                ASM_FP16[REACH][SLOT], "=r,r,r,r", [word, step, zero],
                dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
    else:
        code = ((word.to(tl.int32) >> (2 * SLOT)) & 3) - REACH
        found = (code.to(tl.float32) * step.to(tl.float32) + zero.to(tl.float32)).to(step.dtype)
    return found


@triton.jit
def spread(x, BN: tl.constexpr, BG: tl.constexpr, EACH: tl.constexpr):
    """Numbers of groups [BN, BG] for each of their words [BN, BG EACH]."""
    wide = tl.broadcast_to(x[:, :, None], [BN, BG, EACH])
    return tl.reshape(wide, [BN, BG * EACH])


@triton.jit
def side_of(
    codes, steps, zeros, head, token, live, tokens, TYPE: tl.constexpr,
    D: tl.constexpr, BW: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Words int16, steps and zeros of tokens: each [BN, BW]; 0 outside."""
    line = head * tokens + token
    word = tl.arange(0, BW)
    held = live[:, None] & (word < D // 8)[None, :]
    words = tl.load(codes + line[:, None] * (D // 8) + word[None, :], mask=held, other=0)
    each: tl.constexpr = GROUP // 8
    groups: tl.constexpr = BW // each
    group = tl.arange(0, groups)
    place = line[:, None] * (D // GROUP) + group[None, :]
    held = live[:, None] & (group < D // GROUP)[None, :]
    step = decode_e4m3(tl.load(steps + place, mask=held, other=0)).to(TYPE)
    zero = tl.zeros([BN, groups], TYPE)
    if ZERO is not None:
        zero = tl.load(zeros + place, mask=held, other=0).to(TYPE)
    return words, spread(step, BN, groups, each), spread(zero, BN, groups, each)
