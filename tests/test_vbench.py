"""VBench arithmetic against the published totals; names, shares and clip lengths."""

import json
from pathlib import Path

import numpy as np
import pytest

from videokv import cli
from videokv.metrics import read_frames, vbench, vbench_export, vbench_files, vbench_run
from videokv.metrics.vbench import DIMENSIONS, QUALITY, SEMANTIC, Score, total, totals

# 2605.26266, Table 5: quality, semantic, total, each with its standard error.
TABLE_5 = [
    (80.10, 0.69, 70.93, 1.97, 78.27, 0.68),
    (78.46, 0.67, 69.49, 2.00, 76.67, 0.67),
    (79.62, 0.67, 70.83, 2.04, 77.86, 0.67),
    (74.90, 0.55, 51.62, 1.26, 70.24, 0.50),
    (79.69, 0.68, 71.31, 1.94, 78.02, 0.67),
    (79.57, 0.67, 70.79, 1.96, 77.81, 0.67),
    (79.95, 0.69, 71.35, 1.97, 78.23, 0.68),
    (83.60, 0.67, 60.02, 2.27, 78.89, 0.70),
    (73.97, 0.71, 48.27, 1.74, 68.83, 0.67),
    (84.62, 0.61, 61.71, 2.15, 80.04, 0.65),
    (76.48, 0.79, 51.28, 2.06, 71.44, 0.75),
    (83.25, 0.66, 59.91, 2.24, 78.58, 0.69),
]


@pytest.mark.parametrize("row", TABLE_5, ids=lambda row: str(row[4]))
def test_totals_and_errors_are_the_published_ones(row) -> None:
    quality, quality_sem, semantic, semantic_sem, whole, sem = row
    found = total(Score(quality, quality_sem), Score(semantic, semantic_sem))
    assert found.mean == pytest.approx(whole, abs=0.011)  # the inputs are rounded
    assert found.sem == pytest.approx(sem, abs=0.011)


def test_ends_of_the_ranges_and_the_weight_of_dynamic_degree() -> None:
    every = {**QUALITY, **SEMANTIC}
    top = totals({name: Score(every[name][1], 0.0) for name in DIMENSIONS})
    low = totals({name: Score(every[name][0], 0.0) for name in DIMENSIONS})
    assert top.total.mean == pytest.approx(1) and low.total.mean == pytest.approx(0)
    raw = {name: Score(every[name][1], 0.0) for name in DIMENSIONS}
    still = totals({**raw, "dynamic_degree": Score(0.0, 0.02)})
    assert still.quality.mean == pytest.approx(6 / 6.5)
    assert still.quality.sem == pytest.approx(0.02 * 0.5 / 6.5)
    scene = totals({**raw, "scene": Score(0.4111, 0.01)}).semantic
    assert scene.mean == pytest.approx(8.5 / 9) and scene.sem == pytest.approx(0.01 / 0.8222 / 9)
    with pytest.raises(ValueError, match="missing \\['scene'\\]"):
        totals({name: Score(1.0) for name in DIMENSIONS if name != "scene"})


def test_clips_are_averaged_before_the_error_over_prompts() -> None:
    found = vbench.from_prompts({"a": [0.2, 0.4], "b": [0.5] * 9, "c": [0.7]})
    assert found.mean == pytest.approx(0.5) and found.sem == pytest.approx(0.2 / 3**0.5)
    assert vbench.from_prompts({"a": [1.0]}).sem is None
    with pytest.raises(ValueError, match="no prompt was matched"):
        vbench.from_prompts({})
    with pytest.raises(ValueError, match="no clip"):
        vbench.from_prompts({"a": []})


def test_any_prompt_gets_a_file_name_of_its_own() -> None:
    assert vbench_files.file_name("a person swimming in ocean", 0) == (
        "a person swimming in ocean-0.mp4"
    )
    odd = ['a/b "c"', "a_b _c_", "x" * 300, "x" * 301, "ü" * 200]
    names = [vbench_files.file_name(p, 1) for p in odd]
    assert len(set(names)) == len(odd)
    assert all(
        "_" not in n and "/" not in n and '"' not in n and len(n.encode()) < 200 for n in names
    )


def test_the_first_share_and_short_videos() -> None:
    prompts = {"color": [str(i) for i in range(10)], "scene": ["one"]}
    assert vbench_files.first_share(prompts, share=0.3) == {
        "color": ["0", "1", "2"],
        "scene": ["one"],
    }
    with pytest.raises(ValueError, match="has no prompts"):
        vbench_files.first_share({"color": []}, share=0.3)
    assert vbench_files.export("p", "color", 0, frames=48, fps=24).seconds == 2
    with pytest.raises(ValueError, match="clips of 10 s"):
        vbench_files.export("p", "human_action", 0, frames=177, fps=24)


