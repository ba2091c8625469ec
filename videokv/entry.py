"""What the ``videokv`` program starts with: it imports the commands so that Ctrl-C is quiet."""

from __future__ import annotations

import sys

from videokv.stopping import quiet_interrupt


def main(arguments: list[str] | None = None) -> int:
    """Run a command line (sys.argv unless given) and return its exit code (see cli.py)."""
    with quiet_interrupt():
        from videokv import cli
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
