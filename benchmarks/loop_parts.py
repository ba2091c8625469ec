"""Parts of the whole loop for few layers: passes, first reads after a commit, commits.

    python benchmarks/loop_parts.py [--layers 6] [--recipes a,b] [--functions 14] [--kernels 12]

Prints, for each store, milliseconds (host / until the GPU is done) of the first pass after a
commit, of later passes, of the clean pass and of the commit, then the kernels of each (launches,
milliseconds) and the Python functions in which the host spends its time. Needs a GPU; about 40 s.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import gc
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import needs_gpu  # noqa: F401 - refuses in one line
import torch
from torch.profiler import ProfilerActivity, profile

from videokv.recipes import recipe
from videokv.studies import bench, bench_loop
from videokv.studies.bench_baselines import dense_attentions

DENSE = ("dense/fa4", "dense/cudnn")
RECIPES = ("quarot-2bit", "quantwm-2bit", "videokv-2bit")
PARTS = ("first", "later", "clean", "commit")
CHUNKS = 4  # timed ones, with a full window


class Loop:
    """A store, the blocks that read it, and the chunk that is next."""

    def __init__(self, made: bench.Bench, blocks: list[bench_loop.Block], name: str) -> None:
        s = made.sizes
        which, _, attention = name.partition("/")
        self.blocks, self.tokens, self.chunk = blocks, s.chunk, 0
        self.store: Any
        if which == "dense":
            self.store = bench_loop.DenseStore(made, dense_attentions(made.device)[attention])
        else:
            chosen = recipe(which, backend=attention or "auto", window_chunks=s.window_chunks)
            self.store = chosen.new_cache(layers=s.layers)
        self.inputs = [made.draw(1, s.chunk, s.heads * s.head_dim, seed=n) for n in range(3)]
        self.steps: tuple[tuple[str, Callable[[], None]], ...] = (
            ("first", lambda: self.passed(0)),
            ("later", lambda: self.passed(1)),
            ("later", lambda: self.passed(0)),
            ("clean", lambda: self.passed(2, self.chunk * self.tokens)),
            ("commit", self.commit),
        )

    @torch.no_grad()
    def passed(self, number: int, start: int | None = None) -> None:
        x = self.inputs[number]
        for layer, block in enumerate(self.blocks):
            x = block(x, self.store, layer, start)

    def commit(self) -> None:
        self.store.commit((self.chunk + 1) * self.tokens)
        self.chunk += 1


def timed(loop: Loop) -> str:
    """Medians over chunks: host and whole milliseconds of each part."""
    found: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS}
    for _ in range(CHUNKS):
        for part, step in loop.steps:
            torch.cuda.synchronize()
            began = time.perf_counter()
            step()
            host = time.perf_counter()
            torch.cuda.synchronize()
            whole = time.perf_counter()
            found[part].append(((host - began) * 1e3, (whole - began) * 1e3))
    words = []
    for part, times in found.items():
        host, whole = (statistics.median(column) for column in zip(*times, strict=True))
        words.append(f"{part} {host:.2f} / {whole:.2f}")
    return ", ".join(words)


def traced(loop: Loop, *, kernels: int) -> None:
    """Launches and milliseconds of every kernel of each part."""
    done = set()
    for part, step in loop.steps:
        if part in done:
            step()
            continue
        done.add(part)
        activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU]
        with profile(activities=activities) as seen:
            step()
            torch.cuda.synchronize()
        rows = sorted(
            ((e.device_time_total, e.count, e.key) for e in seen.key_averages()
             if e.device_type == torch.autograd.DeviceType.CUDA), reverse=True)  # fmt: skip
        launches, total = sum(r[1] for r in rows), sum(r[0] for r in rows) / 1e3
        print(f"  {part}: {launches} launches, {total:.2f} ms")
        for spent, count, key in rows[:kernels]:
            print(f"    {spent / 1e3:8.3f} ms {count:4d}x {key[:90]}")


def profiled(loop: Loop, *, functions: int) -> None:
    """Python functions by their own time."""
    done = set()
    for part, step in loop.steps:
        torch.cuda.synchronize()
        if part in done or part == "clean":
            step()
            continue
        done.add(part)
        gc.disable()
        watch = cProfile.Profile()
        watch.enable()
        step()
        watch.disable()
        gc.enable()
        stats = pstats.Stats(watch).stats  # type: ignore[attr-defined]
        print(f"  {part}: functions, calls, own and total ms")
        found = ((own, total, calls, at) for at, (_, calls, own, total, _) in stats.items())
        rows = sorted(found, reverse=True)
        for own, total, calls, (file, line, name) in rows[:functions]:
            place = "/".join(file.split("/")[-2:])
            print(f"    {calls:5d} {own * 1e3:7.2f} {total * 1e3:7.2f}  {place}:{line} {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    both = [name + end for name in RECIPES for end in ("", "+calibrated")]
    parser.add_argument("--recipes", default=",".join((*DENSE, *both)))
    parser.add_argument("--functions", type=int, default=14)
    parser.add_argument("--kernels", type=int, default=12)
    options = parser.parse_args()
    sizes = dataclasses.replace(bench.Sizes(), layers=options.layers)
    made = bench.Bench(torch.device("cuda"), sizes, 600, print, judged=False)
    blocks = bench_loop._blocks(made)
    for name in options.recipes.split(","):
        began = time.perf_counter()
        try:
            loop = Loop(made, blocks, name)
            for _ in range(sizes.window_chunks + 2):
                for _, step in loop.steps:
                    step()
        except (KeyError, ValueError) as reason:
            print(f"\n{name}: {reason}")
            continue
        print(f"\n{name}, {options.layers} layers, host / whole ms: {timed(loop)}", flush=True)
        if options.kernels:
            traced(loop, kernels=options.kernels)
        if options.functions and not name.startswith("dense"):
            profiled(loop, functions=options.functions)
        print(f"  ({time.perf_counter() - began:.1f} s)", flush=True)
        del loop
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
