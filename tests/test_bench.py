"""The benchmark command: isolated sections, files, targets."""

import json

import pytest
import torch

from videokv import cli
from videokv.report.figures.bench_curve import save_bench_curve
from videokv.studies import bench as study
from videokv.studies.bench import Bench, Figure, Sizes, Unavailable
from videokv.studies.bench_sections import SECTIONS


def tiny(**options):
    return Bench(torch.device("cpu"), Sizes.tiny(), say=lambda text: None, judged=False, **options)


def test_every_section_runs_on_tiny_tensors():
    run = tiny()
    study.run(run, SECTIONS)
    assert run.failures == []
    names = {figure.name.split("/")[0] for figure in run.figures}
    assert names == {*SECTIONS} and run.curve[0]["cached_tokens"] == 32


def test_the_curve_is_drawn_with_its_data(tmp_path):
    rows = [{"cached_tokens": n, "dense_cudnn_ms": n / 9, "sdpa_ms": n / 10} for n in (6400, 12800)]
    png, svg, data = save_bench_curve(rows, tmp_path, name="gpu-curve")
    assert png.read_bytes()[:4] == b"\x89PNG" and "cached keys" in svg.read_text()
    assert json.loads(data.read_text())["points"] == rows
    with pytest.raises(ValueError, match="no point"):
        save_bench_curve([], tmp_path)


def test_a_broken_section_is_reported_and_the_next_one_runs():
    def broken(bench):
        raise RuntimeError("no such kernel\nsecond line")

    def missing(bench):
        raise Unavailable("not installed")

    run = tiny()
    study.run(run, {"a": broken, "b": missing, "c": lambda bench: bench.add("c/x", 1, "ms")})
    assert "RuntimeError: no such kernel (test_bench.py:" in run.failures[0]
    assert run.notes == ["b: not installed"] and run.figures[0].name == "c/x"


def test_sections_by_name_and_within_the_time():
    run = tiny(seconds=-1.0)
    study.run(run, SECTIONS, only=["copy"])
    assert run.figures == [] and "left out" in run.notes[0]
    with pytest.raises(ValueError, match="unknown sections"):
        study.run(run, SECTIONS, only=["cpoy"])


def test_wrong_results_are_not_timed():
    x = torch.ones(4)
    with pytest.raises(ValueError, match="not timed"):
        study.require_close(x * 1.1, x, tolerance=1e-2, what="x")
    with pytest.raises(ValueError, match="not timed"):
        study.require_close(x * torch.nan, x, tolerance=1e-2, what="x")


def test_targets_are_checked_from_the_file(tmp_path, capsys):
    run = tiny()
    run.judged = True
    run.add("a", 1.0, "x", 1.1)
    run.add("b", 2.0, "x", 3.0, "higher")
    run.add("c", 2.0, "ms")
    path, _ = study.write(run, tmp_path, name="gpu", run_facts={"device": "none"})
    rows = json.loads(path.read_text())
    assert rows[1] == {"name": "b", "value": 2.0, "unit": "x", "target": 3.0, "better": "higher"}
    assert cli.main(["bench", "--check", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "SHORT" in printed and "1 of 2 targets are met" in printed
    better = tiny()
    better.judged = True
    better.add("b", 4.0, "x", 3.0, "higher")
    study.write(better, tmp_path, name="gpu", run_facts={})
    assert [figure.name for figure in study.read(path)] == ["a", "c", "b"]
    assert cli.main(["bench", "--check", str(path)]) == 0


def test_a_file_of_something_else_is_refused(tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text('[{"nonsense": 1}]')
    assert cli.main(["bench", "--check", str(path)]) == 2
    assert "does not hold figures" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_no_time_is_refused(tmp_path, capsys, seconds: str):
    assert cli.main(["bench", "--seconds", seconds, "--out", str(tmp_path)]) == 2
    assert "--seconds must be above 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.write_text("")
    assert cli.main(["bench", "--tiny", "--device", "cpu", "--out", str(taken)]) == 2
    said = capsys.readouterr()
    assert "must be a folder" in said.err and not said.out


def test_the_command_writes_its_files(tmp_path, capsys):
    options = ["--tiny", "--device", "cpu", "--only", "copy", "--out", str(tmp_path)]
    assert cli.main(["bench", *options]) == 0
    facts = json.loads((tmp_path / "cpu-tiny.run.json").read_text())
    assert facts["device"] == "cpu" and "torch" in facts["versions"]
    assert cli.main(["bench", "--only", "cpoy", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "there are" in capsys.readouterr().err
    with pytest.raises(ValueError, match="finite"):
        Figure("x", float("nan"), "ms")
