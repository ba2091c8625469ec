"""The layers of a ``CompressedCache`` as transformers sees them."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from videokv.adapters.transformers.attention import Turn, hand_over

if TYPE_CHECKING:
    from videokv.adapters.transformers.cache import CompressedCache


class Owned:
    """A layer of a ``CompressedCache``, which it does not keep alive."""

    def own(self, owner: CompressedCache, index: int) -> None:
        self._owner = weakref.ref(owner)
        self._index = index

    @property
    def owner(self) -> CompressedCache:
        owner = self._owner()
        if owner is None:
            raise ValueError("the CompressedCache of this layer is gone; keep a reference to it")
        return owner

    @property
    def turn(self) -> Turn:
        return Turn(self.owner, self._index)

    def reset(self) -> None:
        raise ValueError("layers of a CompressedCache are reset together: call cache.reset()")

    def offload(self) -> None:
        raise ValueError("CompressedCache does not offload through transformers")

    prefetch = offload


class CompressedLayer(Owned, CacheLayerMixin):
    """A packed layer; its rows are in the KVCache of the owner."""

    is_croppable = False  # a cut packed chunk is not what it was before

    def __init__(self, owner: CompressedCache, index: int) -> None:
        CacheLayerMixin.__init__(self)
        self.own(owner, index)

    def lazy_initialization(self, *states: Tensor) -> None:
        """Nothing to prepare: storage grows with the chunks."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new rows as they are; the keys carry the Turn of this layer."""
        self.owner.begin(self._index, key_states)
        return hand_over(key_states, self.turn), value_states

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """(rows, offset); query: a number of tokens, or in transformers 4 their positions."""
        tokens = query if isinstance(query, int) else len(query)
        return self.get_seq_length() + tokens, 0

    def get_seq_length(self) -> int:
        return self.owner.length_of(self._index)

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 4


class WindowLayer(Owned, DynamicSlidingWindowLayer):
    """A sliding layer: dense, the last ``window`` - 1 tokens, as transformers keeps them.

    What it held before the running forward is remembered until that is done.
    """

    def __init__(self, owner: CompressedCache, index: int, window: int) -> None:
        DynamicSlidingWindowLayer.__init__(self, sliding_window=window)
        self.own(owner, index)
        self.record_past = False
        self.is_initialized = False
        self._before: tuple[Tensor | None, Tensor | None, int] | None = None

    def activate_past_recording(self) -> None:
        """Keep more than the window from now on, until the next ``crop``."""
        self.record_past = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """What the new rows may see: the window before the first of them, and themselves."""
        self.owner.begin(self._index, key_states)
        self._before = (self.keys, self.values, self.cumulative_length)
        visible = self.sliding_window - 1 + key_states.shape[-2]
        past = (self.keys, self.values)
        full = [
            new if old is None else torch.cat([old, new], -2)
            for old, new in zip(past, (key_states, value_states), strict=True)
        ]
        self._hold(*full, length=self.cumulative_length + key_states.shape[-2])
        keys, values = (rows[:, :, -visible:] for rows in full)
        return hand_over(keys, self.turn), values

    def _hold(self, keys: Tensor, values: Tensor, *, length: int) -> None:
        """Keep rows, and no more than the window unless the past is recorded."""
        if not self.record_past:
            first = max(0, keys.shape[-2] - (self.sliding_window - 1))
            keys, values = keys[:, :, first:], values[:, :, first:]
            if first > keys.shape[-2] // 8:  # a long prompt would be kept alive by its end
                keys, values = keys.clone(), values.clone()
        self.keys, self.values, self.cumulative_length = keys, values, length
        self.is_initialized, self.device = True, keys.device

    def settle(self) -> None:
        """The forward is done."""
        self._before = None

    def abandon(self) -> None:
        """Undo the update of a forward that broke off."""
        if self._before is not None:
            self.keys, self.values, self.cumulative_length = self._before
            self.is_initialized = self.keys is not None
            self._before = None

    def clear(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.is_initialized = False
        self.cumulative_length = 0
        self._before = None

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens (minus their number), which ``check_crop`` allows."""
        if self.keys is None or self.values is None:
            return
        kept = self.keys.shape[-2] + tokens_to_remove
        first = max(0, kept - (self.sliding_window - 1))
        self.keys, self.values = (rows[:, :, first:kept] for rows in (self.keys, self.values))
        self.cumulative_length += tokens_to_remove

    def check_crop(self, tokens: int) -> None:
        """Raise ValueError where the last tokens cannot be removed: older ones would be missing."""
        if not tokens or self.keys is None:
            return
        needed = min(self.sliding_window - 1, self.cumulative_length - tokens)
        if self.keys.shape[-2] - tokens < needed:
            raise ValueError(
                f"layer {self._index} keeps a window of {self.sliding_window} tokens, and those "
                f"before it that crop(-{tokens}) needs are gone: call "
                "cache.activate_past_recording() before the forwards that may be cut, or "
                "cache.reset()"
            )

    def held(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values, None while it is empty."""
        if self.keys is None or self.values is None:
            return None
        return self.keys, self.values

    def copied(self, owner: CompressedCache, memo: dict[int, Any]) -> WindowLayer:
        """The same rows in a copy that belongs to ``owner``."""
        made = WindowLayer(owner, self._index, self.sliding_window)
        for name, value in vars(self).items():
            if name != "_owner":
                setattr(made, name, copy.deepcopy(value, memo))
        return made
