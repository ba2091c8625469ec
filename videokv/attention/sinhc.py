"""log(sinh(a) / a): the log moment generating function of a uniform rounding error.

A channel rounded with step Delta has an error e uniform in [-Delta/2, Delta/2], so that
log E[exp(scale q_c e)] = log(sinh(a)/a), a = scale q_c Delta / 2 (paper 1, the exact correction).
"""

from __future__ import annotations

import torch
from torch import Tensor

_SWITCH = 0.5
# Taylor coefficients in a^2: 2^(2n) B_2n / (2n (2n)!). Six terms reach 1e-10 relative at _SWITCH.
_SERIES = (1 / 6, -1 / 180, 1 / 2835, -1 / 37800, 1 / 467775, -691 / 3831077250)


def log_sinhc(a: Tensor) -> Tensor:
    """log(sinh(a)/a), elementwise, float32 or float64; even, 0 at 0, never overflows.

    Relative error below 1e-9 in float64 and 3e-6 in float32 (worst just above the switch, where
    the closed form cancels).
    """
    size = a.abs()
    square = size.clamp(max=_SWITCH).square()
    series = torch.zeros_like(square)
    for coefficient in reversed(_SERIES):
        series = (series + coefficient) * square
    large = size.clamp(min=_SWITCH)
    closed = large - torch.log(2 * large) + torch.log1p(-torch.exp(-2 * large))
    return torch.where(size < _SWITCH, series, closed)
