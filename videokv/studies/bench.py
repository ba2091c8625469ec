"""``videokv bench``: how long things take on this GPU, ours beside what others offer, in one run.

Every section first checks results against a reference and reports no time where it fails. Sections
are independent: one that fails is reported with its reason and the next one runs. Figures with a
target are judged by ``--check``.
"""

from __future__ import annotations

import json
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

Better = Literal["lower", "higher"]
GIGABYTE = 1e9


@dataclass(frozen=True)
class Figure:
    """One number. target: what it has to reach (``better`` says from which side), or None."""

    name: str
    value: float
    unit: str
    target: float | None = None
    better: Better = "lower"

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"{self.name} must be finite, got {self.value!r}")

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target


@dataclass(frozen=True)
class Sizes:
    """Of a 1.3 B video model's layer at 480p; ``tiny`` for a run that only shows that it runs.

    chunk: tokens of a chunk (3 latent frames); cached: chunks in the cache.
    """

    heads: int = 12
    head_dim: int = 128
    chunk: int = 4680
    cached: int = 6
    centroids: int = 256
    decode_heads: int = 32
    decode_kv_heads: int = 8
    decode_tokens: int = 131072
    curve_tokens: tuple[int, ...] = (7020, 14040, 28080, 60840, 121680)
    layers: int = 30
    mlp: int = 8960
    chunks: int = 12
    denoise_steps: int = 4
    window_chunks: int = 6
    more_heads: tuple[tuple[int, int], ...] = ((24, 8), (40, 40))

    @property
    def cached_tokens(self) -> int:
        """Keys in the cache."""
        return self.chunk * self.cached

    @classmethod
    def tiny(cls) -> Sizes:
        """Small enough for a CPU."""
        return cls(2, 64, 32, 2, 8, 4, 2, 256, (32, 96), 2, 96, 4, 2, 2, ((4, 2),))


class Unavailable(Exception):
    """A baseline or a kernel that this machine does not have; said, not a failure."""


