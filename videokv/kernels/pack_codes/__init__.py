"""Small codes to bytes and back, exactly.

The first code of a byte (3 bits: of a 24-bit big-endian word) sits in its most significant bits:

    bits 2, 4 codes a byte     | a a | b b | c c | d d |
    bits 4, 2 codes a byte     | a a a a | b b b b |
    bits 8, 1 code a byte      | a a a a a a a a |
    bits 3, 8 codes in 3 bytes | a a a b b b c c | c d d d e e e f | f f g g g h h h |
                                 ---- byte 0 ----  ---- byte 1 ----  ---- byte 2 ----

Codes run along the last dimension. A last byte (word) that they do not fill is padded with zeros.
"""

from __future__ import annotations

from torch import Tensor, uint8

from videokv.kernels.pack_codes import reference
from videokv.tensors import SUPPORTED_BITS


def packed_length(count: int, *, bits: int) -> int:
    """Bytes that ``count`` codes take: whole bytes, whole 3-byte words at 3 bits."""
    _check_bits(bits)
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    if bits == 3:
        return -(-count // 8) * 3
    return -(-count * bits // 8)


def pack(codes: Tensor, *, bits: int) -> Tensor:
    """Pack uint8 codes ``[..., n]`` below ``2**bits`` into new bytes ``[..., packed_length(n)]``.

    Raises ValueError for another dtype and, on the CPU, for codes that do not fit (on a GPU
    looking at the values would stall it; there the caller has to have clamped them).
    """
    _check_bits(bits)
    _check_tensor(codes, what="codes")
    if codes.device.type == "cpu" and codes.numel() and int(codes.max()) >= 1 << bits:
        raise ValueError(f"{bits}-bit codes must be below {1 << bits}, got {int(codes.max())}")
    return reference.pack(codes, bits=bits)


def unpack(packed: Tensor, *, bits: int, count: int) -> Tensor:
    """The ``count`` codes ``[..., count]`` (uint8) that ``packed`` ``[..., bytes]`` holds.

    The result may be a view, of ``packed`` itself at 8 bits. Raises ValueError where the last
    dimension is not ``packed_length(count)``.
    """
    _check_bits(bits)
    _check_tensor(packed, what="packed")
    expected = packed_length(count, bits=bits)
    if packed.shape[-1] != expected:
        raise ValueError(
            f"{count} codes of {bits} bits take {expected} bytes, got packed of shape "
            f"{tuple(packed.shape)}; pass the count that was packed"
        )
    return reference.unpack(packed, bits=bits, count=count)


def _check_bits(bits: int) -> None:
    if bits not in SUPPORTED_BITS:
        raise ValueError(f"bits must be one of {SUPPORTED_BITS}, got {bits!r}")


def _check_tensor(tensor: Tensor, *, what: str) -> None:
    if tensor.dtype != uint8 or tensor.ndim < 1:
        raise ValueError(
            f"{what} must be uint8 with at least one dimension, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}"
        )
