"""Without a GPU, Triton kernels run through Triton's interpreter (to be set before its import)."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
