"""Ctrl-C while a program is still importing. Light: torch alone takes seconds to import."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130


@contextmanager
def quiet_interrupt() -> Iterator[None]:
    """Ctrl-C inside prints "stopped" and ends the process at once with 130.

    For imports alone, while no file is open. An exception would not do: libraries catch it halfway
    through their imports and raise another one. Changes nothing where Ctrl-C is ignored (nohup) or
    handled by somebody else, or off the main thread, where signals cannot be handled.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(number: int, frame: FrameType | None) -> None:
    sys.stderr.write("stopped\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED)
