"""KIVI: granularities, bytes, outlier channels, noise of a step a channel, the streaming window."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from videokv.protocols import EncodeContext
from videokv.quantizers.kivi import KiviStream, build_kivi
from videokv.tensors import held_bytes


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def context(role: str = "key") -> EncodeContext:
    return EncodeContext(0, role)


def oracle(x: np.ndarray, axis: int, group: int, bits: int) -> np.ndarray:
    """Round to nearest with FP16 steps and minima, groups along ``axis`` of ``[T, D]``."""
    out = np.empty_like(x)
    top = (1 << bits) - 1
    for start in range(0, x.shape[axis], group):
        piece = np.take(x, range(start, min(start + group, x.shape[axis])), axis)
        low, high = piece.min(axis, keepdims=True), piece.max(axis, keepdims=True)
        step = np.float16((high - low) / top).astype(np.float64)
        low = np.float16(low).astype(np.float64)
        code = np.clip(np.rint((piece - low) / step), 0, top)
        where = [slice(None)] * 2
        where[axis] = slice(start, start + piece.shape[axis])
        out[tuple(where)] = code * step + low
    return out


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("length", [63, 128, 1000])
def test_matches_the_oracle(bits, length):
    x = tokens(1, 2, length, 64)
    for quantizer, axis, role in zip(
        build_kivi(bits, fp16_scales=True), (0, 1), ("key", "value"), strict=True
    ):
        decoded = quantizer.encode(x, context(role)).decode(torch.float64).numpy()
        for head in range(2):
            expected = oracle(x[0, head].double().numpy(), axis, 32, bits)
            wrong = ~np.isclose(decoded[0, head], expected, rtol=1e-4, atol=1e-5)
            assert wrong.mean() < 1e-3  # halves in float32


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("fp16_scales", "more"), [(False, 0.75), (True, 1.0)])
def test_bytes(bits, fp16_scales, more):
    x = tokens(1, 2, 320, 128).bfloat16()
    for quantizer, role in zip(
        build_kivi(bits, fp16_scales=fp16_scales), ("key", "value"), strict=True
    ):
        assert held_bytes(quantizer.encode(x, context(role))) * 8 / x.numel() == bits + more


def test_a_large_channel_leaves_the_others_alone():
    """R09: groups along tokens: 0.45 rms for channel 7 + 300 and without."""
    x = tokens(1, 1, 256, 128)
    x[..., 7] += 300
    keys, values = build_kivi(2)
    others = torch.arange(128) != 7

    def rms(quantizer) -> float:
        error = quantizer.encode(x, context()).decode(torch.float32) - x
        return float(error[..., others].square().mean().sqrt())

    assert rms(keys) < 0.45 and rms(values) > 1.0


def test_keys_have_a_noise_column_a_channel():
    x = tokens(1, 2, 70, 80)
    (term,) = build_kivi(2)[0].encode(x, context()).noise()
    assert term.query_map.group_size == 1 and term.weights.shape == (1, 2, 70, 80)
    assert torch.equal(term.weights[:, :, 0], term.weights[:, :, 31])
    assert not torch.equal(term.weights[:, :, 0], term.weights[:, :, 32])


def test_values_refuse_heads_that_groups_do_not_divide():
    keys, values = build_kivi(2)
    keys.check(80)
    with pytest.raises(ValueError, match="32 does not divide head_dim 80"):
        values.check(80)


def fed(stream: KiviStream, x: torch.Tensor, first: int) -> None:
    stream.append(x[:, :, :first], x[:, :, :first] + 1)
    for i in range(first, x.shape[2]):
        stream.append(x[:, :, i : i + 1], x[:, :, i : i + 1] + 1)


@pytest.mark.parametrize("first", [1, 31, 32, 40, 100])
def test_stream_keeps_its_windows(first):
    """Keys: 0..R-1 recent tokens are dense; values: the last R, whatever the calls were."""
    x = tokens(1, 2, 100, 64)
    stream = KiviStream(2, group_size=16, recent=32)
    fed(stream, x, first)
    segment = stream.segment(torch.float32)
    assert segment.keys.shape == segment.values.shape == x.shape
    assert stream.dense_keys == 100 % 32 and stream.dense_values == 32
    assert torch.equal(segment.keys[:, :, 96:], x[:, :, 96:])
    assert torch.equal(segment.values[:, :, 68:], x[:, :, 68:] + 1)
    # R01: old keys are those of packing whole blocks, and not exact.
    blocks = build_kivi(2, group_size=16)[0].encode(x[:, :, :96], context())
    assert torch.equal(segment.keys[:, :, :96], blocks.decode(torch.float32))
    (term,) = segment.noise
    assert bool((term.weights[:, :, :96] > 0).all()) and not term.weights[:, :, 96:].any()


def test_stream_packs_a_full_block_only_at_the_next_call():
    """Scores of the call that fills the block still see its keys dense."""
    stream = KiviStream(2, recent=32)
    x = tokens(1, 1, 32, 64)
    fed(stream, x, 31)
    assert stream.dense_keys == 32 and torch.equal(stream.segment(torch.float32).keys, x)
    assert stream.segment(torch.float32).noise == ()
    stream.append(x[:, :, :1], x[:, :, :1])
    assert stream.dense_keys == 1 and not torch.equal(
        stream.segment(torch.float32).keys[:, :, :32], x
    )


def test_stream_counts_what_it_holds():
    """R01, R02: 3 bits an element and the dense windows, after 32 tokens and 168 calls of one."""
    stream = KiviStream(2, recent=32, fp16_scales=True)
    x = tokens(1, 1, 200, 64).bfloat16()
    fed(stream, x, 32)
    packed = (192 + 168) * 64 * 3 // 8
    assert stream.held_bytes() == packed + (8 + 32) * 64 * 2


def test_stream_refuses():
    with pytest.raises(ValueError, match="recent must be a multiple of group_size 32, got 48"):
        KiviStream(2, recent=48)
    stream = KiviStream(2)
    with pytest.raises(ValueError, match="no token"):
        stream.segment(torch.float32)
    with pytest.raises(ValueError, match="same tokens"):
        stream.append(tokens(1, 1, 2, 64), tokens(1, 1, 3, 64))
    for options, word in (
        ({"group_size": 0}, "group_size"),
        ({"group_size": "32"}, "group_size"),
        ({"recent": "128"}, "recent"),
        ({"recent": 32.0}, "recent"),
        ({"fp16_scales": "no"}, "fp16_scales"),
    ):
        with pytest.raises(ValueError, match=word):
            KiviStream(2, **options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[:, :, :, :32], "holds keys .*64.* got .*32"),
        (lambda x: x.repeat(2, 1, 1, 1), r"holds keys \[1, 1, T, 64\].* got \[2"),
        (lambda x: x.half(), "got .*float16"),
        (lambda x: x * torch.nan, "keys of layer 5 hold NaN"),
        (lambda x: None, "NoneType"),
    ],
)
def test_a_refused_token_leaves_the_stream_as_it_was(change, words):
    stream = KiviStream(2, recent=32, layer=5)
    stream.append(tokens(1, 1, 50, 64), tokens(1, 1, 50, 64))
    before = stream.segment(torch.float32)
    new = tokens(1, 1, 1, 64)
    with pytest.raises(ValueError, match=words):
        stream.append(change(new), new if change(new) is None else change(new))
    with pytest.raises(ValueError, match="values of layer 5"):
        stream.append(new, new * torch.nan)
    assert torch.equal(stream.segment(torch.float32).keys, before.keys)
    assert (stream.dense_keys, stream.dense_values) == (18, 32)
