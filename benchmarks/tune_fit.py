"""Time the fit of ``calibrated`` on a GPU, in variants of its blocks, each checked first.

python benchmarks/tune_fit.py
"""

from __future__ import annotations

import itertools
import time

import needs_gpu  # noqa: F401 - refuses in one line
import torch

import videokv
from videokv.kernels.fit_factor import kernel_refusal, reference
from videokv.kernels.fit_factor import triton as kernel
from videokv.protocols import EncodeContext

HEADS, TOKENS, SIZE, ROWS, ROUNDS, LAYERS = 12, 4680, 128, 128, 10, 10


def timed(run) -> tuple[float, float]:
    """GPU and host milliseconds of a call."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin = time.perf_counter()
    first.record()
    for _ in range(ROUNDS):
        run()
    last.record()
    host_ms = (time.perf_counter() - begin) * 1e3 / ROUNDS
    torch.cuda.synchronize()
    return first.elapsed_time(last) / ROUNDS, host_ms


def main() -> None:
    """A line a recipe for the whole fit of a layer, then a line a variant for the kernels of some
    layers at once, with heads sitting out passes and without."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, HEADS, TOKENS, SIZE, generator=generator).to("cuda", torch.bfloat16)
    queries = torch.randn(1, HEADS, ROWS, SIZE, generator=generator).to("cuda", torch.bfloat16)
    scale = SIZE**-0.5
    for features in (1, 4, 128):
        refusal = kernel_refusal(keys.dtype, size=SIZE, features=features, device=keys.device)
        print(f"{features} features: {refusal or 'the kernel serves'}")
    for name in ("quarot-2bit", "kivi-2bit", "rtn-2bit"):
        recipe = videokv.recipe(f"{name}+calibrated")
        packed = recipe.keys.encode(keys, EncodeContext(0, "key"))
        fit = recipe.correction_method().fit
        gpu_ms, host_ms = timed(lambda p=packed, f=fit: f(p, keys, queries, scale=scale))
        print(f"{name}: whole fit {gpu_ms:.3f} ms, host {host_ms:.3f}")
    noisy = packed.decode(torch.float32)
    (term,) = packed.noise()
    phi = term.query_map.features(queries, scale=scale)
    alone = (queries, keys, noisy, phi, term.weights)
    want = reference.fit_factor(*(t.double() for t in alone), scale=scale)
    tensors = [t.repeat(LAYERS, 1, 1, 1) for t in alone]
    shapes = ((32, 4, 2), (64, 4, 2), (64, 8, 2))
    for (block, warps, stages), unrolled in itertools.product(shapes, (4, 1)):
        kernel.BLOCK_TOKENS, kernel.WARPS, kernel.STAGES = block, warps, stages
        kernel.UNROLLED = unrolled
        off = float((kernel.fit_factor(*tensors, scale=scale) - want).abs().max())
        whole = []
        for narrow in (0.0, 2.0**-12):
            kernel.NARROW = narrow
            whole.append(timed(lambda: kernel.fit_factor(*tensors, scale=scale))[0])
        print(
            f"{LAYERS} layers, {block} tokens, {warps} warps, {stages} stages, {unrolled} at once: "
            f"{whole[1]:.3f} ms (all passes {whole[0]:.3f}), off by {off:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
