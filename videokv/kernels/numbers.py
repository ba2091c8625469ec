"""Arithmetic that must give the same bits in a Triton kernel as in PyTorch.

E4M3 is handled as bytes, so that it works before compute capability 8.9 too. Helpers of other
kernels; import only where Triton is there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_e4m3(byte):
    """Float32 of E4M3 bytes without sign (steps), exactly."""
    number = byte.to(tl.int32)
    normal = (number << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where(number < 8, number.to(tl.float32) * 0.001953125, normal)  # 2^-9


@triton.jit
def e4m3_halves(byte):
    """FP16 of E4M3 bytes, exactly."""
    number = byte.to(tl.int32)
    bits = ((number & 0x80) << 8) | ((number & 0x7F) << 7)
    return bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0  # the exponents' biases: 7, 15


@triton.jit
def exp2_codes(byte):
    """2^(-byte / 20), float32; 0 for 255: logarithmic steps without their scale."""
    return tl.where(byte == 255, 0.0, tl.math.exp2(byte.to(tl.float32) * -0.05))


@triton.jit
def encode_e4m3(x):
    """E4M3 bytes of float32, nearest even, saturating at 448."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    size_bits = size.to(tl.int32, bitcast=True)
    # Round the upper 12 bits to nearest even; the exponent's bias goes from 127 to 7.
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - 960
    small = round_even(size * 512.0).to(tl.int32)  # below 2^-6: multiples of 2^-9
    code = tl.where(size < 0.015625, small, normal)
    return (code | sign).to(tl.uint8)


@triton.jit
def round_bf16(x):
    """Float32 rounded to what BF16 holds, nearest even (finite numbers)."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_even(x):
    """rint(x) of float32, any size; 0 without a sign (older versions negate by 0 - x)."""
    size = tl.abs(x)
    rounded = (size + 8388608.0) - 8388608.0  # 2^23: float32 has no fractions above it
    rounded = tl.where(size < 8388608.0, rounded, size)
    return tl.where(x < 0, 0.0 - rounded, rounded)


@triton.jit
def unpack_rows(packed, row, live, ROW_BYTES: tl.constexpr, BITS: tl.constexpr, BD: tl.constexpr):
    """Codes int32 [rows, BD] of packed rows of ROW_BYTES bytes; 0 outside."""
    if BITS == 3:
        word = tl.arange(0, BD // 8)
        place = packed + row[:, None] * ROW_BYTES + word[None, :] * 3
        inside = live[:, None] & (word * 3 < ROW_BYTES)[None, :]
        bits = tl.load(place, mask=inside, other=0).to(tl.int32) << 16
        bits |= tl.load(place + 1, mask=inside, other=0).to(tl.int32) << 8
        bits |= tl.load(place + 2, mask=inside, other=0).to(tl.int32)
        codes = _eight_codes(bits)
    else:
        column = tl.arange(0, BD * BITS // 8)
        place = packed + row[:, None] * ROW_BYTES + column[None, :]
        inside = live[:, None] & (column < ROW_BYTES)[None, :]
        bits = tl.load(place, mask=inside, other=0).to(tl.int32)
        if BITS == 2:
            even = tl.interleave((bits >> 6) & 3, (bits >> 2) & 3)
            odd = tl.interleave((bits >> 4) & 3, bits & 3)
            codes = tl.interleave(even, odd)
        elif BITS == 4:
            codes = tl.interleave((bits >> 4) & 15, bits & 15)
        else:
            codes = bits
    return codes


@triton.jit
def unpack_words3(packed, row, live, ROW_BYTES: tl.constexpr, BD: tl.constexpr):
    """3-bit codes int32 [rows, BD] of rows of int32 words, three for 32 codes; 0 outside."""
    triple = tl.arange(0, BD // 32)
    place = packed + row[:, None] * (ROW_BYTES // 4) + triple[None, :] * 3
    inside = live[:, None] & (triple * 12 < ROW_BYTES)[None, :]
    a = tl.load(place, mask=inside, other=0)
    b = tl.load(place + 1, mask=inside, other=0)
    c = tl.load(place + 2, mask=inside, other=0)
    # Bytes 0..11 lie from the lowest of a to the highest of c; each three are one big-endian word.
    first = ((a & 255) << 16) | (a & 0xFF00) | ((a >> 16) & 255)
    second = (((a >> 24) & 255) << 16) | ((b & 255) << 8) | ((b >> 8) & 255)
    third = (b & 0xFF0000) | (((b >> 24) & 255) << 8) | (c & 255)
    fourth = ((c & 0xFF00) << 8) | (((c >> 16) & 255) << 8) | ((c >> 24) & 255)
    return _eight_codes(tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth)))


@triton.jit
def _eight_codes(bits):
    """The eight 3-bit codes of 24-bit words [rows, n]: int32 [rows, 8 n]."""
    even = tl.interleave(
        tl.interleave((bits >> 21) & 7, (bits >> 9) & 7),
        tl.interleave((bits >> 15) & 7, (bits >> 3) & 7),
    )
    odd = tl.interleave(
        tl.interleave((bits >> 18) & 7, (bits >> 6) & 7),
        tl.interleave((bits >> 12) & 7, bits & 7),
    )
    return tl.interleave(even, odd)
