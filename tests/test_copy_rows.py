"""Rows copied by one kernel: the bits of PyTorch's copy, whatever the strides."""

import pytest
import torch

from videokv.kernels import copy_rows as room
from videokv.kernels import gpu
from videokv.kernels.copy_rows import MOST_PAIRS, copy_rows, reference
from videokv.tensors import E4M3

pytest.importorskip("triton")
from videokv.kernels.copy_rows import triton as kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16 = torch.float16


def rows(tokens, *, size=128, batch=2, heads=3, seed=0, dtype=F16):
    """As a model gives them: [B, T, H, D] seen as [B, H, T, D], the tokens of a longer tensor."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(batch, tokens + 2, heads, size, generator=generator)
    return drawn.to(DEVICE, dtype)[:, 1:-1].transpose(1, 2)


def places(tokens, *, size=128, spare=16, batch=2, heads=3, dtype=F16):
    buffer = torch.full((batch, heads, tokens + 9, size + spare), 7.0, device=DEVICE).to(dtype)
    return buffer, buffer[:, :, 4 : 4 + tokens, :size]


@pytest.fixture
def launches(monkeypatch):
    """As on a GPU; a list of the pairs of each launch."""
    monkeypatch.setattr(gpu, "_verdicts", {})
    monkeypatch.setattr(room, "wants_kernels", lambda device: True)
    monkeypatch.setattr(room, "machine_refusal", lambda device: None)
    found, honest = [], kernel.copy_rows
    monkeypatch.setattr(kernel, "copy_rows", lambda pairs: found.append(pairs) or honest(pairs))
    return found


def check(pairs, buffers):
    copy_rows(pairs)
    got = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        buffer.fill_(7.0)
    reference.copy_rows(pairs)
    for a, b in zip(got, buffers, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("tokens", [1, 63, 130])
@pytest.mark.parametrize(
    ("size", "spare", "dtype"), [(128, 16, F16), (80, 16, torch.float32), (63, 0, F16)]
)
def test_keys_and_values_in_one_launch(tokens, size, spare, dtype, launches):
    keys, values = (rows(tokens, size=size, seed=seed, dtype=dtype) for seed in (0, 1))
    (a, key_rows), (b, value_rows) = (
        places(tokens, size=size, spare=more, dtype=dtype) for more in (spare, 0)
    )
    pairs = [(keys, key_rows), (values, value_rows)]
    copy_rows(pairs)
    launches.clear()
    check(pairs, (a, b))
    assert len(launches) == 1


def test_more_pairs_than_a_launch_takes_of_other_lengths_and_head_sizes(launches):
    lengths = (9, 70, 1, 33, 64, 5)
    sizes = (64, 80, 64, 128, 64, 40)
    made = [places(n, size=size) for n, size in zip(lengths, sizes, strict=True)]
    pairs = [
        (rows(n, size=size, seed=n), place)
        for n, size, (_, place) in zip(lengths, sizes, made, strict=True)
    ]
    copy_rows(pairs)
    launches.clear()
    check(pairs, [buffer for buffer, _ in made])
    assert [len(some) for some in launches] == [MOST_PAIRS, 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_and_contiguous_rows(dtype, launches):
    buffer, place = places(20, dtype=dtype)
    check([(rows(20, dtype=dtype).contiguous(), place)], [buffer])
    assert launches


def test_no_rows_are_no_launch(launches):
    buffer, place = places(0)
    copy_rows([(rows(0), place)])
    assert not launches and bool((buffer == 7).all())


def test_what_is_not_finite_passes_the_check(launches):
    keys = rows(5).contiguous()
    keys[0, 0, 0, 0] = torch.nan
    buffer, place = places(5)
    copy_rows([(keys, place)])
    assert not any(gpu._verdicts.values()) and place.isnan().any()


def test_channels_that_lie_apart_are_copied_by_pytorch_and_said(launches):
    buffer, place = places(20)
    source = rows(128, size=20).mT
    gpu.say_once.cache_clear()
    with pytest.warns(UserWarning, match="copied by PyTorch: channels lie side by side"):
        copy_rows([(source, place)])
    assert not launches and torch.equal(place, source)


def test_refusals():
    for source, out in (
        (rows(5), places(6)[1]),
        (rows(5), places(5, dtype=torch.float32)[1]),
        (rows(5).to(E4M3), places(5)[1]),
    ):
        with pytest.raises(ValueError, match="copy_rows expects pairs"):
            copy_rows([(source, out)])
    with pytest.raises(ValueError, match="equal B, H"):
        copy_rows([(rows(5), places(5)[1]), (rows(5, heads=2), places(5, heads=2)[1])])


def test_a_kernel_that_disagrees_is_not_used(launches, monkeypatch):
    monkeypatch.setattr(kernel, "copy_rows", lambda pairs: None)
    buffer, place = places(5)
    with pytest.warns(UserWarning, match="self-check failed"):
        copy_rows([(rows(5), place)])
    assert torch.equal(place, rows(5))
