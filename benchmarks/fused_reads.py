"""What is saved where a chunk is reconstructed in one pass: rotary embedding, and E4M3 rows.

    python benchmarks/fused_reads.py [--chunks 7 --tokens 4680 --heads 12 --head-dim 128]

Needs a CUDA GPU. Prints a line a measurement: median milliseconds of one layer's read (BF16), after
the two ways were compared.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import needs_gpu  # noqa: F401 - refuses in one line
import torch
from torch import Tensor

import videokv
from videokv.cache.chunks import decoded
from videokv.kernels.attend import to_e4m3
from videokv.kernels.reconstruct import Rope, decode_into
from videokv.protocols import Segment

RECIPES = ("rtn-2bit", "quarot-2bit", "quantwm-2bit", "videokv-2bit")
RUNS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, size in (("chunks", 7), ("tokens", 4680), ("heads", 12), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, vars(options))
    for name in RECIPES:
        _measure(name, options)


def _measure(name: str, options: argparse.Namespace) -> None:
    shape = (1, options.heads, options.tokens, options.head_dim)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    cache = videokv.recipe(name).new_cache(layers=1)
    for chunk in range(options.chunks):
        cache.write(0, chunk * options.tokens, draw(), draw(), draw())
        cache.commit((chunk + 1) * options.tokens)
    layer, current = cache._layers[0], Segment(draw(), draw())
    chunks = layer.state.chunks
    angles = torch.rand(options.tokens, options.head_dim // 2, device="cuda") * 50
    rope = Rope(angles.cos(), angles.sin())
    turns = torch.polar(torch.ones_like(angles).double(), angles.double())
    out = torch.empty(shape, device="cuda", dtype=torch.bfloat16)

    def in_complex_numbers() -> None:
        for chunk in chunks:
            pairs = torch.view_as_complex(
                decoded(chunk.keys, torch.bfloat16).double().unflatten(-1, (-1, 2))
            )
            out.copy_(torch.view_as_real(pairs * turns).flatten(-2))

    def afterwards() -> None:
        for chunk in chunks:
            out.copy_(rope.turn(decoded(chunk.keys, torch.bfloat16)))

    def together() -> None:
        for chunk in chunks:
            decode_into(chunk.keys, out, rope=rope)

    def converted() -> None:
        parts = layer.gathered(current)[:-1]
        for side in ("keys", "values"):
            to_e4m3(torch.cat([getattr(part, side) for part in parts], 2))

    def narrow() -> None:
        layer.gathered_narrow(current)

    in_complex_numbers()
    wanted = out.float()
    for way in (in_complex_numbers, afterwards, together):
        way()
        error = float((out.float() - wanted).norm() / wanted.norm())
        assert error < 1e-2, (name, way.__name__, error)
        print(f"{name} rope {way.__name__}: {_milliseconds(way):.3f} ms, off by {error:.1e}")
    exact = cache.view(0)[0].keys.float()
    part = layer.gathered_narrow(current)[0]
    assert part.key_scale is not None
    error = float(
        (part.keys.float() * part.key_scale[..., None, None] - exact).norm() / exact.norm()
    )
    assert error < 5e-2, (name, error)
    for way in (converted, narrow):
        print(f"{name} e4m3 {way.__name__}: {_milliseconds(way):.3f} ms, off by {error:.1e}")


def _milliseconds(way: Callable[[], None]) -> float:
    for _ in range(3):
        way()
    times = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        way()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


if __name__ == "__main__":
    main()
