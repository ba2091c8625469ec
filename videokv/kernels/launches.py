"""Launches of a kernel that are alike, without Triton's search for the compiled one.

A JIT function looks at each argument of each launch, which takes the host several times as long as
the launch itself.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

ALIGNED_BYTES = 16  # Triton compiles another kernel where a tensor does not begin there


class Launches:
    """Launches of ``kernel`` with one grid and the same constants, on one device.

    The kernel of the last one is taken again as long as nothing changes that it was chosen by:
    numbers, and where there are tensors, of which dtype, and how their memory is aligned; of tensor
    descriptors, dtype, block and layout in shared memory.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], constants: Mapping[str, Any]) -> None:
        self._kernel, self._constants = kernel, constants
        self._grid = (*grid, 1, 1)[:3]
        # What the last launch was chosen by, its kernel, and constants in the kernel's order.
        self._kept: tuple[list[Any], Any, list[Any]] = ([], None, [])

    def __call__(self, *arguments: Any) -> None:
        """Launch with all arguments (tensors, descriptors, numbers, None) but the constants, which
        come last."""
        kinds = [_kind(x) for x in arguments]
        known, compiled, constants = self._kept
        if kinds == known:
            compiled[self._grid](*arguments, *constants)
            return
        compiled = self._kernel[self._grid](*arguments, **self._constants)
        if hasattr(compiled, "run"):  # the interpreter compiles nothing
            names = self._kernel.arg_names[len(arguments) :]
            self._kept = kinds, compiled, [self._constants[name] for name in names]


def _kind(x: Any) -> Hashable:
    if isinstance(x, Tensor):
        return x.dtype if x.data_ptr() % ALIGNED_BYTES == 0 else (x.dtype, "unaligned")
    if hasattr(x, "block_shape"):
        return x.base.dtype, tuple(x.block_shape), getattr(x, "layout", None)
    number: Hashable = x
    return number


def alike(
    kernel: Any, grid: tuple[int, ...], device: torch.device, **constants: Hashable
) -> Launches:
    """``Launches`` of a kernel on a device, the same ones for the same grid and constants."""
    return _made(kernel, grid, device, tuple(constants.items()))


@functools.lru_cache(maxsize=1024)
def _made(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    constants: tuple[tuple[str, Hashable], ...],
) -> Launches:
    return Launches(kernel, grid, dict(constants))
