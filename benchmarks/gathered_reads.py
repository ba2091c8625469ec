"""One layer's read on a GPU: all chunks at once against chunk by chunk, and the copy of new rows.

    python benchmarks/gathered_reads.py [--chunks 6 --tokens 4680 --heads 12 --head-dim 128]

Needs a CUDA GPU; about 20 s. The two ways are compared bit for bit first; then median milliseconds
of the device (a captured graph) and of the host, and the copy's blocks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import needs_gpu  # noqa: F401 - refuses in one line
import torch
from torch import Tensor

import videokv
from videokv.kernels.copy_rows import copy_rows, kernel_refusal, reference
from videokv.kernels.copy_rows import triton as copy_kernel
from videokv.kernels.reconstruct import decode_into
from videokv.kernels.reconstruct.decoding import Decoding, Source

RECIPES = ("rtn-2bit", "quarot-2bit", "qvg-2bit", "quantwm-2bit", "videokv-2bit")
RUNS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, size in (("chunks", 6), ("tokens", 4680), ("heads", 12), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, vars(options))
    for name in RECIPES:
        _reads(name, options)
    _copies(options)


def _reads(name: str, options: argparse.Namespace) -> None:
    shape = (1, options.heads, options.tokens, options.head_dim)
    generator = torch.Generator("cuda").manual_seed(0)
    cache = videokv.recipe(name, sink_chunks=0).new_cache(layers=1)
    for chunk in range(options.chunks):
        q, k, v = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in "qkv")
        cache.write(0, chunk * options.tokens, k, v, q)
        cache.commit((chunk + 1) * options.tokens)
    chunks = cache._layers[0].state.chunks
    sources = [
        Source(held, side, number * options.tokens)
        for number, chunk in enumerate(chunks)
        for side, held in enumerate((chunk.keys, chunk.values))
        if not isinstance(held, Tensor)
    ]
    rows = options.chunks * options.tokens
    wide = torch.zeros(1, options.heads, rows, options.head_dim + 16, device="cuda").bfloat16()
    outputs = (wide[..., : options.head_dim], torch.zeros_like(wide)[..., : options.head_dim])
    outputs = (outputs[0], outputs[1].contiguous())
    decoding = Decoding(sources)

    def together() -> None:
        decoding.write(*outputs)

    def one_by_one() -> None:
        for chunk, side, row in sources:
            decode_into(chunk, outputs[side][:, :, row : row + chunk.shape[2]])

    one_by_one()
    wanted = [out.clone() for out in outputs]
    for out in outputs:
        out.zero_()
    together()
    assert all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True)), name
    (ready,) = decoding._ready.values()
    written = sum(out.numel() * out.itemsize for out in outputs)
    for way in (one_by_one, together):
        device_ms, host_ms = _device_ms(way), _host_ms(way)
        print(
            f"{name} {way.__name__}: device {device_ms:.3f} ms ({written / device_ms / 1e9:.2f} "
            f"TB/s written), host {host_ms:.3f} ms"
        )
    print(
        f"{name}: {len(ready.batches)} launches for {len(sources)} chunks, {len(ready.rest)} left"
    )


def _copies(options: argparse.Namespace) -> None:
    shape = (1, options.tokens, options.heads, options.head_dim)
    held = [torch.randn(shape, device="cuda").bfloat16().transpose(1, 2) for _ in range(2)]
    wide = torch.zeros(*held[0].shape[:3], options.head_dim + 16, device="cuda").bfloat16()
    outputs = [wide[..., : options.head_dim], torch.zeros(held[0].shape, device="cuda").bfloat16()]
    pairs = list(zip(held, outputs, strict=True))
    print(f"copy pytorch: device {_device_ms(lambda: reference.copy_rows(pairs)):.4f} ms")
    assert kernel_refusal(pairs) is None
    timed = []
    for elements in (2048, 4096, 8192):
        for warps in (4, 8):
            copy_kernel.ELEMENTS, copy_kernel.WARPS = elements, warps
            for out in outputs:
                out.zero_()
            copy_rows(pairs)
            assert all(torch.equal(a, b) for a, b in pairs)
            timed.append((_device_ms(lambda: copy_rows(pairs)), elements, warps))
    for device_ms, elements, warps in sorted(timed, reverse=True):
        print(f"copy {elements} elements, {warps} warps: device {device_ms:.4f} ms")
    print(f"copy host: {_host_ms(lambda: copy_rows(pairs)):.3f} ms")


def _device_ms(way: Callable[[], None]) -> float:
    way()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way()
    times = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _host_ms(way: Callable[[], None]) -> float:
    times = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        way()
        times.append(1e3 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times)


if __name__ == "__main__":
    main()
