"""One line instead of a traceback where a script needs a GPU and there is none.

Imported for that alone, before kernels: without a GPU Triton is often missing too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    raise SystemExit(f"{Path(sys.argv[0]).name} needs a CUDA GPU")


def require_hopper() -> None:
    """SystemExit, in one line, on a GPU of another kind."""
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        name = Path(sys.argv[0]).name
        raise SystemExit(f"{name} needs a Hopper GPU (9.0), this one is {major}.{minor}")
