"""The page of figures that ``videokv bench`` left, in Markdown.

python benchmarks/bench_page.py benchmarks/results/nvidia-h200.json > docs/bench.md
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path

from videokv.studies.bench import Figure, read

TITLES = {
    "copy": "What the device copies",
    "reconstruct": "Packed rows to dense ones",
    "dense": "Attention on dense keys",
    "attention": "Attention on a packed cache, reconstruction included",
    "encode": "Packing keys and values",
    "end_to_end": "A whole model's loop",
    "decode": "Few queries on packed keys",
    "curve": "Over the number of cached keys",
}

NOTES = {
    "attention": (
        "`auto`: what a call takes that names no backend, with FlashAttention-4 installed and "
        "(`without_fa4`) left out. `error`: relative norm against float64 on the same dequantized "
        "keys and values."
    ),
    "end_to_end": (
        "`against_best_dense` and `against_cudnn` include packing, "
        "`passes_against_best_dense` does not. `snapshot`: the whole history is packed anew every "
        "chunk. `again`: the best dense loop once more, after all others, on a GPU that has warmed "
        "up."
    ),
    "curve": (
        "`quarot-2bit+calibrated` by each backend, as called, reconstruction included; 12 heads, "
        "4,680 queries and as many current keys."
    ),
    "decode": "`packed` is `rtn-2bit+taylor`; 131,072 cached keys, 32 query and 8 key/value heads.",
}


def main() -> None:
    """Print the page."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    path = Path(sys.argv[1])
    figures = read(path)
    facts = json.loads(path.with_suffix(".run.json").read_text())
    aimed = [figure for figure in figures if figure.target is not None]
    met = sum(figure.met is True for figure in aimed)
    print("# Benchmark\n")
    print(
        f"One {facts['device']}, {facts['date'][:10]}, commit {facts['commit']}, `videokv "
        f"{facts['command']}`: "
        + ", ".join(f"{name} {number}" for name, number in sorted(facts["versions"].items()))
        + ".\n"
    )
    print(
        f"{met} of {len(aimed)} targets are met. Medians; each result was checked before it was "
        "timed. `ms`: as called, host and device; `device_ms`: replays of a CUDA graph.\n"
    )
    if facts["kept_from_earlier"]:
        print(f"{len(facts['kept_from_earlier'])} figures are kept from an earlier run.\n")
    for section, rows in groupby(figures, key=lambda figure: figure.name.split("/")[0]):
        print(f"## {TITLES.get(section, section)}\n")
        if section in NOTES:
            print(f"{NOTES[section]}\n")
        print("| figure | value | target |\n| --- | ---: | --- |")
        for row in rows:
            print(_row(row))
        print()
    for title, lines in (("Left out", facts["notes"]), ("Failed", facts["failures"])):
        if lines:
            print(f"## {title}\n")
            print("\n".join(f"- {line}" for line in lines) + "\n")
    plot = path.with_name(f"{path.stem}-curve.svg")
    if plot.exists():
        print(f"![time over the number of cached keys](../benchmarks/results/{plot.name})")


def _row(figure: Figure) -> str:
    name = figure.name.partition("/")[2] or figure.name
    value = f"{figure.value:.4g} {figure.unit}"
    if figure.target is None:
        return f"| {name} | {value} | |"
    sign = "≤" if figure.better == "lower" else "≥"
    return f"| {name} | {value} | {sign} {figure.target:g}: {'met' if figure.met else 'missed'} |"


if __name__ == "__main__":
    main()
