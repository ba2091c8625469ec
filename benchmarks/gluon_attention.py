"""Schedules of the Gluon attention kernel on a Hopper GPU: right first, then how fast.

    python benchmarks/gluon_attention.py [--only NAME ...] [--seconds 55]

Each schedule runs in a process of its own, so that one which hangs or fails ends nothing else: all
compile and check themselves side by side on odd sizes, then each is timed alone. Shape: 12 heads of
128 channels, 4680 queries, 28080 cached and 4680 current keys, 16 columns of a correction; medians
of replayed graphs. "values": cached values in E4M3 or BF16.
"""

from __future__ import annotations

import argparse
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

HEADS, SIZE, CHUNK, CACHED = 12, 128, 4680, 6
SCALE = SIZE**-0.5
CHECKS = (
    # heads, KV heads, queries, past, current, columns
    (2, 2, 77, 333, 77, 16),
    (4, 2, 300, 1000, 0, 16),
    (2, 2, 130, 0, 200, 0),
    (6, 3, 4680, 1001, 77, 4),
    (1, 1, 5, 3, 1, 0),
)
BASELINES = ("cudnn",)
SCHEDULES: dict[str, dict[str, Any]] = {
    "simple": {"ahead": False},
    "ahead": {"turns": False},
    "turns": {},
    "turns, 3 keys": {"key_stages": 3},
    "ahead, 3 keys": {"key_stages": 3, "turns": False},
    "simple, 3 keys unchecked": {"key_stages": 3, "ahead": False},
    "turns, 3 keys, 2 of 16": {"key_stages": 3, "poly": 2},
    "turns, 3 keys, 4 of 16": {"key_stages": 3, "poly": 4},
    "turns, 3 keys, no exp unchecked": {"key_stages": 3, "poly": 99},
    "turns, 3 keys 66 unchecked": {"key_stages": 3, "programs": 66},
    "turns, 3 keys, no columns unchecked": {"key_stages": 3},
    "turns, bf16": {"bf16": True},
    "ahead, bf16": {"bf16": True, "turns": False},
}


def say(text: str) -> None:
    """One line, at once."""
    print(text, flush=True)


def draw(*shape: int, seed: int) -> Tensor:
    """Standard normal numbers in BF16 on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def make_call(
    heads: int, kv_heads: int, queries: int, past: int, current: int, columns: int, *, bf16: bool
) -> Any:
    """As a cache makes it: keys with 16 spare channels, E4M3 values with tokens side by side."""
    from videokv.kernels.attend import Call, Rows, to_e4m3

    room = -(-past // 16) * 16
    wide_q = draw(1, heads, queries, SIZE + 16, seed=1)
    wide_k = draw(1, kv_heads, max(room, 1), SIZE + 16, seed=2)[:, :, :past]
    old = None
    if past:
        values, scale = draw(1, kv_heads, past, SIZE, seed=3), None
        if not bf16:
            narrow, scale = to_e4m3(values)
            turned = torch.zeros(1, kv_heads, SIZE, room, device="cuda", dtype=narrow.dtype)
            turned.view(torch.uint8)[..., :past] = narrow.mT.contiguous().view(torch.uint8)
            values = turned.mT[:, :, :past]
        old = Rows(wide_k[..., :SIZE], values, None, scale)
    new = None
    if current:
        new = Rows(*(draw(1, kv_heads, current, SIZE, seed=s) for s in (4, 5)))
    extra: tuple[Any, Any] = (None, None)
    if columns and past:
        extra = (wide_q[..., SIZE : SIZE + columns], wide_k[..., SIZE : SIZE + columns])
    return Call(wide_q[..., :SIZE], old, new, SCALE, *extra)


def off(got: Tensor, want: Tensor) -> float:
    """Relative error in norm."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def check(run: Callable[[Any], tuple[Tensor, Tensor]], *, bf16: bool) -> str:
    """Errors of output and log-sum-exp against float64, one pair a size."""
    from videokv.kernels.attend import reference

    words = []
    for sizes in CHECKS:
        call = make_call(*sizes, bf16=bf16)
        want, want_lse = reference.attend(replace(call, query=call.query.double()))
        got, got_lse = run(call)
        torch.cuda.synchronize()
        error, lse_error = off(got, want), off(got_lse, want_lse)
        words.append(f"{error:.1e}/{lse_error:.0e}")
        if not (error < (1e-2 if bf16 else 5e-2) and lse_error < 1e-2):
            raise AssertionError(f"{sizes}: off by {error:.2e}, lse by {lse_error:.2e}; {words}")
    return " ".join(words)


