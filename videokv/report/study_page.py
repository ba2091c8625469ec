"""report.html of a study: videos, plots with errors, a sortable table, figures; nothing fetched."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from videokv.report.figures.from_folder import (
    SHOWN_CLIPS,
    frames_of,
    read_folder,
    save_figures,
    thinned,
)
from videokv.report.page import MAX_PAGE_BYTES
from videokv.report.plots import recipe_plot
from videokv.report.study_columns import column_of, is_of_one_chunk
from videokv.report.video import Panel, Scene, encode_video
from videokv.studies.demo import case_name
from videokv.studies.results import (
    MIN_CASES_FOR_PRINTED_ERROR,
    Results,
    mean_sem_n,
    write_bytes,
)
from videokv.studies.variants import REFERENCE

TITLES = {
    "compare": "Kinds of cache on the shipped world model",
    "kvsplit": "Keys alone, values alone, both",
    "tradeoff": "Bits against quality",
    "ablate": "What each part brings",
    "longrun": "A long rollout",
    "diagnose": "What caches do to attention",
    "memory": "Memory of large models, counted",
    "prefill": "Chunked prefill of a language model",
}
PLOTTED = (
    "psnr_db", "psnr_early_db", "sharpness_late_to_real", "saturation_late_to_real",
    "motion_late_to_real", "drift_late", "ssim", "cached_mass", "flicker", "nll",
    "nll_gap_recovered", "mass_shift", "jsd_nats", "token_shift", "output_mse_relative",
)  # fmt: skip
OF_DIAGNOSE = PLOTTED[-4:]
FIRST = (*PLOTTED, "bits_per_element", "ratio", "longest_latent_frames")  # in the table
NOT_SHOWN = ("frames",)  # the video shows them
HEADS = "Of every head, layer and step; boxes are quartiles."
FIGURES = {
    "attention_maps": (
        "Attention maps",
        "By query and key; left of the line cached keys, right of it the chunk being made.",
    ),
    "token_selection": ("Selected tokens", "The cached token that each query attends to most."),
    "query_energy": (
        "Query energy", "Share of the queries' energy in their strongest directions."
    ),
    "convexity": ("Convexity", "Why noise in a score raises its weight on average."),
    "mass_shift": ("Mass shift by head", HEADS),
    "jsd_nats": ("JSD by head", HEADS),
    "output_mse": ("Output error by head", HEADS),
    "memory": ("Bytes held at 480p", ""),
    "tradeoff_psnr_db": ("PSNR by bits", "Circled: the Pareto front."),
    "tradeoff_ssim": ("SSIM by bits", "Circled: the Pareto front."),
    "psnr_db_by_chunk": ("PSNR by chunk", "Bars: one standard error, from 8 clips on."),
    "sharpness_by_chunk": (
        "Sharpness by chunk", "Bars: one standard error, from 8 clips on. Drift to grey loses it."
    ),
    "saturation_by_chunk": ("Saturation by chunk", "Max - min of RGB: grey has none."),
    "motion_by_chunk": ("Motion by chunk", "A frozen picture has none."),
    "drift_by_chunk": (
        "Drift by chunk", "How far the distribution of pixel values is from that of real frames."
    ),
    "flicker_by_chunk": ("Flicker by chunk", "Error of the changes from frame to frame, to BF16."),
    "nll_by_chunk": ("NLL by chunk", ""),
}  # fmt: skip
WIDE = ("attention_maps", "convexity", "memory")
VIDEO_CLIPS = 2
PHONE_COLUMNS = 2


def write_study_page(folder: Path) -> Path:
    """Draw the figures of a finished study and write ``folder/report.html``, whole or not at all.

    Raises ValueError where the folder holds no results or the page would pass 30 MB.
    """
    results = read_folder(folder)
    made = save_figures(folder)
    page = build_study_page(
        results,
        figures=[p for p in made if p.suffix == ".svg" and p.stem not in NOT_SHOWN],
        videos=_videos(folder, made),
    ).encode()
    if len(page) > MAX_PAGE_BYTES:
        raise ValueError(
            f"the report would take {len(page) / 1e6:.0f} MB, more than "
            f"{MAX_PAGE_BYTES / 1e6:.0f}; run fewer recipes into a folder"
        )
    write_bytes(folder / "report.html", page)
    return folder / "report.html"


def build_study_page(
    results: Results, *, figures: Sequence[Path] = (), videos: Sequence[str] = ()
) -> str:
    """One HTML document; all text that comes from outside is escaped.

    figures: SVG files to show. videos: ready ``<figure>`` elements.
    """
    cases = len({row.case for row in results.rows})
    return Template(_resource("study.html")).substitute(
        css=_resource("page.css"),
        js=_resource("page.js"),
        study=escape(results.study),
        title=escape(TITLES.get(results.study, results.study)),
        lead=escape(_lead(results, cases)),
        caution=escape(_caution(results)),
        videos="\n".join(videos),
        plots=_plots(results),
        table=_table(results),
        protocol=escape(_protocol(results)),
        figures=_figures(figures),
        facts=_facts(results),
        command=escape(results.command),
    )


def _lead(results: Results, cases: int) -> str:
    names = results.recipes
    if results.study == "memory":
        return (
            f"{len(names)} kinds of cache in {cases} settings of model and resolution, counted "
            "from chunks that are really packed."
        )
    return (
        f"{len(names)} kinds of cache, each with the same {_what(results)}s; {REFERENCE} is the "
        f"reference.{_of_long(results)}"
    )


def _of_long(results: Results) -> str:
    length, actions = results.versions.get("length"), results.versions.get("actions")
    if length is None:
        return ""
    return f" {length}." + ("" if actions is None else f" Actions: {actions}.")


def _what(results: Results) -> str:
    return "chunk" if results.study == "prefill" else "clip"


def _caution(results: Results) -> str:
    if results.study == "memory":
        return "Weights and activations are not counted. MB are 10^6 bytes."
    counts = [line.n for line in results.summary]
    n, what = max(counts, default=0), _what(results)
    if n >= MIN_CASES_FOR_PRINTED_ERROR:
        return f"{n} {what}s; ± and bars: one standard error of the mean over {what}s."
    return (
        f"{n} {what}{'s' * (n != 1)}, an example and not a measurement: bars go from the lowest "
        f"to the highest. From {MIN_CASES_FOR_PRINTED_ERROR} on, standard errors are shown."
    )


def _protocol(results: Results) -> str:
    if results.protocol == "none":
        return "No frames are compared."
    said = f"Frames that metrics see: {results.protocol}. PSNR: mean over frames of the dB of each."
    for name, why in results.not_available.items():
        said += f" {column_of(name)[0]} is not available: {why}."
    return said


def _plots(results: Results) -> str:
    if results.study == "memory":
        return ""
    wanted = OF_DIAGNOSE if results.study == "diagnose" else PLOTTED
    parts = []
    for metric in wanted:
        values = {
            name: [r.value for r in results.rows if (r.recipe, r.metric) == (name, metric)]
            for name in results.recipes
        }
        values = {name: found for name, found in values.items() if found}
        if values:
            heading, unit, _, factor = column_of(metric)
            plot = recipe_plot(values, unit=f"{heading}, {unit}", factor=factor, salt=metric)
            parts.append(f"<figure><h3>{escape(heading)}</h3>{plot}</figure>")
    return f'<div class="plots">{"".join(parts)}</div>' if parts else ""


def _table(results: Results) -> str:
    by_case = results.study == "memory"
    metrics = sorted(
        (m for m in dict.fromkeys(r.metric for r in results.rows) if not is_of_one_chunk(m)),
        key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST),
    )
    heads = "".join(_heading(*column_of(name)[:2]) for name in metrics)
    lines: Iterable[tuple[str, str]] = (
        dict.fromkeys((row.case, row.recipe) for row in results.rows)
        if by_case
        else [("", name) for name in results.recipes]
    )
    values: dict[tuple[str, str, str], list[float]] = {}
    for row in results.rows:
        values.setdefault((row.case if by_case else "", row.recipe, row.metric), []).append(
            row.value
        )
    body = []
    for case, recipe in lines:
        name = escape(f"{case}, {recipe}" if case else recipe)
        cells = "".join(_cell(values.get((case, recipe, metric), []), metric) for metric in metrics)
        body.append(f'<tr><th scope="row" data-value="{name}">{name}</th>{cells}</tr>')
    return (
        f"<table><thead><tr>{_heading('Row', '')}{heads}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def _heading(name: str, unit: str) -> str:
    small = f"<small>{escape(unit)}</small>" if unit else ""
    return (
        f'<th scope="col" aria-sort="none"><button type="button">{escape(name)}{small}'
        "</button></th>"
    )


def _cell(values: Sequence[float], metric: str) -> str:
    if not values:
        return '<td class="none">–</td>'
    _, _, digits, factor = column_of(metric)
    mean, sem, n = mean_sem_n(values)
    spread = ""
    if sem is not None and n >= MIN_CASES_FOR_PRINTED_ERROR:
        spread = f"<small> ± {sem * factor:.{digits}f}</small>"
    return f'<td data-value="{mean!r}">{mean * factor:.{digits}f}{spread}</td>'


def _figures(paths: Sequence[Path]) -> str:
    if not paths:
        return ""
    wide = "".join(_figure(path) for path in paths if path.stem in WIDE)
    small = "".join(_figure(path) for path in paths if path.stem not in WIDE)
    return f'<h2>Figures</h2>{wide}<div class="plots">{small}</div>'


def _figure(path: Path) -> str:
    heading, caption = FIGURES.get(path.stem, ("", ""))
    heading = escape(heading or column_of(path.stem)[0].capitalize())
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<figure class="sheet"><h3>{heading}</h3><img alt="{heading}" '
        f'src="data:image/svg+xml;base64,{data}"><figcaption>{escape(caption)}</figcaption></figure>'
    )


def _videos(folder: Path, made: Sequence[Path]) -> list[str]:
    scenes, step = [], 1
    more = len(read_folder(folder).recipes) - SHOWN_CLIPS
    left_out = f" The first {SHOWN_CLIPS} caches; {more} more are in the table." if more > 0 else ""
    for number in range(VIDEO_CLIPS):
        found = frames_of(folder, case_name(number))
        if REFERENCE in found:
            found, step = thinned(found)
            panels = tuple(Panel(name, "", frames) for name, frames in found.items())
            scenes.append(Scene(panels, context=0))
    if not scenes or len({len(scene.panels) for scene in scenes}) != 1:
        scenes = scenes[:1]
    if not scenes:
        return []
    if step > 1:
        left_out += f" Every {step}th frame."
    broad, narrow = encode_video(scenes), encode_video(scenes, columns=PHONE_COLUMNS)
    shown = [
        f'<figure class="wide">{_video(broad, "broad")}{_video(narrow, "narrow")}<figcaption>'
        f"Generated frames only, the same actions and noise everywhere.{left_out}</figcaption>"
        "</figure>"
    ]
    for path in made:
        if path.suffix == ".mp4":
            shown.append(
                f'<figure class="wide">{_video(path.read_bytes(), "both")}<figcaption>The '
                "BF16 rollout, and what others differ from it by; grey is no difference."
                "</figcaption></figure>"
            )
    return shown


def _video(content: bytes, kind: str) -> str:
    data = base64.b64encode(content).decode()
    return (
        f'<video class="{kind}" src="data:video/mp4;base64,{data}" controls muted loop autoplay '
        "playsinline></video>"
    )


def _facts(results: Results) -> str:
    facts = [("Seed", str(results.seed)), ("Device", results.device)]
    facts += [(name.replace("_", " ").capitalize(), v) for name, v in results.versions.items()]
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)


def _resource(name: str) -> str:
    return files("videokv.report").joinpath(name).read_text(encoding="utf-8")
