"""Rows, summary and journal: nothing is repeated or lost, whatever stops the process."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import studies_fakes

from videokv.studies.journal import JOURNAL_NAME, LOCK_NAME, Journal
from videokv.studies.results import (
    Results,
    Row,
    paired_difference,
    read_results,
    summarize,
    write_json,
)

SETTINGS = {"study": "demo", "clips": 2, "seed": 0}


def rows() -> tuple[Row, ...]:
    return tuple(
        Row(f"clip-{i}", recipe, "psnr_db", base + i)
        for recipe, base in (("a", 30.0), ("b", 33.0))
        for i in (0, 1, 3)
    )


def test_summary_means_errors_and_counts() -> None:
    a, b = summarize(rows())
    assert (a.recipe, a.metric, a.n) == ("a", "psnr_db", 3)
    assert a.mean == pytest.approx(31 + 1 / 3)
    assert a.sem == pytest.approx((7 / 3) ** 0.5 / 3**0.5)
    assert b.printed_sem is None  # shown from eight cases up
    eight = summarize(Row(str(i), "a", "ssim", i / 8) for i in range(8))
    assert eight[0].printed_sem == eight[0].sem


def test_one_case_has_no_standard_error() -> None:
    assert summarize(rows()[:1])[0].sem is None


def test_paired_differences_use_common_cases_only() -> None:
    more = (*rows(), Row("clip-9", "b", "psnr_db", 99.0))
    assert paired_difference(more, metric="psnr_db", recipe="b", reference="a") == (3.0, 3.0, 3.0)
    assert paired_difference(more, metric="ssim", recipe="b", reference="a") == ()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "3"])
def test_rows_are_finite_numbers(value: object) -> None:
    with pytest.raises(ValueError, match="psnr_db of a in clip-0"):
        Row("clip-0", "a", "psnr_db", value)  # type: ignore[arg-type]


def test_results_file_has_the_promised_shape(tmp_path: Path) -> None:
    results = Results("demo", "videokv demo", 0, "cpu", {"torch": "2"}, rows())
    write_json(tmp_path / "results.json", results.as_json())
    read = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    wanted = {"study", "command", "seed", "device", "versions", "protocol", "rows", "summary"}
    wanted |= {"not_available"}
    assert set(read) == wanted
    assert read["rows"][0] == {
        "case": "clip-0",
        "recipe": "a",
        "metric": "psnr_db",
        "value": 30.0,
    }
    assert set(read["summary"][0]) == {"recipe", "metric", "mean", "sem", "n"}
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "results.json", {"old": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(tmp_path / "results.json", {"new": 1})
    assert json.loads((tmp_path / "results.json").read_text()) == {"old": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_journal_resumes(tmp_path: Path) -> None:
    with Journal(tmp_path, SETTINGS) as journal:
        journal.append("one", {"rows": [1]})
    with Journal(tmp_path, SETTINGS) as journal:
        assert journal.done["one"]["rows"] == [1]
        with pytest.raises(ValueError, match="already"):
            journal.append("one", {"rows": [1]})


@pytest.mark.parametrize("torn", ['{"key": "two", "ro', '{"key": "two"}', "\x00\x00"])
def test_a_torn_last_line_is_run_again(tmp_path: Path, torn: str) -> None:
    with Journal(tmp_path, SETTINGS) as journal:
        journal.append("one", {})
    with open(tmp_path / JOURNAL_NAME, "a") as file:
        file.write(torn)
    with Journal(tmp_path, SETTINGS) as journal:
        assert list(journal.done) == ["one"]
        journal.append("two", {})
    with Journal(tmp_path, SETTINGS) as journal:
        assert list(journal.done) == ["one", "two"]


def test_a_full_disk_leaves_no_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(tmp_path, SETTINGS) as journal:
        journal.append("one", {})
        before = (tmp_path / JOURNAL_NAME).read_bytes()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError):
            journal.append("two", {})
    assert (tmp_path / JOURNAL_NAME).read_bytes() == before


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    with Journal(tmp_path, SETTINGS) as journal:
        journal.append("one", {})
    path = tmp_path / JOURNAL_NAME
    path.write_text(path.read_text() + "garbage\n" + '{"key": "two"}\n')
    with pytest.raises(ValueError, match="line 3"), Journal(tmp_path, SETTINGS):
        pass


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    with Journal(tmp_path, SETTINGS):
        pass
    with pytest.raises(ValueError, match="clips = 2") as caught:
        Journal(tmp_path, {**SETTINGS, "clips": 5}).__enter__()
    assert "clips = 5" in str(caught.value) and "seed" not in str(caught.value)


def test_two_studies_into_one_folder_are_refused(tmp_path: Path) -> None:
    child = start_child(tmp_path, "time.sleep(60)")
    try:
        with pytest.raises(ValueError, match="another study is writing"):
            Journal(tmp_path, SETTINGS).__enter__()
    finally:
        child.kill()
        child.wait()
    with Journal(tmp_path, SETTINGS):  # the dead process holds nothing
        pass


def test_a_lock_file_left_behind_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("99999999")
    with Journal(tmp_path, SETTINGS):
        pass


def test_kill_minus_nine_repeats_and_loses_nothing(tmp_path: Path) -> None:
    work = """
    for i in range(40):
        if str(i) not in journal.done:
            journal.append(str(i), {"rows": [i] * 200})
            time.sleep(0.002)
    """
    for delay in (0.03, 0.05):
        child = start_child(tmp_path, work)
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait()
    child = start_child(tmp_path, work)
    assert child.wait(timeout=60) == 0
    lines = (tmp_path / JOURNAL_NAME).read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines[1:]] == [str(i) for i in range(40)]


def start_child(folder: Path, work: str) -> subprocess.Popen:
    """A process that holds the journal of ``folder`` and does ``work``; returns once it holds."""
    body = textwrap.indent(textwrap.dedent(work), "    ")
    script = (
        "import time\nfrom pathlib import Path\nfrom videokv.studies.journal import Journal\n"
        f"with Journal(Path({str(folder)!r}), {SETTINGS!r}) as journal:\n"
        f"    print('held', flush=True)\n{body}\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    return child


def test_committed_results_of_studies_satisfy_the_schema() -> None:
    folder = Path(__file__).parent.parent / "benchmarks" / "results"
    parts = {"study", "command", "rows", "summary"}
    found = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    studies = [
        path for path, read in found.items() if isinstance(read, dict) and parts <= set(read)
    ]
    assert studies
    for path in studies:
        studies_fakes.check_schema(path)
        read_results(path)
