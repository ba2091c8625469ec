"""The worldmodel commands refuse bad input before any work, and stop quietly."""

from pathlib import Path

import pytest

from videokv import cli
from videokv.worldmodel import cli as commands


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(commands, "load_weights", lambda *_, **__: pytest.fail("worked first"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("sample --out d --device cpu:x", "unknown device 'cpu:x'"),
        ("sample --out d --device cpu:7", "'cpu:7' is not here"),
        ("sample --out d --device tpu", "unknown device 'tpu'"),
        ("sample --out d --seed -1", "seed must be 0 or more, got -1"),
        ("sample --out [x]/file/below", "[x]/file/below: Not a directory"),
        ("evaluate --seed -1", "seed must be 0 or more, got -1"),
        ("evaluate --out /nonexistent/x.json", "/nonexistent/x.json: No such file or directory"),
        ("evaluate --sheet /nonexistent/x.png", "/nonexistent/x.png: No such file or directory"),
        ("evaluate --out [x]", "[x] must be a file"),
        ("train --data d --out [x]/file --steps 1", "[x]/file is a file"),
        ("data --out [x]/file/below", "[x]/file/below: Not a directory"),
    ],
)
def test_bad_input_is_refused_before_any_work(capsys, tmp_path: Path, arguments, says) -> None:
    (tmp_path / "[x]").mkdir()
    (tmp_path / "[x]" / "file").write_text("kept")
    assert cli.main(["worldmodel", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and "free space" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["[x]"]


def test_a_file_that_is_there_is_kept_until_the_result_replaces_it(capsys, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("old")
    assert cli.main(["worldmodel", "evaluate", "--out", "x.json", "--device", "tpu"]) == 2
    assert (tmp_path / "x.json").read_text() == "old"


def test_ctrl_c_ends_with_130(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "load_weights", interrupted)
    for arguments in (["sample", "--out", "d"], ["evaluate"]):
        assert cli.main(["worldmodel", *arguments]) == 130
        assert "stopped" in capsys.readouterr().err
        with pytest.raises(SystemExit) as end:
            commands.app(args=arguments, prog_name="videokv worldmodel")
        assert end.value.code == 130
