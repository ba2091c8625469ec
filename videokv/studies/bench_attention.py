"""Sections of ``videokv bench`` that attend: dense, attention, decode, curve."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from videokv.attention.stock_kernels import left_out
from videokv.studies.bench import Bench, Unavailable, require_close
from videokv.studies.bench_baselines import dense_attentions

ATTENTION_RECIPES = (
    "quarot-2bit+calibrated",
    "quantwm-2bit+calibrated",
    "videokv-2bit+calibrated",
    "videokv-2bit-small+calibrated",
)
DECODE_RECIPES = {
    "packed": "rtn-2bit+taylor",
    "videokv": "videokv-2bit+calibrated",
    "videokv_small": "videokv-2bit-small+calibrated",
}
OUTPUT_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
FP8_TARGET_ERROR = 4e-2
FP8_TOLERANCE = 1.5e-1  # timed above the target too: the error is reported beside it


def dense(bench: Bench) -> None:
    """Stock kernels and ours on dense keys, with and without correction columns."""
    s = bench.sizes
    q = bench.draw(1, s.heads, s.chunk, s.head_dim, seed=1)
    k = bench.draw(1, s.heads, s.cached_tokens + s.chunk, s.head_dim, seed=2)
    v = bench.draw(1, s.heads, s.cached_tokens + s.chunk, s.head_dim, seed=3)
    scale = s.head_dim**-0.5
    want = _attention_rows(q, k, v, scale)
    for name, function in dense_attentions(bench.device).items():
        bench.attempt(
            f"dense/{name}",
            partial(_dense_one, bench, name, partial(function, q, k, v, scale), want),
        )
    for name in ("fa4", "cudnn"):
        if bench.device.type == "cuda":
            bench.attempt(
                f"dense/{name}_16_columns",
                partial(_columns_one, bench, name, q, k, v, scale),
            )
            bench.attempt(
                f"dense/{name}_split", partial(_split_one, bench, name, q, k, v, scale, want)
            )
    for fp8 in (False, True):
        bench.attempt(
            "dense/ours_fp8" if fp8 else "dense/ours",
            partial(_our_kernel, bench, q, k, v, scale, want, fp8=fp8),
        )


def _dense_one(bench: Bench, name: str, run: Callable[[], Tensor], want: Tensor) -> float:
    require_close(
        _some_rows(run()), want, tolerance=OUTPUT_TOLERANCE[bench.dtype], what=f"dense {name}"
    )
    ms = bench.milliseconds(run)
    bench.add(f"dense/{name}/ms", ms, "ms")
    return ms


def _columns_one(bench: Bench, name: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> float:
    from torch.nn.functional import pad

    from videokv.attention.stock_kernels import KERNELS, has_fa4

    if name == "fa4" and not has_fa4():
        raise Unavailable("flash-attn-4 is not installed")
    wide_q, wide_k = pad(q, (0, 16)), pad(k, (0, 16))
    ms = bench.milliseconds(lambda: KERNELS[name](wide_q, wide_k, v, scale, False))
    bench.add(f"dense/{name}_16_columns/ms", ms, "ms")
    return ms


def _split_one(
    bench: Bench, name: str, q: Tensor, k: Tensor, v: Tensor, scale: float, want: Tensor
) -> float:
    """A stock kernel whose last wave is split over keys, as ours are: what that alone brings."""
    from videokv.attention.stock_kernels import KernelChoice, has_fa4
    from videokv.attention.waves import run_split, split_for

    if name == "fa4" and not has_fa4():
        raise Unavailable("flash-attn-4 is not installed")
    split = split_for(name, q, k, v)
    if split is None:
        raise Unavailable("no split is faster here")
    run = partial(
        run_split, KernelChoice(name, q.shape[3], v.shape[3], False).run, q, k, v, split,
        scale=scale,
    )  # fmt: skip
    tolerance = OUTPUT_TOLERANCE[bench.dtype]
    require_close(_some_rows(run()[0]), want, tolerance=tolerance, what=f"{name} split")
    ms = bench.milliseconds(run)
    bench.add(f"dense/{name}_split/ms", ms, "ms")
    return ms


def _our_kernel(
    bench: Bench, q: Tensor, k: Tensor, v: Tensor, scale: float, want: Tensor, *, fp8: bool
) -> float:
    """With a correction of 4 columns (of zeros: the product is made), and without."""
    from videokv.kernels.attend import Call, Rows, attend, kernel_refusal, to_e4m3

    s = bench.sizes
    past_k, past_v = k[:, :, : s.cached_tokens], v[:, :, : s.cached_tokens]
    past = Rows(past_k, past_v)
    if fp8:
        v8, value_scale = to_e4m3(past_v)
        past = Rows(past_k, v8.mT.contiguous().mT, None, value_scale)
    current = Rows(k[:, :, s.cached_tokens :], v[:, :, s.cached_tokens :])
    extra_q = torch.zeros(1, s.heads, s.chunk, 4, device=bench.device)
    extra_k = torch.zeros(1, s.heads, s.cached_tokens, 4, device=bench.device)
    call = Call(q, past, current, scale, extra_q, extra_k)
    refusal = kernel_refusal(call)
    if refusal is not None:
        raise Unavailable(refusal)
    error = require_close(
        _some_rows(attend(call)[0]),
        want,
        tolerance=FP8_TOLERANCE if fp8 else OUTPUT_TOLERANCE[bench.dtype],
        what="our kernel",
    )
    label = "ours_fp8" if fp8 else "ours"
    target = FP8_TARGET_ERROR if fp8 else OUTPUT_TOLERANCE[bench.dtype]
    bench.add(f"dense/{label}/error", error, "relative", target)
    plain = dataclasses.replace(call, extra_query=None, extra_keys=None)
    bench.add(f"dense/{label}_uncorrected/ms", bench.milliseconds(lambda: attend(plain)), "ms")
    ms = bench.milliseconds(lambda: attend(call))
    bench.add(f"dense/{label}/ms", ms, "ms")
    return ms


def attention(bench: Bench) -> None:
    """A compressed cache with its correction, reconstruction included, against dense attention."""
    s = bench.sizes
    for heads, kv_heads in ((s.heads, s.heads), *s.more_heads):
        where = f"attention/{heads}x{kv_heads}"
        baselines = _dense_times(bench, heads, kv_heads, s.cached_tokens, where)
        for name in ATTENTION_RECIPES:
            for backend in _backends(bench):
                # It is compiled for each number of heads and columns, some seconds each.
                if backend == "flex" and (heads != s.heads or name != ATTENTION_RECIPES[0]):
                    continue
                bench.attempt(
                    f"{where}/{name}/{backend}",
                    partial(
                        _cached_one, bench, f"{where}/{name}/{backend}", name, backend,
                        (heads, kv_heads), baselines,
                    ),
                )  # fmt: skip
            plain = name.partition("+")[0]
            bench.attempt(
                f"{where}/{plain}",
                partial(_correction_cost, bench, where, name, plain, (heads, kv_heads)),
            )


def _backends(bench: Bench) -> tuple[str, ...]:
    if bench.device.type != "cuda":
        return ("auto",)
    return ("auto", "sdpa", "triton-fp8", "flex")


def _dense_times(
    bench: Bench, heads: int, kv_heads: int, cached: int, where: str
) -> dict[str, float]:
    """Stock kernels on one dense tensor of all keys, nothing to join or rebuild."""
    s = bench.sizes
    q = bench.draw(1, heads, s.chunk, s.head_dim, seed=1)
    k, v = (bench.draw(1, kv_heads, cached + s.chunk, s.head_dim, seed=seed) for seed in (2, 3))
    scale = s.head_dim**-0.5
    times = {}
    for name, function in dense_attentions(bench.device).items():
        if name == "flex":
            continue
        ms = bench.attempt(
            f"{where}/dense_{name}",
            partial(bench.milliseconds, partial(function, q, k, v, scale)),
        )
        if ms is not None:
            times[name] = ms
            bench.add(f"{where}/dense_{name}/ms", ms, "ms")
    return times


def _cached_one(
    bench: Bench,
    where: str,
    name: str,
    backend: str,
    heads: tuple[int, int],
    baselines: dict[str, float],
) -> float:
    cache, (q, k, v) = filled_cache(bench, name, backend, heads)
    fp8 = backend == "triton-fp8"
    limit = FP8_TOLERANCE if fp8 else OUTPUT_TOLERANCE[bench.dtype]
    got = _some_rows(cache.attend(0, q, k, v))
    error = require_close(got, _cache_oracle(cache, q, k, v), tolerance=limit, what=where)
    bench.add(f"{where}/error", error, "relative", FP8_TARGET_ERROR if fp8 else limit)
    ms = bench.milliseconds(lambda: cache.attend(0, q, k, v))
    bench.add(f"{where}/ms", ms, "ms")
    if backend != "flex":  # compiled: its guards do not like a capture
        device_ms = bench.device_milliseconds([lambda: cache.attend(0, q, k, v)])
        bench.add(f"{where}/device_ms", device_ms, "ms")
    with_fa4 = "fa4" in baselines
    for dense_name, dense_ms in baselines.items():
        target = _attention_target(backend, dense_name, with_fa4)
        bench.add(f"{where}/against_{dense_name}", ms / dense_ms, "x", target)
    if backend == "auto" and with_fa4 and "cudnn" in baselines:
        _without_fa4(bench, f"{where.rpartition('/')[0]}/without_fa4", name, heads, baselines)
    return ms


def _without_fa4(
    bench: Bench, where: str, name: str, heads: tuple[int, int], baselines: dict[str, float]
) -> None:
    """What "auto" does on this machine where FlashAttention-4 is not installed."""
    with left_out("fa4"):
        cache, (q, k, v) = filled_cache(bench, name, "auto", heads)
        got = _some_rows(cache.attend(0, q, k, v))
        limit = OUTPUT_TOLERANCE[bench.dtype]
        require_close(got, _cache_oracle(cache, q, k, v), tolerance=limit, what=where)
        ms = bench.milliseconds(lambda: cache.attend(0, q, k, v))
    bench.add(f"{where}/ms", ms, "ms")
    target = _attention_target("auto", "cudnn", with_fa4=False)
    bench.add(f"{where}/against_cudnn", ms / baselines["cudnn"], "x", target)


def _attention_target(backend: str, dense_name: str, with_fa4: bool) -> float | None:
    """auto, which a user gets: with FA4 1.15 x FA4 and 0.97 x cuDNN, without 1.20."""
    if backend == "auto" and with_fa4:
        return {"fa4": 1.15, "cudnn": 0.97}.get(dense_name)
    if backend == "auto":
        return {"cudnn": 1.20}.get(dense_name)
    return 0.90 if (backend, dense_name) == ("triton-fp8", "fa4") else None


def _correction_cost(
    bench: Bench, where: str, name: str, plain: str, heads: tuple[int, int]
) -> float:
    """The same cache with and without its correction, by the backend that is chosen."""
    times = []
    for each in (name, plain):
        cache, (q, k, v) = filled_cache(bench, each, "auto", heads)
        times.append(bench.milliseconds(partial(cache.attend, 0, q, k, v)))
    bench.add(f"{where}/{name}/correction_alone", times[0] / times[1], "x", 1.05)
    return times[0]


def filled_cache(
    bench: Bench,
    name: str,
    backend: str,
    heads: tuple[int, int],
    *,
    tokens: int | None = None,
    queries: int | None = None,
    chunk: int | None = None,
) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
    """A cache of one layer with ``tokens`` packed tokens in chunks of ``chunk``, and the current
    chunk's q, k and v."""
    from videokv.recipes import recipe

    s = bench.sizes
    tokens = s.cached_tokens if tokens is None else tokens
    cache = recipe(name, backend=backend).new_cache(layers=1)
    chunk = s.chunk if chunk is None else chunk
    for number, start in enumerate(range(0, tokens, chunk)):
        length = min(chunk, tokens - start)
        q, k, v = _chunk(bench, heads, length, seed=10 * number)
        cache.write(0, start, k, v, q)
        cache.commit(start + length)
    return cache, _chunk(bench, heads, queries or s.chunk, seed=7)


