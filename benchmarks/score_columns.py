"""The correction's columns on one GPU: variants of the kernels, launches and host time of a read.

    python benchmarks/score_columns.py [rotated,projected,both]

A line a figure, under 30 s. Shape: 12 heads of 128 channels, 4680 queries, six packed chunks of
4680 keys, BF16. "rotated" is QuaRot (4 columns), "projected" QuantWM (a basis of rank 8 a chunk, 12
columns), "both" QuaRot with such bases. Every variant is checked against float64 before its time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import needs_gpu  # noqa: F401 - refuses in one line
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from videokv.attention.columns import ColumnCall, plan_calls, with_columns
from videokv.kernels.score_columns import keep_noise, placement, reference, stacked_bases
from videokv.kernels.score_columns import triton as kernel
from videokv.kernels.score_columns import triton_energies as energies
from videokv.kernels.score_columns import triton_sums as sums
from videokv.noise import QueryMap, ScoreNoise
from videokv.protocols import Segment
from videokv.rotation import Rotation

HEADS, SIZE, CHUNK, CHUNKS, RANK, SPARE = 12, 128, 4680, 6, 8, 16
SCALE = SIZE**-0.5
VARIANTS = ((64, 8, 8), (128, 8, 8), (64, 8, 4), (64, 8, 2), (64, 4, 4), (32, 4, 4), (16, 4, 4))


def milliseconds(run: Callable[[], object]) -> float:
    """Median device time."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=10, rep=40, return_mode="median"))


