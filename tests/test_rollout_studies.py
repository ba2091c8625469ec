"""compare, kvsplit, tradeoff, ablate: rows, resuming, the schema, the grids, the commands."""

import json

import pytest
import studies_fakes
import torch

from videokv import cli
from videokv.metrics import NotAvailable
from videokv.studies import grids, rollouts
from videokv.studies import rollout as seam
from videokv.studies.results import Results, Row, read_results
from videokv.studies.rollouts import RolloutPlan, run_rollouts
from videokv.studies.variants import Variant, checked, variant


@pytest.fixture
def calls(monkeypatch, tmp_path) -> list[str]:
    found: list[str] = []
    studies_fakes.install(monkeypatch, found)
    monkeypatch.chdir(tmp_path)
    yield found
    rollouts._model.cache_clear()
    rollouts._clips.cache_clear()


def plan(tmp_path, *names: str, **changes) -> RolloutPlan:
    settings = {"clips": 2, "chunks": 2, "device": "cpu", **changes}
    return RolloutPlan("compare", grids.compare_variants(names), tmp_path / "d", **settings)


def test_rows_are_complete_and_valid(calls, tmp_path) -> None:
    seen = []
    results = run_rollouts(plan(tmp_path, "rtn-2bit"), on_unit=lambda *a: seen.append(a))
    assert calls == ["bf16 0", "bf16 1", "rtn-2bit 0", "rtn-2bit 1"]
    assert seen[-1] == ("rtn-2bit | clip-001", 4, 4)
    metrics = {row.metric for row in results.rows if row.recipe == "rtn-2bit"}
    assert {"psnr_db", "psnr_first_chunk_db", "ssim", "flicker", "identical_frames"} <= metrics
    assert results.find("bf16", "psnr_db") is None
    assert results.protocol == "all"
    studies_fakes.check_schema(tmp_path / "d" / "results.json")


