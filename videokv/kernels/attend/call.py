"""What one attention call consists of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from videokv.tensors import E4M3


@dataclass(frozen=True, eq=False)
class Rows:
    """keys ``[B, Hkv, T, D]`` and values ``[B, Hkv, T, Dv]`` of any strides.

    key_scale, value_scale: float32 ``[B, Hkv]`` that E4M3 keys and values are multiplied by; None
    for a side in the query's dtype.
    """

    keys: Tensor
    values: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def fp8(self) -> bool:
        """Whether keys or values are E4M3."""
        return E4M3 in (self.keys.dtype, self.values.dtype)


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call.

    query ``[B, Hq, M, D]`` (Hq a multiple of Hkv). past, current: at least one of them, of one
    token or more. extra_query ``[B, Hq, M, F]``, extra_keys ``[B, Hkv, T of past, F]``: columns of
    the correction, float32 or FP16, or None. causal: query m sees current rows <= m (M of them).
    """

    query: Tensor
    past: Rows | None
    current: Rows | None
    scale: float
    extra_query: Tensor | None = None
    extra_keys: Tensor | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        parts = [rows for rows in (self.past, self.current) if rows is not None]
        if not parts or any(rows.keys.shape[2] == 0 for rows in parts):
            raise ValueError("attend expects past or current rows, of one token or more each")
        if self.current is not None and self.current.fp8:
            raise ValueError("current rows must be in the query's dtype, got E4M3")
        if self.past is not None:
            for name, side, scale in (
                ("keys", self.past.keys, self.past.key_scale),
                ("values", self.past.values, self.past.value_scale),
            ):
                if (side.dtype == E4M3) != (scale is not None):
                    raise ValueError(f"E4M3 {name}, and they alone, come with a scale a head")
        if (self.extra_query is None) != (self.extra_keys is None):
            raise ValueError("columns come in pairs: give extra_query and extra_keys, or neither")
        if self.extra_query is not None and self.past is None:
            raise ValueError("columns correct cached keys, but there are none")

    @property
    def value_dim(self) -> int:
        """Channels of the output."""
        rows = self.past if self.past is not None else self.current
        assert rows is not None
        return rows.values.shape[3]

    @property
    def columns(self) -> int:
        """Columns of the correction."""
        return 0 if self.extra_query is None else self.extra_query.shape[3]

    @property
    def fp8(self) -> bool:
        """Whether a side of the past is E4M3."""
        return self.past is not None and self.past.fp8
