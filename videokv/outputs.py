"""Where results go: checked before any work, and in words where the system refuses."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

_FULL = {errno.ENOSPC, errno.EDQUOT}
_WRONG_PLACE = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


def check_folder(folder: Path) -> None:
    """See that ``folder`` can be written, or made where it is not there yet; makes nothing.

    Raises:
        ValueError: it is a file.
        OSError: it, or the nearest folder above it, cannot be written; names ``folder``.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out must be a folder, {folder} is a file; choose another folder")
    above = folder.absolute()
    while not above.exists():
        above = above.parent
    _probe(above, named=folder)


def check_file(path: Path) -> None:
    """See that a file ``path`` can be written; a file that is there is left as it is.

    Raises:
        ValueError: it is a folder.
        OSError: it, or its folder, cannot be written; names ``path``.
    """
    if path.is_dir():
        raise ValueError(f"{path} must be a file, it is a folder; name a file in it")
    if not path.exists():
        _probe(path.absolute().parent, named=path)
        return
    with open(path, "ab"):
        pass


def describe(error: OSError) -> str:
    """One line: the path, what the system says, and what helps against that."""
    where = f"{error.filename}: " if error.filename else ""
    what = error.strerror or str(error)
    if error.errno in _FULL:
        return f"{where}{what}; free space there, or choose another folder"
    if error.errno in _WRONG_PLACE:
        return f"{where}{what}; choose another folder or file"
    return f"{where}{what}"


def _probe(folder: Path, *, named: Path) -> None:
    """Make a file in ``folder`` and remove it; the error names what was asked for."""
    try:
        if not folder.is_dir() and folder.exists():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".videokv-"):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(named)) from error
