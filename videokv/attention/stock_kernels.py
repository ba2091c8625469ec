"""PyTorch's own attention kernels, called so that they return their log-sum-exp.

Which kernel takes which dtypes, head sizes, unequal key and value head sizes or grouped-query heads
changes with the PyTorch version and the GPU, so it is not written down here: a small problem is run
once for every combination that a process needs, checked against float64, and remembered. All of
them return natural logs; the probe checks that too. (The first call of a combination synchronises:
run once before capturing a CUDA graph.)
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_aten = torch.ops.aten
_ROWS, _TOKENS = 35, 67  # odd, and not multiples of a tile
_Kernel = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 2e-3,  # float32 kernels may use TF32 where the user allowed it
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}


def _cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse


def _fa4(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, T, H, D] views
    out, lse = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
    return out.transpose(1, 2), lse


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, lse


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return out, lse


KERNELS: dict[str, _Kernel] = {
    "cpu": _cpu,
    "fa4": _fa4,
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
}
# In order of speed on one H200; float32 has only one. FlashAttention-4 (the package flash-attn-4,
# extra "fa4") takes part where it is installed and gives the right result.
_CANDIDATES: dict[tuple[str, torch.dtype], tuple[str, ...]] = {
    ("cpu", torch.float64): ("cpu",),
    ("cpu", torch.float32): ("cpu",),
    ("cpu", torch.bfloat16): ("cpu",),
    ("cpu", torch.float16): ("cpu",),
    ("cuda", torch.bfloat16): ("fa4", "cudnn", "flash", "efficient"),
    ("cuda", torch.float16): ("fa4", "cudnn", "flash", "efficient"),
    ("cuda", torch.float32): ("efficient",),
}


_left_out: frozenset[str] = frozenset()


@contextlib.contextmanager
def left_out(kernel: str) -> Iterator[None]:
    """Choose as if ``kernel`` were not there: to measure what the next one does.

    Raises ValueError for a kernel of another name.
    """
    global _left_out
    if kernel not in KERNELS:
        raise ValueError(f"unknown stock kernel {kernel!r}; use one of {tuple(KERNELS)}")
    before, _left_out = _left_out, _left_out | {kernel}
    try:
        yield
    finally:
        _left_out = before


def has(kernel: str) -> bool:
    """Whether a kernel takes part: not left out, its package there."""
    return kernel not in _left_out and (kernel != "fa4" or has_fa4())


@dataclass(frozen=True)
class KernelChoice:
    """A kernel and how its inputs must be shaped.

    head_dim: size of q and k after padding (at least the one asked for).
    value_dim: size of v after padding.
    repeat_heads: whether KV heads must be repeated to the number of query heads.
    """

    kernel: str
    head_dim: int
    value_dim: int
    repeat_heads: bool

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Output ``[B, Hq, M, value_dim]``, natural-log lse ``[B, Hq, M]`` (float32 or float64).

        q, k, v already have this choice's head sizes; heads are repeated here where need be.
        """
        if self.repeat_heads:
            repeats = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        q, k, v = _aligned(q), _aligned(k), _aligned(v)
        out, lse = KERNELS[self.kernel](q, k, v, scale, causal)
        # cuDNN returns [B, H, M, 1]; the efficient kernel rounds M up to a multiple of 32.
        lse = lse.reshape(q.shape[0], q.shape[1], -1)[..., : q.shape[2]]
        return out, lse


@dataclass(frozen=True)
class _ProbeSizes:
    """The problem that a probe runs: ``[1, 2 heads_per_kv, rows, D]`` on ``[1, 2, tokens, D]``."""

    heads_per_kv: int
    rows: int
    tokens: int
    causal: bool


def choose_kernel(
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    heads_per_kv: int,
    rows: int,
    tokens: int,
    causal: bool = False,
) -> KernelChoice | str:
    """The first stock kernel that takes these sizes on this device, or why none does.

    heads_per_kv: query heads of one KV head. rows, tokens: number of queries and of keys; only
    whether they are 1 matters (some kernels do not take that).
    """
    index = device.index
    if device.type == "cuda" and index is None:
        index = torch.cuda.current_device()
    rows, tokens = (1 if rows == 1 else _ROWS), (1 if tokens == 1 else _TOKENS)
    if causal:
        rows = tokens
    sizes = _ProbeSizes(heads_per_kv, rows, tokens, causal)
    return _choose(device.type, index, dtype, head_dim, value_dim, sizes, _left_out)


