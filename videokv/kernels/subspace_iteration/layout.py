"""What subspace iteration gives, and how long it goes on."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

SHIFT = 1e-3  # of the mean eigenvalue: leaves directions as they are, bounds condition numbers
FIRST_ROUNDS, ROUNDS = 3, 12  # with the matrix and with its square


class Directions(NamedTuple):
    """U bfloat16 ``[B, H, D, r]``; seen = M U float32 ``[B, H, D, r]``, quadratic = U^T M U
    ``[B, H, r, r]``, of U as it is stored."""

    basis: Tensor
    seen: Tensor
    quadratic: Tensor
