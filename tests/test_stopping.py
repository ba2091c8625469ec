"""Ctrl-C before, while and after the commands are imported."""

import signal
import subprocess
import sys

import pytest

from videokv.stopping import quiet_interrupt

# Takes long to import the module argv[1], then starts the program argv[2].
SLOW_START = """
import runpy, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            print("importing", flush=True)
            try:
                time.sleep(60)
            except BaseException:
                raise ImportError("initialization failed")
sys.meta_path.insert(0, Slow())
runpy.run_module(sys.argv[2], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("program", "slow"),
    [
        ("videokv", "videokv.cli"),
        ("videokv.entry", "typer"),
        ("videokv", "torch"),
        ("videokv.worldmodel", "videokv.worldmodel.cli"),
        ("videokv.worldmodel", "torch"),
    ],
)
def test_ctrl_c_while_importing_is_quiet(program: str, slow: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW_START, slow, program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "importing\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert (child.returncode, out, err) == (130, "", "stopped\n")


def test_the_entry_imports_nothing_heavy() -> None:
    script = (
        "import sys, videokv.entry\n"
        "print([n for n in ('torch', 'numpy', 'typer', 'rich') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_the_handler_is_put_back_and_others_are_left() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with quiet_interrupt():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with quiet_interrupt():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
