"""The report: one file, nothing fetched, text escaped, findings that follow the numbers."""

import re
import shutil
import subprocess
from pathlib import Path

import demo_fakes
import numpy as np
import pytest

from videokv.report import plots
from videokv.report.demo import write_report
from videokv.report.findings import caution, findings, headline
from videokv.report.page import build_page
from videokv.studies.demo import DemoRun, DemoSettings, run_demo
from videokv.studies.results import Results, Row

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    with pytest.MonkeyPatch.context() as patch:
        demo_fakes.install(patch)
        out = tmp_path_factory.mktemp("demo <b>&")
        return run_demo(DemoSettings(out=out, clips=2, chunks=2))


@pytest.fixture(scope="module")
def page(run: DemoRun) -> str:
    return write_report(run).page.read_text(encoding="utf-8")


def results(psnr: dict[str, list[float]], mass: dict[str, float] | None = None) -> Results:
    rows = [Row(f"clip-{i}", r, "psnr_db", v) for r, vs in psnr.items() for i, v in enumerate(vs)]
    rows += [Row("clip-0", r, "cached_mass", v) for r, v in (mass or {}).items()]
    for recipe in psnr:
        for metric, value in (
            ("bits_per_element", 2.75),
            ("ratio", 5.8),
            ("held_bytes", 1e6),
            ("dense_bytes", 6e6),
        ):
            rows.append(Row("clip-0", recipe, metric, value))
    return Results("demo", "videokv demo", 0, "CPU", {}, tuple(rows))


def words(found: Results) -> str:
    return " ".join(" ".join((f.title, f.text, *f.items)) for f in findings(found, {}))


def test_one_file_that_fetches_nothing(page: str) -> None:
    text = re.sub(r"base64,[^\"]*", "", page)
    assert not re.search(r"https?://|//\w|@import|url\((?!#)", text)
    sources = re.findall(r'\b(?:src|href)="([^"]{0,30})', page)
    assert sources and all(source.startswith(("data:", "#")) for source in sources)
    assert '<link rel="stylesheet"' not in page and "<script src" not in page
    assert len(page) < 30_000_000
    assert len(set(re.findall(r'\bid="([^"]+)"', page))) == len(re.findall(r'\bid="[^"]+"', page))


def test_video_plots_table_and_both_colour_schemes_are_there(page: str) -> None:
    assert re.search(r"<video[^>]+muted loop autoplay playsinline", page)
    assert "data:video/mp4;base64,AAAA" in page
    assert page.count("<svg") == 2 and "currentColor" in page and plots.INK not in page
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    assert page.count("<tr") == 1 + 8 and page.count("aria-sort") > 8


def test_text_from_outside_is_escaped(run: DemoRun) -> None:
    assert "<b>&" in run.results.command
    page = build_page(run, video=b"", narrow_video=b"")
    command = page[page.index("<pre>") : page.index("</pre>")]
    assert "&lt;b&gt;&amp;" in command and "<b>" not in command


def test_recipe_names_are_escaped(run: DemoRun) -> None:
    evil = '<img src="x">'
    rows = [
        Row(r.case, evil if r.recipe == "rtn-2bit+taylor" else r.recipe, r.metric, r.value)
        for r in run.results.rows
    ]
    changed = Results("demo", "c", 0, "CPU", {}, tuple(rows))
    page = build_page(
        DemoRun(run.settings, changed, run.curves, "clips"), video=b"", narrow_video=b""
    )
    assert "<img" not in page and "&lt;img" in page


def test_the_headline_follows_the_numbers() -> None:
    top = headline(results({"rtn-2bit": [28.0, 29.0], "rtn-2bit+taylor": [33.0, 34.0]}))
    assert "5.8×" in top.title and "33.5 dB" in top.title
    assert "5.0 dB closer to" in top.text
    assert "No recipe below 4 bits" in headline(Results("demo", "", 0, "", {}, ())).title


def test_a_reversed_effect_is_said_as_it_is() -> None:
    said = words(
        results(
            {"rtn-2bit": [30.0, 30.5], "rtn-2bit+taylor": [28.0, 28.5]},
            {"bf16": 0.32, "rtn-2bit": 0.29, "rtn-2bit+taylor": 0.25},
        )
    )
    assert "rtn-2bit+taylor over rtn-2bit: −2.0 dB in every clip" in said
    assert "the reverse of what noise in the scores predicts" in said


def test_mixed_signs_and_few_clips_are_not_dressed_up() -> None:
    said = words(results({"rtn-2bit": [30.0, 30.0, 30.0], "rtn-2bit+taylor": [32.0, 29.9, 31.0]}))
    assert "with this sign in 2 of" in said and "±" not in said
    assert "examples, not a measurement" in caution(3) and "example" in caution(1)


def test_an_effect_within_its_error_is_called_so() -> None:
    noise = np.random.default_rng(0).normal(0, 1, 8)
    base = [30.0] * 8
    said = words(results({"rtn-2bit": base, "rtn-2bit+taylor": [30 + x for x in noise]}))
    assert "±" in said and "too small for these clips" in said


def test_a_page_with_the_reference_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo_fakes.install(monkeypatch)
    alone = run_demo(DemoSettings(out=tmp_path, clips=1, chunks=1, recipes=("bf16",)))
    assert "No recipe below 4 bits" in write_report(alone).page.read_text()


@pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="no chromium to render the page with")
def test_the_page_renders(run: DemoRun, page: str, tmp_path: Path) -> None:
    from PIL import Image

    shot = tmp_path / "page.png"
    subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}",
            f"--screenshot={shot}", "--window-size=600,1200",
            (run.settings.out / "report.html").as_uri(),
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    with Image.open(shot) as image:
        colours = image.convert("RGB").getcolors(1 << 24)
    assert colours is not None and len(colours) > 50
