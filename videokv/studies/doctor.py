"""A self-test of this machine: what is there, and whether packing and attention give right results.

Every attention backend is held against a softmax in float64, every usual family against its input.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

import videokv

OPTIONAL = ("triton", "flash-attn-4", "transformers", "diffusers", "vizdoom")
# recipe → the largest relative error of keys that its width allows on Gaussian numbers
ROUND_TRIPS = {"rtn-4bit": 0.15, "rtn-2bit": 0.6, "quarot-2bit": 0.6}
ATTENTION_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Check:
    """One line of the report. ok: None where it is information only."""

    name: str
    ok: bool | None
    detail: str


def examine() -> tuple[Check, ...]:
    """All checks, in the order in which they are shown."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda"))
    checks = [
        Check("videokv", None, videokv.__version__),
        Check("python", None, f"{platform.python_version()} on {platform.platform()}"),
        Check("torch", None, torch.__version__),
        *(Check(name, None, _installed(name)) for name in OPTIONAL),
        *(Check(f"device {d}", None, _describe(d)) for d in devices),
    ]
    for device in devices:
        checks += [_guarded(f"pack {n} on {device}", _round_trip, n, device) for n in ROUND_TRIPS]
        checks += [
            _guarded(f"attention {n} on {device}", _attention, n, device)
            for n in ("auto", *_backends())
        ]
    return tuple(checks)


def _guarded(name: str, test: Callable[..., Check], *args: object) -> Check:
    """A test that raises has failed, and the others still run."""
    try:
        return test(name, *args)
    except Exception as error:  # noqa: BLE001 - whatever it is, the reader is told
        return Check(name, False, f"{type(error).__name__}: {error}")


def _round_trip(name: str, recipe_name: str, device: torch.device) -> Check:
    from videokv.protocols import EncodeContext
    from videokv.recipes import recipe

    keys = _random(1, 2, 63, 128, seed=0).to(device)
    quantizer = recipe(recipe_name).keys
    if quantizer is None:
        raise ValueError(f"{recipe_name} packs no keys")
    packed = quantizer.encode(keys, EncodeContext(layer=0, role="key"))
    error = float((packed.decode(torch.float32) - keys).norm() / keys.norm())
    limit = ROUND_TRIPS[recipe_name]
    return Check(name, error <= limit, f"relative error {error:.3f} (at most {limit})")


def _attention(name: str, backend: str, device: torch.device) -> Check:
    from videokv.attention import attend, explain_choice
    from videokv.protocols import Segment

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query, key, value = (
        _random(1, heads, tokens, 64, seed=i).to(device, dtype)
        for i, (heads, tokens) in enumerate(((4, 33), (2, 95), (2, 95)))
    )
    cuts = (slice(0, 63), slice(63, 95))
    segments = [Segment(key[:, :, cut], value[:, :, cut]) for cut in cuts]
    try:
        choice = explain_choice(query, segments, backend=backend)
    except ValueError as refusal:
        return Check(name, None, str(refusal))
    output, _ = attend(query, segments, scale=0.125, backend=backend)
    error = float((output.double() - _oracle(query, key, value)).abs().max())
    limit = ATTENTION_TOLERANCE[dtype]
    detail = f"largest error {error:.1e} in {dtype} (at most {limit})"
    if backend == "auto":
        detail += f"; takes {choice.backend}: {choice.why}"
    return Check(name, error <= limit, detail)


def _oracle(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
    return ((query.double() @ key.mT) * 0.125).softmax(-1) @ value


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _backends() -> tuple[str, ...]:
    from videokv.attention import backend_names

    return backend_names()


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed (optional)"


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    count = torch.cuda.device_count()
    return f"{count} × {properties.name}, {memory}, compute {properties.major}.{properties.minor}"
