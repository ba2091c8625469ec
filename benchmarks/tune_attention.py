"""Variants of our Triton attention kernel, the parts of a corrected read, and decode, on one GPU.

    python benchmarks/tune_attention.py --seconds 75

A line a figure: milliseconds (median), and against what. Sections are cut where time runs out.
Shape: 12 heads of 128 channels, 4680 queries, 28080 cached and 4680 current keys, BF16; decode with
32 query and 8 KV heads on 131072 cached keys.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import needs_gpu  # noqa: F401 - refuses in one line
import torch
from torch import Tensor
from torch.nn.functional import pad

HEADS, SIZE, CHUNK, CACHED = 12, 128, 4680, 6
DECODE_HEADS, DECODE_KV_HEADS, DECODE_TOKENS = 32, 8, 131072
SCALE = SIZE**-0.5
BF16_TILES = (
    (128, 64, 8, 4, True), (128, 128, 8, 2, True), (128, 64, 8, 3, True), (128, 64, 8, 2, True),
    (64, 64, 4, 2, True), (64, 128, 4, 2, True), (128, 64, 8, 4, False), (128, 128, 8, 2, False),
)  # fmt: skip
FP8_TILES = ((128, 64, 8, 4, True), (128, 128, 8, 2, True), (128, 128, 8, 3, True),
             (64, 128, 4, 2, True))  # fmt: skip


def say(text: str) -> None:
    """One line, at once."""
    print(text, flush=True)


def milliseconds(run: Callable[[], Any], *, rep: int = 60) -> float:
    """Median of device times."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=15, rep=rep, return_mode="median"))


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Standard normal numbers on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


class Tuner:
    """Runs sections until the time is up; what fails says so and is passed over."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """What raises inside becomes a line."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - one variant must not end the others
            words = (str(error).strip().splitlines() or [""])[0][:140]
            say(f"{name}: FAILED {type(error).__name__}: {words}")

    def over(self, name: str) -> bool:
        """Whether there is no time left for ``name``."""
        late = time.monotonic() > self._end
        if late:
            say(f"{name}: no time left")
        return late


