"""Any order of operations: what reads keep between commits never outlives what it was made of."""

import random

import pytest
import torch

import videokv
from videokv.cache import cache as cache_module
from videokv.cache import stacking

LAYERS, HEADS, GROUP, SIZE = 2, 2, 2, 64


class Walk:
    """A cache under random operations, and what an untouched copy of its state says."""

    def __init__(self, recipe, seed, *, budget, unlike):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.recipe, self.budget, self.unlike = recipe, budget, unlike
        self.cache = recipe.new_cache(layers=LAYERS, workspace_bytes=budget)
        self.batch, self.done = 2, []

    def rows(self, tokens, layer):
        size = SIZE * 2 if layer and self.unlike else SIZE
        return [
            torch.randn(self.batch, heads, tokens, size, generator=self.generator)
            for heads in (HEADS * GROUP, HEADS, HEADS)
        ]

    def write(self, tokens=None):
        start = self.cache.length
        tokens = tokens or self.random.choice([1, 7, 16, 40])
        for layer in range(LAYERS):
            q, k, v = self.rows(tokens, layer)
            self.cache.write(layer, start, k, v, q)
        return start + tokens

    def commit(self):
        end = self.write()
        if self.random.random() < 0.3:
            self.attend()
        if self.random.random() < 0.3:
            end = self.write()
        self.cache.commit(end if self.random.random() < 0.8 else max(end - 3, self.cache.length))

    def attend(self):
        for layer in self.random.sample(range(LAYERS), LAYERS):
            q, k, v = self.rows(self.random.choice([1, 5, 33]), layer)
            got = self.cache.attend(layer, q, k, v)
            other = self.recipe.new_cache(layers=LAYERS)
            other.restore(self.cache.layer_states(), length=self.cache.length)
            want = other.attend(layer, q, k, v)
            torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4, msg=lambda m: self.told(m))

    def told(self, message):
        return f"after {', '.join(self.done)}: {message}"

    def forget(self):
        self.cache.forget(self.random.randint(0, self.cache.length))

    def crop(self):
        length = self.random.randint(self.cache.length // 2, self.cache.length)
        self.cache.crop(length, decode_partial=True)

    def keep(self):
        start = self.random.randint(0, self.cache.length)
        for layer in range(LAYERS):
            self.cache.keep(layer, [(0, 5), (start, start + 60)])

    def select_batch(self):
        self.batch, old = self.random.choice([1, 2, 3]), self.batch
        self.cache.select_batch([self.random.randrange(old) for _ in range(self.batch)])

    def to(self):
        self.cache.to("cpu")

    def reset(self):
        self.cache.reset(keep_statistics=self.random.random() < 0.5)

    def failed_commit(self):
        end = self.write(16)
        q, k, v = self.rows(16, 1)
        k[..., -1, 0] = torch.nan
        self.cache.write(1, self.cache.length, k, v, q)
        with pytest.raises(ValueError, match="layer 1"):
            self.cache.commit(end)

    def walk(self, steps):
        names = ["commit"] * 5 + ["forget", "crop", "keep", "select_batch", "to", "failed_commit"]
        for _ in range(steps):
            name = self.random.choice(names) if self.random.random() > 0.03 else "reset"
            self.done.append(name)
            getattr(self, name)()
            self.attend()


def forced(monkeypatch):
    """The GPU's way on the CPU: one buffer a read, all layers of a kind packed together."""
    monkeypatch.setattr(cache_module, "worth_gathering", lambda device: True)
    monkeypatch.setattr(stacking, "STACKED_ON", ("cpu",))


@pytest.mark.parametrize("budget", [None, 500_000])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("rtn-2bit+taylor", {"chunk_tokens": 16}),
        ("quarot-2bit+calibrated", {"sink_chunks": 1}),
        ("quantwm-2bit+calibrated", {"window_chunks": 3}),
        ("videokv-2bit", {"sink_chunks": 1, "recent_chunks": 1, "window_chunks": 3}),
    ],
)
def test_reads_follow_the_state(name, policy, seed, budget, monkeypatch):
    forced(monkeypatch)
    recipe = videokv.recipe(name, **policy)
    Walk(recipe, seed, budget=budget, unlike=seed == 2).walk(12)


@pytest.mark.parametrize("name", ["quarot-2bit", "videokv-2bit"])
def test_rows_of_rotated_chunks_are_selected(name):
    """A product with a rotation rounds differently for fewer rows, as a single token shows."""
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        cache = videokv.recipe(name).new_cache(layers=1)
        x = torch.randn(3, 2, 1 + seed, 64, generator=generator)
        cache.write(0, 0, x, x, x)
        cache.commit(1 + seed)
        (want,) = cache.view(0)
        cache.select_batch([2])
        (got,) = cache.view(0)
        torch.testing.assert_close(got.keys, want.keys[2:], rtol=1e-4, atol=1e-5)
