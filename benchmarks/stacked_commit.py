"""Commits of several layers, packed alone and together: milliseconds, and what differs.

    python benchmarks/stacked_commit.py [--layers 4] [--tokens 4680] [--chunks 10]

Needs a GPU; about 20 s.
"""

from __future__ import annotations

import argparse
import statistics
import time

import needs_gpu  # noqa: F401 - refuses in one line
import torch

import videokv
from videokv.cache import KVCache, stacking
from videokv.tensors import walk_tensors

RECIPES = ("quarot-2bit+calibrated", "quantwm-2bit+calibrated", "videokv-2bit", "qvg-2bit")
HEADS, SIZE, WINDOW = 12, 128, 7


def timed(name: str, options: argparse.Namespace, *, together: bool) -> tuple[KVCache, list[float]]:
    """The cache after all chunks and the milliseconds of each commit."""
    stacking.STACKED_ON = ("cuda",) if together else ("none",)
    cache = KVCache(videokv.recipe(name, window_chunks=WINDOW))
    generator = torch.Generator("cuda").manual_seed(0)
    found = []
    for number in range(options.chunks):
        start = number * options.tokens
        for layer in range(options.layers):
            q, k, v = torch.randn(
                3, 1, HEADS, options.tokens, SIZE, generator=generator, device="cuda"
            ).bfloat16()
            cache.write(layer, start, k, v, q)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        cache.commit(start + options.tokens)
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - begin))
    return cache, found


def differing(one: KVCache, other: KVCache) -> str:
    """Share of the stored bytes that differ, of codes and of what the corrections fitted."""
    shares = []
    for parts in (("keys", "values"), ("factors",)):
        pairs = [
            (a, b)
            for x, y in zip(one.layer_states().values(), other.layer_states().values(), strict=True)
            for p, q in zip(x.chunks, y.chunks, strict=True)
            for part in parts
            for a, b in zip(
                walk_tensors(getattr(p, part)), walk_tensors(getattr(q, part)), strict=True
            )
        ]
        unlike = sum(int((a.contiguous().view(-1).view(torch.uint8)
                          != b.contiguous().view(-1).view(torch.uint8)).sum())
                     for a, b in pairs)  # fmt: skip
        shares.append(f"{unlike}/{sum(a.nbytes for a, _ in pairs)}")
    return f"bytes that differ: codes {shares[0]}, factors {shares[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4680)
    parser.add_argument("--chunks", type=int, default=10)
    options = parser.parse_args()
    for name in RECIPES:
        timed(name, options, together=True)  # compiles and checks the kernels
        caches, times = zip(*(timed(name, options, together=on) for on in (False, True)),
                            strict=True)  # fmt: skip
        late = [statistics.median(each[WINDOW:]) for each in times]
        peak = [cache.memory().workspace_peak_bytes / 2**20 for cache in caches]
        print(
            f"{name:26} alone {late[0]:6.2f} ms, together {late[1]:6.2f} ms (window full); "
            f"copies {peak[1]:.0f} MiB; {differing(*caches)}"
        )


if __name__ == "__main__":
    main()
