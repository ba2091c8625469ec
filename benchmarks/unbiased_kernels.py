"""Settings of the kernels of videokv's own format, timed on this GPU.

    python benchmarks/unbiased_kernels.py [--only reconstruct|encode]

[12, 28080, 128] in BF16, as in ``videokv bench``; the share is of the copy bandwidth measured in
the same run. Settings that are better than the constants in the kernels' files belong there.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial

import needs_gpu  # noqa: F401 - refuses in one line
import torch

from videokv.kernels import reconstruct as reading
from videokv.kernels.assign_centroids import triton_few as few_kernels
from videokv.kernels.gpu import disagreement
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


COPIES = 3
# Elements and warps of a block, programs, longest stretch, registers (0: any), stages, split.
SETTINGS = [
    (8192, 4, 1056, 8, 0, 3, 1),
    (8192, 4, 1056, 8, 0, 3, 0),
    (8192, 8, 1056, 8, 0, 2, 0),
    (8192, 4, 1056, 8, 128, 3, 1),
    (8192, 4, 1056, 8, 0, 2, 1),
    (8192, 4, 528, 16, 0, 3, 1),
    (8192, 4, 528, 16, 128, 3, 1),
    (8192, 4, 396, 16, 0, 3, 1),
    (8192, 4, 1056, 3, 128, 3, 1),
    (16384, 8, 528, 8, 0, 3, 1),
    (16384, 8, 528, 8, 128, 3, 1),
    (16384, 4, 528, 8, 0, 3, 1),
]


def main() -> None:
    """Print a line for each setting, the best of each kernel last."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=["reconstruct", "encode"])
    only = parser.parse_args().only
    bench = Bench(torch.device("cuda"))
    x = bench.draw(*SHAPE)
    copies = [torch.empty_like(x) for _ in range(COPIES)]
    ms = bench.device_milliseconds([partial(copy.copy_, x) for copy in copies])
    rate = 2 * x.nbytes / ms
    print(f"copy {rate / 1e6:.0f} GB/s")
    if only != "encode":
        best = [_reconstruct(bench, bits, x, copies, rate) for bits in (2, 3)]
        print(*best, sep="\n")
    if only != "reconstruct":
        _whole(bench)
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


def _reconstruct(
    bench: Bench, bits: int, x: torch.Tensor, rows: list[torch.Tensor], rate: float
) -> str:
    """Every setting, checked against the reference and then timed by graph replays."""
    chunks = [Unbiased(bits).encode(x, EncodeContext(0, "key", seed=i)) for i in range(COPIES)]
    moved = held_bytes(chunks[0]) + x.nbytes
    parts = [chunk.parts() for chunk in chunks]
    calls = [
        partial(reconstruction.reconstruct, part, row, factor=None, rope=None)
        for part, row in zip(parts, rows, strict=True)
    ]
    want = torch.empty_like(x)
    reading.reference.reconstruct(parts[0], want, factor=None)
    best = (float("inf"), "no setting")
    for setting in SETTINGS:
        reconstruction.BLOCK_ELEMENTS, reconstruction.WARPS = setting[:2]
        reconstruction.PROGRAMS, reconstruction.LONGEST = setting[2:4]
        reconstruction.REGISTERS, reconstruction.STAGES = setting[4] or None, setting[5]
        reconstruction.SPLIT_BITS = (2, 3, 4) if setting[6] else ()
        try:
            rows[0].fill_(torch.nan)
            calls[0]()
            refusal = disagreement(rows[0], want, tolerance=reading.TOLERANCE[torch.bfloat16])
            if refusal is not None:
                raise ValueError(refusal)
            ms = bench.device_milliseconds(calls, rounds=4, replays=9)
        except Exception as error:  # noqa: BLE001 - one setting must not end the run
            print(f"reconstruct {bits} bits {setting}: FAILED {type(error).__name__}: {error}")
            continue
        line = (
            f"reconstruct {bits} bits {setting}: {ms:.4f} ms, {moved / ms / rate:.2f} of the copy"
        )
        print(line, flush=True)
        best = min(best, (ms, f"BEST {line}, now {SETTINGS[0]}"))
    return best[1]


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
