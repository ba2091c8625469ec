"""docs/methods.md from the results of the sweeps: every quantizer and correction, both testbeds.

    python benchmarks/methods_table.py > docs/methods.md

Standard errors over clips or chunks, of paired differences where two recipes are compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from videokv.studies.results import mean_sem_n

RESULTS = Path(__file__).parent / "results"
CORRECTIONS = ("", "+taylor", "+measured", "+calibrated")
QUANTIZERS = (
    "rtn-2bit", "quarot-2bit", "kivi-2bit@recent_chunks=0", "kivi-2bit", "qvg-2bit",
    "quantwm-2bit", "rtn-2bit-psac8", "quarot-2bit-psac8", "videokv-2bit", "videokv-2bit-small",
)  # fmt: skip
OTHERS = (
    "rtn-3bit", "quarot-3bit", "rtn-4bit", "quarot-4bit", "qvg-pro-2bit", "qvg-pro-2bit+calibrated",
    "fp8", "nvfp4", "nvfp4+taylor", "mxfp4", "mxfp4+taylor", "rtn-2bit+cumulant",
    "quarot-2bit+cumulant",
)  # fmt: skip
OURS = ("videokv-2bit", "videokv-2bit-small")
Rows = dict[str, dict[str, Any]]


def load(name: str, **wanted: object) -> tuple[dict[str, Any], Rows]:
    """What a file says about itself, and its rows by recipe."""
    found = json.loads((RESULTS / name).read_text())
    rows = [r for r in found["rows"] if all(r.get(k) == v for k, v in wanted.items())]
    return found["about"], {row["recipe"]: row for row in rows}


def told(values: list[float], digits: int, *, sign: bool = False, scale: float = 1.0) -> str:
    """Mean and standard error."""
    mean, sem, _ = mean_sem_n([scale * v for v in values])
    return f"{mean:{'+' if sign else ''}.{digits}f} ± {sem or 0:.{digits}f}"


def paired(rows: Rows, one: str, other: str, key: str) -> list[float]:
    """Case by case."""
    return [a - b for a, b in zip(rows[one][key], rows[other][key], strict=True)]


def share(rows: Rows, name: str) -> str:
    """Of the NLL gap between rtn-2bit and bf16 that is closed, of sums; error of the ratio."""
    gap = paired(rows, "rtn-2bit", "bf16", "nll")
    closed = paired(rows, "rtn-2bit", name, "nll")
    ratio = sum(closed) / sum(gap)
    mean_gap = sum(gap) / len(gap)
    parts = [ratio + (c - ratio * g) / mean_gap for c, g in zip(closed, gap, strict=True)]
    return told(parts, 0, scale=100) + " %"


def methods(world: Rows, shifts: Rows, prefill: Rows) -> None:
    """The large table."""
    print("| recipe | bits | PSNR, dB | mass - BF16, points | token shift, % | bits "
          "| NLL - BF16 | closed |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    names = [q + c for q in QUANTIZERS for c in CORRECTIONS]
    for name in (*names, *OTHERS):
        cells = ["", "", "", ""]
        if name in world:
            row = world[name]
            cells[0] = f"{row['held_bits']:.2f}"
            cells[1] = told(row["psnr_db"], 2)
            cells[2] = told(paired(world, name, "bf16", "mass"), 2, sign=True, scale=100)
        if name in shifts:
            cells[3] = told(shifts[name]["token_shift"], 1, scale=100)
        more = ["", "", ""]
        if name in prefill:
            row = prefill[name]
            above = told(paired(prefill, name, "bf16", "nll"), 4, sign=True)
            more = [f"{row['held_bits']:.2f}", above, share(prefill, name)]
        print("| " + " | ".join([f"`{name}`", *cells, *more]) + " |")


def multipliers(world: Rows, prefill: Rows) -> None:
    """calibrated against the best fixed multiplier on Taylor's terms."""
    print("| quantizer | best, PSNR | calibrated minus it, dB | best, NLL | calibrated minus it |")
    print("| --- | --- | --- | --- | --- |")
    for base in QUANTIZERS:
        cells = [f"`{base}`"]
        for rows, key, digits, pick in ((world, "psnr_db", 2, max), (prefill, "nll", 4, min)):
            fixed = {base: "0", f"{base}+taylor": "1"}
            fixed |= {n: n.partition("*")[2] for n in rows if n.startswith(f"{base}+taylor*")}
            if len(fixed) < 4:
                cells += ["not swept", ""]
                continue
            best = pick(fixed, key=lambda n: sum(rows[n][key]))
            cells.append(f"x {fixed[best]}: {told(rows[best][key], digits)}")
            cells.append(told(paired(rows, f"{base}+calibrated", best, key), digits, sign=True))
        print("| " + " | ".join(cells) + " |")


