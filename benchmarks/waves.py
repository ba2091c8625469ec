"""Stock attention whole, and with the rows of its last wave split over keys: ms, by heads and keys.

    python benchmarks/waves.py

Each pair is compared before it is timed. Needs a Hopper GPU; kernels that are not installed are
left out.
"""

from __future__ import annotations

import statistics

import torch
from needs_gpu import require_hopper

from videokv.attention.stock_kernels import KernelChoice, has_fa4
from videokv.attention.waves import best_split, run_split

ROWS, REPEATS = 4680, 30


def timed(run) -> float:
    """Median ms of a call, between events, on a queue that is never empty."""
    for _ in range(5):
        run()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    torch.cuda._sleep(20_000_000)
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def main() -> None:
    """Print a row for each kernel, number of heads, width and number of keys."""
    require_hopper()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    kernels = ["fa4"] if has_fa4() else []
    print("kernel heads kv width tokens | whole ms, split ms, ratio (waves) | difference")
    for name in [*kernels, "cudnn"]:
        for heads, kv_heads in ((12, 12), (24, 8), (40, 40)):
            for width in (128, 144):
                for tokens in (11700, 32760, 65520) if heads == 12 else (32760,):
                    row(name, heads, kv_heads, width, tokens, processors)


def row(name: str, heads: int, kv_heads: int, width: int, tokens: int, processors: int) -> None:
    """One line."""
    generator = torch.Generator("cuda").manual_seed(heads)

    def draw(count: int, length: int, size: int) -> torch.Tensor:
        return torch.randn(
            1, count, length, size, device="cuda", dtype=torch.bfloat16, generator=generator
        )

    query, keys, values = draw(heads, ROWS, width), draw(kv_heads, tokens, width), None
    values = draw(kv_heads, tokens, 128)
    choice = KernelChoice(name, width, 128, False)
    split = best_split(rows=ROWS, heads=heads, tokens=tokens, tile=128, processors=processors)
    whole, whole_lse = choice.run(query, keys, values, scale=0.09, causal=False)
    ms = timed(lambda: choice.run(query, keys, values, scale=0.09, causal=False))
    label = f"{name:6s} {heads:3d} {kv_heads:3d} {width:4d} {tokens:6d} | {ms:.3f}"
    if split is None:
        print(f"{label}  not split", flush=True)
        return

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return run_split(choice.run, query, keys, values, split, scale=0.09)

    out, lse = run()
    off = float((out.float() - whole.float()).norm() / whole.float().norm())
    off_lse = float((lse - whole_lse).abs().max())
    again = timed(run)
    blocks = -(-ROWS // 128) * heads / processors
    print(
        f"{label} {again:.3f} {again / ms:.3f} ({split.cost:.2f} of {blocks:.2f} up) "
        f"{split.rows} rows whole, {split.parts} parts | {off:.1e} {off_lse:.1e}",
        flush=True,
    )


if __name__ == "__main__":
    main()