def test_an_export_is_read_back_and_a_missing_video_is_named(tmp_path) -> None:
    entry = vbench_files.export("a cat", "color", 0, frames=100, fps=20)
    vbench_files.write_prompts(tmp_path, [entry])
    with pytest.raises(ValueError, match="a cat-0.mp4"):
        vbench_files.read_prompts(tmp_path)
    (tmp_path / "color").mkdir()
    (tmp_path / entry.file).touch()
    assert vbench_files.read_prompts(tmp_path) == (entry,)
    with pytest.raises(ValueError, match="prompts.json"):
        vbench_files.read_prompts(tmp_path / "color")
    with pytest.raises(ValueError, match="two videos"):
        vbench_files.write_prompts(tmp_path, [entry, entry])


def test_clips_find_their_prompts() -> None:
    exports = [
        vbench_files.export(p, "color", 0, frames=100, fps=20) for p in ("a cat", "a cat-0 b")
    ]
    clips = [
        {"video_path": "x/split_clip/a cat-0/a cat-0_000.mp4", "video_results": 0.5},
        {"video_path": "x/split_clip/a cat-0/a cat-0_001.mp4", "video_results": 0.7},
        {"video_path": "x/a cat-0 b-0.mp4", "video_results": True},
    ]
    found = vbench_run.by_prompt(clips, exports, "color")
    assert found == {"a cat": [0.5, 0.7], "a cat-0 b": [1.0]}
    with pytest.raises(ValueError, match="no clip of"):
        vbench_run.by_prompt(clips[:2], exports, "color")
    with pytest.raises(ValueError, match="no prompt"):
        vbench_run.by_prompt([{"video_path": "y.mp4", "video_results": 1}], exports, "color")


def test_the_prompts_that_vbench_is_given() -> None:
    known = [{"prompt_en": "a cat", "dimension": ["color", "scene"], "auxiliary_info": {"c": 1}}]
    cat = vbench_files.export("a cat", "color", 2, frames=100, fps=20)
    own = vbench_files.export("my/own", "color", 0, frames=100, fps=20)
    assert vbench_run.prompt_list([cat], known, "color") == [
        {"prompt_en": "a cat", "dimension": ["color"], "auxiliary_info": {"c": 1}}
    ]
    with pytest.raises(ValueError, match="my/own"):
        vbench_run.prompt_list([own], known, "color")
    bare = vbench_run.prompt_list([own], known, "imaging_quality")
    assert bare == [
        {"prompt_en": vbench_files.file_stem("my/own"), "dimension": ["imaging_quality"]}
    ]
    assert vbench_run.options(Path("p"), [cat], "color")["num_of_samples_per_prompt"] == 3


def test_without_the_package_it_says_so(tmp_path) -> None:
    entry = vbench_files.export("a cat", "color", 0, frames=100, fps=20)
    vbench_files.write_prompts(tmp_path, [entry])
    (tmp_path / "color").mkdir()
    (tmp_path / entry.file).touch()
    if vbench_run.find_spec("vbench") is None:
        with pytest.raises(vbench_run.NotAvailable, match="vbench"):
            vbench_run.score_folder(tmp_path, ["color"], device="cpu")


def exported(folder: Path, *dimensions: str) -> None:
    entries = [vbench_files.export("a cat", d, 0, frames=300, fps=20) for d in dimensions]
    vbench_files.write_prompts(folder, entries)
    for entry in entries:
        (folder / entry.file).parent.mkdir()
        (folder / entry.file).touch()


def test_the_command_prints_totals(monkeypatch, capsys, tmp_path) -> None:
    def score(folder, dimensions, *, device):
        return {name: Score(0.5, 0.01) for name in dimensions}

    monkeypatch.setattr(vbench_run, "score_folder", score)
    exported(tmp_path, *DIMENSIONS)
    assert cli.main(["vbench", "score", str(tmp_path)]) == 0
    assert "total" in capsys.readouterr().out
    assert cli.main(["vbench", "score", str(tmp_path), "--dimensions", "color"]) == 0
    assert "total" not in capsys.readouterr().out
    monkeypatch.undo()
    assert cli.main(["vbench", "score", str(tmp_path / "color")]) == 2
    assert "prompts.json" in capsys.readouterr().err
    if vbench_run.find_spec("vbench") is None:
        assert cli.main(["vbench", "score", str(tmp_path), "--dimensions", "color"]) == 2
        assert "needs the package vbench" in capsys.readouterr().err


def videos(folder: Path, *names: str, frames: int = 24) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        picture = np.zeros((frames, 16, 16, 3), np.uint8)
        vbench_export._write_video(folder / name, picture)