def draw(*shape: int, seed: int) -> Tensor:
    """Standard normal BF16 numbers on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def maps_of(kind: str) -> list[QueryMap]:
    """The map of every chunk."""
    turn = None if kind == "projected" else Rotation(SIZE)
    if kind == "rotated":
        return [QueryMap(32, turn)] * CHUNKS
    drawn = [draw(1, HEADS, SIZE, RANK, seed=50 + n).float() for n in range(CHUNKS)]
    return [QueryMap(64, turn, torch.linalg.qr(b)[0].bfloat16()) for b in drawn]


def read(maps: Sequence[QueryMap]) -> ColumnCall:
    """One dense chunk, the packed ones and the current one in a buffer with spare channels."""
    rows = CHUNK * (CHUNKS + 2)
    keys = torch.empty(1, HEADS, rows, SIZE + SPARE, device="cuda", dtype=torch.bfloat16)
    noise: list[tuple[ScoreNoise, ...]] = [()]
    for number, query_map in enumerate(maps):
        weights = draw(1, HEADS, CHUNK, SIZE // query_map.group_size, seed=number).float()
        noise.append((ScoreNoise(weights.square(), query_map),))
    kept = keep_noise(
        [(CHUNK, terms) for terms in noise], shape=(1, HEADS, SIZE), dtype=torch.bfloat16
    )
    assert kept is not None
    segments = []
    for number, terms in enumerate([*kept[1], ()]):
        place = keys[:, :, number * CHUNK : (number + 1) * CHUNK, :SIZE]
        segments.append(Segment(place, place, terms, spare=SPARE))
    (call,) = plan_calls(segments)
    return call


def time_read(kind: str, query: Tensor) -> None:
    """Launches and times of all columns of a read."""
    call = read(maps_of(kind))

    def run() -> tuple[Tensor, Tensor]:
        return with_columns(query, call, scale=SCALE, width=SIZE + SPARE)

    wide = [x.clone() for x in run()]
    omega = torch.full_like(wide[1][..., SIZE:], torch.nan)
    assert call.kept is not None
    reference.place_key_columns(omega, call.kept.placement)
    same = torch.equal(omega, wide[1][..., SIZE:])
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(50):
        run()
    host = (time.perf_counter() - start) / 50 * 1e3
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    launches = sum(e.count for e in seen.key_averages() if e.self_device_time_total > 0)
    print(
        f"{kind}: columns of keys and queries {milliseconds(run):.3f} ms in {launches} launches, "
        f"host {host:.3f} ms; keys are {'' if same else 'NOT '}those of the reference",
        flush=True,
    )


def time_variants(kind: str, query: Tensor) -> None:
    """Rows of a program, its warps, and directions in flight."""
    maps = maps_of(kind)[: 1 if kind == "rotated" else CHUNKS]
    bases = stacked_bases(maps, batch=1, heads=HEADS)
    few = query[:, :, :200]
    want = reference.widen_query(few.double(), maps, scale=SCALE, width=SIZE + SPARE)[..., SIZE:]
    for rows, warps, unrolled in VARIANTS:
        kernel.ROWS, kernel.WARPS, kernel.UNROLLED = rows, warps, unrolled

        energies.MOST_GROUPS = sums.MOST_GROUPS = 0  # the direct way, which these constants are of

        def run(of: Tensor = query) -> Tensor:
            return kernel.widen_query(of, maps, scale=SCALE, width=SIZE + SPARE, bases=bases)

        name = f"{kind}: {rows} rows, {warps} warps, {unrolled} in flight"
        try:
            got = run(few)[..., SIZE:].double()
            error = float((got - want).norm() / want.norm())
            print(f"{name}: {milliseconds(run):.4f} ms, error {error:.1e}", flush=True)
        except Exception as problem:  # noqa: BLE001 - one variant must not end the others
            print(f"{name}: FAILED {str(problem).splitlines()[0][:120]}", flush=True)
    kernel.ROWS, kernel.WARPS, kernel.UNROLLED = VARIANTS[0]
    energies.MOST_GROUPS, sums.MOST_GROUPS = 2, 8
    if sums.serves(query, maps):
        for rows, warps in ((64, 4), (128, 8), (64, 8), (128, 4), (32, 4), (64, 2)):
            sums.ROWS, sums.WARPS = rows, warps
            got = run(few)[..., SIZE:].double()
            error = float((got - want).norm() / want.norm())
            took = milliseconds(run)
            print(f"{kind} by sums: {rows} rows, {warps} warps: {took:.4f} ms, error {error:.1e}")
        sums.ROWS, sums.WARPS = 64, 8
    if bases is None or not energies.serves(query, maps, bases):
        return
    for rows, warps in ((64, 4), (128, 8), (64, 8), (128, 4), (32, 4)):
        energies.ROWS, energies.WARPS = rows, warps
        got = run(few)[..., SIZE:].double()
        error = float((got - want).norm() / want.norm())
        took = milliseconds(run)
        print(f"{kind} by energies: {rows} rows, {warps} warps: {took:.4f} ms, error {error:.1e}")
    energies.ROWS, energies.WARPS = 64, 4


def time_places(kind: str) -> None:
    """Rows of a program that writes the columns of keys."""
    for tokens in (128, 64, 256, 512):
        placement.TOKENS = kernel.TOKENS = tokens
        placement._tables.cache_clear()
        call = read(maps_of(kind))
        assert call.kept is not None
        shape = (1, HEADS, CHUNK * (CHUNKS + 2), SIZE + SPARE)
        whole = torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16)
        want = torch.full_like(whole[..., SIZE:], torch.nan)
        place = call.kept.placement
        kernel.place_key_columns(whole[..., SIZE:], place)
        reference.place_key_columns(want, place)
        same = torch.equal(want, whole[..., SIZE:])
        took = milliseconds(lambda out=whole[..., SIZE:], p=place: kernel.place_key_columns(out, p))
        print(f"{kind}: keys, {tokens} rows: {took:.4f} ms, right: {same}", flush=True)
    placement.TOKENS = kernel.TOKENS = 128
    placement._tables.cache_clear()


def main() -> None:
    kinds = (sys.argv[1] if len(sys.argv) > 1 else "rotated,projected,both").split(",")
    query = draw(1, HEADS, CHUNK, SIZE, seed=99)
    for kind in kinds:
        time_read(kind, query)
    for kind in kinds:
        time_variants(kind, query)
    for kind in kinds:
        time_places(kind)


if __name__ == "__main__":
    main()
