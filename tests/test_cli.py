"""The command line: what it prints, what it writes, and how it refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path

import demo_fakes
import numpy as np
import pytest

import videokv
from videokv.studies import rollout as seam

pytest.importorskip("videokv.worldmodel.cli", reason="the world model's commands are not here")

from videokv import cli  # noqa: E402


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    demo_fakes.install(monkeypatch)
    monkeypatch.chdir(tmp_path)


def demo(*options: str) -> int:
    return cli.main(["demo", "--clips", "1", "--chunks", "1", *options])


def test_demo_writes_everything_and_prints_a_table(capsys, tmp_path: Path) -> None:
    assert demo("--out", "d") == 0
    names = {p.name for p in (tmp_path / "d").iterdir() if not p.name.startswith(".")}
    assert names == {
        "comparison.mp4",
        "curves.json",
        "frames",
        "report.html",
        "results.json",
        "rows.jsonl",
    }
    printed = capsys.readouterr()
    assert "quarot-2bit+calibrated" in printed.out and "report.html" in printed.out
    assert "±" not in printed.out
    assert "8/8 chunks: videokv-2bit+calibrated, clip-000: done" in printed.err


def test_a_narrow_terminal_gets_whole_columns(capsys, monkeypatch) -> None:
    from rich.console import Console

    from videokv.report import terminal

    monkeypatch.setattr(terminal, "stdout_console", lambda: Console(width=80))
    assert demo("--recipes", "quarot-2bit+calibrated") == 0
    printed = capsys.readouterr().out
    assert "PSNR" in printed and "Sharpness" not in printed and "…" not in printed


def test_demo_json_is_clean(capsys) -> None:
    assert demo("--recipes", "rtn-2bit, rtn-4bit", "--json") == 0
    read = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert read["command"].endswith("--recipes bf16,rtn-2bit,rtn-4bit --out videokv-demo")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--recipes", "rtn-2bt"], "rtn-2bit"),
        (["--recipes", "rtn-5bit"], "2, 3, 4 or 8"),
        (["--recipes", " , "], "names no recipe"),
        (["--window", "-1"], "window must be 1 to 8"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--device", "cpu:x"], "unknown device 'cpu:x'"),
        (["--device", "cpu:7"], "'cpu:7' is not here"),
        (["--clips", "0"], "clips must be 1"),
        (["--clips", "many"], "--clips"),
        (["--chunks", "11"], "at most|1 to 10"),
        (["--nonsense"], "nonsense"),
    ],
)
def test_bad_input_ends_with_2_and_no_traceback(capsys, tmp_path: Path, options, says) -> None:
    assert demo(*options) == 2
    printed = capsys.readouterr()
    assert re.search(says, printed.err) and "Traceback" not in printed.err and not printed.out
    assert not list(tmp_path.iterdir())


def test_an_unwritable_folder_ends_with_2_before_any_work(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(seam, "load_model", lambda device: pytest.fail("worked first"))
    (tmp_path / "file").write_text("x")
    for out in ("file", "file/below", "/proc/videokv"):
        assert demo("--out", out) == 2
        assert out in capsys.readouterr().err


def test_a_refused_folder_is_explained_by_its_cause(capsys, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for out in ("file", "file/below", "/proc/videokv"):
        for command in (["demo"], ["worldmodel", "sample"]):
            assert cli.main([*command, "--out", out]) == 2
            error = capsys.readouterr().err
            assert out in error and "choose another folder" in error and "free space" not in error


def test_weights_that_cannot_be_read_leave_no_folder(capsys, monkeypatch, tmp_path: Path) -> None:
    def damaged(device: object) -> None:
        raise ValueError("weights.safetensors: not a whole safetensors file; get it again")

    monkeypatch.setattr(seam, "load_model", damaged)
    assert demo("--out", "new/d") == 2
    assert "get it again" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_cut_frames_file_of_a_finished_demo_is_named(capsys) -> None:
    assert demo("--out", "d", "--recipes", "rtn-2bit") == 0
    for recipe in ("bf16", "game"):
        path = Path("d/frames") / recipe / "clip-000.npz"
        whole = path.read_bytes()
        for damage in (whole[:500], b"", whole[:300] + b"x" * 200 + whole[500:]):
            path.write_bytes(damage)
            capsys.readouterr()
            assert demo("--out", "d", "--recipes", "rtn-2bit") == 2
            error = capsys.readouterr().err
            assert f"{path} is damaged" in error and "choose another --out" in error
            assert error.count("\n") == 1 + error.count("already there")
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda unit: unit.pop("rows"), "line 2 has no 'rows'"),
        (lambda unit: unit.pop("cached_mass_by_layer"), "line 2 has no 'cached_mass_by_layer'"),
        (lambda unit: unit.update(rows=5), "line 2 is no unit of this study"),
        (lambda unit: unit.update(psnr_db_by_frame={"clip-000": 1}), "line 2 is no unit"),
    ],
)
def test_a_damaged_unit_of_the_journal_is_named(capsys, change, says: str) -> None:
    assert demo("--out", "d", "--recipes", "rtn-2bit") == 0
    journal = Path("d/rows.jsonl")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    change(lines[1])
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert demo("--out", "d", "--recipes", "rtn-2bit") == 2
    error = capsys.readouterr().err
    assert f"rows.jsonl, {says}" in error and "delete the folder" in error


def test_damaged_arrays_are_named(capsys) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (3, 16, 20, 3), np.uint8)
    np.savez_compressed("whole.npz", frames=frames)
    np.save("whole.npy", frames)
    whole = Path("whole.npz").read_bytes()
    damage = {
        "cut.npz": whole[:500],
        "empty.npz": b"",
        "overwritten.npz": whole[:300] + b"x" * 200 + whole[500:],
        "cut.npy": Path("whole.npy").read_bytes()[:200],
    }
    for name, content in damage.items():
        Path(name).write_bytes(content)
        assert cli.main(["metrics", name, "whole.npz"]) == 2
        error = capsys.readouterr().err
        assert f"{name} is not a readable array file" in error and error.count("\n") == 1


def test_a_full_disk_ends_with_2(capsys, monkeypatch, tmp_path: Path) -> None:
    from videokv.studies import demo as study

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "d/frames/x.npz")

    monkeypatch.setattr(study, "save_frames", full)
    assert demo("--out", "d") == 2
    error = capsys.readouterr().err
    assert "d/frames/x.npz: No space left on device; free space there" in error
    assert not (tmp_path / "d" / "results.json").exists()


def test_ctrl_c_ends_with_130_and_says_how_to_go_on(capsys, monkeypatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    rolled = seam.run_rollout
    monkeypatch.setattr(seam, "run_rollout", interrupted)
    assert demo("--out", "d") == 130
    error = capsys.readouterr().err
    assert "resume with the same command" in error and "videokv demo --clips 1" in error
    monkeypatch.setattr(seam, "run_rollout", rolled)
    assert demo("--out", "d") == 0


def test_other_settings_in_the_folder_end_with_2(capsys) -> None:
    assert demo("--out", "d") == 0
    assert demo("--out", "d", "--seed", "5") == 2
    assert "seed = 5" in capsys.readouterr().err


def test_recipes(capsys) -> None:
    assert cli.main(["recipes"]) == 0
    assert "quarot-2bit+calibrated" in capsys.readouterr().out
    assert cli.main(["recipes", "--json", "--tokens", "324", "--head-dim", "128"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed[0] == {"recipe": "bf16", "bits_per_element": 16.0, "ratio": 1.0}
    assert cli.main(["recipes", "--tokens", "0"]) == 2


def test_a_recipe_that_refuses_the_shape_says_why(capsys, monkeypatch) -> None:
    def count(name: str, *, tokens: int, head_dim: int) -> float:
        if name == "rtn-2bit":
            raise ValueError("group_size 32 does not divide head_dim 80")
        return 16.0

    monkeypatch.setattr(seam, "count_bits", count)
    assert cli.main(["recipes", "--json", "--head-dim", "80"]) == 0
    entry = next(e for e in json.loads(capsys.readouterr().out) if e["recipe"] == "rtn-2bit")
    assert entry["bits_per_element"] is None and "head_dim 80" in entry["refusal"]


def test_metrics_of_two_clips(capsys, tmp_path: Path, monkeypatch) -> None:
    from videokv.metrics import NotAvailable
    from videokv.metrics import measures as room

    def no_weights(*_: object, **__: object) -> float:
        raise NotAvailable("no weights on this machine")

    monkeypatch.setattr(room, "lpips", no_weights)
    frames = np.random.default_rng(0).integers(0, 256, (3, 16, 20, 3), np.uint8)
    np.savez(tmp_path / "a.npz", frames=frames)
    np.save(tmp_path / "b.npy", frames)
    assert cli.main(["metrics", "a.npz", "b.npy", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["psnr_db"] == 100.0 and read["identical_frames"] == 3
    assert read["protocol"] == "all" and "no weights" in read["not_available"]["lpips_vgg"]
    assert cli.main(["metrics", "a.npz", "b.npy"]) == 0
    printed = capsys.readouterr().out
    assert "psnr_pooled_db       100.0000" in printed
    assert "lpips_alex           not available: no weights on this machine" in printed
    assert cli.main(["metrics", "a.npz", "b.npy", "--protocol", "qvg", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["frames"] == 2
    assert cli.main(["metrics", "a.npz", "b.npy", "--protocol", "last"]) == 2
    np.save(tmp_path / "c.npy", frames[:2])
    assert cli.main(["metrics", "a.npz", "c.npy"]) == 2
    assert cli.main(["metrics", "a.npz", "missing.mp4"]) == 2
    assert "missing.mp4" in capsys.readouterr().err


def test_version_help_and_unknown_commands(capsys) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == videokv.__version__
    assert cli.main(["demo", "--help"]) == 0
    assert "side by side" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["unknown"]) == 2


def test_doctor_reports_a_failure_with_1(capsys, monkeypatch) -> None:
    from videokv.studies import doctor

    checks = (doctor.Check("torch", None, "2"), doctor.Check("pack", False, "relative error 9"))
    monkeypatch.setattr(doctor, "examine", lambda: checks)
    assert cli.main(["doctor"]) == 1
    assert "FAIL pack" in capsys.readouterr().out


def test_doctor_finds_this_machine_well() -> None:
    pytest.importorskip("videokv.recipes", reason="the recipes are not here")
    from videokv.studies.doctor import examine

    failed = [check for check in examine() if check.ok is False]
    assert not failed


def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "videokv.cli", "metrics", "x", "y"],
        capture_output=True,
        text=True,
        cwd=Path(videokv.__file__).parents[1],
    )
    assert done.returncode == 2 and "no such file" in done.stderr and "Trace" not in done.stderr