def test_videos_of_the_chosen_prompts_are_exported(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    listed = {"color": ["a red bird", "a blue/green car", "a cat"], "scene": ["a red bird"]}
    Path("p.json").write_text(json.dumps(listed))
    options = ["--prompts", "p.json", "--share", "0.5"]
    assert cli.main(["vbench", "prompts", *options]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [(line[0], line[2]) for line in lines] == [
        ("color", "a red bird"),
        ("color", "a blue/green car"),
        ("scene", "a red bird"),
    ]
    names = {line[1] for line in lines}
    videos(Path("v"), "a red bird-0.mp4", "a red bird-1.mp4")
    export = ["vbench", "export", "out", "--videos", "v", *options]
    assert cli.main(export) == 2
    said = capsys.readouterr().err
    assert "1 of 3 prompts" in said and "car" in said and not Path("out").exists()
    videos(Path("v"), *(name for name in names if "car" in name))
    assert cli.main(export) == 0
    written = vbench_files.read_prompts(Path("out"))
    assert len(written) == 5 and {e.dimension for e in written} == {"color", "scene"}
    assert written[0].frames == 24 and written[0].seconds == pytest.approx(2.06, abs=0.01)
    videos(Path("v"), *names, frames=10)
    assert cli.main([*export[:2], "short", *export[3:]]) == 2
    assert "generate a longer one" in capsys.readouterr().err and not Path("short").exists()
    Path("p.json").write_text('[{"prompt_en": "a cat", "dimension": ["scene"]}]')
    assert vbench_export.read_prompt_list(Path("p.json")) == {"scene": ["a cat"]}
    for wrong in ("{}", "[1]", '{"scene": 1}', '{"nothing": ["a"]}', "x"):
        Path("p.json").write_text(wrong)
        assert cli.main(["vbench", "prompts", *options]) == 2
    if vbench_run.find_spec("vbench") is None:
        assert cli.main(["vbench", "prompts"]) == 2
        assert "--prompts" in capsys.readouterr().err


def test_frames_of_a_study_are_exported(capsys, monkeypatch, tmp_path) -> None:
    from videokv.studies.demo import frames_path, save_frames

    monkeypatch.chdir(tmp_path)
    g = np.random.default_rng(0)
    for number, length in enumerate((24, 24)):
        frames = g.integers(0, 256, (length, 16, 24, 3), dtype=np.uint8)
        save_frames(frames_path(Path("s"), "rtn-2bit", f"clip-00{number}"), frames)
    export = ["vbench", "export", "out", "--study", "s", "--recipe"]
    assert cli.main([*export, "rtn-2bit"]) == 0
    written = vbench_files.read_prompts(Path("out"))
    assert len(written) == 2 * len(vbench.WORLD_MODEL_DIMENSIONS)
    back = read_frames(Path("out") / written[0].file)
    first = read_frames(frames_path(Path("s"), "rtn-2bit", "clip-000"))
    assert back.shape == first.shape and np.abs(back.astype(int) - first).mean() < 4
    assert cli.main([*export, "qvg-2bit"]) == 2
    assert "rtn-2bit" in capsys.readouterr().err
    assert cli.main([*export, "rtn-2bit", "--dimensions", "color"]) == 2
    assert cli.main(export[:-3]) == 2 and cli.main(export[:-1]) == 2


@pytest.mark.parametrize("prompt", [1, None, ["a cat"], " "])
def test_prompts_that_are_not_text_are_refused(tmp_path, prompt):
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"color": ["a cat", prompt]}))
    with pytest.raises(ValueError, match="prompts must be text"):
        vbench_export.read_prompt_list(path)


def test_an_empty_list_of_exported_videos_is_named(tmp_path):
    (tmp_path / "prompts.json").write_text("[]")
    with pytest.raises(ValueError, match="lists no videos"):
        vbench_files.read_prompts(tmp_path)


def test_damaged_lists_and_scores_that_are_not_finite_are_named(tmp_path):
    entry = {"file": 5, "prompt": "a cat", "dimension": "color", "frames": 1, "seconds": 1}
    (tmp_path / "prompts.json").write_text(json.dumps([entry]))
    with pytest.raises(ValueError, match="file must be text"):
        vbench_files.read_prompts(tmp_path)
    exports = [vbench_files.export("a cat", "color", 0, frames=100, fps=20)]
    for wrong in (float("nan"), float("inf")):
        clip = {"video_path": "x/a cat-0.mp4", "video_results": wrong}
        with pytest.raises(ValueError, match="it has no mean"):
            vbench_run.by_prompt([clip], exports, "color")
