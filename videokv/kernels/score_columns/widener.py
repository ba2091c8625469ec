"""What all kernels that write queries with their columns do around the launch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from videokv.kernels.gpu import on_device
from videokv.kernels.launches import Launches


def widener(
    launches: Launches, *others: Tensor | float | None, width: int
) -> Callable[[Tensor], Tensor]:
    """Makes ``[B, Hq, M, width]`` of a query ``[B, Hq, M, D]``; others: the kernel's arguments
    after the query, its strides and the output."""

    def widened(query: Tensor) -> Tensor:
        query = query if query.stride(3) == 1 else query.contiguous()
        out = query.new_empty(*query.shape[:3], width)
        with on_device(query.device):
            launches(query, *query.stride()[:3], out, *others)
        return out

    return widened
