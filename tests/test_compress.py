"""compress(): patched inside the context, restored after it, other models refused."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from cache_fakes import rows
from torch import nn

import videokv


class WorldModel(nn.Module):
    """The seam of the shipped world model, and nothing else of it."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(blocks=2, window_chunks=3, head_dim=32)
        self.cache_factory = dict


WorldModel.__module__ = "videokv.worldmodel.model"


def roll(model, chunks=4):
    cache = model.cache_factory()
    for number in range(chunks):
        for layer in range(2):
            q, k, v = rows(6, seed=number, size=32, groups=1)
            cache.write(layer, 6 * number, k, v, q)
            cache.attend(layer, q, k, v)
        cache.commit(6 * number + 6)
    return cache


def test_patched_inside_restored_after():
    model = WorldModel()
    with videokv.compress(model, "rtn-2bit+calibrated", record_mass=True, seed=4) as kv:
        with pytest.raises(ValueError, match="run the model"):
            kv.memory()
        roll(model)
        cache = roll(model)
        assert kv.caches == (cache,)
    assert model.cache_factory is dict
    assert cache.recipe.seed == 4 and cache.recipe.policy.window_chunks == 3
    assert kv.memory() == cache.memory() and kv.memory().bits_per_element == 2.75
    assert cache.visible_tokens == 18 and len(kv.mass().steps) == 3


def test_restored_after_an_exception():
    model = WorldModel()
    with pytest.raises(RuntimeError), videokv.compress(model, "rtn-2bit"):
        raise RuntimeError
    assert model.cache_factory is dict


def test_contexts_nest():
    model = WorldModel()
    with videokv.compress(model, "rtn-2bit"):
        outer = model.cache_factory
        with videokv.compress(model, "rtn-4bit"):
            assert model.cache_factory().recipe.name == "rtn-4bit"
        assert model.cache_factory is outer


def test_a_factory_of_the_class_is_uncovered_again():
    class Plain(WorldModel):
        cache_factory = None

        def __init__(self):
            nn.Module.__init__(self)
            self.config = SimpleNamespace(blocks=1, window_chunks=1, head_dim=32)

    model = Plain()
    with videokv.compress(model, "bf16"):
        assert model.cache_factory is not None
    assert "cache_factory" not in vars(model) and model.cache_factory is None


@pytest.mark.parametrize("model", [nn.Linear(2, 2), None, "a path"])
def test_other_models_are_refused(model):
    with (
        pytest.raises(ValueError, match="no adapter for .*supported: .*worldmodel.WorldModel"),
        videokv.compress(model, "rtn-2bit"),
    ):
        pass


def test_bad_recipes_are_refused_before_the_model_is_touched():
    model = WorldModel()
    for bad in [
        {"name": "rtn-5bit"},
        {"name": "rtn-2bit", "grup": 1},
        {"name": "rtn-2bit", "group_size": 48},
        {"name": "rtn-2bit-psac999"},
    ]:
        name = bad.pop("name")
        with pytest.raises(ValueError), videokv.compress(model, name, **bad):
            pass
    assert model.cache_factory is dict


def test_real_world_model_inside_the_context():
    module = pytest.importorskip("videokv.worldmodel.model")
    config_module = pytest.importorskip("videokv.worldmodel.config")
    config = config_module.WorldModelConfig(
        height=16, width_px=16, width=64, heads=2, blocks=2, window_chunks=2
    )
    model = module.WorldModel(config)
    if not hasattr(model, "cache_factory"):
        pytest.skip("this WorldModel has no cache_factory yet")
    sampler = pytest.importorskip("videokv.worldmodel.sampler")
    context = torch.zeros(1, config.chunk_frames, 16, 16, 3, dtype=torch.uint8)
    actions = torch.zeros(1, 4 * config.chunk_frames, dtype=torch.long)
    frames = {}
    for name in ("bf16", "rtn-8bit", "rtn-2bit+calibrated"):
        with videokv.compress(model, name, record_mass=True) as kv:
            frames[name] = sampler.rollout(model, context, actions, None, chunks=3, steps=2)
        assert 0 < kv.mass().mean < 1 and kv.memory().ratio >= 1
    plain = sampler.rollout(model, context, actions, None, chunks=3, steps=2)
    assert torch.equal(plain, frames["bf16"])


LIGHT = """
import sys, videokv
heavy = {"triton", "matplotlib", "transformers", "diffusers", "vizdoom", "av", "rich", "typer"}
print(sorted(heavy & set(sys.modules)), videokv.__version__)
names = [getattr(videokv, name) for name in videokv.__all__]
videokv.recipes.recipes()
print(sorted((heavy | {"videokv.worldmodel.model"}) & set(sys.modules)))
import torch
print(torch.cuda.is_initialized())
"""


def test_import_is_light():
    command = [sys.executable, "-c", LIGHT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"[] {videokv.__version__}", "[]", "False"]


def test_unknown_public_names():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        videokv.nothing  # noqa: B018
    assert "compress" in dir(videokv)
