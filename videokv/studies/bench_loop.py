"""The whole loop: a transformer of Wan-1.3B's shape with random weights generates chunk by chunk.

Each chunk takes some denoising passes and one clean pass that writes the cache. The same loop runs
with dense keys in one preallocated buffer and the best dense attention, with each recipe, and with
Quant-VideoGen's compress and uncompress.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

from videokv.studies.bench import Bench, Unavailable
from videokv.studies.bench_baselines import Attention, QuantVideoGen, dense_attentions

JUDGED = ("quarot-2bit+calibrated", "quantwm-2bit+calibrated", "videokv-2bit")
RECIPES = (*JUDGED, "videokv-2bit+calibrated", "videokv-2bit-small+calibrated")


class Store(Protocol):
    """What the loop asks of a cache."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...
    def write(self, layer: int, start: int, k: Tensor, v: Tensor, q: Tensor) -> None: ...
    def commit(self, end: int) -> None: ...


@dataclass(frozen=True)
class Times:
    """Medians over the chunks with a full window, of passes and of commits."""

    pass_ms: float
    commit_ms: float


class Block(nn.Module):
    """Self-attention and MLP, random weights."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        s = bench.sizes
        width = s.heads * s.head_dim
        options: Any = {"bias": False, "device": bench.device, "dtype": bench.dtype}
        self.heads = s.heads
        self.qkv = skip_init(nn.Linear, width, 3 * width, **options)
        self.out = skip_init(nn.Linear, width, width, **options)
        self.up = skip_init(nn.Linear, width, s.mlp, **options)
        self.down = skip_init(nn.Linear, s.mlp, width, **options)

    def forward(self, x: Tensor, store: Store, layer: int, start: int | None) -> Tensor:
        """x ``[1, T, width]``; start: where the rows are written, in the clean pass."""
        normed = functional.layer_norm(x, x.shape[-1:])
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(normed).chunk(3, -1)
        )
        if start is not None:
            store.write(layer, start, k, v, q)
        x = x + self.out(store.attend(layer, q, k, v).transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.up(functional.layer_norm(x, x.shape[-1:])))
        return x + self.down(hidden)


class DenseStore:
    """One buffer a layer, the oldest chunk overwritten; the current rows are written behind."""

    def __init__(self, bench: Bench, attention: Attention) -> None:
        s = bench.sizes
        self._attention, self._sizes = attention, s
        shape = (1, s.heads, (s.window_chunks + 1) * s.chunk, s.head_dim)
        self._rows = [
            tuple(torch.zeros(shape, device=bench.device, dtype=bench.dtype) for _ in range(2))
            for _ in range(s.layers)
        ]
        self._chunks = 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = self._sizes
        held = min(self._chunks, s.window_chunks)
        # The order of keys does not matter here: a new chunk takes the slot of the oldest.
        slot = self._chunks % (s.window_chunks + 1)
        keys, values = self._rows[layer]
        for rows, new in ((keys, k), (values, v)):
            rows[:, :, slot * s.chunk : (slot + 1) * s.chunk] = new
        seen = (held + 1) * s.chunk
        return self._attention(q, keys[:, :, :seen], values[:, :, :seen], s.head_dim**-0.5)

    def write(self, layer: int, start: int, k: Tensor, v: Tensor, q: Tensor) -> None:
        """The attention of the same pass writes them."""

    def commit(self, end: int) -> None:
        self._chunks += 1


class TheirStore:
    """Quant-VideoGen's package: every chunk compressed when it is done, uncompressed to attend."""

    def __init__(self, bench: Bench, attention: Attention) -> None:
        s = bench.sizes
        self._package = QuantVideoGen(centroids=s.centroids, iterations=2)
        self._attention, self._sizes = attention, s
        self._packed: list[list[Any]] = [[] for _ in range(s.layers)]
        self._fresh: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = [self._package.uncompress(packed) for packed in self._packed[layer]]
        keys = torch.cat([*(pair[0] for pair in past), k], 2)
        values = torch.cat([*(pair[1] for pair in past), v], 2)
        return self._attention(q, keys, values, self._sizes.head_dim**-0.5)

    def write(self, layer: int, start: int, k: Tensor, v: Tensor, q: Tensor) -> None:
        self._fresh[layer] = (k.contiguous(), v.contiguous())

    def commit(self, end: int) -> None:
        for layer, (keys, values) in self._fresh.items():
            packed = self._packed[layer]
            packed.append(self._package.compress(keys, values))
            del packed[: -self._sizes.window_chunks]
        self._fresh = {}


class SnapshotStore:
    """Any recipe where the model re-encodes its whole history for every chunk."""

    def __init__(self, bench: Bench, cache: Any) -> None:
        self._cache, self._sizes = cache, bench.sizes
        self._history: list[list[tuple[Tensor, Tensor, Tensor]]] = [
            [] for _ in range(bench.sizes.layers)
        ]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self._cache.attend(layer, q, k, v)
        return out

    def write(self, layer: int, start: int, k: Tensor, v: Tensor, q: Tensor) -> None:
        self._history[layer].append((k, v, q))
        del self._history[layer][: -self._sizes.window_chunks]

    def commit(self, end: int) -> None:
        self._cache.reset(keep_statistics=True)
        for layer, parts in enumerate(self._history):
            k, v, q = (torch.cat(each, 2) for each in zip(*parts, strict=True))
            self._cache.write(layer, 0, k, v, q)
        self._cache.commit(k.shape[2])