def stock(tuner: Tuner, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Stock kernels with head size 128, and 144 as columns make it."""
    from videokv.attention.stock_kernels import KERNELS, has_fa4

    wide_q, wide_k = pad(q, (0, 16)), pad(k, (0, 16))
    for name in ("fa4", "cudnn"):
        if name == "fa4" and not has_fa4():
            say("fa4: not installed")
            continue
        for label, a, b in (("128/128", q, k), ("144/128", wide_q, wide_k)):
            with tuner.attempt(f"{name} {label}"):
                ms = milliseconds(lambda a=a, b=b, n=name: KERNELS[n](a, b, v, SCALE, False))
                say(f"{name} {label}: {ms:.3f} ms")


def calls(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Our kernel's calls: dtype of the past, with and without a correction of 4 columns in 16."""
    from videokv.kernels.attend import Call, Rows, to_e4m3

    past_tokens = CACHED * CHUNK
    wide_k, wide_q = pad(k, (0, 16)), pad(q, (0, 16))
    wide_k[..., SIZE : SIZE + 4] = draw(1, HEADS, k.shape[2], 4, seed=5).abs() * 0.1
    wide_q[..., SIZE : SIZE + 4] = -draw(1, HEADS, CHUNK, 4, seed=6).abs()
    past_k, past_v = wide_k[:, :, :past_tokens, :SIZE], v[:, :, :past_tokens]
    (k8, k_scale), (v8, v_scale) = to_e4m3(past_k.contiguous()), to_e4m3(past_v)
    v8 = v8.mT.contiguous().mT
    current = Rows(wide_k[:, :, past_tokens:, :SIZE], v[:, :, past_tokens:])
    columns = wide_q[..., SIZE:], wide_k[:, :, :past_tokens, SIZE:]
    pasts = {
        "bf16": Rows(past_k, past_v),
        "v-fp8": Rows(past_k, v8, None, v_scale),
        "kv-fp8": Rows(k8, v8, k_scale, v_scale),
    }
    found = {}
    for name, past in pasts.items():
        found[name] = Call(wide_q[..., :SIZE], past, current, SCALE, *columns)
        found[f"{name} plain"] = replace(found[name], extra_query=None, extra_keys=None)
    return found


def kernel_error(out: Tensor, call: Any, exact: Any, *, rows: int = 48) -> float:
    """Relative error of the first queries against float64 on the rows before they were rounded."""
    from videokv.kernels.attend import Rows, reference

    def wide(part: Any) -> Any:
        return Rows(part.keys[:, :4].double(), part.values[:, :4].double())

    few = replace(
        exact, query=call.query[:, :4, :rows].double(), past=wide(exact.past),
        current=wide(exact.current),
        extra_query=None if call.extra_query is None else call.extra_query[:, :4, :rows].double(),
        extra_keys=None if call.extra_keys is None else call.extra_keys[:, :4].double(),
    )  # fmt: skip
    want = reference.attend(few)[0]
    return float((out[:, :4, :rows].double() - want).norm() / want.norm())


def variants(tuner: Tuner, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Tiles of our kernel."""
    from videokv.kernels.attend import Tile
    from videokv.kernels.attend import triton as kernel

    found = calls(q, k, v)
    plan = [("bf16", tile) for tile in BF16_TILES]
    plan += [("bf16 plain", tile) for tile in BF16_TILES[:2]]
    plan += [(name, tile) for tile in FP8_TILES for name in ("v-fp8", "kv-fp8")]
    plan += [("v-fp8 plain", FP8_TILES[0])]
    for name, sizes in plan:
        label = "ours {} {}x{} w{} s{} {}".format(name, *sizes[:4], "tma" if sizes[4] else "ptr")
        if tuner.over(label):
            return
        with tuner.attempt(label):
            call, tile = found[name], Tile(*sizes)
            error = kernel_error(kernel.attend(call, tile=tile)[0], call, found["bf16"])
            ms = milliseconds(lambda call=call, tile=tile: kernel.attend(call, tile=tile))
            say(f"{label}: {ms:.3f} ms, error {error:.1e}")


def filled(name: str, backend: str) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
    """A cache of one layer with six packed chunks, and current q, k and v."""
    from videokv.recipes import recipe

    cache = recipe(name, backend=backend).new_cache(layers=1)
    for chunk in range(CACHED):
        q, k, v = (draw(1, HEADS, CHUNK, SIZE, seed=10 * chunk + n) for n in (1, 2, 3))
        cache.write(0, chunk * CHUNK, k, v, q)
        cache.commit((chunk + 1) * CHUNK)
    q, k, v = (draw(1, HEADS, CHUNK, SIZE, seed=100 + n) for n in (1, 2, 3))
    return cache, (q, k, v)


def parts(tuner: Tuner) -> None:
    """One corrected read: device time of each kernel, and the host's time to launch them."""
    for name in ("quarot-2bit+calibrated", "quantwm-2bit+calibrated"):
        for backend in ("sdpa", "triton", "triton-fp8"):
            label = f"read {name.partition('-')[0]} {backend}"
            if tuner.over(label):
                return
            with tuner.attempt(label):
                cache, (q, k, v) = filled(name, backend)
                _profile(label, lambda c=cache, q=q, k=k, v=v: c.attend(0, q, k, v))


def _profile(label: str, run: Callable[[], Any], *, times: int = 4, most: int = 9) -> None:
    run()
    ms = milliseconds(run, rep=40)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    host_ms = (time.perf_counter() - start) * 1e3 / times
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events) / times / 1e3
    count = sum(e.count for e in events) // times
    say(f"{label}: {ms:.3f} ms; kernels {total:.3f} ms in {count} launches; host {host_ms:.2f} ms")
    for event in events[:most]:
        per_call = event.self_device_time_total / times
        say(f"    {per_call:8.1f} us  {event.count // times:3d} x  {event.key[:70]}")


def graph_ms(run: Callable[[], Any]) -> float:
    """Device time of a captured call, without the host's launches."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return milliseconds(graph.replay)


def decode_cache(name: str) -> Any:
    """A cache of one layer and one packed chunk of DECODE_TOKENS tokens."""
    from videokv.recipes import recipe

    cache = recipe(name).new_cache(layers=1)
    k, v = (draw(1, DECODE_KV_HEADS, DECODE_TOKENS, SIZE, seed=seed) for seed in (2, 3))
    cache.write(0, 0, k, v, draw(1, DECODE_HEADS, DECODE_TOKENS, SIZE, seed=1))
    cache.commit(DECODE_TOKENS)
    return cache


def decode_wanted(cache: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the decoded chunk gives in float32."""
    from videokv.attention import attend
    from videokv.protocols import Segment

    parts = [*cache.view(0), Segment(k, v)]
    wide = [Segment(s.keys.float(), s.values.float(), noise=s.noise) for s in parts]
    return attend(q.float(), wide, backend="sdpa")[0]


def off(got: Tensor, want: Tensor) -> float:
    """Relative norm of the difference."""
    return float((got.float() - want).norm() / want.norm())


# kernel (rows up to which the one for few rows serves), programs, tokens of a block, warps, stages
DECODE_FEW = (
    (16, 2112, 32, 1, 3), (16, 2112, 32, 1, 4), (16, 1584, 32, 1, 3), (16, 3168, 32, 1, 3),
    (16, 4224, 32, 1, 2), (16, 1056, 64, 1, 2), (16, 1056, 64, 1, 3), (16, 1056, 32, 2, 3),
    (0, 528, 64, 4, 2), (0, 528, 128, 4, 2),
)  # fmt: skip
DECODE_MANY = (
    (16, 264, 64, 4, 2), (16, 528, 64, 4, 2), (16, 528, 64, 4, 3), (16, 264, 128, 4, 2),
    (16, 264, 128, 8, 2), (64, 264, 64, 4, 2),
)  # fmt: skip


def decode(tuner: Tuner) -> None:
    """A few queries on one packed chunk: launches, then variants, each checked first."""
    from videokv.kernels.attend_packed.triton_words import Tuning

    for name in ("rtn-2bit+taylor", "videokv-2bit+calibrated"):
        if tuner.over(name):
            return
        cache = decode_cache(name)
        for queries in (1, 16):
            q = draw(1, DECODE_HEADS, queries, SIZE, seed=4)
            k, v = (draw(1, DECODE_KV_HEADS, queries, SIZE, seed=seed) for seed in (5, 6))

            def run(cache: Any = cache, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
                return cache.attend(0, q, k, v)

            label = f"decode {name} {queries}"
            with tuner.attempt(label):
                want = decode_wanted(cache, q, k, v)
                say(f"{label}: error {off(run(), want):.1e}")
                _profile(label, run, most=8)
                say(f"{label}: captured {graph_ms(run):.3f} ms")
            if not name.startswith("rtn"):
                continue
            for variant in DECODE_FEW if queries == 1 else DECODE_MANY:
                if tuner.over(label):
                    return
                before = Tuning.few_rows, Tuning.few, Tuning.many
                Tuning.few_rows, Tuning.few, Tuning.many = variant[0], variant[1:], variant[1:]
                with tuner.attempt(f"{label} {variant}"):
                    error = off(run(), want)
                    ms = graph_ms(run)
                    say(f"{label} {variant}: captured {ms:.3f} ms, error {error:.1e}")
                Tuning.few_rows, Tuning.few, Tuning.many = before
        del cache


def main() -> None:
    """Everything, in the order of what matters most."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--only", choices=("stock", "variants", "parts", "decode"), action="append")
    options = parser.parse_args()
    only = options.only or ("stock", "variants", "parts", "decode")
    tuner = Tuner(options.seconds)
    torch.set_grad_enabled(False)
    if "stock" in only or "variants" in only:
        q = draw(1, HEADS, CHUNK, SIZE, seed=1)
        k, v = (draw(1, HEADS, (CACHED + 1) * CHUNK, SIZE, seed=seed) for seed in (2, 3))
        if "stock" in only:
            with tuner.attempt("stock"):
                stock(tuner, q, k, v)
        if "variants" in only:
            with tuner.attempt("variants"):
                variants(tuner, q, k, v)
        del q, k, v
    for name, section in (("parts", parts), ("decode", decode)):
        if name in only and not tuner.over(name):
            with tuner.attempt(name):
                section(tuner)


if __name__ == "__main__":
    main()
