"""Weak references to every row that is written to a cache."""

import contextlib
import gc
import weakref

from videokv.cache import KVCache


class Written:
    def __init__(self):
        self.refs = []

    def alive(self):
        gc.collect()
        return sum(ref() is not None for ref in self.refs)

    def __len__(self):
        return len(self.refs)


@contextlib.contextmanager
def written_rows():
    """Inside, each tensor of keys that is written (or what it is a view of) is watched."""
    rows, original = Written(), KVCache.write

    def write(self, layer, start_token, key, value, query=None):
        rows.refs.append(weakref.ref(key if key._base is None else key._base))
        return original(self, layer, start_token, key, value, query)

    KVCache.write = write
    try:
        yield rows
    finally:
        KVCache.write = original


@contextlib.contextmanager
def broken_off(*, after):
    """Inside, the write after so many stops the program."""
    original, writes = KVCache.write, []

    def write(self, *args, **kwargs):
        writes.append(1)
        if len(writes) > after:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    KVCache.write = write
    try:
        yield
    finally:
        KVCache.write = original