@functools.lru_cache(maxsize=1024)
def _choose(
    device_type: str,
    device_index: int | None,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    sizes: _ProbeSizes,
    without: frozenset[str],
) -> KernelChoice | str:
    kernels = [k for k in _CANDIDATES.get((device_type, dtype), ()) if k not in without]
    if not kernels:
        return f"no stock kernel returns its log-sum-exp for {dtype} on {device_type}"
    device = torch.device(device_type if device_index is None else f"{device_type}:{device_index}")
    reasons = []
    for kernel in kernels:
        if kernel == "fa4" and not has_fa4():
            reasons.append("fa4: flash-attn-4 is not installed")
            continue
        for choice in _shapings(kernel, head_dim, value_dim, sizes.heads_per_kv):
            reason = probe(choice, device, dtype, sizes)
            if reason is None:
                return choice
        reasons.append(f"{kernel}: {reason}")
    return (
        f"no stock kernel takes key head size {head_dim} with value head size {value_dim} in "
        f"{dtype} on {device_type} (" + "; ".join(reasons) + ")"
    )


def _shapings(kernel: str, head_dim: int, value_dim: int, heads_per_kv: int) -> list[KernelChoice]:
    """Cheapest first: unequal head sizes and grouped heads as they are, else padded, repeated."""
    padded_value = round_up(value_dim, 8)
    equal = max(head_dim, padded_value)
    sizes = [(head_dim, padded_value)]
    if head_dim != padded_value:
        sizes.append((equal, equal))
    repeats = (False, True) if heads_per_kv > 1 else (False,)
    return [KernelChoice(kernel, d, dv, repeat) for d, dv in sizes for repeat in repeats]


def probe(
    choice: KernelChoice,
    device: torch.device,
    dtype: torch.dtype,
    sizes: _ProbeSizes,
) -> str | None:
    """Why the kernel cannot serve these shapes (its own words, or a wrong result), or None.

    Raises ValueError while a CUDA graph is captured: nothing can be compared then.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"kernel {choice.kernel!r} was never tried with head size {choice.head_dim}, and a "
            "CUDA graph is being captured: run this attention once, with the same cache, before"
        )
    heads_per_kv, rows, tokens = sizes.heads_per_kv, sizes.rows, sizes.tokens
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, length: int, width: int) -> Tensor:
        values = torch.randn(1, heads, length, width, generator=generator, dtype=torch.float64)
        return values.to(dtype)

    q = draw(2 * heads_per_kv, rows, choice.head_dim)
    k, v = draw(2, tokens, choice.head_dim), draw(2, tokens, choice.value_dim)
    scale = choice.head_dim**-0.5
    try:
        with torch.no_grad():
            out, lse = choice.run(
                q.to(device), k.to(device), v.to(device), scale=scale, causal=sizes.causal
            )
            out, lse = out.cpu().double(), lse.cpu().double()
    except Exception as error:  # noqa: BLE001 - kernels refuse by assertions and errors of their own
        return str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
    k, v = (x.double().repeat_interleave(heads_per_kv, 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * scale
    if sizes.causal:
        scores = scores.masked_fill(torch.ones(rows, tokens).triu(1).bool(), -torch.inf)
    if out.shape != (1, 2 * heads_per_kv, rows, choice.value_dim) or lse.shape != out.shape[:3]:
        return f"returned shapes {tuple(out.shape)} and {tuple(lse.shape)}"
    error_out = float((out - scores.softmax(-1) @ v).abs().max())
    error_lse = float((lse - scores.logsumexp(-1)).abs().max())
    if not max(error_out, error_lse) < _TOLERANCE[dtype]:
        return f"wrong by {error_out:.1e} in the output and {error_lse:.1e} in the log-sum-exp"
    return None


@functools.lru_cache(maxsize=1)
def has_fa4() -> bool:
    """Whether FlashAttention-4's package is there (older flash_attn packages have no ``cute``)."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


def _aligned(x: Tensor) -> Tensor:
    """``x``, or a copy where its strides are not what vector loads of 8 elements need."""
    *steps, last = x.stride()
    whole = not any([step % 8 for step in steps]) and x.data_ptr() % 16 == 0
    return x if last == 1 and (whole or x.device.type == "cpu") else x.contiguous()
