"""What the numbers of a demo show, in sentences that are computed from them.

Nothing is said that the rows do not hold: directions are read from the figures (also where they go
against the papers), and what few clips cannot show is called so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from videokv.report.style import megabytes
from videokv.studies.demo import REFERENCE
from videokv.studies.results import (
    MIN_CASES_FOR_PRINTED_ERROR,
    Results,
    mean_sem_n,
    paired_difference,
)
from videokv.studies.rollout import CHUNK_FRAMES

Curves = Mapping[str, Mapping[str, Sequence[float]]]  # recipe → case → dB by frame

LOW_BITS = 4.0  # below: what the project is for
PLAIN = "rtn-2bit"
MASS_EPSILON = 0.002  # a fifth of a percentage point: called the same


@dataclass(frozen=True)
class Finding:
    """A heading, a paragraph, and a list where figures stand side by side."""

    title: str
    text: str
    items: tuple[str, ...] = ()


@dataclass(frozen=True)
class Headline:
    """title: the main result; text: one sentence; tiles: (figure, what it is)."""

    title: str
    text: str
    tiles: tuple[tuple[str, str], ...]


def best_low_bit(results: Results) -> str | None:
    """The recipe below 4 bits whose rollout is closest to BF16, None where there is none."""
    scores = {
        recipe: _mean(results, recipe, "psnr_db")
        for recipe in results.recipes
        if (_mean(results, recipe, "bits_per_element") or 16.0) < LOW_BITS
    }
    known = {recipe: score for recipe, score in scores.items() if score is not None}
    return max(known, key=lambda recipe: known[recipe]) if known else None


def headline(results: Results) -> Headline:
    best = best_low_bit(results)
    if best is None:
        return Headline(
            "No recipe below 4 bits was run",
            "Add one, such as quarot-2bit+calibrated, to see what a 2-bit cache does.",
            (),
        )
    psnr, ratio, bits = (
        _figure(results, best, name) for name in ("psnr_db", "ratio", "bits_per_element")
    )
    held, dense = (_figure(results, best, name) for name in ("held_bytes", "dense_bytes"))
    text = f"{best} holds {megabytes(held)} a clip where a dense cache holds {megabytes(dense)}"
    tiles = [
        (f"{psnr:.1f} dB", "PSNR against the BF16 cache"),
        (f"{bits:.2f} bits", "per cached element"),
        (f"{ratio:.1f}×", "smaller cache"),
    ]
    gains = paired_difference(results.rows, metric="psnr_db", recipe=best, reference=PLAIN)
    if gains and best != PLAIN:
        gain = mean_sem_n(gains)[0]
        text += f". Its video is {_closer(gain)} the BF16 video than that of plain {PLAIN}"
        tiles.insert(1, (f"{_signed(gain)} dB", f"against plain {PLAIN}"))
    title = f"A {ratio:.1f}× smaller cache, and video that matches BF16 to {psnr:.1f} dB"
    return Headline(title, text + ".", tuple(tiles))


def findings(results: Results, psnr_by_frame: Curves) -> tuple[Finding, ...]:
    """One paragraph a finding; those whose recipes were not run are left out."""
    found = (
        _rounding(results),
        _mass(results),
        _changes(results, _correction_pairs(results), "What the corrections change"),
        _changes(results, _rotation_pairs(results), "What rotating the keys changes"),
        _over_time(results, psnr_by_frame),
        _sharpness(results),
        _cost(results),
    )
    return tuple(finding for finding in found if finding is not None)


def _rounding(results: Results) -> Finding | None:
    fine, coarse = (_mean(results, name, "psnr_db") for name in ("rtn-4bit", PLAIN))
    if fine is None or coarse is None:
        return None
    order = "loses" if coarse < fine else "does not lose"
    change = paired_difference(results.rows, metric="psnr_db", recipe=PLAIN, reference="rtn-4bit")
    text = (
        f"Plain rounding to 4 bits stays {fine:.1f} dB from the BF16 rollout; at 2 bits it is "
        f"{coarse:.1f} dB. Going from 4 to 2 bits {order} quality here: "
        f"{_verdict(change)}."
    )
    return Finding("What rounding alone does", text)


def _mass(results: Results) -> Finding | None:
    base = _mean(results, REFERENCE, "cached_mass")
    plain = _mean(results, PLAIN, "cached_mass")
    if base is None or plain is None:
        return None
    text = (
        f"With the BF16 cache, {base:.1%} of the attention falls on cached keys. With {PLAIN} it "
        f"is {plain:.1%}: {_mass_move(plain - base)}."
    )
    others = [
        (name, mass - base)
        for name in results.recipes
        if "+" in name and (mass := _mean(results, name, "cached_mass")) is not None
    ]
    if others:
        name, shift = min(others, key=lambda item: abs(item[1]))
        points = f"{_signed(shift * 100, digits=2)} points"
        text += f" Of the corrected recipes, {name} comes closest to BF16 ({points})"
        away = [n for n, s in others if s < -MASS_EPSILON]
        text += f"; {_join(away)} over-correct{_s(away)}, below BF16." if away else "."
    return Finding("Where attention goes", text)


def _mass_move(shift: float) -> str:
    if shift > MASS_EPSILON:
        return f"noisy keys draw {shift * 100:.1f} points away from the chunk being made"
    if shift < -MASS_EPSILON:
        return f"{-shift * 100:.1f} points less, the reverse of what noise in the scores predicts"
    return "no shift to speak of in this rollout"


def _changes(results: Results, pairs: Sequence[tuple[str, str]], title: str) -> Finding | None:
    lines = []
    for recipe, reference in pairs:
        gains = paired_difference(
            results.rows, metric="psnr_db", recipe=recipe, reference=reference
        )
        if gains:
            lines.append(f"{recipe} over {reference}: {_verdict(gains)}")
    if not lines:
        return None
    return Finding(title, "PSNR against the BF16 video, clip by clip:", tuple(lines))


def _correction_pairs(results: Results) -> list[tuple[str, str]]:
    names = results.recipes
    return [(n, n.split("+")[0]) for n in names if "+" in n and n.split("+")[0] in names]


def _rotation_pairs(results: Results) -> list[tuple[str, str]]:
    names = results.recipes
    pairs = [(n, n.replace("quarot", "rtn", 1)) for n in names if n.startswith("quarot")]
    return [(rotated, plain) for rotated, plain in pairs if plain in names]


def _over_time(results: Results, psnr_by_frame: Curves) -> Finding | None:
    parts = []
    for recipe in dict.fromkeys((PLAIN, best_low_bit(results))):
        curves = list(psnr_by_frame.get(recipe or "", {}).values())
        if curves and len(curves[0]) > CHUNK_FRAMES:
            first = mean_sem_n([x for c in curves for x in c[:CHUNK_FRAMES]])[0]
            last = mean_sem_n([x for c in curves for x in c[-CHUNK_FRAMES:]])[0]
            way = "falls" if last < first else "rises"
            parts.append(f"{recipe} {way} from {first:.1f} to {last:.1f} dB")
    if not parts:
        return None
    return Finding(
        "As the rollout goes on",
        f"From the first generated chunk to the last, {' and '.join(parts)}. Every chunk is "
        "conditioned on the ones before it, so differences are carried on: a low figure late in a "
        "clip means another video, not always a worse one.",
    )


def _sharpness(results: Results) -> Finding | None:
    base = _mean(results, REFERENCE, "sharpness")
    if not base:
        return None
    ratios = {
        name: value / base
        for name in results.recipes
        if name != REFERENCE and (value := _mean(results, name, "sharpness")) is not None
    }
    if not ratios:
        return None
    low, high = min(ratios, key=lambda n: ratios[n]), max(ratios, key=lambda n: ratios[n])
    if max(abs(ratios[low] - 1), abs(ratios[high] - 1)) < 0.05:
        text = "All videos keep the sharpness of the BF16 one within 5 %: where they differ, it is "
        text += "in what is shown, not in blur."
    else:
        text = (
            f"Against the BF16 video, edges are between {ratios[low]:.0%} ({low}) and "
            f"{ratios[high]:.0%} ({high}) as strong: below 100 % the picture is blurred or "
            "greyer, above it carries texture that BF16 does not draw."
        )
    return Finding("How sharp the videos are", text)


def _cost(results: Results) -> Finding | None:
    best = best_low_bit(results)
    base = _mean(results, REFERENCE, "seconds_per_chunk")
    if best is None or not base:
        return None
    seconds = _figure(results, best, "seconds_per_chunk")
    bits, ratio = (_figure(results, best, n) for n in ("bits_per_element", "ratio"))
    workspace = _figure(results, best, "workspace_peak_bytes")
    text = (
        f"{best} stores {bits:.2f} bits an element, scales and zero points included; with all that "
        f"is kept dense the cache is {ratio:.1f}× smaller. While it is read, up to "
        f"{megabytes(workspace)} of it is unpacked at once. A chunk takes {seconds:.2f} s, with "
        f"BF16 {base:.2f} s ({seconds / base:.2f}×), on {results.device}: timed once, as it ran, "
        "with attention mass recorded; not a benchmark."
    )
    return Finding("What it costs and saves", text)


def caution(clips: int) -> str:
    """What the number of clips allows to be said."""
    if clips >= MIN_CASES_FOR_PRINTED_ERROR:
        return f"{clips} clips; ± is one standard error of the mean."
    what = "One clip is an example" if clips == 1 else f"{clips} clips are examples"
    return f"{what}, not a measurement: no error bars. Ask for 32 clips for figures to quote."


def _verdict(differences: Sequence[float]) -> str:
    """A paired difference in words, with what its number of cases allows."""
    mean, sem, n = mean_sem_n(differences)
    change = _signed(mean)
    if n >= MIN_CASES_FOR_PRINTED_ERROR and sem is not None:
        clear = "" if abs(mean) > 2 * sem else ", too small for these clips to tell from zero"
        return f"{change} ± {sem:.1f} dB (n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{n}){clear}"
    if n == 1:
        return f"{change} dB (one clip)"
    same = sum(math.copysign(1, d) == math.copysign(1, mean) for d in differences)
    agree = "in every clip" if same == n else f"on average, with this sign in {same} of {n} clips"
    told = f" (n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{n})" if same == n else ""
    return f"{change} dB {agree}{told}"


def _signed(value: float, *, digits: int = 1) -> str:
    """With its sign; a true minus, which no line breaks after."""
    return f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def _closer(gain: float) -> str:
    if abs(gain) < 0.05:
        return "as close to"
    return f"{abs(gain):.1f} dB {'closer to' if gain > 0 else 'further from'}"


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _s(names: Sequence[str]) -> str:
    return "s" if len(names) == 1 else ""


def _mean(results: Results, recipe: str, metric: str) -> float | None:
    line = results.find(recipe, metric)
    return None if line is None else line.mean


def _figure(results: Results, recipe: str, metric: str) -> float:
    value = _mean(results, recipe, metric)
    if value is None:
        raise ValueError(f"the results hold no {metric} of {recipe}")
    return value
