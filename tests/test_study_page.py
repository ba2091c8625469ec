"""The studies' page: escaped, whole, small, with errors and units; drawn by a browser."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from videokv.report import study_page
from videokv.report.figures.from_folder import frames_of
from videokv.report.run_options import RunOptions, with_run_options
from videokv.report.study_columns import STUDY_COLUMNS, column_of
from videokv.report.study_page import build_study_page, write_study_page
from videokv.studies.demo import case_name, frames_path, save_frames
from videokv.studies.results import Results, Row, write_json
from videokv.studies.variants import path_name

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
NASTY = "a<b>&\"'"
PROBE = """<script>addEventListener("load", () => setTimeout(() => {
  const button = document.querySelectorAll("thead button")[1];
  const order = () => [...document.querySelectorAll("tbody th")].map((h) => h.textContent).join();
  button.click(); const up = order(); button.click(); const down = order();
  const videos = [...document.querySelectorAll("video")];
  document.title = JSON.stringify({ up, down, ready: videos.map((v) => v.videoWidth > 0),
    wide: document.documentElement.scrollWidth <= innerWidth });
}, 1500));</script>"""


def results(study: str = "compare", clips: int = 8, name: str = "rtn-2bit") -> Results:
    rng = np.random.default_rng(0)
    rows = [Row(case_name(n), "bf16", "cached_mass", 0.3) for n in range(clips)]
    for recipe, level in ((name, 20.0), ("rtn-4bit", 30.0)):
        for n in range(clips):
            rows.append(Row(case_name(n), recipe, "psnr_db", level + float(rng.normal())))
            rows.append(Row(case_name(n), recipe, "unheard_of", 1.0))
    facts = {"videokv": "0", "text": NASTY}
    return Results(study, f"videokv {study} --x {NASTY}", 0, "cpu", facts, tuple(rows))


def folder(tmp_path: Path, found: Results) -> Path:
    write_json(tmp_path / "results.json", found.as_json())
    for name in found.recipes:
        frames = np.random.default_rng(1).integers(0, 255, (6, 24, 32, 3)).astype(np.uint8)
        for n in range(2):
            save_frames(frames_path(tmp_path, path_name(name), case_name(n)), frames)
    return tmp_path


def test_everything_from_outside_is_escaped() -> None:
    page = build_study_page(results(name=NASTY))
    assert "a<b>" not in page and "a&lt;b&gt;&amp;" in page
    assert "://" not in page and 'name="viewport"' in page


def test_errors_and_units_are_there() -> None:
    page = build_study_page(results())
    assert "± " in page and "dB to BF16" in page and "unheard of" in page
    assert "one standard error of the mean over clips" in page
    few = build_study_page(results(clips=2))
    assert "<small> ±" not in few and "lowest to the highest" in few.replace("\n", " ")
    assert build_study_page(results(clips=1)).count("<svg") == 2


def test_memory_has_a_row_for_every_model() -> None:
    rows = [Row(f"m{n} 480p", "bf16", "held_bytes", 2e9) for n in range(3)]
    page = build_study_page(Results("memory", "c", 0, "cpu", {}, tuple(rows), "none"))
    assert page.count("<tr><th") == 4 and "m2 480p, bf16" in page and "2000.00" in page


def test_every_metric_has_a_heading_of_its_own() -> None:
    headings = [column[:2] for column in STUDY_COLUMNS.values()]
    assert len(set(headings)) == len(headings)
    assert column_of("psnr_chunk_03_db")[0] == "PSNR, chunk 3"


def test_too_large_a_page_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(study_page, "MAX_PAGE_BYTES", 1000)
    with pytest.raises(ValueError, match="fewer recipes"):
        write_study_page(folder(tmp_path, results()))
    assert not (tmp_path / "report.html").exists()


def test_the_shared_options_reach_the_command() -> None:
    seen = []

    @with_run_options(out="o", chunks=3, chunks_option=False)
    def command(more: int = 1, *, run: RunOptions) -> None:
        seen.append((more, run))

    command(more=2, out=Path("x"), clips=1, seed=5, device="cpu", workers=2, ray=None, as_json=True)
    assert seen == [(2, RunOptions(Path("x"), 1, 3, 5, "cpu", 2, None, True))]


def test_videos_show_the_caches_of_the_results_by_their_labels(tmp_path: Path) -> None:
    name = "quarot-2bit g64+taylor"
    place = folder(tmp_path, results(name=name))
    stale = np.zeros((6, 24, 32, 3), np.uint8)
    save_frames(frames_path(tmp_path, "left-from-before", case_name(0)), stale)
    assert list(frames_of(place, case_name(0))) == ["bf16", name, "rtn-4bit"]
    assert "more are in the table" not in write_study_page(place).read_text()
    rows = [Row(case_name(0), r, "psnr_db", 1.0) for r in ("bf16", *(f"r{n}" for n in range(9)))]
    place = folder(tmp_path, Results("compare", "c", 0, "cpu", {}, tuple(rows)))
    assert len(frames_of(place, case_name(0))) == 8
    assert "The first 8 caches; 2 more are in the table." in write_study_page(place).read_text()


@pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="no chromium to render the page with")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_sorts_the_table_and_plays_the_videos(tmp_path: Path, width: int) -> None:
    page = write_study_page(folder(tmp_path, results()))
    assert page.stat().st_size < 30_000_000
    text = page.read_text().replace("</body>", f"{PROBE}</body>")
    (tmp_path / "probe.html").write_text(text)
    # A window is never narrower than 500 pixels; a frame inside one is.
    frame = f'<iframe src="probe.html" width="{width}" height="3000"></iframe>'
    bridge = (
        "<script>setInterval(() => { try { document.title = "
        "document.querySelector('iframe').contentDocument.title } catch {} }, 200)</script>"
    )
    (tmp_path / "outer.html").write_text(f"<title>-</title>{frame}{bridge}")
    dumped = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--allow-file-access-from-files",
            f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=6000",
            "--window-size=1400,1200", "--dump-dom", (tmp_path / "outer.html").as_uri(),
        ],
        check=True, capture_output=True, text=True, timeout=120,
    ).stdout  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", dumped)
    assert title is not None and '"wide":true' in title[1], dumped[:500]
    assert '"up":"rtn-2bit,rtn-4bit,bf16","down":"rtn-4bit,rtn-2bit,bf16"' in title[1]
    assert '"ready":[true' in title[1] and "false" not in title[1]
