"""Few queries on packed keys, part by part: each kernel on the device alone, and whole calls.

    python benchmarks/decode_parts.py            # on a GPU, under half a minute

Kernels are compared with the reference first. Device times are of CUDA graph replays.
"""

from __future__ import annotations

import argparse
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import needs_gpu  # noqa: F401 - refuses in one line
import torch
from torch import Tensor

import videokv
from videokv.kernels.attend_packed import PackedCall, reference
from videokv.kernels.reconstruct import inner_parts
from videokv.protocols import EncodeContext
from videokv.quantizers.groupwise import Groupwise
from videokv.quantizers.rotated import Rotated
from videokv.tensors import GroupFormat, map_tensors

HEADS, KV_HEADS, TOKENS, SIZE = 32, 8, 131072, 128
RECIPES = ("rtn-2bit+taylor", "quarot-2bit", "videokv-2bit+calibrated")
RTN = Groupwise(GroupFormat(2, 32))
KINDS = {
    "rtn": RTN,
    "quarot": Rotated(RTN),
}
CHECKS = (("rtn", 1), ("rtn", 4), ("rtn", 16), ("quarot", 1))


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def call_of(kind: str, *, heads: int, kv_heads: int, tokens: int, queries: int) -> PackedCall:
    sides = []
    for role, seed in (("key", 1), ("value", 2)):
        rows = draw(1, kv_heads, tokens, SIZE, seed=seed)
        chunk = KINDS[kind].encode(rows, EncodeContext(0, role))
        sides.append(map_tensors(inner_parts(chunk), lambda tensor: tensor.contiguous()))
    query = draw(1, heads, queries, SIZE, seed=3)
    return PackedCall(query, *sides, SIZE**-0.5, by_steps=True)


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def device_us(function: Callable[[], object], *, repeats: int = 20) -> float:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            function()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / repeats / 5


def called_us(function: Callable[[], object], *, repeats: int = 100) -> float:
    """As called, many times in a row: the slower of host and device."""
    for _ in range(5):
        function()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6 / repeats


def attempt(what: str, function: Callable[[], str]) -> None:
    begin = time.perf_counter()
    try:
        found = function()
        print(f"{what}: {found} ({time.perf_counter() - begin:.1f} s)", flush=True)
    except Exception:  # noqa: BLE001 - the next figure is worth having
        print(f"{what}: FAILED\n{traceback.format_exc(limit=6)}", flush=True)


def correctness(kind: str, queries: int) -> str:
    from videokv.kernels.attend_packed import triton, triton_words

    call = call_of(kind, heads=8, kv_heads=2, tokens=1003, queries=queries)
    want, want_lse = reference.attend_packed(call)
    words = []
    for fast in (True, False):
        parts, lses = triton_words.split_attention([call], fast=fast)
        got, lse = triton.merge(parts, lses, call.query, rotation=call.values.rotation)
        words.append(f"{off(got, want):.1e}/{off(lse, want_lse):.1e}")
    return f"output/lse off by {' '.join(words)} (Gluon, Triton)"


def split_times(queries: int) -> None:
    from videokv.kernels.attend_packed import triton, triton_words

    call = call_of("rtn", heads=HEADS, kv_heads=KV_HEADS, tokens=TOKENS, queries=queries)
    for fast in (True, False):

        def work(fast: bool = fast) -> str:
            split = lambda: triton_words.split_attention([call], fast=fast)  # noqa: E731
            parts, lses = split()
            merged = device_us(lambda: triton.merge(parts, lses, call.query))
            return f"split {device_us(split):.1f} us, merge of {len(parts)} {merged:.1f} us"

        attempt(f"rtn, {queries} queries, {'Gluon' if fast else 'Triton'}", work)


def unbiased_times(cache: Any, query: Tensor) -> str:
    """Of a cache with one packed chunk: the kernels of ``triton_unbiased``."""
    from videokv.kernels.attend_packed import triton_unbiased
    from videokv.kernels.attend_packed.unbiased_query import ready

    chunk = cache._layers[0].state.chunks[0]
    sides = [inner_parts(side) for side in (chunk.keys, chunk.values)]
    call = PackedCall(query, *sides, SIZE**-0.5, by_steps=True)
    if not triton_unbiased.serves(call):
        return ""
    times = [
        device_us(lambda fast=fast: triton_unbiased.split_attention(call, fast=fast))
        for fast in (True, False)
    ]
    served = triton_unbiased._is_fast(call)
    return (
        f"; split {times[0]:.1f} us in Gluon (served: {served}), {times[1]:.1f} us in Triton, of "
        f"it the query {device_us(lambda: ready(call)):.1f} us"
    )


def whole(name: str, queries: int) -> str:
    cache = videokv.recipe(name).new_cache(layers=1)
    q, k, v = (
        draw(1, heads, TOKENS, SIZE, seed=seed)
        for heads, seed in ((KV_HEADS, 4), (KV_HEADS, 5), (KV_HEADS, 6))
    )
    cache.write(0, 0, k, v, q.repeat_interleave(HEADS // KV_HEADS, 1)[:, :, :TOKENS])
    cache.commit(TOKENS)
    q = draw(1, HEADS, queries, SIZE, seed=7)
    k, v = (draw(1, KV_HEADS, queries, SIZE, seed=seed) for seed in (8, 9))
    got = cache.attend(0, q, k, v)
    view = cache.view(0)
    from videokv.attention import attend
    from videokv.protocols import Segment

    two = [s.noise for s in view]
    past = [Segment(s.keys.float(), s.values.float(), n) for s, n in zip(view, two, strict=True)]
    want, _ = attend(q.float(), [*past, Segment(k.float(), v.float())], backend="eager")
    error = off(got, want)
    del want, past, view
    function = lambda: cache.attend(0, q, k, v)  # noqa: E731
    current = lambda: cache.recipe.attend(  # noqa: E731
        q, [Segment(k, v)], scale=SIZE**-0.5, causal=False, need_lse=True
    )
    return (
        f"off by {error:.1e}, device {device_us(function):.1f} us, as called "
        f"{called_us(function):.0f} us; current rows by a stock kernel: device "
        f"{device_us(current):.1f} us, as called {called_us(current):.0f} us"
        f"{unbiased_times(cache, q)}"
    )


def dense(queries: int) -> str:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = draw(1, HEADS, queries, SIZE, seed=7)
    k, v = (draw(1, KV_HEADS, TOKENS, SIZE, seed=seed) for seed in (8, 9))
    found = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def run(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        found.append(f"{backend.name} {device_us(run):.1f} us")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, nargs="*", default=[1, 16])
    queries = parser.parse_args().queries
    warnings.simplefilter("always")
    for kind, count in CHECKS:
        attempt(f"{kind}, {count} queries", lambda k=kind, c=count: correctness(k, c))
    for count in queries:
        split_times(count)
        for name in RECIPES:
            attempt(f"{name}, {count} queries", lambda n=name, c=count: whole(n, c))
        attempt(f"dense, {count} queries", lambda c=count: dense(c))


if __name__ == "__main__":
    begin = time.perf_counter()
    main()
    print(f"{time.perf_counter() - begin:.1f} s")