def end_to_end(bench: Bench) -> None:
    """Time of a chunk against the same loop with dense keys, and peak bytes of the cache."""
    blocks = _blocks(bench)
    dense: dict[str, Times] = {}
    for name, attention in dense_attentions(bench.device).items():
        if name in ("flex", "fa2"):
            continue
        times = _attempt(bench, f"dense_{name}", blocks, partial(DenseStore, bench, attention))
        if times is not None:
            dense[name] = times
    if not dense:
        raise Unavailable("no dense attention ran, there is nothing to compare with")
    best = min(times.pass_ms for times in dense.values())
    done: dict[str, Times] = {}
    for name in RECIPES:
        _one_recipe(bench, blocks, name, dense, best, done)
    fastest = min(dense, key=lambda n: dense[n].pass_ms)
    attention = dense_attentions(bench.device)[fastest]
    theirs = _attempt(bench, "quant-videogen", blocks, lambda: TheirStore(bench, attention))
    if theirs is not None:
        whole = (theirs.pass_ms + theirs.commit_ms) / best
        bench.add("end_to_end/quant-videogen/against_best_dense", whole, "x")
        passes = theirs.pass_ms / best
        bench.add("end_to_end/quant-videogen/passes_against_best_dense", passes, "x")
    # A GPU that has warmed up is slower: how much of a ratio that may be.
    again = _attempt(bench, f"dense_{fastest}/again", blocks, partial(DenseStore, bench, attention))
    if again is not None:
        bench.add(f"end_to_end/dense_{fastest}/again/against_first", again.pass_ms / best, "x")


def _one_recipe(
    bench: Bench, blocks: list[Block], name: str, dense: dict[str, Times], best: float,
    done: dict[str, Times],
) -> None:  # fmt: skip
    """done: recipes that ran before; this one is added."""
    from videokv.recipes import recipe

    try:
        recipe(name)
    except ValueError as reason:
        bench.note(f"end_to_end/{name}: {reason}")
        return
    s = bench.sizes
    memory: list[Any] = []

    def store(backend: str = "auto", which: str = name) -> Any:
        cache = recipe(which, backend=backend, window_chunks=s.window_chunks).new_cache(
            layers=s.layers
        )
        memory.append(cache)
        return cache

    times = _attempt(bench, name, blocks, store)
    if times is not None:
        done[name] = times
        whole = times.pass_ms + times.commit_ms
        bench.add(f"end_to_end/{name}/against_best_dense", whole / best, "x", 1.10)
        passes = times.pass_ms / best
        bench.add(f"end_to_end/{name}/passes_against_best_dense", passes, "x")
        if "cudnn" in dense:
            against = whole / dense["cudnn"].pass_ms
            bench.add(f"end_to_end/{name}/against_cudnn", against, "x", 1.02)
        seen = memory[-1].memory()
        peak = (seen.held_bytes + seen.workspace_peak_bytes) / seen.dense_bytes
        bench.add(f"end_to_end/{name}/peak_kv_bytes_of_dense", peak, "x", 0.25)
    plain = name.partition("+")[0]
    if times is not None and plain != name:
        without = done.get(plain) or _attempt(bench, plain, blocks, lambda: store(which=plain))
        if without is not None:
            cost = times.pass_ms / without.pass_ms
            bench.add(f"end_to_end/{name}/correction_alone", cost, "x", 1.05)
    if name not in JUDGED:
        return
    if bench.device.type == "cuda":
        fp8 = _attempt(bench, f"{name}/fp8", blocks, lambda: store("triton-fp8"))
        if fp8 is not None:
            whole = fp8.pass_ms + fp8.commit_ms
            bench.add(f"end_to_end/{name}/fp8_against_best_dense", whole / best, "x", 1.00)
    _attempt(bench, f"{name}/snapshot", blocks, lambda: SnapshotStore(bench, store()))


def _attempt(bench: Bench, name: str, blocks: list[Block], make: Any) -> Times | None:
    found: list[Times] = []

    def run() -> float:
        times = _generate(bench, blocks, make())
        found.append(times)
        bench.add(f"end_to_end/{name}/passes_ms_per_chunk", times.pass_ms, "ms")
        bench.add(f"end_to_end/{name}/encode_ms_per_chunk", times.commit_ms, "ms")
        return times.pass_ms

    bench.attempt(f"end_to_end/{name}", run)
    return found[0] if found else None


def _blocks(bench: Bench) -> list[Block]:
    """Seeded weights, drawn without touching the global generator."""
    generator = torch.Generator(device=bench.device).manual_seed(0)
    blocks = [Block(bench) for _ in range(bench.sizes.layers)]
    for block in blocks:
        for weight in block.parameters():
            weight.requires_grad_(False)
            weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)
    return blocks


@torch.no_grad()
def _generate(bench: Bench, blocks: list[Block], store: Store) -> Times:
    s = bench.sizes
    passes, commits = [], []
    for chunk in range(s.chunks):
        start = chunk * s.chunk
        began = _now(bench)
        for step in range(s.denoise_steps + 1):
            x = bench.draw(1, s.chunk, s.heads * s.head_dim, seed=100 * chunk + step)
            clean = step == s.denoise_steps
            for layer, block in enumerate(blocks):
                x = block(x, store, layer, start if clean else None)
        middle = _now(bench)
        store.commit(start + s.chunk)
        passes.append((middle - began) * 1e3)
        commits.append((_now(bench) - middle) * 1e3)
    full = slice(min(s.window_chunks + 1, s.chunks - 1), None)
    if not bool(torch.isfinite(x).all()):
        raise ValueError("the loop's output is not finite")
    return Times(statistics.median(passes[full]), statistics.median(commits[full]))


def _now(bench: Bench) -> float:
    if bench.device.type == "cuda":
        torch.cuda.synchronize(bench.device)
    return time.perf_counter()
