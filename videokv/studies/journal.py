"""The append-only journal of a study: what is done stays done, whatever kills the process.

    out/rows.jsonl    line 1: {"settings": {...}}, then one line a finished unit of work
    out/.lock         held while a study writes there; the system frees it when the process dies

A line is written and synced as a whole after everything that belongs to its unit is on disk. A
crash can only tear the last line, which is cut off on the next opening: its unit is run again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

JOURNAL_NAME = "rows.jsonl"
LOCK_NAME = ".lock"


class Journal:
    """Context manager over a folder. ``done`` maps the key of each finished unit to its payload.

    settings: the study's fingerprint, JSON values only. A folder begun with other settings is
    refused with a ValueError that names them; so is a folder in which another process writes.
    check: reads a unit that was there before and raises KeyError, TypeError or ValueError where it
    is not what the study writes; the folder is then refused with a ValueError naming the line.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        *,
        check: Callable[[Mapping[str, Any]], object] = lambda unit: None,
    ) -> None:
        self.folder = folder
        self.settings = json.loads(json.dumps(settings, sort_keys=True, allow_nan=False))
        self.done: dict[str, Any] = {}
        self._check = check
        self._path = folder / JOURNAL_NAME
        self._lock = FileLock(folder / LOCK_NAME, timeout=0)

    def __enter__(self) -> Journal:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout as error:
            raise ValueError(
                f"another study is writing into {self.folder}; wait for it or choose another --out"
            ) from error
        try:
            self._open()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()

    def append(self, key: str, payload: Mapping[str, Any]) -> None:
        """Record a finished unit; on the disk when this returns. A key is recorded once only."""
        if key in self.done:
            raise ValueError(f"{key} is already in {self._path}")
        line = json.dumps({"key": key, **payload}, allow_nan=False)
        self._append_line(line)
        self.done[key] = json.loads(line)

    def _open(self) -> None:
        lines = self._whole_lines()
        if not lines:
            self._append_line(json.dumps({"settings": self.settings}, allow_nan=False))
            return
        self._check_settings(lines[0].get("settings"))
        for number, record in enumerate(lines[1:], start=2):
            key = record.get("key")
            if not isinstance(key, str) or key in self.done:
                raise ValueError(self._damage(number, f"has the key {key!r}, expected a new one"))
            self._check_unit(record, number)
            self.done[key] = record

    def _check_unit(self, record: Mapping[str, Any], number: int) -> None:
        try:
            self._check(record)
        except KeyError as error:
            raise ValueError(self._damage(number, f"has no {error}")) from error
        except (TypeError, ValueError) as error:
            raise ValueError(self._damage(number, f"is no unit of this study: {error}")) from error

    def _whole_lines(self) -> list[dict[str, Any]]:
        """All whole lines; a torn last one is cut off the file."""
        if not self._path.exists():
            return []
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._path, len(whole))
        return [self._parse(line, i) for i, line in enumerate(whole.splitlines(), start=1)]

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(self._damage(number, f"is not JSON: {error}")) from error
        if not isinstance(record, dict):
            raise ValueError(self._damage(number, "is not a record"))
        return record

    def _damage(self, number: int, what: str) -> str:
        return f"{self._path}, line {number} {what}; choose another --out or delete the folder"

    def _check_settings(self, found: object) -> None:
        if not isinstance(found, dict):
            raise ValueError(self._damage(1, "does not name the settings of a study"))
        names = [n for n in {**found, **self.settings} if found.get(n) != self.settings.get(n)]
        if names:
            there = ", ".join(f"{n} = {found.get(n)!r}" for n in names)
            here = ", ".join(f"{n} = {self.settings.get(n)!r}" for n in names)
            raise ValueError(
                f"{self.folder} was begun with other settings\n  there: {there}\n  now:   {here}\n"
                "repeat the first command to resume it, or choose another --out"
            )

    def _append_line(self, line: str) -> None:
        """Append and sync; where that fails (a full disk) the file is cut back to what it was."""
        with open(self._path, "ab", buffering=0) as file:
            before = file.tell()
            try:
                _write_all(file.fileno(), line.encode() + b"\n")
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), before)
                raise


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
