"""Folders and files are checked before any work, and refusals are explained by their cause."""

import errno
import os
from pathlib import Path

import pytest

from videokv.outputs import check_file, check_folder, describe


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_asks_for_space(code: int) -> None:
    said = describe(OSError(code, os.strerror(code), "d/x"))
    assert said == f"d/x: {os.strerror(code)}; free space there, or choose another folder"


@pytest.mark.parametrize(
    "code", [errno.EACCES, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EROFS]
)
def test_a_wrong_place_asks_for_another(code: int) -> None:
    said = describe(OSError(code, os.strerror(code), "d/x"))
    assert said == f"d/x: {os.strerror(code)}; choose another folder or file"


def test_other_causes_get_no_advice() -> None:
    assert describe(OSError(errno.EIO, "Input/output error")) == "Input/output error"


def test_nothing_is_made(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b")
    check_folder(tmp_path)
    check_file(tmp_path / "x.json")
    assert not list(tmp_path.iterdir())
    (tmp_path / "x.json").write_text("old")
    check_file(tmp_path / "x.json")
    assert (tmp_path / "x.json").read_text() == "old"


def test_wrong_places_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="file is a file"):
        check_folder(tmp_path / "file")
    with pytest.raises(ValueError, match="must be a file"):
        check_file(tmp_path)
    for wrong in (tmp_path / "file" / "x.json", tmp_path / "no" / "x.json"):
        with pytest.raises(OSError) as caught:
            check_file(wrong)
        assert caught.value.filename == str(wrong)
    with pytest.raises(NotADirectoryError) as caught:
        check_folder(tmp_path / "file" / "below")
    assert caught.value.filename == str(tmp_path / "file" / "below")
