"""A study's results.json as a Markdown table, with differences paired by case.

python benchmarks/table.py benchmarks/results/worldmodel-demo-32.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from videokv.studies.results import mean_sem_n


def main(path: str) -> None:
    """Print both tables."""
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for row in json.loads(Path(path).read_text())["rows"]:
        rows.setdefault((row["recipe"], row["metric"]), {})[row["case"]] = row["value"]
    recipes = list(dict.fromkeys(recipe for recipe, _ in rows))

    def figure(recipe: str, metric: str, digits: int, minus: str | None = None) -> str:
        values = rows.get((recipe, metric), {})
        if minus is not None:
            other = rows.get((minus, metric), {})
            values = {case: values[case] - other[case] for case in values if case in other}
        if not values:
            return "–"
        mean, sem, n = mean_sem_n(list(values.values()))
        sign = "+" if minus is not None else ""
        error = f" ± {sem:.{digits}f}" if n >= 8 and sem is not None else ""
        return f"{mean:{sign}.{digits}f}{error}"

    print("| recipe | PSNR to BF16 (dB) | SSIM | cached mass | bits | smaller |")
    print("| --- | --- | --- | --- | --- | --- |")
    for recipe in recipes:
        sizes = (figure(recipe, m, 2) for m in ("bits_per_element", "ratio"))
        bits, ratio = (size.partition(" ")[0] for size in sizes)  # the same for every clip
        quality = f"{figure(recipe, 'psnr_db', 2)} | {figure(recipe, 'ssim', 3)}"
        mass = figure(recipe, "cached_mass", 4)
        print(f"| `{recipe}` | {quality} | {mass} | {bits} | {ratio}× |")
    print("\n| correction | PSNR (dB) | cached mass | mass against bf16 |")
    print("| --- | --- | --- | --- |")
    for recipe in recipes:
        base, plus, _ = recipe.partition("+")
        if plus and base in recipes:
            gain = figure(recipe, "psnr_db", 2, base)
            moved = figure(recipe, "cached_mass", 4, base)
            left = figure(recipe, "cached_mass", 4, "bf16")
            print(f"| `{recipe}` | {gain} | {moved} | {left} |")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
