"""One thread a process; without a GPU, Triton kernels run through Triton's interpreter (both to be
set before their import)."""

import os

# Two test processes on two cores: their threads would wait for each other (a file took ten times as
# long). Programs that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
