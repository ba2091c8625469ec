"""The world model: geometry, the cache seam, and training path = cached inference path."""

from __future__ import annotations

import pytest
import torch

from videokv.worldmodel.config import WorldModelConfig
from videokv.worldmodel.model import (
    WorldModel,
    count_parameters,
    rope_angles,
    rope_factors,
    rotate_pairs,
    teacher_forcing_mask,
)
from videokv.worldmodel.plain import PlainCache

TINY = WorldModelConfig(
    height=16, width_px=24, width=48, heads=2, blocks=2, window_chunks=2, clip_chunks=6
)


def tiny_model(seed: int = 0) -> WorldModel:
    """A tiny model with no zero weights, so that every path matters."""
    model = WorldModel(TINY).initialize(seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.eval()


def clip(config: WorldModelConfig, *, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    size = (batch, config.clip_frames, config.height, config.width_px, 3)
    frames = torch.rand(size, generator=generator) * 2 - 1
    actions = torch.randint(0, config.actions, size[:2], generator=generator)
    return frames, actions


def test_the_shipped_shape_fits_in_the_repository() -> None:
    config = WorldModelConfig()
    assert (config.chunk_tokens, config.head_dim, config.clip_frames) == (324, 128, 30)
    parameters = count_parameters(WorldModel(config))
    assert 15_000_000 < parameters < 16_000_000
    assert 2 * parameters + 100_000 < 32_000_000


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"patch": 7}, "patch"),
        ({"heads": 5}, "head"),
        ({"window_chunks": 0}, "window_chunks"),
        ({"clip_chunks": 2}, "clip_chunks"),
        ({"blocks": True}, "blocks"),
    ],
)
def test_a_bad_shape_is_refused(change: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        WorldModelConfig(**change)


def test_config_survives_json() -> None:
    assert WorldModelConfig.from_json(TINY.to_json()) == TINY
    with pytest.raises(ValueError, match="JSON"):
        WorldModelConfig.from_json("{")


def test_patches_round_trip() -> None:
    frames, _ = clip(TINY)
    model = tiny_model()
    patches = model.to_patches(frames)
    assert patches.shape == (2, 18, TINY.frame_tokens, 192)
    assert torch.equal(model.to_frames(patches), frames)
    assert torch.equal(patches[0, 0, 1].reshape(8, 8, 3), frames[0, 0, :8, 8:16])


def test_rope_depends_on_relative_positions_only() -> None:
    config = WorldModelConfig()
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 128, generator=generator, dtype=torch.float64)

    def score(frame: int) -> torch.Tensor:
        positions = torch.tensor([[frame, 4, 5], [frame + 7, 1, 9]])
        angles = rope_angles(config, positions).double()
        turned = [
            rotate_pairs(x[None], *rope_factors(a[None]))
            for x, a in zip((q, k), angles, strict=True)
        ]
        return (turned[0] * turned[1]).sum()

    assert abs(score(0) - score(500)) < 2e-3 * q.norm() * k.norm() / 10
    assert abs(score(0) - (q * k).sum()) > 0.1


def test_training_path_equals_cached_inference() -> None:
    """Clean history: each noisy chunk of the long pass = the same chunk against a cache."""
    model, (frames, actions) = tiny_model(), clip(TINY)
    size, first = TINY.chunk_frames, TINY.context_chunks
    generator = torch.Generator().manual_seed(5)
    noisy = torch.randn(frames[:, first * size :].shape, generator=generator)
    chunk_t = torch.rand(2, TINY.clip_chunks - first, generator=generator)
    history = frames[:, :-size]
    with pytest.warns(UserWarning, match="dense"):
        mask = teacher_forcing_mask(TINY, "cpu")
    with torch.no_grad():
        at_once = model.forward_training(
            history,
            noisy,
            torch.zeros(history.shape[:2]),
            chunk_t.repeat_interleave(size, 1),
            actions,
            mask,
        )
        cache = PlainCache(layers=2, window_chunks=TINY.window_chunks)
        for chunk in range(TINY.clip_chunks):
            rows = slice(chunk * size, (chunk + 1) * size)
            start = chunk * size
            if chunk >= first:
                here = slice(start - first * size, start - first * size + size)
                out = model(
                    noisy[:, here],
                    chunk_t[:, chunk - first],
                    actions[:, rows],
                    start_frame=start,
                    cache=cache,
                )
                torch.testing.assert_close(out, at_once[:, here], atol=1e-4, rtol=1e-4)
            model(
                frames[:, rows],
                torch.zeros(2),
                actions[:, rows],
                start_frame=start,
                cache=cache,
                write=True,
            )
            cache.commit((start + size) * TINY.frame_tokens)


