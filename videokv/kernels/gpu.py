"""When a Triton kernel may run: what the machine must have, and a check of every first use.

No kernel is trusted because it worked elsewhere. Before an operation is chosen for the first time
in a configuration (dtypes, head size, format) on a device, its kernel and its PyTorch reference run
on the same small inputs there; it serves that configuration only if they agree. The verdict is kept
for the process. A first use synchronises: run a step once before capturing a CUDA graph.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Callable, Hashable

import torch

SMALLEST_CAPABILITY = (8, 0)

_verdicts: dict[Hashable, str | None] = {}
_HERE = contextlib.nullcontext()


class CannotCheck(Exception):
    """What a check was given tells nothing of the kernel: another call's may."""


def wants_kernels(device: torch.device) -> bool:
    """Whether PyTorch steps on ``device`` would be a fallback (and worth a word)."""
    return device.type == "cuda"


@functools.lru_cache(maxsize=64)
def machine_refusal(device: torch.device) -> str | None:
    """Why no Triton kernel can run on ``device``, or None."""
    if device.type != "cuda":
        return f"Triton kernels run on CUDA tensors, these are on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'videokv[triton]')"
    capability = torch.cuda.get_device_capability(device)
    if capability < SMALLEST_CAPABILITY:
        return f"compute capability {capability} is below {SMALLEST_CAPABILITY}"
    return None


def checked_refusal(
    name: str, config: Hashable, device: torch.device, check: Callable[[], str | None]
) -> str | None:
    """Why the kernel ``name`` may not serve ``config`` on ``device``, or None.

    check: runs kernel and reference once; None where they agree, else what is wrong. What it raises
    (no memory, a compiler error, too little shared memory) is the reason too; that of a
    ``CannotCheck`` holds for this call alone.
    """
    key = (name, config, device)
    if key not in _verdicts:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "not checked before this graph capture; run the step once before capturing"
        try:
            _verdicts[key] = check()
        except CannotCheck as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the reference serves the call
            _verdicts[key] = _words(error)
    return _verdicts[key]


def disagreement(
    got: torch.Tensor, want: torch.Tensor, *, tolerance: float, what: str = "the output"
) -> str | None:
    """None where ``got`` is within ``tolerance`` of ``want`` in relative norm, else the error.

    Synchronises. NaN and infinity are never within it; where ``want`` has some, CannotCheck is
    raised: inputs that are not finite must not decide about those of later calls.
    """
    want = want.double()
    if not bool(want.isfinite().all()):
        raise CannotCheck(f"{what} of these inputs is not finite, which checks no kernel")
    error = float((got.double() - want).norm() / want.norm().clamp(min=1e-30))
    if error <= tolerance:
        return None
    return f"self-check failed: {what} is off by {error:.1e} (at most {tolerance:.1e})"


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Launch where the data is, not on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def products(dtype: torch.dtype, device: torch.device) -> str:
    """How a kernel multiplies matrices of ``dtype``.

    Float32 as three TF32 products: written out in float32 they take minutes to compile. (The
    interpreter on the CPU knows plain float32 only.)
    """
    if dtype != torch.float32:
        return "tf32"
    return "tf32x3" if device.type == "cuda" else "ieee"


@functools.lru_cache(maxsize=256)
def say_once(message: str) -> None:
    """Warn, once in a process for each message."""
    warnings.warn(message, stacklevel=4)


def _words(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else repr(error)
