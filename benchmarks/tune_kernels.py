"""Settings of the reading and encoding kernels, timed on this GPU by graph replays.

    python benchmarks/tune_kernels.py [--seconds 60] [--only reconstruct ...]

[12, 28080, 128] in BF16, as in ``videokv bench``. Every setting is checked against the reference
before it is timed; one line each, the best of each kernel last. Settings that are better than the
constants in the kernels' files belong there. The share is of the copy bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import needs_gpu  # noqa: F401 - refuses in one line
import torch

from videokv.kernels import assign_centroids, gpu, quantize_groups
from videokv.kernels import reconstruct as reading
from videokv.kernels.assign_centroids import Clusters, choice, triton_step
from videokv.kernels.assign_centroids import triton as centroids
from videokv.kernels.quantize_groups import triton as quantizing
from videokv.kernels.quantize_groups import triton_owned, triton_turned
from videokv.kernels.reconstruct import triton as reconstruction
from videokv.protocols import EncodeContext
from videokv.recipes import recipe
from videokv.rotation import Rotation
from videokv.studies.bench import Bench
from videokv.tensors import GroupFormat, held_bytes

SHAPE = (1, 12, 28080, 128)
COPIES = 3
KERNELS: dict[str, list[tuple[int, ...]]] = {
    # Elements, warps, blocks of a program, programs, registers (0: any), split (reading_case).
    "reconstruct-rtn": [(8192, 4, 1, 1056, 0, 1), (4096, 4, 1, 1056, 0, 1)],
    "reconstruct-qvg": [
        (4096, 4, 1, 1056, 0, 1),
        (2048, 4, 1, 1056, 0, 1),
        (2048, 2, 1, 1056, 0, 1),
        (4096, 2, 1, 1056, 0, 1),
        (8192, 8, 1, 1056, 0, 1),
    ],
    "reconstruct-quarot": [
        (8192, 4, 8, 1056, 0, 1),
        (8192, 4, 8, 1056, 0, 0),
        (8192, 4, 8, 528, 0, 1),
        (8192, 4, 16, 396, 0, 1),
        (8192, 4, 16, 528, 0, 1),
        (8192, 4, 3, 1056, 0, 1),
        (8192, 4, 8, 1056, 96, 1),
        (16384, 8, 8, 528, 0, 1),
        (16384, 8, 8, 264, 128, 1),
    ],
    "reconstruct-quantwm_without_psac": [
        (4096, 4, 1, 1056, 0, 1),
        (2048, 4, 1, 1056, 0, 1),
        (2048, 2, 1, 1056, 0, 1),
        (4096, 2, 1, 1056, 0, 1),
    ],
    "reconstruct-quantwm": [
        (4096, 4, 8, 1056, 0, 1),
        (4096, 4, 1, 1056, 0, 1),
        (4096, 4, 2, 1056, 0, 1),
        (4096, 4, 8, 1056, 80, 1),
        (2048, 4, 1, 1056, 0, 1),
        (2048, 2, 1, 1056, 0, 1),
        (4096, 8, 1, 1056, 0, 1),
        (8192, 8, 1, 1056, 0, 1),
        (8192, 4, 8, 528, 128, 1),
    ],
    "quantize-rtn": [(64, 2, 8), (128, 4, 8), (128, 4, 3), (32, 1, 8), (64, 2, 3), (64, 1, 8)],
    "quantize-quarot": [(64, 4, 2, 8), (64, 4, 2, 4), (32, 4, 2, 8), (64, 4, 2, 16), (32, 2, 2, 8)],
    "quantize-qvg": [(2048, 4, 8), (4096, 4, 8), (1024, 4, 8), (2048, 2, 8)],
    "cluster": [(128, 8, 2), (128, 8, 3), (128, 8, 1), (64, 8, 2)],
    "assign": [(128, 8, 8), (64, 4, 8), (64, 8, 8), (128, 8, 4), (64, 4, 32)],
    "sum": [(64, 128, 8, 3), (64, 256, 8, 3), (128, 128, 8, 3), (64, 128, 4, 3), (64, 64, 4, 3)],
    "choose": [(128, 8, 5), (128, 8, 10), (64, 4, 10), (64, 8, 8)],
}


@dataclass(frozen=True)
class Case:
    """One kernel: how its settings are put in place, checked and run."""

    apply: Callable[[tuple[int, ...]], None]
    check: Callable[[], str | None]
    calls: Sequence[Callable[[], object]]
    moved_bytes: int


def main() -> None:
    """Print a line for each setting."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", nargs="*", default=list(KERNELS))
    options = parser.parse_args()
    names = [n for n in KERNELS if any(n.startswith(start) for start in options.only)]
    if not names:
        parser.error(f"--only takes beginnings of {', '.join(KERNELS)}; got {options.only}")
    begin = time.monotonic()
    bench = Bench(torch.device("cuda"), say=say)
    tensors = [bench.draw(*SHAPE, seed=seed) for seed in range(COPIES)]
    rate = (
        2
        * tensors[0].nbytes
        / bench.device_milliseconds([partial(torch.empty_like(x).copy_, x) for x in tensors])
    )
    say(f"copy {rate / 1e6:.0f} GB/s")
    cases: dict[str, Case] = {}
    for name in names:
        with told(name):
            cases[name] = case(name, tensors)
    say(f"prepared in {time.monotonic() - begin:.0f} s")
    best: dict[str, tuple[float, tuple[int, ...]]] = {}
    for setting_number in range(max(len(settings) for settings in KERNELS.values())):
        for name, one in cases.items():
            if setting_number >= len(KERNELS[name]):
                continue
            if time.monotonic() - begin > options.seconds:
                break
            setting = KERNELS[name][setting_number]
            with told(f"{name} {setting}"):
                ms = timed(bench, one, setting)
                share = one.moved_bytes / ms / rate
                say(f"{name} {setting}: {ms:.4f} ms, {share:.2f} of the copy")
                best[name] = min(best.get(name, (float("inf"), ())), (ms, setting))
    for name, (ms, setting) in best.items():
        say(f"BEST {name} {setting}: {ms:.4f} ms, now {KERNELS[name][0]}")
    say(f"{time.monotonic() - begin:.0f} s")


