"""Compile Triton kernels for GPUs that are not there: a driver that only says what it would be.

``with compiled_for(90) as kernels:`` any launch inside compiles the kernel for compute capability
9.0 down to machine code and does not run it; ``kernels`` collects what was compiled.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

import torch
import triton
from triton.backends.compiler import GPUTarget


@contextlib.contextmanager
def compiled_for(capability: int) -> Iterator[list]:
    """Launches become compilations; needs an interpreter-free process (TRITON_INTERPRET unset)."""
    found: list = []
    run = triton.runtime.jit.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.append((self.fn.__name__, kernel))
        return kernel

    triton.runtime.driver.set_active(_driver(capability))
    triton.runtime.jit.JITFunction.run = compile_only
    try:
        yield found
    finally:
        triton.runtime.jit.JITFunction.run = run


def _driver(capability: int) -> types.SimpleNamespace:
    target = GPUTarget("cuda", capability, 32)
    return types.SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: capability,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
        get_device_interface=lambda: torch.cuda,
        map_python_to_cpp_type=lambda name: name,
    )
