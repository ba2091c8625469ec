"""Settings of the kernels of videokv's own format, timed on this GPU.

    python benchmarks/unbiased_kernels.py [encode]

[12, 28080, 128] in BF16, as in ``videokv bench``; the share is of the copy bandwidth measured in
the same run. Settings that are better than the constants in the kernels' files belong there.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial

import torch

from videokv.kernels.assign_centroids import triton_few as few_kernels
from videokv.kernels.quantize_unbiased import quantize_unbiased
from videokv.kernels.quantize_unbiased import triton as encoding
from videokv.kernels.reconstruct import triton_unbiased as reconstruction
from videokv.protocols import EncodeContext
from videokv.quantizers.unbiased import Unbiased, fit_centres
from videokv.rotation import Rotation
from videokv.studies.bench import Bench
from videokv.tensors import held_bytes

SHAPE = (1, 12, 28080, 128)
CHUNK = (1, 12, 4680, 128)  # what a commit of the large models encodes


def main() -> None:
    """Print a line for each setting; with ``encode`` as an argument only those of encoding."""
    bench = Bench(torch.device("cuda"))
    _whole(bench)
    x = bench.draw(*SHAPE)
    if "encode" not in sys.argv[1:]:
        _decode(bench, x)
    _encode(bench, x)


def _whole(bench: Bench) -> None:
    """An encode as a cache asks for it: on the GPU, on the host, and with its one transfer."""
    for shape in (CHUNK, SHAPE):
        x = bench.draw(*shape)
        for bits in (2, 3):
            encode = partial(Unbiased(bits).encode, x, EncodeContext(0, "key"))
            centres = fit_centres(x, bits=4, iterations=3, seed=0)
            parts = {
                "encode": encode,
                "centroids": partial(fit_centres, x, bits=4, iterations=3, seed=0),
                "codes": partial(
                    quantize_unbiased, x, bits=bits, group_size=shape[3], centres=centres,
                    rotation=Rotation(shape[3]),
                ),
            }  # fmt: skip
            for name, call in parts.items():
                print(f"{name} {shape} at {bits} bits, back to back "
                      f"{bench.back_to_back_milliseconds(call):.4f} ms, host "
                      f"{bench.host_milliseconds(call):.4f} ms, of kernels:")  # fmt: skip
                print(f"  {bench.kernel_milliseconds(call):.4f} ms")


def _decode(bench: Bench, x: torch.Tensor) -> None:
    copies = [torch.empty_like(x) for _ in range(4)]
    turns = itertools.cycle(copies)
    ms = bench.milliseconds(lambda: next(turns).copy_(x))
    rate = 2 * x.nbytes / ms
    print(f"copy {rate / 1e6:.0f} GB/s")
    for bits in (2, 3):
        chunk = Unbiased(bits).encode(x, EncodeContext(0, "key"))
        moved = held_bytes(chunk) + x.nbytes
        parts = chunk.parts()
        for elements, warps, programs in itertools.product(
            (4096, 8192, 16384), (4, 8), (264, 528, 1056, 1 << 30)
        ):
            reconstruction.BLOCK_ELEMENTS = elements
            reconstruction.WARPS, reconstruction.PROGRAMS = warps, programs
            ms = bench.milliseconds(
                lambda: reconstruction.reconstruct(parts, next(turns), factor=None, rope=None)  # noqa: B023
            )
            where = f"{bits} bits, {elements} elements, {warps} warps, {programs} programs"
            print(f"reconstruct {where}: {ms:.4f} ms, {moved / ms / rate:.2f} of the copy")


def _encode(bench: Bench, x: torch.Tensor) -> None:
    centres = fit_centres(x, bits=4, iterations=1, seed=0)
    fixed = {"group_size": SHAPE[3], "centres": centres, "rotation": Rotation(SHAPE[3])}
    for bits, elements, warps in itertools.product((2, 3), (4096, 8192), (4, 8)):
        encoding.BLOCK_ELEMENTS, encoding.WARPS = elements, warps
        ms = bench.milliseconds(partial(encoding.quantize, x, bits=bits, **fixed))
        print(f"encode {bits} bits, {elements} elements, {warps} warps: {ms:.4f} ms")
    start = few_kernels.spread(x, count=15, seed=0)
    ms = bench.milliseconds(partial(few_kernels.spread, x, count=15, seed=0))
    print(f"15 starts: {ms:.4f} ms")
    for stretches, blocks, stages in itertools.product((8, 16, 32), (4, 8), (2, 3)):
        few_kernels.STRETCHES, few_kernels.LABEL_BLOCKS = stretches, blocks
        few_kernels.STAGES = stages
        ms = [
            bench.milliseconds(
                partial(few_kernels.few_centres, x, start, iterations=iterations, bits=4)
            )
            for iterations in (0, 3)
        ]
        where = f"{stretches} stretches, {blocks} blocks, {stages} stages"
        print(f"labels, {where}: {ms[0]:.4f} ms; an iteration {(ms[1] - ms[0]) / 3:.4f} ms")


if __name__ == "__main__":
    main()