def test_the_schema_refuses_what_is_not_a_study(tmp_path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    good = Results("x", "c", 0, "cpu", {}, (Row("a", "b", "psnr_db", 1.0),)).as_json()
    for change in ({"protocol": "some"}, {"seed": -1}, {"rows": [{"case": "a"}]}, {"more": 1}):
        (tmp_path / "r.json").write_text(json.dumps({**good, **change}))
        with pytest.raises(jsonschema.ValidationError):
            studies_fakes.check_schema(tmp_path / "r.json")


def test_a_study_resumes_and_takes_more_recipes(calls, tmp_path) -> None:
    first = run_rollouts(plan(tmp_path, "rtn-2bit"))
    calls.clear()
    assert run_rollouts(plan(tmp_path, "rtn-2bit")).rows == first.rows and not calls
    run_rollouts(plan(tmp_path, "rtn-2bit", "rtn-4bit"))
    assert calls == ["rtn-4bit 0", "rtn-4bit 1"]
    with pytest.raises(ValueError, match="seed = 1"):
        run_rollouts(plan(tmp_path, "rtn-2bit", seed=1))


def test_batches_give_the_rows_of_single_clips(calls, tmp_path, monkeypatch) -> None:
    alone = run_rollouts(plan(tmp_path / "1", "rtn-2bit", clips=3))
    monkeypatch.setitem(rollouts.BATCH_CLIPS, "cpu", 2)
    calls.clear()
    batched = run_rollouts(plan(tmp_path / "2", "rtn-2bit", clips=3))
    assert calls == ["bf16 0", "bf16 2", "rtn-2bit 0", "rtn-2bit 2"]
    assert [(r.case, r.recipe, r.metric) for r in batched.rows] == [
        (r.case, r.recipe, r.metric) for r in alone.rows
    ]
    journal = tmp_path / "2" / "d" / "rows.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-2]))  # killed in the middle of a batch
    calls.clear()
    assert run_rollouts(plan(tmp_path / "2", "rtn-2bit", clips=3)).rows == batched.rows
    assert calls == ["rtn-2bit 0", "rtn-2bit 2"]
    assert len(journal.read_text().splitlines()) == len(lines)


def test_a_deadline_leaves_all_recipes_of_fewer_clips(calls, tmp_path, monkeypatch) -> None:
    asked = iter(range(100))  # before each of two stages, and after every unit
    with monkeypatch.context() as patch:
        patch.setattr(rollouts, "is_over", lambda deadline: next(asked) >= 7)
        found = run_rollouts(plan(tmp_path, "rtn-2bit", "rtn-4bit", clips=4))
    cases = {name: [r.case for r in found.rows if (r.recipe, r.metric) == (name, "sharpness")]
             for name in found.recipes}  # fmt: skip
    assert cases == {"bf16": [f"clip-{n:03d}" for n in range(4)], "rtn-2bit": ["clip-000"],
                     "rtn-4bit": ["clip-000"]}  # fmt: skip
    calls.clear()
    assert len(run_rollouts(plan(tmp_path, "rtn-2bit", "rtn-4bit", clips=4)).rows) > len(found.rows)
    assert calls[0] == "rtn-2bit 1" and len(calls) == 6


def test_chunk_rows(calls, tmp_path) -> None:
    found = run_rollouts(plan(tmp_path, "rtn-2bit", long=True)).summary
    names = {name: {s.metric for s in found if s.recipe == name and "chunk_0" in s.metric}
             for name in ("bf16", "rtn-2bit")}  # fmt: skip
    own = {f"{figure}_chunk_0{n}" for n in (1, 2)
           for figure in ("sharpness", "saturation", "motion", "drift")}  # fmt: skip
    assert names["bf16"] == own
    assert names["rtn-2bit"] == own | {f"psnr_chunk_0{n}_db" for n in (1, 2)} | {
        "flicker_chunk_01", "flicker_chunk_02"
    }  # fmt: skip


def test_long_rollouts_repeat_the_actions_and_resume(calls, tmp_path) -> None:
    found = run_rollouts(plan(tmp_path, "rtn-2bit", chunks=14, long=True, clips=1))
    assert found.find("rtn-2bit", "psnr_chunk_14_db") and found.find("bf16", "drift_chunk_14")
    assert "14 chunks, 42 frames, 3.6 s" in found.versions["length"]
    assert "over again" in found.versions["actions"]
    late = [f"{name}_late_to_real" for name in ("sharpness", "saturation", "motion")]
    assert all(found.find("bf16", name).mean == pytest.approx(1, abs=0.1) for name in late)
    calls.clear()
    again = run_rollouts(plan(tmp_path, "rtn-2bit", chunks=14, long=True, clips=1))
    assert again.rows == found.rows and not calls


def test_actions_go_on_where_they_end() -> None:
    actions = torch.arange(36)[None]
    assert seam.continued(actions, 30) is not None and seam.continued(actions, 30).shape == (1, 36)
    longer = seam.continued(actions, 6 + 3 * 24)[0].tolist()
    assert longer == [*range(36), *range(6, 36), *range(6, 18)]
    assert seam.chunks_for(60) == 234 and seam.chunks_for(0.1) == 1
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="seconds"):
            seam.chunks_for(wrong)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"clips": 0}, "clips must be"),
        ({"chunks": 11}, "chunks must be 1 to 10"),
        ({"window": 9}, "window must be 1 to 8"),
        ({"workers": 0}, "workers must be"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_wrong_plans_are_refused(tmp_path, changes, says) -> None:
    with pytest.raises(ValueError, match=says):
        plan(tmp_path, "rtn-2bit", **changes)


def test_every_grid_can_be_built_and_labels_are_unique() -> None:
    grids_of = [
        grids.kvsplit_variants(["qvg-2bit", "quarot-2bit+taylor"]),
        grids.tradeoff_variants("quarot"),
        grids.ablate_variants(grids.ablation_parts()),
    ]
    for found in grids_of:
        ready = checked(found)
        assert ready[0].label == "bf16" and len(ready) == len({v.label for v in ready})
    assert len(grids_of[1]) == 18
    split = {v.label: v.recipe() for v in grids_of[0]}
    assert split["qvg-2bit K2V16"].values is None and split["qvg-2bit K16V2"].keys is None
    assert split["quarot-2bit+taylor K2V16"].correction == "taylor"
    with pytest.raises(ValueError, match="qsac-psac"):
        grids.ablate_variants(["nothing"])
    with pytest.raises(ValueError, match="share the label"):
        checked([variant("rtn-2bit", "a"), Variant("a", "rtn-4bit")])


def test_the_pareto_front() -> None:
    points = {"a": (2.0, 20.0), "b": (3.0, 30.0), "c": (3.0, 25.0), "d": (2.0, 20.0)}
    rows = [
        Row("clip-000", name, metric, value)
        for name, pair in points.items()
        for metric, value in zip(("bits_per_element", "psnr_db"), pair, strict=True)
    ]
    found = grids.pareto_rows(Results("t", "", 0, "cpu", {}, tuple(rows)))
    assert {r.recipe: r.value for r in found} == {"a": 1.0, "b": 1.0, "c": 0.0, "d": 1.0}


@pytest.mark.parametrize(
    "options",
    [
        ["compare", "--recipes", "rtn-2bit"],
        ["kvsplit", "--recipes", "qvg-2bit"],
        ["tradeoff", "--bits", "2", "--groups", "32,64"],
        ["ablate", "--parts", "metric"],
        ["longrun", "--recipes", "rtn-2bit", "--chunks", "12"],
    ],
    ids=lambda o: o[0],
)
def test_the_commands(calls, capsys, tmp_path, options) -> None:
    assert cli.main([*options, "--clips", "1", "--out", "o", "--device", "cpu", "--json"]) == 0
    read = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert read["study"] == options[0] and read["command"].startswith("videokv ")
    studies_fakes.check_schema(tmp_path / "o" / "results.json")
    drawn = {p.stem for p in (tmp_path / "o" / "figures").glob("*.svg")}
    more = {
        "tradeoff": {"tradeoff_psnr_db", "tradeoff_ssim"},
        "longrun": {
            f"{name}_by_chunk"
            for name in ("psnr_db", "sharpness", "saturation", "motion", "drift", "flicker")
        },
    }
    assert drawn == {"frames"} | more.get(options[0], set())
    for suffix in (".png", ".json"):
        assert {p.stem for p in (tmp_path / "o" / "figures").glob(f"*{suffix}")} == drawn
    page = (tmp_path / "o" / "report.html").read_text()
    assert options[0] in page and "<video" in page and "<table" in page and "://" not in page
    assert cli.main([*options, "--clips", "1", "--out", "o", "--device", "cpu"]) == 0
    assert "bf16" in capsys.readouterr().out


def test_more_metrics_where_they_are_available(calls, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(rollouts.PERCEPTUAL, "flip", lambda x, y: 0.25)
    found = run_rollouts(plan(tmp_path, "rtn-2bit", also=("flip",)))
    assert found.find("rtn-2bit", "flip").mean == 0.25
    with pytest.raises(ValueError, match="lpips_alex"):
        plan(tmp_path, "rtn-2bit", also=("vmaf",))

    def missing(x, y):
        raise NotAvailable("no <weights> here")

    monkeypatch.setitem(rollouts.PERCEPTUAL, "lpips_alex", missing)
    options = ["compare", "--recipes", "rtn-2bit", "--also", "lpips_alex,flip", "--clips", "1"]
    assert cli.main([*options, "--out", "o", "--device", "cpu"]) == 0
    assert "lpips_alex is not available: no <weights> here" in capsys.readouterr().out
    written = read_results(tmp_path / "o" / "results.json")
    assert written.not_available == {"lpips_alex": "no <weights> here"}
    assert written.find("rtn-2bit", "flip") and not written.find("rtn-2bit", "lpips_alex")
    page = (tmp_path / "o" / "report.html").read_text()
    assert "LPIPS Alex is not available: no &lt;weights&gt; here" in page


def test_figures_of_a_finished_folder(calls, capsys, tmp_path) -> None:
    run_rollouts(plan(tmp_path, "rtn-2bit"))
    assert cli.main(["figures", "d"]) == 0
    assert (tmp_path / "d" / "report.html").is_file()
    names = {p.name for p in (tmp_path / "d" / "figures").iterdir()}
    assert names == {"frames.png", "frames.svg", "frames.json", "differences.mp4"}
    assert cli.main(["figures", "d", "--clip", "clip-009"]) == 2
    assert cli.main(["figures", "nowhere"]) == 2
    assert "results.json" in capsys.readouterr().err


def test_a_wrong_recipe_ends_with_2(calls, capsys) -> None:
    assert cli.main(["compare", "--recipes", "rtn-2bt"]) == 2
    assert "rtn-2bit" in capsys.readouterr().err
    assert cli.main(["tradeoff", "--bits", "two"]) == 2
    assert "--bits" in capsys.readouterr().err and not calls
