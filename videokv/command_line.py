"""The command line of this run, as results record it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

_arguments: list[str] = []


def record(arguments: Sequence[str]) -> None:
    """Remember what the program was called with (``cli.main`` does it)."""
    _arguments[:] = arguments


def command() -> str:
    """The command that makes these results again, quoted for a shell."""
    return shlex.join(["videokv", *_arguments])
