"""Sections of ``videokv bench`` that pack and unpack: copy, reconstruct, encode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from videokv.studies.bench import GIGABYTE, Bench, Unavailable, require_close
from videokv.studies.bench_baselines import QuantVideoGen

COPIES = 4  # buffers that take turns, so that no run finds its input in the cache


def copy(bench: Bench) -> None:
    """What the device copies in a second, read plus written: the ceiling of the rest."""
    bench.add("copy/28080x12x128", _copy_rate(bench, _tensor_bytes(bench)), "GB/s", better="higher")
    if bench.device.type == "cuda":
        bench.add("copy/2GiB", _copy_rate(bench, 1 << 31), "GB/s", better="higher")


def _copy_rate(bench: Bench, size: int) -> float:
    pairs = [
        tuple(torch.empty(size, dtype=torch.uint8, device=bench.device) for _ in range(2))
        for _ in range(COPIES if size < 1 << 30 else 1)
    ]
    generator = torch.Generator(device=bench.device).manual_seed(0)
    for source, _ in pairs:
        source.random_(generator=generator)
    calls = [partial(target.copy_, source) for source, target in pairs]
    return 2 * size / (bench.device_milliseconds(calls) / 1e3) / GIGABYTE


def reconstruct(bench: Bench) -> None:
    """Packed chunks to dense rows, against the copy bandwidth at the same size."""
    rate = _copy_rate(bench, _tensor_bytes(bench)) * GIGABYTE
    for label, chunks, target in _packed_chunks(bench):
        bench.attempt(
            f"reconstruct/{label}",
            partial(_reconstruct_one, bench, label, chunks, target, rate),
        )
    bench.attempt("reconstruct/quant-videogen", lambda: _their_reconstruct(bench))


def _reconstruct_one(
    bench: Bench, label: str, chunks: list[Any], target: float, rate: float
) -> float:
    from videokv.kernels.reconstruct import decode_into, kernel_refusal, reference
    from videokv.kernels.reconstruct import reconstruct as run_reconstruct
    from videokv.tensors import held_bytes

    parts = chunks[0].parts()
    out = torch.empty(parts.shape, dtype=bench.dtype, device=bench.device)
    want = torch.empty(parts.shape, dtype=torch.float32, device=bench.device)
    reference.reconstruct(parts, want, factor=None)
    run_reconstruct(parts, out=out)
    require_close(out, want, tolerance=8e-3, what=f"reconstruct {label}")
    refusal = kernel_refusal(parts, bench.dtype, bench.device)
    if refusal is not None:
        bench.note(f"reconstruct/{label}: in PyTorch steps, {refusal}")
    calls = [
        partial(run_reconstruct, chunk.parts(), out=rows)
        for chunk, rows in ((chunk, torch.empty_like(out)) for chunk in chunks)
    ]
    ms = bench.device_milliseconds(calls)
    moved = held_bytes(chunks[0]) + out.nbytes
    bench.add(f"reconstruct/{label}/ms", ms, "ms")
    host_ms = bench.host_milliseconds(lambda: decode_into(chunks[0], out))
    bench.add(f"reconstruct/{label}/host_ms", host_ms, "ms")
    share = moved / (ms / 1e3) / rate
    bench.add(f"reconstruct/{label}/of_copy_bandwidth", share, "x", target, "higher")
    return ms


def _their_reconstruct(bench: Bench) -> float:
    theirs = QuantVideoGen(centroids=bench.sizes.centroids, iterations=2)
    packed = []
    for seed in range(COPIES):
        keys = _history(bench, seed=seed)
        packed.append(theirs.compress(keys, keys))
    ms = bench.device_milliseconds([partial(theirs.uncompress, each) for each in packed]) / 2
    bench.add("reconstruct/quant-videogen/ms", ms, "ms")
    host_ms = bench.host_milliseconds(lambda: theirs.uncompress(packed[0])) / 2
    bench.add("reconstruct/quant-videogen/host_ms", host_ms, "ms")
    ours = _found(bench, "reconstruct/qvg/ms")
    bench.add("reconstruct/qvg/against_quant-videogen", ms / ours, "x faster", 2.5, "higher")
    return ms


def _packed_chunks(bench: Bench) -> list[tuple[str, list[Any], float]]:
    """(name, packed chunks of the whole history, share of the copy bandwidth to reach)."""
    wanted = (
        ("rtn", "rtn-2bit", 0, 0.70),
        ("quarot", "quarot-2bit", 0, 0.70),
        ("qvg", "qvg-2bit", 0, 0.70),
        ("quantwm_without_psac", "quantwm-2bit", 1, 0.70),
        ("quantwm", "quantwm-2bit", 0, 0.55),
        ("videokv_keys", "videokv-2bit", 0, 0.70),
        ("videokv_values", "videokv-2bit", 1, 0.70),
        ("videokv_small", "videokv-2bit-small", 0, 0.70),
    )
    found = []
    for label, name, side, target in wanted:
        chunks = [_encode(bench, name, side, seed=seed) for seed in range(COPIES)]
        found.append((label, chunks, target))
    return found


def _encode(bench: Bench, name: str, side: int, *, seed: int) -> Any:
    from videokv.protocols import EncodeContext
    from videokv.recipes import recipe

    options = {"centroids": bench.sizes.centroids} if name.startswith(("qvg", "quantwm")) else {}
    chosen = recipe(name, **options)
    quantizer = (chosen.keys, chosen.values)[side]
    assert quantizer is not None
    keys = _history(bench, seed=seed)
    return quantizer.encode(keys, _context(bench, EncodeContext, ("key", "value")[side]))


def _context(bench: Bench, kind: Any, role: str) -> Any:
    query = bench.draw(1, bench.sizes.heads, 2048, bench.sizes.head_dim, seed=99, spread=True)
    query = query.float()
    moment = query.mT @ query / query.shape[2]
    return kind(layer=0, role=role, query_moment=moment, query_count=2048)


def encode(bench: Bench) -> None:
    """Packing the keys and values of the whole history."""
    rate = _copy_rate(bench, _tensor_bytes(bench)) * GIGABYTE
    times = {}
    for label, name in (
        ("rtn", "rtn-2bit"),
        ("quarot", "quarot-2bit"),
        ("qvg", "qvg-2bit"),
        ("quantwm", "quantwm-2bit"),
        ("videokv", "videokv-2bit"),
        ("videokv_small", "videokv-2bit-small"),
    ):
        moved = 2 * _tensor_bytes(bench) * (1 + 2.75 / 16)
        ideal_ms = moved / rate * 1e3 if label in ("rtn", "quarot") else None
        one = partial(_encode_one, bench, label, name, ideal_ms)
        ms = bench.attempt(f"encode/{label}", one)
        if ms is not None:
            times[label] = ms
    if "qvg" in times and "quantwm" in times:
        bench.add("encode/quantwm/against_qvg", times["quantwm"] / times["qvg"], "x", 2.0)
    bench.attempt("encode/quant-videogen", lambda: _their_encode(bench, times))


def _encode_one(bench: Bench, label: str, name: str, ideal_ms: float | None) -> float:
    """ideal_ms: what copying as many bytes takes. ms: host and device together."""
    run = _encode_both(bench, name)
    ms = bench.back_to_back_milliseconds(run)
    bench.add(f"encode/{label}/ms", ms, "ms")
    if ideal_ms is not None:
        bench.add(f"encode/{label}/of_copy_bandwidth", ideal_ms / ms, "x", 0.60, "higher")
    kernel_ms = bench.attempt(f"encode/{label}/kernel_ms", partial(bench.kernel_milliseconds, run))
    if kernel_ms is not None:
        bench.add(f"encode/{label}/kernel_ms", kernel_ms, "ms")
        if ideal_ms is not None:
            share = ideal_ms / kernel_ms
            bench.add(f"encode/{label}/kernels_of_copy_bandwidth", share, "x")
    return ms


def _encode_both(bench: Bench, name: str) -> Callable[[], None]:
    """Packs keys and values as a cache does: with the chunk before known."""
    from videokv.protocols import EncodeContext
    from videokv.recipes import recipe

    options: dict[str, Any] = {}
    if name.startswith(("qvg", "quantwm")):
        options = {"centroids": bench.sizes.centroids, "iterations": 2}
    chosen = recipe(name, **options)
    tensors = [_history(bench, seed=seed) for seed in (1, 2)]
    contexts = [_context(bench, EncodeContext, role) for role in ("key", "value")]
    sides = (chosen.keys, chosen.values)
    previous = [
        side.encode(x, c)  # type: ignore[union-attr]
        for side, x, c in zip(sides, tensors, contexts, strict=True)
    ]
    contexts = [dataclasses.replace(c, previous=p) for c, p in zip(contexts, previous, strict=True)]

    def run() -> None:
        for side, x, c in zip(sides, tensors, contexts, strict=True):
            side.encode(x, c)  # type: ignore[union-attr]

    return run


def _their_encode(bench: Bench, ours: dict[str, float]) -> float:
    theirs = QuantVideoGen(centroids=bench.sizes.centroids, iterations=2)
    keys, values = _history(bench, seed=1), _history(bench, seed=2)
    run = partial(theirs.compress, keys, values)
    ms = bench.back_to_back_milliseconds(run)
    bench.add("encode/quant-videogen/ms", ms, "ms")
    kernel_ms = bench.attempt(
        "encode/quant-videogen/kernel_ms", partial(bench.kernel_milliseconds, run)
    )
    if kernel_ms is not None:
        bench.add("encode/quant-videogen/kernel_ms", kernel_ms, "ms")
    for label in ("qvg", "videokv", "videokv_small"):
        if label in ours:
            name = f"encode/{label}/against_quant-videogen"
            bench.add(name, ms / ours[label], "x faster", 3.0, "higher")
    return ms


def _history(bench: Bench, *, seed: int) -> Tensor:
    s = bench.sizes
    return bench.draw(1, s.heads, s.cached_tokens, s.head_dim, seed=seed)


def _tensor_bytes(bench: Bench) -> int:
    s = bench.sizes
    return s.heads * s.cached_tokens * s.head_dim * bench.dtype.itemsize


def _found(bench: Bench, name: str) -> float:
    for figure in bench.figures:
        if figure.name == name:
            return figure.value
    raise Unavailable(f"{name} was not measured in this run")