def timed(bench: Bench, one: Case, setting: tuple[int, ...]) -> float:
    """Milliseconds of a call; ValueError where the results are wrong."""
    one.apply(setting)
    refusal = one.check()
    if refusal is not None:
        raise ValueError(refusal)
    return bench.device_milliseconds(one.calls, rounds=4, replays=9)


def case(name: str, tensors: list[torch.Tensor]) -> Case:
    """Inputs of a kernel."""
    kind, _, label = name.partition("-")
    if kind == "reconstruct":
        return reading_case(label, tensors)
    if kind == "quantize":
        return quantizing_case(label, tensors)
    return centroids_case(name, tensors)


def reading_case(label: str, tensors: list[torch.Tensor]) -> Case:
    """A packed history and rows to write."""
    side = int(label == "quantwm_without_psac")
    clustered = {"centroids": 256} if label.startswith(("qvg", "quantwm")) else {}
    chosen = recipe(f"{label.partition('_')[0]}-2bit", **clustered)
    quantizer: Any = (chosen.keys, chosen.values)[side]
    query = tensors[0][:, :, :2048].float()
    context = EncodeContext(
        layer=0,
        role=("key", "value")[side],
        query_moment=query.mT @ query / query.shape[2],
        query_count=2048,
    )
    chunks = [quantizer.encode(x, context) for x in tensors]
    parts = [chunk.parts() for chunk in chunks]
    rows = [torch.empty_like(x) for x in tensors]
    kinds = {"rtn": "plain", "quarot": "rotated", "quantwm": "low_rank"}
    load = kinds.get(label, "stages")

    def apply(setting: tuple[int, ...]) -> None:
        elements, warps, longest, programs, registers, split = setting
        reconstruction.ELEMENTS[load], reconstruction.WARPS[load] = elements, warps
        reconstruction.LONGEST[load], reconstruction.PROGRAMS = longest, programs
        reconstruction.REGISTERS[load], reconstruction.SPLIT = registers or None, bool(split)
        reconstruction._plans.clear()

    want = torch.empty_like(rows[0])
    reading.reference.reconstruct(parts[0], want, factor=None)

    def check() -> str | None:
        rows[0].fill_(torch.nan)
        reconstruction.reconstruct(parts[0], rows[0], factor=None)
        return gpu.disagreement(rows[0], want, tolerance=reading.TOLERANCE[torch.bfloat16])

    return Case(
        apply,
        check,
        [
            partial(reconstruction.reconstruct, part, row, factor=None)
            for part, row in zip(parts, rows, strict=True)
        ],
        held_bytes(chunks[0]) + rows[0].nbytes,
    )


