"""Packing keys and values part by part: what is launched, how long each kernel and the host take.

    python benchmarks/encode_parts.py [--only qvg quantwm] [--tokens 28080]

Needs a GPU; about 25 s. Checks come first: kernels against the tests' oracles on this GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import needs_gpu  # noqa: F401 - refuses in one line
import torch

from videokv.kernels import assign_centroids, gpu
from videokv.kernels.assign_centroids import starts, triton_spread
from videokv.kernels.quantize_groups import triton as quantizing
from videokv.protocols import EncodeContext
from videokv.recipes import recipe
from videokv.studies.bench import Bench
from videokv.tensors import GroupFormat

HEADS, SIZE = 12, 128
RECIPES = ("rtn-2bit", "quarot-2bit", "qvg-2bit", "quantwm-2bit", "videokv-2bit")
ROLES = ("key", "value")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=["starts", "host", *RECIPES])
    parser.add_argument("--tokens", type=int, default=28080)
    options = parser.parse_args()
    warnings.simplefilter("always")
    begin = time.monotonic()
    bench = Bench(torch.device("cuda"), say=say)

    def wanted(name: str) -> bool:
        return any(name.startswith(start) for start in options.only)

    if wanted("starts"):
        attempt("starts", partial(draw_starts, bench, options.tokens))
    if wanted("host"):
        attempt("host", partial(launching, bench))
    for name in filter(wanted, RECIPES):
        attempt(name, partial(encode, bench, name, options.tokens))
    refused = {str(key): reason for key, reason in gpu._verdicts.items() if reason is not None}
    say(f"refused: {refused or 'nothing'}; {time.monotonic() - begin:.0f} s")


def draw_starts(bench: Bench, tokens: int) -> None:
    """k-means++ of 256 centroids: the draws, then milliseconds for some numbers of heads."""
    x = bench.draw(1, HEADS, tokens, SIZE)
    got = assign_centroids.spread_tokens(x, count=256, seed=0)
    say(f"starts refused: {assign_centroids.spread_refusal(x, count=256)}")
    say(f"draws are off by {starts.draw_error(x, got, seed=0):.1e}")
    steps = once(lambda: starts.spread_tokens(x, count=256, seed=0))
    want = starts.spread_tokens(x, count=256, seed=0)
    say(f"same rows as the steps: {float((got == want).all(-1).float().mean()):.4f}")
    say(f"starts in PyTorch steps, {HEADS} heads: {steps:.1f} ms")
    for heads in (HEADS, 60, 720):
        rows = x.repeat(-(-heads // HEADS), 1, 1, 1) if heads > HEADS else x
        for warps, channels in ((8, 8), (8, 4), (8, 16), (4, 8), (16, 8)):
            triton_spread.MOST_WARPS, triton_spread.CHANNELS = warps, channels
            ms = once(partial(triton_spread.spread, rows, count=256, seed=0), rounds=2)
            say(f"starts, {heads} heads, {warps} warps, {channels} channels: {ms:.2f} ms")
        triton_spread.MOST_WARPS, triton_spread.CHANNELS = 8, 8
        del rows


def launching(bench: Bench) -> None:
    """Host microseconds of what an encoding is made of, on a tensor too small to wait for."""
    x = bench.draw(1, 2, 64, SIZE)
    format = GroupFormat(2, 32)
    plain: dict[str, Any] = {"format": format, "rotation": None, "clusters": None, "away": False}
    calls: dict[str, Callable[[], object]] = {
        "torch.empty": lambda: torch.empty(1, 2, 64, 32, dtype=torch.uint8, device="cuda"),
        "x + x": lambda: x + x,
        "x.float()": lambda: x.float(),
        "quantize_groups.launch (3 empties, zeros, a kernel)": lambda: quantizing.launch(
            x, **plain
        ),
        "the same and its facts": lambda: quantizing.quantize(x, format=format),
    }
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(100):
                call()
            times.append((time.perf_counter() - begin) * 1e4)
            torch.cuda.synchronize()
        say(f"host: {name}: {statistics.median(times):.1f} us")


def encode(bench: Bench, name: str, tokens: int) -> None:
    """One recipe: first and later chunks of keys and values."""
    clustered = name.startswith(("qvg", "quantwm"))
    options = {"centroids": 256, "iterations": 2} if clustered else {}
    chosen = recipe(name, **options)
    sides: Any = (chosen.keys, chosen.values)
    tensors = [bench.draw(1, HEADS, tokens, SIZE, seed=seed) for seed in (1, 2)]
    query = bench.draw(1, HEADS, 2048, SIZE, seed=99, spread=True).float()
    moment = query.mT @ query / query.shape[2]
    contexts = [
        EncodeContext(layer=0, role=role, query_moment=moment, query_count=2048)  # type: ignore[arg-type]
        for role in ROLES
    ]

    def both(contexts: list[EncodeContext]) -> list[Any]:
        return [s.encode(x, c) for s, x, c in zip(sides, tensors, contexts, strict=True)]

    previous = both(contexts)
    later = [dataclasses.replace(c, previous=p) for c, p in zip(contexts, previous, strict=True)]
    for role, x, chunk in zip(ROLES, tensors, both(later), strict=True):
        off = chunk.decode(torch.float32).sub_(x.float()).norm() / x.float().norm()
        say(f"{name} {role}: error {20 * float(off.log10()):.3f} dB")
    for label, known in (("first", contexts), ("later", later)):
        if label == "first" and not clustered:
            continue
        ms = bench.back_to_back_milliseconds(partial(both, known), repeats=10)
        say(f"{name} {label}: {ms:.3f} ms as called")
        profiled(partial(both, known), f"{name} {label}")


def profiled(call: Callable[[], object], label: str, repeats: int = 4) -> None:
    """Every kernel by its name: microseconds and how often, of one call."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    kinds: dict[str, list[float]] = {}
    for event in found.events() or ():
        if event.device_type.name == "CUDA":
            kinds.setdefault(event.name, []).append(event.device_time)
    total = sum(map(sum, kinds.values())) / repeats
    count = sum(map(len, kinds.values())) / repeats
    say(f"{label}: {total / 1e3:.3f} ms of kernels, {count:.1f} launches and copies")
    for name, times in sorted(kinds.items(), key=lambda item: -sum(item[1])):
        distinct = sorted(times, reverse=True)
        say(
            f"    {sum(times) / repeats:8.1f} us {len(times) / repeats:5.1f} x  "
            f"{distinct[0]:7.1f} .. {distinct[-1]:6.1f}  {name[:90]}"
        )


def once(call: Callable[[], object], rounds: int = 1) -> float:
    """Milliseconds of a call after one that is not counted."""
    call()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(rounds):
        call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / rounds


def attempt(name: str, run: Callable[[], None]) -> None:
    """Whatever breaks is said, and the next part runs."""
    try:
        run()
    except Exception as error:  # noqa: BLE001 - one part must not end the run
        import traceback

        say(f"{name}: FAILED {type(error).__name__}: {error}")
        traceback.print_exc(limit=-4, file=sys.stdout)


def say(text: str) -> None:
    """At once: a run may be cut off."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