def _chunk(
    bench: Bench, heads: tuple[int, int], length: int, *, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    size = bench.sizes.head_dim
    q = bench.draw(1, heads[0], length, size, seed=seed + 1, spread=True)
    k = bench.draw(1, heads[1], length, size, seed=seed + 2)
    return q, k, bench.draw(1, heads[1], length, size, seed=seed + 3)


def curve(bench: Bench) -> None:
    """Time over the number of cached keys."""
    s = bench.sizes
    for tokens in s.curve_tokens:
        row: dict[str, Any] = {"cached_tokens": tokens}
        heads = (s.heads, s.heads)
        times = _dense_times(bench, *heads, tokens, f"curve/{tokens}")
        row |= {f"dense_{name}_ms": ms for name, ms in times.items()}
        for backend in _backends(bench):
            run = partial(_curve_point, bench, backend, tokens)
            ms = bench.attempt(f"curve/{tokens}/{backend}", run)
            if ms is not None:
                row[f"{backend}_ms"] = ms
                bench.add(f"curve/{tokens}/{backend}/ms", ms, "ms")
        bench.curve.append(row)


def _curve_point(bench: Bench, backend: str, tokens: int) -> float:
    heads = (bench.sizes.heads, bench.sizes.heads)
    cache, (q, k, v) = filled_cache(bench, ATTENTION_RECIPES[0], backend, heads, tokens=tokens)
    return bench.milliseconds(partial(cache.attend, 0, q, k, v))


def decode(bench: Bench) -> None:
    """Few queries on a long prompt, packed as one chunk: codes are read, not dense keys."""
    s = bench.sizes
    heads = (s.decode_heads, s.decode_kv_heads)
    for queries in (1, 16):
        where = f"decode/{queries}"
        q = bench.draw(1, heads[0], queries, s.head_dim, seed=1)
        k, v = (bench.draw(1, heads[1], s.decode_tokens, s.head_dim, seed=i) for i in (2, 3))
        scale = s.head_dim**-0.5
        times = []
        for name, function in dense_attentions(bench.device).items():
            ms = bench.attempt(
                f"{where}/dense_{name}",
                partial(bench.milliseconds, partial(function, q, k, v, scale)),
            )
            if ms is not None:
                call = partial(function, q, k, v, scale)
                device_ms = ms if name == "flex" else bench.device_milliseconds([call])
                times.append((ms, device_ms))
                bench.add(f"{where}/dense_{name}/ms", ms, "ms")
                bench.add(f"{where}/dense_{name}/device_ms", device_ms, "ms")
        for label in DECODE_RECIPES:
            bench.attempt(f"{where}/{label}", partial(_packed_decode, bench, label, queries, times))


def _packed_decode(
    bench: Bench, label: str, queries: int, dense_times: Sequence[tuple[float, float]]
) -> float:
    """dense_times: of each stock kernel, as called and on the device alone (graph replays)."""
    s = bench.sizes
    cache, (q, k, v) = filled_cache(
        bench, DECODE_RECIPES[label], "auto", (s.decode_heads, s.decode_kv_heads),
        tokens=s.decode_tokens, chunk=s.decode_tokens, queries=queries,
    )  # fmt: skip
    got = _some_rows(cache.attend(0, q, k, v))
    limit = OUTPUT_TOLERANCE[bench.dtype]
    require_close(got, _cache_oracle(cache, q, k, v), tolerance=limit, what=f"decode {label}")
    call = partial(cache.attend, 0, q, k, v)
    ms, device_ms = bench.milliseconds(call), bench.device_milliseconds([call])
    bench.add(f"decode/{queries}/{label}/ms", ms, "ms")
    bench.add(f"decode/{queries}/{label}/device_ms", device_ms, "ms")
    if dense_times:
        on_device = min(each for _, each in dense_times) / device_ms
        name = f"decode/{queries}/{label}/device_against_best_dense"
        bench.add(name, on_device, "x faster", better="higher")
        faster = min(each for each, _ in dense_times) / ms
        # The name that this figure had when there was one packed recipe.
        where = "against_best_dense" if label == "packed" else f"{label}/against_best_dense"
        bench.add(f"decode/{queries}/{where}", faster, "x faster", 3.0, "higher")
    return ms


def _cache_oracle(cache: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Some rows of the same attention in float64, on the same decoded keys and values."""
    from videokv.attention import attend
    from videokv.protocols import Segment

    past = cache.view(0)
    wide = [Segment(s.keys.double(), s.values.double(), s.noise) for s in past]
    wide.append(Segment(k.double(), v.double()))
    return attend(_some_rows(q).double(), wide, backend="eager")[0]


def _attention_rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    scores = _some_rows(q).double() @ k.double().mT * scale
    return scores.softmax(-1) @ v.double()


def _some_rows(x: Tensor) -> Tensor:
    """About 16 of the rows ``[B, H, M, D]``."""
    return x[:, :, :: max(1, x.shape[2] // 16)]