def milliseconds(run: Callable[[], Any], *, rounds: int = 40) -> float:
    """Median of a replayed graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    ms = sorted(s.elapsed_time(e) for s, e in times)[rounds // 2]
    smi = subprocess.Popen(["nvidia-smi", "--query-gpu=clocks.sm,power.draw,clocks_event_reasons.active", "--format=csv,noheader"], stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 1.5
    while smi.poll() is None and time.monotonic() < until:
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
    say("clock " + (smi.stdout.read().strip() if smi.poll() is not None else "?"))
    return ms


def child(name: str) -> None:
    """One schedule or baseline: checks, says "ready", waits for a line, times."""
    bf16 = "bf16" in name
    if name in ("fa4", "cudnn"):
        from videokv.attention.stock_kernels import KERNELS

        q, k, v = (draw(1, HEADS, n, SIZE, seed=7) for n in (CHUNK, 7 * CHUNK, 7 * CHUNK))
        kernel = KERNELS[name]

        def run() -> Any:
            return kernel(q, k, v, SCALE, False)

        words = "dense"
    elif name.startswith("triton"):
        from videokv.kernels.attend import device_tile
        from videokv.kernels.attend.triton import attend as triton_attend

        call = make_call(HEADS, HEADS, CHUNK, CACHED * CHUNK, CHUNK, 16, bf16=bf16)

        def run() -> Any:
            return triton_attend(call, tile=device_tile(call))

        words = ""
    else:
        from videokv.kernels.attend import hopper

        settings = {k: v for k, v in SCHEDULES[name].items() if k != "bf16"}
        schedule = hopper.Schedule(**settings)
        words = ""
        if "unchecked" not in name:
            words = check(lambda call: hopper.attend(call, schedule=schedule), bf16=bf16)
        call = make_call(HEADS, HEADS, CHUNK, CACHED * CHUNK, 0 if "alone" in name else CHUNK, 0 if "no columns" in name else 16, bf16=bf16)
        if "zeros" in name:
            call.query.zero_(); call.past.keys.zero_(); call.past.values.view(torch.uint8).zero_(); call.current.keys.zero_(); call.current.values.zero_()

        def run() -> Any:
            return hopper.attend(call, schedule=schedule)

    run()
    torch.cuda.synchronize()
    say(f"ready {words}")
    if sys.stdin.readline():
        say(f"took {milliseconds(run):.3f} ms")


class Child:
    """A process of this script, its lines in a queue."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        self.errors: list[str] = []
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.rstrip())
        self.lines.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def line(self, word: str, seconds: float) -> str | None:
        """The next line that starts with ``word``; None where none comes in time, or ever."""
        end = time.monotonic() + seconds
        try:
            while True:
                line = self.lines.get(timeout=max(end - time.monotonic(), 0.01))
                if line is None or line.startswith(word):
                    return line
        except queue.Empty:
            return None

    def last_words(self) -> str:
        """What it said last of why it failed."""
        self.process.kill()
        time.sleep(0.1)
        text = [line for line in self.errors if line.strip()]
        return " | ".join(line.strip() for line in text[-6:])[-500:] or "no answer in time"


def main(names: list[str], seconds: float) -> None:
    """A line a schedule."""
    end = time.monotonic() + seconds
    children = [Child(name) for name in names]
    ready: list[tuple[Child, str]] = []
    for one in children:
        words = one.line("ready", end - 10 - time.monotonic())
        if words is None:
            say(f"{one.name:34} FAILED: {one.last_words()}")
        else:
            ready.append((one, words.removeprefix("ready").strip()))
    say(f"compiled and checked; {end - time.monotonic():.0f} s left")
    for one, words in ready:
        assert one.process.stdin is not None
        one.process.stdin.write("go\n")
        one.process.stdin.flush()
        clock = one.line("clock", 8)
        took = one.line("took", 8)
        if took is None:
            took = f"FAILED: {one.last_words()}"
        say(f"{one.name:34} {took.removeprefix('took')}   {words} {clock}")
        one.process.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--seconds", type=float, default=58)
    parser.add_argument("--child")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
    else:
        main(arguments.only or [*BASELINES, *SCHEDULES], arguments.seconds)