def seeds() -> None:
    """The differences again, over three seeds of the noise."""
    per_seed = [load("worldmodel-methods-32.json", seed=seed)[1] for seed in range(3)]
    print("| calibrated minus | " + " | ".join(f"`{q}`" for q in SEEDED) + " |")
    print("| --- |" + " --- |" * len(SEEDED))
    for ending in ("", "+taylor*0.5", "+taylor", "+taylor*1.5", "+taylor*2", "+measured"):
        cells = []
        for base in SEEDED:
            found = [
                paired(rows, f"{base}+calibrated", base + ending, "psnr_db")
                for rows in per_seed
                if base + ending in rows and f"{base}+calibrated" in rows
            ]
            means = [sum(v) / len(v) for v in zip(*found, strict=True)]
            cells.append(f"{told(means, 2, sign=True)} ({len(found)})" if found else "")
        label = ending.lstrip("+").replace("taylor*", "taylor x ") or "none"
        print(f"| {label} | " + " | ".join(cells) + " |")


SEEDED = ("rtn-2bit", "quarot-2bit", "kivi-2bit@recent_chunks=0", *OURS)


def directions(world: Rows, shifts: Rows, prefill: Rows) -> None:
    """What the papers and we say, each as it came out."""
    sides = ("output_mse_relative_keys_only", "output_mse_relative_values_only")
    print("| what | difference |")
    print("| --- | --- |")
    for name in (name for name in QUANTIZERS if name in shifts):
        both = zip(*(shifts[name][side] for side in sides), strict=True)
        found = told([a - b for a, b in both], 4, sign=True)
        print(f"| relative output error, keys alone minus values alone, `{name}` | {found} |")
    pairs = (
        ("quantwm-2bit", "qvg-2bit"),
        ("quantwm-2bit+calibrated", "quantwm-2bit"),
        ("quantwm-2bit+calibrated", "qvg-2bit+calibrated"),
        ("videokv-2bit+calibrated", "quarot-2bit+taylor"),
        ("videokv-2bit+calibrated", "quarot-2bit+cumulant"),
        ("videokv-2bit+calibrated", "kivi-2bit@recent_chunks=0+taylor"),
        ("videokv-2bit-small+calibrated", "quarot-2bit+taylor"),
        ("videokv-2bit-small+calibrated", "kivi-2bit@recent_chunks=0+taylor"),
        *((own + end, other) for own in OURS for end in ("", "+calibrated")
          for other in ("rtn-3bit", "rtn-4bit")),
    )  # fmt: skip
    for one, other in pairs:
        found = told(paired(world, one, other, "psnr_db"), 2, sign=True) + " dB"
        sizes = f"{world[one]['held_bits']:.2f} and {world[other]['held_bits']:.2f} bits"
        if one in prefill and other in prefill:
            found += "; NLL " + told(paired(prefill, one, other, "nll"), 4, sign=True)
            sizes += f"; {prefill[one]['held_bits']:.2f} and {prefill[other]['held_bits']:.2f}"
        print(f"| `{one}` minus `{other}` ({sizes}) | {found} |")


def sizes() -> None:
    """The prefill at other chunk sizes, which change what centroids cost an element."""
    per_size = {
        size: load("prefill-methods.json", chunk_tokens=size)[1] for size in (256, 512, 1024)
    }
    heads = (f"bits, {size} | NLL | closed" for size in per_size)
    print("| recipe | " + " | ".join(heads) + " |")
    print("| --- |" + " --- | --- | --- |" * len(per_size))
    for name in per_size[256]:
        cells = []
        for rows in per_size.values():
            if name not in rows:
                cells += ["not run"] * 3
                continue
            nll = sum(rows[name]["nll"]) / len(rows[name]["nll"])
            cells += [f"{rows[name]['held_bits']:.3f}", f"{nll:.4f}", share(rows, name)]
        print(f"| `{name}` | " + " | ".join(cells) + " |")


