"""report.html: one file with video, plots and table inside, nothing fetched from anywhere."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from videokv.report import plots
from videokv.report.findings import Finding, best_low_bit, caution, findings, headline
from videokv.report.style import COLUMNS, colour_of, dash_of
from videokv.studies.demo import REFERENCE, DemoRun
from videokv.studies.results import Results, write_bytes

MAX_PAGE_BYTES = 30_000_000


def write_page(path: Path, run: DemoRun, *, video: bytes, narrow_video: bytes) -> None:
    """Write the report of a finished demo, whole or not at all.

    video, narrow_video: mp4; the narrow one, in two columns, is shown on a phone.
    Raises ValueError where the page would pass 30 MB.
    """
    page = build_page(run, video=video, narrow_video=narrow_video).encode()
    if len(page) > MAX_PAGE_BYTES:
        raise ValueError(
            f"the report would take {len(page) / 1e6:.0f} MB, more than "
            f"{MAX_PAGE_BYTES / 1e6:.0f}; run fewer recipes"
        )
    write_bytes(path, page)


def build_page(run: DemoRun, *, video: bytes, narrow_video: bytes) -> str:
    """The report as one HTML document; all text that comes from outside is escaped."""
    results, settings = run.results, run.settings
    top = headline(results)
    curves = run.curves["psnr_db_by_frame"]
    return Template(_resource("page.html")).substitute(
        css=_resource("page.css"),
        js=_resource("page.js"),
        title=escape(top.title),
        lead=_prose(top.text, results.recipes),
        tiles="\n".join(
            f"<div><dd>{escape(figure)}</dd><dt>{escape(what)}</dt></div>"
            for figure, what in top.tiles
        ),
        caution=escape(caution(settings.clips)),
        video=base64.b64encode(video).decode(),
        narrow_video=base64.b64encode(narrow_video).decode(),
        psnr_plot=plots.psnr_by_frame(curves, results.recipes),
        band=escape(plots.band_note(settings.clips)),
        mass_plot=plots.mass_by_layer(run.curves["cached_mass_by_layer"], results.recipes),
        table=_table(results),
        findings="\n".join(_finding(found, results.recipes) for found in findings(results, curves)),
        facts=_facts(run),
        command=escape(results.command),
    )


def _finding(finding: Finding, recipes: Sequence[str]) -> str:
    items = "".join(f"<li>{_prose(item, recipes)}</li>" for item in finding.items)
    return (
        f"<section><h3>{escape(finding.title)}</h3><p>{_prose(finding.text, recipes)}</p>"
        f"{f'<ul>{items}</ul>' if items else ''}</section>"
    )


def _breakable(recipe: str) -> str:
    """The name escaped; a narrow column may break it before its correction."""
    return escape(recipe).replace("+", "<wbr>+")


def _prose(text: str, recipes: Sequence[str]) -> str:
    """Escaped text in which the names of recipes stand out and do not break."""
    names = "|".join(re.escape(escape(name)) for name in sorted(recipes, key=len, reverse=True))
    return re.sub(names, r"<b>\g<0></b>", escape(text)) if names else escape(text)


def _table(results: Results) -> str:
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(name)}'
        f"<small>{escape(unit)}</small></button></th>"
        for name, unit, _, _ in COLUMNS.values()
    )
    best = best_low_bit(results)
    body = "\n".join(_table_row(results, recipe, best=recipe == best) for recipe in results.recipes)
    return (
        '<table><thead><tr><th scope="col" aria-sort="none"><button type="button">Recipe'
        f"</button></th>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _table_row(results: Results, recipe: str, *, best: bool) -> str:
    mark = f'<i style="border-top:3px {dash_of(recipe)} {colour_of(recipe, results.recipes)}"></i>'
    cells = "".join(_cell(results, recipe, metric) for metric in COLUMNS)
    kind = ' class="best"' if best else ""
    return (
        f'<tr{kind}><th scope="row" data-value="{escape(recipe)}">{mark}{_breakable(recipe)}</th>'
        f"{cells}</tr>"
    )


def _cell(results: Results, recipe: str, metric: str) -> str:
    line = results.find(recipe, metric)
    if line is None:
        what = "reference" if recipe == REFERENCE else "–"
        return f'<td class="none">{what}</td>'
    _, _, digits, factor = COLUMNS[metric]
    error = line.printed_sem
    spread = "" if error is None else f"<small> ± {error * factor:.{digits}f}</small>"
    return f'<td data-value="{line.mean!r}">{line.mean * factor:.{digits}f}{spread}</td>'


def _facts(run: DemoRun) -> str:
    settings, results = run.settings, run.results
    facts: Sequence[tuple[str, str]] = (
        ("Clips", run.clips_source),
        ("Chunks", f"{settings.chunks} of 3 frames, after 6 frames of context"),
        ("Seed", str(settings.seed)),
        ("Device", results.device),
        *((name.capitalize(), value) for name, value in results.versions.items()),
    )
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)


def _resource(name: str) -> str:
    return files("videokv.report").joinpath(name).read_text(encoding="utf-8")
