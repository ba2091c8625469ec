"""The read path on a GPU: it waits for nothing after a first pass, and can be captured."""

import pytest
import torch

import videokv
from videokv.attention import stock_kernels

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
RECIPES = [
    "bf16",
    "rtn-2bit+taylor",
    "quarot-2bit+calibrated",
    "kivi-2bit",
    "qvg-pro-2bit+cumulant",
    "quantwm-2bit+calibrated",
    "fp8+measured",
    "videokv-2bit+calibrated",
]
CASES = [(recipe, "auto") for recipe in RECIPES] + [
    ("rtn-2bit+taylor", "triton"),
    ("rtn-2bit+taylor", "triton-fp8"),
    ("videokv-2bit+calibrated", "triton-fp8"),
]
HEADS, GROUP, SIZE = 2, 2, 128
LENGTHS = (256, 192, 333)


def rows(tokens, *, heads=HEADS, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(1, heads, tokens, SIZE, generator=generator)
    return drawn.to("cuda", dtype)


def committed(recipe, *, backend="auto", dtype=torch.bfloat16, **options):
    if backend == "triton-fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs E4M3 products")
    cache = videokv.recipe(recipe, backend=backend).new_cache(layers=1, **options)
    start = 0
    for seed, tokens in enumerate(LENGTHS):
        query = rows(tokens, heads=HEADS * GROUP, seed=10 + seed, dtype=dtype)
        key, value = (rows(tokens, seed=20 + 2 * seed + side, dtype=dtype) for side in (0, 1))
        cache.write(0, start, key, value, query)
        start += tokens
        cache.commit(start)
    return cache


def current(tokens, *, seed, dtype=torch.bfloat16):
    query = rows(tokens, heads=HEADS * GROUP, seed=seed, dtype=dtype)
    return query, rows(tokens, seed=seed + 1, dtype=dtype), rows(tokens, seed=seed + 2, dtype=dtype)


@needs_cuda
@pytest.mark.parametrize("tokens", [256, 4])
@pytest.mark.parametrize("recipe, backend", CASES)
def test_reading_waits_for_nothing(recipe, backend, tokens):
    cache, rows_now = committed(recipe, backend=backend), current(tokens, seed=40)
    want = cache.attend(0, *rows_now)  # kernels are checked at their first use
    cache.write(0, sum(LENGTHS), *rows_now[1:], rows_now[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = cache.attend(0, *rows_now)
        cache.write(0, sum(LENGTHS), *rows_now[1:], rows_now[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [256, 4])
@pytest.mark.parametrize("recipe, backend", CASES)
def test_a_captured_read_is_replayed_on_new_rows(recipe, backend, tokens, dtype):
    cache = committed(recipe, backend=backend, dtype=dtype)
    static = current(tokens, seed=40, dtype=dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            cache.attend(0, *static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = cache.attend(0, *static)
    for seed in (50, 60):
        fresh = current(tokens, seed=seed, dtype=dtype)
        for place, new in zip(static, fresh, strict=True):
            place.copy_(new)
        graph.replay()
        torch.testing.assert_close(output, cache.attend(0, *fresh), rtol=1e-2, atol=1e-2)


@needs_cuda
@pytest.mark.parametrize("recipe", ["quarot-2bit+calibrated", "quantwm-2bit+calibrated"])
def test_a_capture_keeps_no_columns_and_an_eager_read_before_it_does(recipe):
    cache, static = committed(recipe), current(256, seed=40)
    want = cache.attend(0, *static)
    history = cache._layers[0]._kept_noise[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = cache.attend(0, *static)
    graph.replay()
    torch.testing.assert_close(output, want, rtol=1e-2, atol=1e-2)
    assert cache._layers[0]._kept_noise[0] is history
    cache._layers[0]._kept_noise = cache._layers[0]._kept_past = None  # as after a commit
    bare = torch.cuda.CUDAGraph()
    with torch.cuda.graph(bare):
        output = cache.attend(0, *static)
    assert cache._layers[0]._kept_noise is None
    bare.replay()
    torch.testing.assert_close(output, want, rtol=1e-2, atol=1e-2)


@needs_cuda
@pytest.mark.parametrize("recipe", ["rtn-2bit+taylor", "quarot-2bit+calibrated"])
def test_a_capture_of_few_queries_before_any_read_leaves_nothing_of_the_graph_behind(recipe):
    """Tables of addresses and factors that a graph makes hold nothing before it is replayed."""
    static = current(4, seed=40)
    want = committed(recipe).attend(0, *static)  # kernels are checked
    cache = committed(recipe)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = cache.attend(0, *static)
    eager = cache.attend(0, *static)  # before a replay
    torch.testing.assert_close(eager, want, rtol=1e-3, atol=1e-3)
    spare = [torch.full((1 << 14,), -1, dtype=torch.int64).pin_memory() for _ in range(8)]
    del spare  # what pinned memory is used for next
    for _ in range(2):
        graph.replay()
        torch.testing.assert_close(output, want, rtol=1e-2, atol=1e-2)


@needs_cuda
def test_a_captured_pass_records_no_mass():
    cache, static = committed("rtn-2bit+taylor", record_mass=True), current(256, seed=40)
    cache.attend(0, *static)
    with (
        pytest.raises(ValueError, match="record_mass=False"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        cache.attend(0, *static)


def test_an_untried_kernel_is_not_tried_during_a_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    choice = stock_kernels.KernelChoice("flash", 128, 128, False)
    sizes = stock_kernels._ProbeSizes(1, 35, 67, False)
    with pytest.raises(ValueError, match="run this attention once"):
        stock_kernels.probe(choice, torch.device("cuda:0"), torch.bfloat16, sizes)