def masses(world: Rows, shifts: Rows, prefill: Rows) -> None:
    """What is left of the mass that keys steal: rollouts, teacher-forced, prefill."""
    print("| calibrated over uncorrected | rollouts | teacher-forced | SmolLM2 |")
    print("| --- | --- | --- | --- |")
    for base in ("rtn-2bit", "quarot-2bit", "rtn-2bit-psac8", "quarot-2bit-psac8"):
        names = (f"{base}+calibrated", base)
        pairs = (
            [paired(world, name, "bf16", "mass") for name in names],
            [shifts[name]["mass_shift"] for name in names],
            [paired(prefill, name, "bf16", "mass") for name in names],
        )
        cells = (" over ".join(told(v, 2, sign=True, scale=100) for v in pair) for pair in pairs)
        print("| " + " | ".join([f"`{base}`", *cells]) + " |")


def formats() -> None:
    """Float formats and qvg-pro with the corrections that the GPU's runs left out."""
    found = json.loads((RESULTS / "formats-cpu.json").read_text())
    world = {row["recipe"]: row for row in found["rows"]}
    prefill = {row["recipe"]: row for row in found["prefill"]}
    names = [n for n in dict.fromkeys([*prefill, *world]) if n not in ("bf16", "rtn-2bit")]
    print(
        f"On CPUs: {len(world['bf16']['mass'])} clips, {found['about']['chunks']} chunks; SmolLM2 "
        f"in float32, the first {found['about']['prefill']['tokens']} tokens of each document, "
        f"{len(prefill['bf16']['nll'])} chunks of 512; differences are to the dense caches of "
        "these runs.\n"
    )
    print(
        "| recipe | bits | PSNR, dB | mass - BF16, points | token shift, % | bits | NLL - dense |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    shifts = {row["recipe"]: row for row in found.get("diagnosis", ())}
    for name in names:
        cells = ["", "", "", "", "", ""]
        if name in world:
            cells[0] = f"{world[name]['held_bits']:.2f}"
            cells[1] = told(world[name]["psnr_db"], 2)
            cells[2] = told(paired(world, name, "bf16", "mass"), 2, sign=True, scale=100)
        if name in shifts:
            cells[3] = told(shifts[name]["token_shift"], 1, scale=100)
        if name in prefill:
            cells[4] = f"{prefill[name]['held_bits']:.2f}"
            cells[5] = told(paired(prefill, name, "bf16", "nll"), 4, sign=True)
        print("| " + " | ".join([f"`{name}`", *cells]) + " |")


def main() -> None:
    about, world = load("worldmodel-methods-32.json", seed=0)
    text, prefill = load("prefill-methods.json", chunk_tokens=512)
    _, shifts = load("diagnose-methods-32.json")
    nll = sum(prefill["bf16"]["nll"]) / len(prefill["bf16"]["nll"])
    print(
        "# Methods: every quantizer with every correction\n\n"
        "Made by `python benchmarks/methods_table.py > docs/methods.md` from "
        "`benchmarks/results/`; do not edit.\n\n"
        f"**World model**: {about['clips']} clips, {about['chunks']} generated chunks, PSNR "
        f"against the rollout with the BF16 cache, {about['device']}, torch {about['torch']}. "
        "Mass: mean attention on cached keys, minus BF16's. Token shift: how often the cached "
        "token that a query looks at most is another one (teacher-forced, 2 chunks, layers 0, 2, "
        "4, 6, first and last denoising step). "
        f"**SmolLM2-135M**: {text['text']}; chunks of 512, {len(prefill['bf16']['nll'])} chunks "
        f"after the first of each; BF16 has an NLL of {nll:.4f}. Closed: share of the gap "
        "from `rtn-2bit` to BF16. Bits: of everything held, per element of K and V (KIVI's recent "
        "chunk, dense, counts as such). ± is the standard error over clips or chunks. `taylor` "
        "stores nothing, `calibrated` and `cumulant` one number a head and chunk, `measured` "
        "one for each group of channels (KIVI's keys: each channel).\n"
    )
    methods(world, shifts, prefill)
    print("\n## calibrated against the best fixed multiplier (0 to 2) on Taylor's terms\n")
    multipliers(world, prefill)
    print(
        "\nThe best of seven or eight noisy multipliers is flattered by its noise. The world model "
        "again, mean of the seeds of the noise that were run (their number in brackets):\n"
    )
    seeds()
    print("\n## Directions\n")
    directions(world, shifts, prefill)
    print("\nMean mass on cached keys minus BF16's, points:\n")
    masses(world, shifts, prefill)
    print("\n## Formats and qvg-pro with every correction\n")
    formats()
    print("\n## Chunk sizes of the prefill\n")
    sizes()


if __name__ == "__main__":
    main()
