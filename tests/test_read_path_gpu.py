"""On a GPU: attention on a packed cache waits for nothing and equals the oracle."""

import pytest
import torch

import videokv

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NAMES = [
    "rtn-2bit",
    "quarot-2bit+calibrated",
    "quantwm-2bit+taylor",
    "qvg-2bit",
    "kivi-2bit",
    "videokv-2bit+calibrated",
    "videokv-2bit-small",
]


def filled(name, device, *, dtype=torch.bfloat16, chunks=4, tokens=256):
    generator = torch.Generator().manual_seed(0)
    cache = videokv.recipe(name).new_cache(layers=2)
    for chunk in range(chunks + 1):
        rows = [
            torch.randn(1, heads, tokens, 128, generator=generator).to(device, dtype)
            for heads in (4, 2, 2)
        ]
        if chunk == chunks:
            return cache, rows
        for layer in range(2):
            cache.write(layer, chunk * tokens, rows[1], rows[2], rows[0])
        cache.commit((chunk + 1) * tokens)
    raise AssertionError


@pytest.mark.parametrize("queries", [256, 1])
@pytest.mark.parametrize("name", NAMES)
def test_no_host_synchronisation_and_no_new_memory(name, queries):
    cache, (q, k, v) = filled(name, "cuda")
    q, k, v = (x[:, :, :queries] for x in (q, k, v))
    for layer in (0, 1, 0):
        cache.attend(layer, q, k, v)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for layer in (0, 1) * 3:
            cache.attend(layer, q, k, v)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_reserved() == reserved


@pytest.mark.parametrize("backend", ["auto", "sdpa", "triton", "flex"])
@pytest.mark.parametrize("name", NAMES)
def test_the_gpu_attends_as_the_oracle_does(name, backend):
    cache, (q, k, v) = filled(name, "cuda")
    segments = [*cache.view(0), videokv.protocols.Segment(k, v)]
    want, _ = videokv.attention.attend(q, segments, backend="eager")
    if backend == "auto":
        got = cache.attend(0, q, k, v)
    else:
        got, _ = videokv.attention.attend(q, segments, backend=backend)
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error < 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_taken_and_codes_are_those_of_the_cpu(name):
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs in PyTorch steps.*")
        warnings.filterwarnings("error", message=".*runs on backend.*")
        cache, (q, k, v) = filled(name, "cuda")
        cache.attend(0, q, k, v)
    twin, _ = filled(name, "cpu")
    for ours, theirs in zip(cache.view(0), twin.view(0), strict=True):
        error = (ours.keys.cpu().float() - theirs.keys.float()).norm() / theirs.keys.float().norm()
        assert float(error) < 5e-2  # rare ties of rotations and of clusters
