"""Every kernel compiles to machine code for compute capabilities 8.0 and 9.0, without a GPU.

The interpreter accepts what the compiler does not: wrong types, too little room. In a process of
its own, for the interpreter is chosen when Triton is imported. Set VIDEOKV_COMPILE_KERNELS=1.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


@pytest.mark.skipif(
    os.environ.get("VIDEOKV_COMPILE_KERNELS") != "1",
    reason="takes a minute; set VIDEOKV_COMPILE_KERNELS=1",
)
@pytest.mark.parametrize("capability", ["90", "80"])
def test_every_kernel_compiles(capability, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{HERE}:{HERE.parent}"}
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_kernels.py"), capability],
        env=environment,
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    print(done.stdout)