def test_the_window_and_the_past_matter() -> None:
    """Chunk i sees chunk i-1, does not see a chunk outside of the (transitive) window's reach."""
    model, (frames, actions) = tiny_model(), clip(TINY)

    def last(changed_chunk: int | None) -> torch.Tensor:
        cache = PlainCache(layers=2, window_chunks=1)
        video = frames.clone()
        if changed_chunk is not None:
            video[:, changed_chunk * 3 : changed_chunk * 3 + 3] = 0.5
        for start in range(0, 15, 3):
            rows = slice(start, start + 3)
            zero = torch.zeros(2)
            model(
                video[:, rows], zero, actions[:, rows], start_frame=start, cache=cache, write=True
            )
            cache.commit((start + 3) * TINY.frame_tokens)
        return model(frames[:, 15:], torch.ones(2), actions[:, 15:], start_frame=15, cache=cache)

    with torch.no_grad():
        base = last(None)
        assert not torch.allclose(base, last(4), atol=1e-4)  # the chunk just before
        assert torch.equal(base, last(0))  # two layers, window 1: reach of two chunks


def test_bad_input_is_refused() -> None:
    model, (frames, actions) = tiny_model(), clip(TINY)
    cache = PlainCache(layers=2, window_chunks=2)
    with pytest.raises(ValueError, match="noisy_chunk"):
        model(frames[..., :2], torch.zeros(2), actions, start_frame=0, cache=cache)
    with pytest.raises(ValueError, match="t must"):
        model(frames, torch.zeros(3), actions, start_frame=0, cache=cache)
    with pytest.raises(ValueError, match="actions"):
        model(frames, torch.zeros(2), actions[:, 1:], start_frame=0, cache=cache)
    with pytest.raises(ValueError, match="start_frame"):
        model(frames, torch.zeros(2), actions, start_frame=-3, cache=cache)


def test_plain_cache_refuses_gaps_and_non_finite_rows() -> None:
    cache = PlainCache(layers=1, window_chunks=None)
    rows = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="token 0"):
        cache.write(0, 4, rows, rows, rows)
    with pytest.raises(ValueError, match="layer 0: values"):
        cache.write(0, 0, rows, rows / 0, rows)
    with pytest.raises(ValueError, match="commit"):
        cache.commit(4)


def test_recorded_mass_is_the_softmax_share() -> None:
    generator = torch.Generator().manual_seed(0)
    cache = PlainCache(layers=1, window_chunks=None, record_mass=True)
    old, new, query = torch.randn(3, 2, 3, 5, 8, generator=generator)
    cache.write(0, 0, old, old, old)
    cache.attend(0, query, new, new)  # a write pass: not recorded
    cache.commit(5)
    cache.attend(0, query, new, new)
    scores = query.double() @ torch.cat((old, new), 2).double().mT / 8**0.5
    expected = scores.softmax(-1)[..., :5].sum(-1).mean((1, 2))
    ((start, layer, mass),) = cache.masses()
    assert (start, layer) == (5, 0)
    torch.testing.assert_close(mass.double(), expected, atol=1e-6, rtol=1e-6)


def test_rotation_turns_interleaved_pairs_as_complex_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 7, 10, generator=generator, dtype=torch.float64)
    angles = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    expected = torch.view_as_complex(x.unflatten(-1, (5, 2))) * torch.exp(1j * angles)
    turned = rotate_pairs(x, *rope_factors(angles))
    torch.testing.assert_close(turned, torch.view_as_real(expected).flatten(-2))


def test_the_training_step_traces_in_one_graph_with_flex_attention() -> None:
    """No graph break, and FlexAttention under the block mask = the dense mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    from videokv.worldmodel.model import _visible
    from videokv.worldmodel.training import training_loss

    model = tiny_model()
    frames = torch.full((1, 18, 16, 24, 3), 90, dtype=torch.uint8)
    draw = torch.Generator().manual_seed(0)
    draws = (
        torch.rand(1, 5, generator=draw),
        torch.rand(1, 4, generator=draw),
        torch.randn(1, 27, 16, 24, 3, generator=draw),
    )
    batch = (frames, torch.zeros(1, 18, dtype=torch.long), *draws)
    with pytest.warns(UserWarning, match="dense"):
        dense = teacher_forcing_mask(TINY, "cpu")
    tokens = dense.shape[0]
    blocks = create_block_mask(_visible(TINY), None, None, tokens, tokens, device="cpu")
    compiled = torch.compile(training_loss, dynamic=False, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(model, *batch, blocks), training_loss(model, *batch, dense)
        )
