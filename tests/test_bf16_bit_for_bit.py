"""The bf16 recipe equals, bit for bit, a sampler that shares no code with the cache."""

import pytest
import torch
from torch.nn import functional as F

import videokv
from videokv.worldmodel.config import WorldModelConfig
from videokv.worldmodel.model import WorldModel
from videokv.worldmodel.sampler import chunk_noise, from_uint8, rollout, time_steps, to_uint8

CONFIG = WorldModelConfig(
    height=16, width_px=24, width=96, heads=2, blocks=2, window_chunks=3, clip_chunks=5
)


class Lists:
    """Keys and values in plain lists; attention is F.scaled_dot_product_attention."""

    def __init__(self):
        self.past = {}
        self.new = {}

    def write(self, layer, start, key, value, query):
        self.new[layer] = (key, value)

    def attend(self, layer, query, key, value):
        pairs = [*self.past.get(layer, []), (key, value)]
        keys = torch.cat([k for k, _ in pairs], 2)
        values = torch.cat([v for _, v in pairs], 2)
        return F.scaled_dot_product_attention(query, keys, values)

    def commit(self, end):
        for layer, pair in self.new.items():
            self.past[layer] = [*self.past.get(layer, []), pair][-CONFIG.window_chunks :]
        self.new = {}


@torch.no_grad()
def plain_sampler(model, context, actions, *, chunks, seed):
    """Eight Euler steps a chunk, then a clean pass that writes: written out once more."""
    lists, made = Lists(), []
    video = from_uint8(context)
    levels = time_steps(steps=CONFIG.sample_steps, shift=CONFIG.sample_shift)
    for number in range(2 + chunks):
        frames = slice(3 * number, 3 * number + 3)
        moves = actions[:, frames].long()
        if number < 2:
            chunk = video[:, frames]
        else:
            chunk = chunk_noise(CONFIG, seed=seed, clips=range(len(context)), chunk=number)
            for now, after in zip(levels, levels[1:], strict=False):
                t = torch.full((len(context),), now)
                clean = model(chunk, t, moves, start_frame=3 * number, cache=lists).to(chunk.dtype)
                chunk = clean + (chunk - clean) * (after / now)
            chunk = chunk.clamp(-1, 1)
            made.append(to_uint8(chunk))
        zero = torch.zeros(len(context))
        model(chunk, zero, moves, start_frame=3 * number, cache=lists, write=True)
        lists.commit(0)
    return torch.cat(made, 1)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("record_mass", [False, True], ids=["plain", "mass"])
def test_rollouts_are_equal(autocast, record_mass):
    model = WorldModel(CONFIG).initialize(seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # gates and the output start at zero
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    context = torch.randint(0, 256, (2, 6, 16, 24, 3), generator=generator, dtype=torch.uint8)
    actions = torch.randint(0, 6, (2, 21), generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
        expected = plain_sampler(model, context, actions, chunks=5, seed=3)
    with videokv.compress(model, "bf16", record_mass=record_mass):
        ours = rollout(model, context, actions, chunks=5, seed=3, autocast=autocast)
    assert torch.equal(ours, expected)
    dense = rollout(model, context, actions, chunks=5, seed=3, autocast=autocast)
    assert torch.equal(dense, expected)
    assert expected.float().std() > 1
