"""Packing is exact, laid out as drawn, and takes the bytes it says."""

from __future__ import annotations

import pytest
import torch

from videokv.kernels.pack_codes import pack, packed_length, unpack

BITS = (2, 3, 4, 8)


def some_codes(*shape: int, bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(0, 1 << bits, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 7, 8, 9, 63, 80, 128, 1000])
def test_round_trip(bits: int, count: int):
    codes = some_codes(2, 3, count, bits=bits)
    packed = pack(codes, bits=bits)
    assert packed.dtype == torch.uint8 and packed.is_contiguous()
    assert packed.shape == (2, 3, packed_length(count, bits=bits))
    assert torch.equal(unpack(packed, bits=bits, count=count), codes)


@pytest.mark.parametrize("bits", BITS)
def test_layout_is_big_endian(bits: int):
    """The bytes read as one big number hold the codes from the top."""
    codes = some_codes(24, bits=bits)
    text = "".join(f"{code:0{bits}b}" for code in codes.tolist())
    expected = [int(text[i : i + 8], 2) for i in range(0, len(text), 8)]
    assert pack(codes, bits=bits).tolist() == expected


def test_drawn_examples():
    codes = torch.tensor([1, 2, 3, 0, 2], dtype=torch.uint8)
    assert pack(codes, bits=2).tolist() == [0b01101100, 0b10000000]
    assert pack(codes, bits=4).tolist() == [0x12, 0x30, 0x20]
    assert pack(codes, bits=3).tolist() == [0b00101001, 0b10000100, 0]


@pytest.mark.parametrize("bits", BITS)
def test_strided_and_expanded_input(bits: int):
    base = some_codes(5, 70, 3, bits=bits)
    for view in (base.transpose(0, 2), base[:, ::2], base[:1].expand(4, -1, -1)):
        packed = pack(view, bits=bits)
        assert torch.equal(packed, pack(view.clone(), bits=bits))
        strided = packed.repeat_interleave(2, 0)[::2]
        assert torch.equal(unpack(strided, bits=bits, count=view.shape[-1]), view)


@pytest.mark.parametrize("bits", BITS)
def test_packing_never_aliases_its_input(bits: int):
    codes = some_codes(2, 64, bits=bits)
    packed = pack(codes[:1], bits=bits)
    assert packed.untyped_storage().nbytes() == packed.numel()


@pytest.mark.parametrize(
    ("count", "bits", "expected"),
    [(1000, 2, 250), (63, 2, 16), (63, 3, 24), (63, 4, 32), (9, 8, 9)],
)
def test_packed_length(count: int, bits: int, expected: int):
    assert packed_length(count, bits=bits) == expected


def test_refusals():
    codes = some_codes(8, bits=2)
    with pytest.raises(ValueError, match="bits must be one of"):
        pack(codes, bits=5)
    with pytest.raises(ValueError, match="uint8"):
        pack(codes.int(), bits=2)
    with pytest.raises(ValueError, match="below 4, got 4"):
        pack(codes + 4 - codes, bits=2)
    with pytest.raises(ValueError, match="take 3 bytes"):
        unpack(pack(codes, bits=2), bits=2, count=9)