def quantizing_case(label: str, tensors: list[torch.Tensor]) -> Case:
    """Tensors to pack."""
    symmetric = label == "qvg"
    format = GroupFormat(2, 64, symmetric=True) if symmetric else GroupFormat(2, 32)
    rotation = Rotation(SHAPE[3]) if label == "quarot" else None
    clusters = None
    if symmetric:
        ids = torch.arange(SHAPE[2], device="cuda").mul(97).remainder(256).to(torch.uint8)
        table = tensors[0][:, :, :256].contiguous()
        clusters = Clusters(ids.expand(*SHAPE[:3]).contiguous(), table)
    fixed: dict[str, Any] = {
        "format": format,
        "rotation": rotation,
        "clusters": clusters,
        "away": symmetric,
    }

    def apply(setting: tuple[int, ...]) -> None:
        quantizing.planned.cache_clear()
        if clusters is not None:
            quantizing.CLUSTERED_ELEMENTS, quantizing.CLUSTERED_WARPS = setting[:2]
            quantizing.LONGEST = setting[2]
        elif rotation is None:
            triton_owned.GROUPS, triton_owned.WARPS, triton_owned.LONGEST = setting
        else:
            triton_turned.ROWS, triton_turned.WARPS = setting[:2]
            triton_turned.STAGES, triton_turned.LONGEST = setting[2:]

    packed = quantizing.launch(tensors[0], **fixed)[0]
    return Case(
        apply,
        partial(quantize_groups._self_check, tensors[0], format, rotation, clusters, symmetric),
        [partial(quantizing.launch, x, **fixed) for x in tensors],
        held_bytes(packed) + tensors[0].nbytes,
    )


def centroids_case(name: str, tensors: list[torch.Tensor]) -> Case:
    """One half of an iteration of k-means, two iterations in one pass each, QSAC's choice."""
    stored = tensors[0][:, :, :256].contiguous()
    table = stored.float()
    origin = table.mean(2, keepdim=True)
    table = table - origin
    labels = centroids.nearest_one(tensors[0], origin, table)
    calls: list[Callable[[], object]]

    def apply(setting: tuple[int, ...]) -> None:
        if name == "assign":
            centroids.ASSIGN_TOKENS, centroids.ASSIGN_WARPS, centroids.ASSIGN_BLOCKS = setting
        elif name == "cluster":
            triton_step.STEP_TOKENS, triton_step.STEP_WARPS, triton_step.STEP_STAGES = setting
        elif name == "choose":
            centroids.CHOOSE_TOKENS, centroids.CHOOSE_WARPS, centroids.CHOOSE_BLOCKS = setting
        else:
            centroids.SUM_TOKENS, centroids.SUM_CENTROIDS = setting[:2]
            centroids.SUM_WARPS, centroids.SUM_STAGES = setting[2:]

    if name == "assign":
        calls = [partial(centroids.nearest_one, x, origin, table) for x in tensors]
    elif name == "cluster":
        calls = [partial(triton_step.cluster, x, stored, iterations=2) for x in tensors]
    elif name == "choose":
        weights = torch.ones(*SHAPE[:2], SHAPE[3], device=stored.device)
        options = {"group_size": 64, "candidates": 4}
        calls = [partial(centroids.choose_by_range, x, stored, weights, **options) for x in tensors]
    else:
        calls = [partial(centroids.means, x, origin, labels, table) for x in tensors]
    check = partial(assign_centroids._self_check, tensors[0])
    if name == "cluster":
        check = partial(assign_centroids._step_self_check, tensors[0], stored)
    if name == "choose":
        check = partial(range_check, tensors[0], stored, weights, options)
    passes = 2 if name == "cluster" else 1
    return Case(apply, check, calls, passes * tensors[0].nbytes + labels.nbytes)


def range_check(
    x: torch.Tensor, table: torch.Tensor, weights: torch.Tensor, options: dict[str, int]
) -> str | None:
    """QSAC's choice on a corner, as the package checks it before its first use."""
    gpu._verdicts.clear()
    return choice.refusal(x, table, weights, **options)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Whatever breaks is said, and the next setting runs."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - one setting must not end the run
        words = (str(error).strip().splitlines() or [""])[0]
        say(f"{what}: FAILED {type(error).__name__}: {words[:120]}")


def say(text: str) -> None:
    """At once: a run may be cut off."""
    print(text, flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
