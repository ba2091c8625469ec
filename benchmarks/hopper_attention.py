"""Attention on a Hopper GPU, kernels only: ms, and the error against float64 of some rows.

    python benchmarks/hopper_attention.py

12 heads x 128, 4,680 queries, 28,080 cached and 4,680 current keys, 16 columns of a correction.
Cached values in BF16 or E4M3. Beside them the Triton kernel and stock kernels on dense keys without
columns. Medians of replayed graphs, in turns, for a GPU that has warmed up is slower.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from needs_gpu import require_hopper
from torch import Tensor

from videokv.attention.stock_kernels import KERNELS, has_fa4
from videokv.kernels.attend import Call, Rows, attend, device_tile, reference, to_e4m3

HEADS, SIZE, CHUNK, CACHED, COLUMNS = 12, 128, 4680, 6 * 4680, 16
ROUNDS, REPEATS = 4, 10


def draw(*shape: int, seed: int) -> Tensor:
    """Standard normal numbers in BF16 on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def make_call(*, narrow: bool) -> Call:
    """As a cache makes it."""
    query = draw(1, HEADS, CHUNK, SIZE + COLUMNS, seed=1)
    keys = draw(1, HEADS, CACHED, SIZE + COLUMNS, seed=2)
    values, scale = draw(1, HEADS, CACHED, SIZE, seed=3), None
    if narrow:
        small, scale = to_e4m3(values)
        values = small.mT.contiguous().mT
    extra = query[..., SIZE:] / 8, keys[..., SIZE:]
    current = Rows(*(draw(1, HEADS, CHUNK, SIZE, seed=s) for s in (4, 5)))
    past = Rows(keys[..., :SIZE], values, None, scale)
    return Call(query[..., :SIZE], past, current, SIZE**-0.5, *extra)


def error_of(call: Call, out: Tensor) -> float:
    """Relative error of every 100th row."""
    some = slice(None, None, 100)
    small = replace(
        call, query=call.query[:, :, some].double(), extra_query=call.extra_query[:, :, some]
    )
    want, _ = reference.attend(small)
    return float((out[:, :, some].double() - want).norm() / want.norm())


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of one call."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def timed(graph: torch.cuda.CUDAGraph) -> float:
    """Median ms of some replays."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    for begin, end in pairs:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def main() -> None:
    """A line a kernel."""
    require_hopper()
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    calls = [make_call(narrow=narrow) for narrow in (False, True)]  # kept: graphs hold no tensors
    for narrow, call in enumerate(calls):
        kind = "e4m3 values" if narrow else "bf16"
        runs = {
            f"{kind}, Gluon": partial(attend, call),
            f"{kind}, Triton": partial(attend, call, tile=device_tile(call)),
        }
        for name, run in runs.items():
            print(f"{name:20s} off by {error_of(call, run()[0]):.1e}", flush=True)
            graphs[name] = captured(run)
    q, k, v = (draw(1, HEADS, n, SIZE, seed=7) for n in (CHUNK, CACHED + CHUNK, CACHED + CHUNK))
    for name in ("cudnn", *(["fa4"] if has_fa4() else [])):
        graphs[f"dense {name}"] = captured(partial(KERNELS[name], q, k, v, SIZE**-0.5, False))
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name].append(timed(graph))
    for name, found in times.items():
        print(f"{name:20s} {statistics.median(found):.3f} ms", flush=True)


if __name__ == "__main__":
    main()
