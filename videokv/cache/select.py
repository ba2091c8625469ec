"""Pick batch rows of a packed cache without touching its codes."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
SAME_ROWS = 1e-4  # relative norm between a chunk's rows decoded alone and among others


def selected(holder: T, index: Tensor, *, batch: int) -> T:
    """A copy of ``holder`` (dataclasses, tuples, tensors) that holds the batch rows ``index``.

    Tensors must have the batch as first dimension, or size 1 there (shared by the rows). A packed
    chunk laid out otherwise offers ``select_batch(index)``, which returns it with those rows;
    any other is decoded before and after, and refused where the rows do not match.

    Raises:
        ValueError: a packed chunk cannot be selected by row.
    """
    return _Selection(index, batch).visit(holder)


class _Selection:
    def __init__(self, index: Tensor, batch: int) -> None:
        self.index = index
        self.batch = batch
        self.done: dict[int, Tensor] = {}

    def visit(self, holder: Any) -> Any:
        if isinstance(holder, Tensor):
            return self._rows(holder)
        if dataclasses.is_dataclass(holder) and not isinstance(holder, type):
            if hasattr(holder, "select_batch"):
                return holder.select_batch(self.index)
            changed = self._fields(holder)
            return self._verified(holder, changed) if hasattr(holder, "decode") else changed
        if isinstance(holder, (tuple, list)):
            return type(holder)(self.visit(item) for item in holder)
        if isinstance(holder, dict):
            return {key: self.visit(item) for key, item in holder.items()}
        return holder

    def _rows(self, tensor: Tensor) -> Tensor:
        """Each tensor is selected once, so that what chunks share stays shared."""
        if tensor.ndim == 0 or tensor.shape[0] != self.batch:
            return tensor
        if id(tensor) not in self.done:
            self.done[id(tensor)] = _index_rows(tensor, self.index)
        return self.done[id(tensor)]

    def _fields(self, holder: Any) -> Any:
        changed = {}
        for field in dataclasses.fields(holder):
            if not field.init:
                continue
            value = getattr(holder, field.name)
            if field.name == "shape" and isinstance(value, tuple) and value[0] == self.batch:
                changed[field.name] = (self.index.numel(), *value[1:])
            else:
                changed[field.name] = self.visit(value)
        return dataclasses.replace(holder, **changed)

    def _verified(self, before: Any, after: Any) -> Any:
        expected = before.decode(torch.float32).index_select(0, self.index)
        found = after.decode(torch.float32)
        # Not bit for bit: a product with a rotation rounds by how many rows it has.
        alike = found.shape == expected.shape and bool(
            (found - expected).norm() <= SAME_ROWS * expected.norm()
        )
        if not alike:
            raise ValueError(
                f"{type(before).__name__} does not keep the batch as the first dimension of its "
                "tensors; give it a method select_batch(index)"
            )
        return after


def _index_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """``index_select`` for every dtype: one-byte floats go through their bytes."""
    if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        return tensor.view(torch.uint8).index_select(0, index).view(tensor.dtype)
    return tensor.index_select(0, index)