@dataclass
class Bench:
    """One run: where it runs, how large, and what it found.

    seconds: of the whole run; sections that have not begun by then are left out, and said so.
    judged: whether figures carry their targets (not in a run of tiny sizes).
    """

    device: torch.device
    sizes: Sizes = field(default_factory=Sizes)
    seconds: float = 1500.0
    say: Callable[[str], None] = print
    judged: bool = True
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    curve: list[dict] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def dtype(self) -> torch.dtype:
        """Of the model: BF16 on a GPU."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def seconds_left(self) -> float:
        """Until the run's budget is spent."""
        return self.seconds - (time.monotonic() - self.started)

    def draw(self, *shape: int, seed: int = 0, spread: bool = False) -> Tensor:
        """Gaussian numbers on the device; spread: some channels are ten times larger."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        values = torch.randn(shape, generator=generator, device=self.device)
        if spread:
            values[..., ::17] *= 4
        return values.to(self.dtype)

    def milliseconds(
        self, function: Callable[[], object], *, repeats: int = 30, limit_seconds: float = 2.0
    ) -> float:
        """Median time of a call, after three that are not counted."""
        for _ in range(3):
            function()
        if self.device.type != "cuda":
            return statistics.median(_wall(function) for _ in range(3))
        torch.cuda.synchronize(self.device)
        begin = time.monotonic()
        pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        while len(pairs) < repeats and time.monotonic() - begin < limit_seconds:
            first = torch.cuda.Event(enable_timing=True)
            last = torch.cuda.Event(enable_timing=True)
            first.record()
            function()
            last.record()
            pairs.append((first, last))
            if len(pairs) % 10 == 0:
                torch.cuda.synchronize(self.device)
        torch.cuda.synchronize(self.device)
        return statistics.median(first.elapsed_time(last) for first, last in pairs)

    def device_milliseconds(
        self, calls: Sequence[Callable[[], object]], *, rounds: int = 3, replays: int = 15
    ) -> float:
        """Time of one call on the GPU alone, by replays of a graph of ``rounds`` x ``calls``.

        calls: the same work on buffers of their own, so that none finds its input in the cache.
        Calls that cannot be captured stand behind a wait, so that the host is ahead of the device;
        the note says so. On the CPU: the wall time.
        """
        for call in (*calls, calls[0]):
            call()
        if self.device.type != "cuda":
            return statistics.median(_wall(call) for call in calls for _ in range(2))
        torch.cuda.synchronize(self.device)
        count = rounds * len(calls)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(rounds):
                    for call in calls:
                        call()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is timed another way
            torch.cuda.synchronize(self.device)
            self.note(f"not captured ({type(error).__name__}): timed by events behind a wait")
            return self._behind_a_wait(calls, rounds)
        graph.replay()
        times = [_events(graph.replay, self.device) for _ in range(replays)]
        return statistics.median(times) / count

    def _behind_a_wait(self, calls: Sequence[Callable[[], object]], rounds: int) -> float:
        times = []
        for _ in range(7):
            torch.cuda._sleep(5_000_000)  # cycles, about 3 ms
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(rounds):
                for call in calls:
                    call()
            last.record()
            torch.cuda.synchronize(self.device)
            times.append(first.elapsed_time(last))
        return statistics.median(times) / (rounds * len(calls))

    def host_milliseconds(self, call: Callable[[], object], *, repeats: int = 40) -> float:
        """What a call keeps the host for, with nothing to wait for (not for calls that do)."""
        call()
        times = []
        for _ in range(5):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append(_wall(lambda: [call() for _ in range(repeats)] and None) / repeats)
        return statistics.median(times)

    def kernel_milliseconds(self, call: Callable[[], object], *, repeats: int = 5) -> float:
        """Sum of what ``call`` runs on the GPU, copies included, by the profiler."""
        from torch.profiler import ProfilerActivity, profile

        if self.device.type != "cuda":
            raise Unavailable("the profiler's device time needs a GPU")
        call()
        torch.cuda.synchronize(self.device)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(repeats):
                call()
            torch.cuda.synchronize(self.device)
        rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
        for row in rows[:8]:
            each = row.self_device_time_total / repeats
            self.say(f"      {each:8.1f} us  {row.count / repeats:4.1f} x  {row.key[:70]}")
        total = sum(row.self_device_time_total for row in rows) / repeats / 1e3
        if total <= 0:
            raise Unavailable("the profiler saw no kernel")
        return total

    def back_to_back_milliseconds(self, call: Callable[[], object], *, repeats: int = 20) -> float:
        """Time of a call among others like it, whatever it waits for: host and device together."""
        for _ in range(3):
            call()
        if self.device.type != "cuda":
            return statistics.median(_wall(call) for _ in range(3))
        many = lambda: [call() for _ in range(repeats)] and None  # noqa: E731
        return statistics.median(_events(many, self.device) for _ in range(3)) / repeats

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        target: float | None = None,
        better: Better = "lower",
    ) -> None:
        """Record a figure and say it."""
        figure = Figure(name, float(value), unit, target if self.judged else None, better)
        self.figures.append(figure)
        self.say(f"  {line(figure)}")

    def note(self, text: str) -> None:
        """Something that is left out, and why."""
        self.notes.append(text)
        self.say(f"  – {text}")

    def attempt(self, name: str, function: Callable[[], float]) -> float | None:
        """What ``function`` returns; None, with the reason said, where it cannot."""
        try:
            return function()
        except Unavailable as reason:
            self.note(f"{name}: {reason}")
        except Exception as error:  # noqa: BLE001 - the next measurement has to run
            self.fail(name, error)
        return None

    def fail(self, name: str, error: Exception) -> None:
        """A section or a part of it broke."""
        words = str(error).strip().splitlines()
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        text = f"{name}: {type(error).__name__}: {words[0][:300] if words else ''} ({place})"
        self.failures.append(text)
        self.say(f"  FAILED {text}")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


Section = Callable[[Bench], None]


def run(bench: Bench, sections: dict[str, Section], *, only: Sequence[str] = ()) -> None:
    """All sections, or those named, one after the other, whatever happens in one of them.

    Raises ValueError for a name that is not there.
    """
    unknown = [name for name in only if name not in sections]
    if unknown:
        raise ValueError(f"unknown sections {unknown}; there are {list(sections)}")
    for name, section in sections.items():
        if only and name not in only:
            continue
        if bench.seconds_left <= 0:
            bench.note(f"{name}: left out, the {bench.seconds:.0f} s of this run are spent")
            continue
        bench.say(f"{name}  ({bench.seconds_left:.0f} s left)")
        try:
            section(bench)
        except Unavailable as reason:
            bench.note(f"{name}: {reason}")
        except Exception as error:  # noqa: BLE001 - the next section has to run
            bench.fail(name, error)


def require_close(got: Tensor, want: Tensor, *, tolerance: float, what: str) -> float:
    """Relative norm of the difference; ValueError where it is above the tolerance."""
    want = want.double()
    error = float((got.double() - want).norm() / want.norm())
    if not error <= tolerance:
        raise ValueError(f"{what} is off by {error:.2e}, at most {tolerance:.0e}: not timed")
    return error


def write(bench: Bench, folder: Path, *, name: str, run_facts: dict) -> tuple[Path, Path]:
    """``<name>.json`` (the figures) and ``<name>.run.json`` (machine, notes, failures, curve).

    Figures of sections that this run left out are kept from the file that is there.
    """
    from videokv.studies.results import write_json

    folder.mkdir(parents=True, exist_ok=True)
    path, facts_path = folder / f"{name}.json", folder / f"{name}.run.json"
    new = {figure.name: asdict(figure) for figure in bench.figures}
    old = [asdict(figure) for figure in read(path)] if path.exists() else []
    kept = [row for row in old if row["name"] not in new]
    write_json(path, [*kept, *new.values()])
    facts = run_facts | {
        "notes": bench.notes,
        "failures": bench.failures,
        "curve": bench.curve,
        "kept_from_earlier": [row["name"] for row in kept],
    }
    write_json(facts_path, facts)
    return path, facts_path


def read(path: Path) -> list[Figure]:
    """The figures of a file; ValueError where it is not one of ours."""
    try:
        rows = json.loads(path.read_text())
        return [Figure(**row) for row in rows]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} does not hold figures of videokv bench: {error}") from error


def line(figure: Figure) -> str:
    """A figure in one line, with its target."""
    text = f"{figure.name:<58} {figure.value:>10.4g} {figure.unit}"
    if figure.target is None:
        return text
    sign = "<=" if figure.better == "lower" else ">="
    return f"{text}   target {sign} {figure.target:g}: {'ok' if figure.met else 'SHORT'}"


def short(figures: Iterable[Figure]) -> list[Figure]:
    """Those that miss their target."""
    return [figure for figure in figures if figure.met is False]


def _events(function: Callable[[], object], device: torch.device) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    first.record()
    function()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last)


def _wall(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e3
