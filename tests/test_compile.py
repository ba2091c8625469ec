"""torch.compile around a cache: graph breaks at the cache, the model compiled a bounded number of
times however many chunks there are, and the same result as without it."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import videokv
from videokv.cache import graphs
from videokv.worldmodel.config import WorldModelConfig
from videokv.worldmodel.model import WorldModel

LENGTHS = (32, 32, 17, 48, 32, 63, 32, 9)
STEPS = 3
WIDTH = 128
RECIPES = ["bf16", "rtn-2bit+taylor", "videokv-2bit+calibrated"]
if torch.cuda.is_available():  # half a minute more on two cores, for the same graphs
    RECIPES.append("quantwm-2bit+calibrated")


class Layer(nn.Module):
    def __init__(self, *, width=WIDTH, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, layer, start, cache, write):
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        if write:
            cache.write(layer, start, key, value, query)
        seen = cache.attend(layer, query, key, value)
        return x + self.out(seen.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, *, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 12

    def forward(self, x, start, cache, write):
        for number, layer in enumerate(self.layers):
            x = layer(x, number, start, cache, write)
        return x


@torch.no_grad()
def rollout(model, cache, lengths):
    """Every pass's output: ``STEPS`` that read and one that writes, for each chunk."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for tokens in lengths:
        x, start = torch.randn(1, tokens, WIDTH, generator=generator), cache.length
        for _ in range(STEPS):
            found.append(model(x, start, cache, False))
        found.append(model(x, start, cache, True))
        cache.commit(start + tokens)
    return found


class Counting:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, module, inputs):
        self.graphs += 1
        return module.forward


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def same(got, want):
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_chunks_compile_nothing_new(recipe):
    model, counting = Model(), Counting()
    want = rollout(model, videokv.recipe(recipe).new_cache(), LENGTHS)
    compiled = torch.compile(model, backend=counting)
    same(rollout(compiled, videokv.recipe(recipe).new_cache(), LENGTHS), want)
    longer = LENGTHS + (5, 100, 32)
    again = rollout(compiled, videokv.recipe(recipe).new_cache(), longer)
    same(again[: len(want)], want)
    # Before and after the cache's calls, with and without writing, one length and any length; the
    # output of several merged calls lies otherwise in memory, which is one more.
    assert 0 < counting.graphs <= 12
    first = counting.graphs
    rollout(compiled, videokv.recipe(recipe).new_cache(), longer)
    assert counting.graphs == first


def test_a_cache_that_was_used_before_the_compiler_came():
    """The methods were plain until then; they are left out of graphs from its first call on."""
    program = f"""
import sys, torch, videokv
sys.path.insert(0, {str(__file__).rpartition("/")[0]!r})
cache = videokv.recipe("rtn-2bit+taylor").new_cache()
x = torch.ones(1, 2, 8, 32)
cache.write(0, 0, x, x)
cache.commit(8)
want = cache.attend(0, x, x, x)
assert "torch._dynamo" not in sys.modules and "triton" not in sys.modules, "imported too early"
graphs = []
def backend(module, inputs):
    graphs.append(module)
    return module.forward
step = torch.compile(lambda x: cache.attend(0, x * 2, x, x) + cache.length, backend=backend)
for scale in (0.5, 0.5, 0.5):
    assert torch.allclose(step(x * scale), cache.attend(0, x, x * scale, x * scale) + 8)
print(len(graphs))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 4


def test_positions_read_inside_do_not_compile_again():
    counting = Counting()
    cache = videokv.recipe("rtn-2bit").new_cache()

    @torch.compile(backend=counting)
    def step(x):
        return cache.attend(0, x * 2, x, x) * 2 + cache.length + cache.held_tokens(0)

    counts = []
    for chunk in range(8):
        x = torch.full((1, 1, 4, 32), float(chunk))
        want = cache.attend(0, x * 2, x, x) * 2 + 2 * cache.length
        same([step(x)], [want])
        cache.write(0, 4 * chunk, x, x)
        cache.commit(4 * chunk + 4)
        counts.append(counting.graphs)
    assert counts[-1] == counts[3]


def test_a_whole_graph_is_refused_with_the_reason():
    cache = videokv.recipe("rtn-2bit").new_cache()
    x = torch.ones(1, 1, 4, 32)
    step = torch.compile(lambda x: cache.attend(0, x, x, x), backend="eager", fullgraph=True)
    cache.attend(0, x, x, x)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=graphs.REASON):
        step(x)


def small_world():
    config = WorldModelConfig(
        height=16, width_px=24, patch=8, chunk_frames=2, width=48, heads=2, blocks=3
    )
    model = WorldModel(config).initialize(seed=0).eval()
    generator = torch.Generator().manual_seed(2)
    for layer in (model.modulation, model.patch_out):  # they start at zero
        layer.weight.data = torch.randn(layer.weight.shape, generator=generator) / 10
    return model


@torch.no_grad()
def play(model, cache, *, chunks):
    config, found = small_world().config, []
    generator = torch.Generator().manual_seed(3)
    for chunk in range(chunks):
        frames = 2 if chunk % 3 else 3  # two chunk lengths
        start = cache.length // config.frame_tokens
        x = torch.randn(1, frames, 16, 24, 3, generator=generator)
        actions = torch.zeros(1, frames, dtype=torch.long)
        for level in (1.0, 0.5):
            found.append(model(x, torch.full((1,), level), actions, start_frame=start, cache=cache))
        clean = torch.zeros(1)
        found.append(model(x, clean, actions, start_frame=start, cache=cache, write=True))
        cache.commit((start + frames) * config.frame_tokens)
    return found


def test_the_world_model():
    model, counting = small_world(), Counting()
    name = "videokv-2bit+calibrated"
    want = play(model, videokv.recipe(name).new_cache(layers=3), chunks=6)
    compiled = torch.compile(model, backend=counting)
    same(play(compiled, videokv.recipe(name).new_cache(layers=3), chunks=3), want[:9])
    first = counting.graphs
    same(play(compiled, videokv.recipe(name).new_cache(layers=3), chunks=6), want)
    assert 0 < first <= 40 and counting.graphs == first


@pytest.mark.skipif(sys.platform == "win32", reason="inductor needs a C++ compiler")
def test_the_default_backend():
    model = Model(layers=1)
    want = rollout(model, videokv.recipe("rtn-2bit+taylor").new_cache(), (32, 17))
    compiled = torch.compile(model)
    same(rollout(compiled, videokv.recipe("rtn-2bit+taylor").new_cache(), (32, 17)), want)
