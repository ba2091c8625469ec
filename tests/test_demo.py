"""The demo on a stand-in model: rows, resume, and settings that are refused before any work."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import demo_fakes
import numpy as np
import pytest

from videokv.studies import rollout as seam
from videokv.studies.demo import (
    DEFAULT_RECIPES,
    GAME,
    DemoSettings,
    Progress,
    resolve_device,
    run_demo,
)
from videokv.studies.journal import JOURNAL_NAME

CHECK_RECIPE = seam.check_recipe


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    demo_fakes.install(monkeypatch)


def small(out: Path, **changes: object) -> DemoSettings:
    chosen = {"clips": 2, "chunks": 1, "recipes": ("rtn-2bit", "rtn-2bit+taylor"), **changes}
    return DemoSettings(out=out, **chosen)  # type: ignore[arg-type]


def test_rows_curves_and_frames(tmp_path: Path) -> None:
    run = run_demo(small(tmp_path))
    read = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert read["study"] == "demo" and read["command"].startswith("videokv demo --clips 2")
    found = {(row["recipe"], row["metric"]) for row in read["rows"]}
    assert ("bf16", "psnr_db") not in found and ("bf16", "cached_mass") in found
    expected = "psnr_db psnr_pooled_db ssim sharpness cached_mass bits_per_element held_bytes "
    expected += "dense_bytes ratio workspace_peak_bytes seconds_per_chunk"
    assert {metric for recipe, metric in found if recipe == "rtn-2bit"} == set(expected.split())
    mean = next(s for s in read["summary"] if (s["recipe"], s["metric"]) == ("rtn-2bit", "psnr_db"))
    assert mean["n"] == 2 and mean["sem"] is not None
    assert run.frames(GAME, "clip-000").shape[0] == 36
    assert run.frames("rtn-2bit", "clip-001").shape == (3, demo_fakes.HEIGHT, demo_fakes.WIDTH, 3)
    curves = json.loads((tmp_path / "curves.json").read_text())
    assert len(curves["psnr_db_by_frame"]["rtn-2bit"]["clip-000"]) == 3
    assert len(curves["cached_mass_by_layer"]["bf16"]["clip-001"]) == demo_fakes.LAYERS


def test_context_frames_enter_no_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_demo(small(tmp_path / "a")).results
    get_clips = seam.get_clips

    def other_context(count: int, *, seed: int) -> seam.Clips:
        clips = get_clips(count, seed=seed)
        clips.frames[:, :6] = 0
        return clips

    monkeypatch.setattr(seam, "get_clips", other_context)
    assert run_demo(small(tmp_path / "b")).results.rows == first.rows


def test_a_finished_demo_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run_demo(small(tmp_path)).results
    monkeypatch.setattr(seam, "run_rollout", lambda *_, **__: pytest.fail("ran again"))
    steps: list[Progress] = []
    assert run_demo(small(tmp_path), on_progress=steps.append).results.rows == before.rows
    assert all(step.resumed for step in steps) and steps[-1].done == steps[-1].total == 3


def test_an_interrupted_demo_gives_the_rows_of_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_demo(small(tmp_path / "whole")).results.rows
    rolled = seam.run_rollout

    def stop_at_the_second(model: object, name: str, **options: object) -> seam.Rollout:
        if name == "rtn-2bit":
            raise KeyboardInterrupt
        return rolled(model, name, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(seam, "run_rollout", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run_demo(small(tmp_path / "cut"))
    monkeypatch.setattr(seam, "run_rollout", rolled)
    assert run_demo(small(tmp_path / "cut")).results.rows == whole


def test_kill_minus_nine_and_resume(tmp_path: Path) -> None:
    script = (
        "import sys, pytest; sys.path.insert(0, sys.argv[1]); import demo_fakes\n"
        "from pathlib import Path\n"
        "from videokv.studies.demo import DemoSettings, run_demo\n"
        "demo_fakes.install(pytest.MonkeyPatch())\n"
        "run_demo(DemoSettings(out=Path(sys.argv[2]), clips=2, chunks=4))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(Path(__file__).parent), tmp_path])
    journal = tmp_path / JOURNAL_NAME
    while child.poll() is None and not (journal.exists() and journal.stat().st_size > 1500):
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    run = run_demo(DemoSettings(out=tmp_path, clips=2, chunks=4))
    keys = [json.loads(line)["key"] for line in journal.read_text().splitlines()[1:]]
    assert keys == [f"{recipe} clip-000..001" for recipe in DEFAULT_RECIPES]
    rows = [(row.case, row.recipe, row.metric) for row in run.results.rows]
    assert len(rows) == len(set(rows))


def test_missing_frames_are_named(tmp_path: Path) -> None:
    run_demo(small(tmp_path))
    lost = tmp_path / "frames" / "rtn-2bit" / "clip-001.npz"
    os.remove(lost)
    with pytest.raises(ValueError, match=r"rtn-2bit/clip-001\.npz is missing"):
        run_demo(small(tmp_path))


def test_other_settings_into_one_folder_are_refused(tmp_path: Path) -> None:
    run_demo(small(tmp_path))
    with pytest.raises(ValueError, match="seed = 0"):
        run_demo(small(tmp_path, seed=1))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"clips": 0}, "clips must be 1"),
        ({"chunks": 11}, "chunks must be 1 to 10"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"window": -2}, "window must be 1 to 8"),
        ({"window": 0}, "window must be 1 to 8"),
    ],
)
def test_settings_are_checked(tmp_path: Path, changes: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        small(tmp_path, **changes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "says"), [("rtn-2bit-psac999", "rank 999"), ("rtn-5bit", "bits")])
def test_recipes_are_checked_against_the_model_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.setattr(seam, "check_recipe", CHECK_RECIPE)
    monkeypatch.setattr(seam, "load_model", lambda _: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=says):
        run_demo(small(tmp_path / "out", recipes=("rtn-2bit", name)))
    assert list(tmp_path.iterdir()) == []


def test_the_shipped_model_has_the_heads_that_recipes_are_checked_against() -> None:
    from videokv.worldmodel.config import WorldModelConfig
    from videokv.worldmodel.weights import load_weights

    assert load_weights(device="cpu").config.head_dim == WorldModelConfig().head_dim


def test_devices_are_checked() -> None:
    for name in ("tpu", "meta", "cuda:97", "nonsense", "cpu:7", "cpu:x"):
        with pytest.raises(ValueError, match="device"):
            resolve_device(name)
    assert resolve_device("cpu").type == "cpu"


def test_the_reference_comes_first_and_once(tmp_path: Path) -> None:
    assert small(tmp_path, recipes=("rtn-2bit", "bf16", "rtn-2bit")).recipes == ("bf16", "rtn-2bit")


def test_frames_are_kept_without_loss(tmp_path: Path) -> None:
    run = run_demo(small(tmp_path))
    clips = seam.get_clips(2, seed=0)
    assert np.array_equal(run.frames(GAME, "clip-001"), clips.frames[1].numpy())
