"""Teacher-forced training of the world model, on one GPU (or, for tests, a CPU).

z = (1 - t) x + t ε; the model predicts x; loss |x̂ - x|² / max(t, 0.2)². t is logit-normal and
shifted to noise, where history is needed; history chunks are slightly noised, so that the model
forgives its own mistakes in a rollout.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from videokv.worldmodel.config import MIRRORED_ACTION, WorldModelConfig
from videokv.worldmodel.data import SplitData
from videokv.worldmodel.model import WorldModel, teacher_forcing_mask
from videokv.worldmodel.weights import save_weights

__all__ = ["Batch", "TrainingOptions", "learning_rate", "training_loss", "train"]

_SMALLEST_LOSS_T = 0.2
_SYNC_STEPS = 10  # steps that the CPU may queue ahead of the GPU before it looks at the clock
_COPY_WALKS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train. Exactly one of ``minutes`` and ``steps`` is the budget.

    The learning rate is a function of the elapsed share of the budget, so a run that is slower
    or faster than expected still decays to zero. ``flip`` is the share of clips that are mirrored
    (left and right turns swapped): 0 suits one fixed level, whose mirror image is never met.

    Raises:
        ValueError: a value is out of range, or not exactly one budget is given.
    """

    minutes: float | None = None
    steps: int | None = None
    batch: int = 12
    peak_learning_rate: float = 6e-4
    warmup_steps: int = 200
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    ema: float = 0.999
    t_mean: float = 0.8
    t_std: float = 1.0
    history_t: float = 0.15
    clean_history: float = 0.3
    flip: float = 0.0
    seed: int = 0
    log_seconds: float = 10.0
    checkpoint_seconds: float = 60.0
    compile: bool = True

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise ValueError(f"give one of minutes and steps, got {self.minutes} and {self.steps}")
        positive = ("batch", "peak_learning_rate", "warmup_steps", "clip_norm", "t_std")
        for name in (*positive, "log_seconds", "checkpoint_seconds", "minutes", "steps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        for name in ("ema", "history_t", "clean_history", "flip"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be within 0..1, got {getattr(self, name)}")
        if self.weight_decay < 0 or self.seed < 0:
            raise ValueError("weight_decay and seed must not be negative")


@dataclasses.dataclass(frozen=True)
class Batch:
    """One step's clips and draws.

    frames uint8 [B, T, H, W, 3]; actions int64 [B, T]; history_t [B, chunks - 1] and noisy_t
    [B, chunks - context_chunks] noise levels; noise float [B, history + noisy frames, H, W, 3].
    """

    frames: Tensor
    actions: Tensor
    history_t: Tensor
    noisy_t: Tensor
    noise: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """The fields in order, as the loss takes them."""
        return (self.frames, self.actions, self.history_t, self.noisy_t, self.noise)


class _Windows:
    """Random windows of walks, gathered on the device that holds them."""

    def __init__(self, split: SplitData, config: WorldModelConfig, device: torch.device) -> None:
        episodes, self._length = split.actions.shape
        size = (config.height, config.width_px, 3)
        if self._length < config.clip_frames or split.frames.shape[2:] != size:
            raise ValueError(
                f"walks must have {config.clip_frames} or more frames of {size}, got "
                f"{split.frames.shape[1]} of {split.frames.shape[2:]}"
            )
        self._config, self._device, self._episodes = config, device, episodes
        self._frames = torch.empty(split.frames.shape, dtype=torch.uint8, device=device)
        for start in range(0, episodes, _COPY_WALKS):
            rows = slice(start, start + _COPY_WALKS)
            self._frames[rows].copy_(torch.from_numpy(split.frames[rows].copy()))
        self._frames = self._frames.flatten(0, 1)
        self._actions = torch.from_numpy(split.actions.copy()).to(device).flatten()
        self._mirror = torch.tensor(MIRRORED_ACTION, device=device)

    def draw(self, options: TrainingOptions, generator: torch.Generator) -> Batch:
        """A batch; every draw comes from the device's generator, with no host sync."""
        config, device, batch = self._config, self._device, options.batch

        def uniform(*size: int) -> Tensor:
            return torch.rand(size, device=device, generator=generator)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, device=device, generator=generator)

        places = self._length - config.clip_frames + 1
        walk = (uniform(batch) * self._episodes).long().clamp_max(self._episodes - 1)
        start = (uniform(batch) * places).long().clamp_max(places - 1)
        index = (walk * self._length + start)[:, None]
        index = index + torch.arange(config.clip_frames, device=device)
        frames, actions = self._frames[index], self._actions[index].long()
        if options.flip > 0:
            flip = uniform(batch) < options.flip
            frames = torch.where(flip[:, None, None, None, None], frames.flip(3), frames)
            actions = torch.where(flip[:, None], self._mirror[actions], actions)
        history = config.clip_chunks - 1
        noisy = config.clip_chunks - config.context_chunks
        history_t = uniform(batch, history) * options.history_t
        history_t = history_t * (uniform(batch, history) >= options.clean_history)
        noisy_t = torch.sigmoid(normal(batch, noisy) * options.t_std + options.t_mean)
        count = (history + noisy) * config.chunk_frames
        noise = normal(batch, count, config.height, config.width_px, 3)
        return Batch(frames, actions, history_t, noisy_t, noise)


def training_loss(
    model: WorldModel,
    frames: Tensor,
    actions: Tensor,
    history_t: Tensor,
    noisy_t: Tensor,
    noise: Tensor,
    mask: Any,
) -> Tensor:
    """The loss of one batch (fields of :class:`Batch`), a float32 scalar."""
    config = model.config
    size = config.chunk_frames
    past, first = (config.clip_chunks - 1) * size, config.context_chunks * size
    clean = frames.float() / 127.5 - 1
    history_t = history_t.repeat_interleave(size, 1, output_size=past)
    noisy_t = noisy_t.repeat_interleave(size, 1, output_size=noise.shape[1] - past)
    target = clean[:, first:]
    history = _mix(clean[:, :past], noise[:, :past], history_t)
    noisy = _mix(target, noise[:, past:], noisy_t)
    with torch.autocast(frames.device.type, torch.bfloat16, enabled=frames.is_cuda):
        out = model.forward_training(history, noisy, history_t, noisy_t, actions, mask)
    error = (out.float() - target).square().mean((2, 3, 4))
    return (error / noisy_t.clamp_min(_SMALLEST_LOSS_T).square()).mean()


def _mix(clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    level = t[:, :, None, None, None]
    return clean + level * (noise - clean)


def learning_rate(options: TrainingOptions, *, step: int, elapsed: float) -> float:
    """Linear warm-up over steps, then linear decay to zero with the elapsed share (0..1)."""
    warmup = min(1.0, (step + 1) / options.warmup_steps)
    return options.peak_learning_rate * warmup * max(0.0, 1.0 - elapsed)


@dataclasses.dataclass
class _Run:
    """What a checkpoint holds: the model, its average, the optimizer, the draws, the clock."""

    model: WorldModel
    average: list[Tensor]
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    step: int = 0
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Write atomically: a killed run leaves the last whole checkpoint."""
        state = {
            "config": self.model.config.to_json(),
            "model": self.model.state_dict(),
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "step": self.step,
            "seconds": self.seconds,
        }
        part = path.with_name(path.name + ".part")
        torch.save(state, part)
        os.replace(part, path)

    def resume(self, path: Path) -> None:
        """Take up a checkpoint; ValueError where it is of another shape or damaged."""
        device = next(self.model.parameters()).device
        try:
            state = torch.load(path, map_location=device, weights_only=True)
        except Exception as error:  # torch.load raises many kinds on a damaged file
            raise ValueError(f"{path}: not a whole checkpoint ({error}); remove it") from error
        if state["config"] != self.model.config.to_json():
            raise ValueError(
                f"{path}: the checkpoint's model is {state['config']}, this run's is "
                f"{self.model.config.to_json()}; use another folder"
            )
        self.model.load_state_dict(state["model"])
        torch._foreach_copy_(self.average, state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.step, self.seconds = state["step"], state["seconds"]

    @torch.no_grad()
    def update_average(self, ema: float) -> None:
        """Move the average to the weights; early steps are forgotten faster."""
        decay = min(ema, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.average, list(self.model.parameters()), 1 - decay)

    def averaged_state(self) -> dict[str, Tensor]:
        """The state dict of the averaged weights."""
        names = [name for name, _ in self.model.named_parameters()]
        return dict(zip(names, self.average, strict=True))


def _new_run(config: WorldModelConfig, options: TrainingOptions, device: torch.device) -> _Run:
    model = WorldModel(config).initialize(seed=options.seed).to(device)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=options.peak_learning_rate, betas=(0.9, 0.99), fused=device.type == "cuda"
    )
    generator = torch.Generator(device).manual_seed(options.seed)
    average = [p.detach().clone() for p in model.parameters()]
    return _Run(model, average, optimizer, generator)


def train(
    split: SplitData,
    folder: str | Path,
    *,
    options: TrainingOptions,
    config: WorldModelConfig | None = None,
    device: str = "cuda",
    log: Callable[[str], None] = print,
) -> Path:
    """Train until the budget is spent; a run in the same folder takes up its checkpoint.

    Writes ``train.log``, ``checkpoint.pt`` (each minute) and at the end ``weights.safetensors``
    (averaged weights, half precision).

    Returns:
        The weights' path.

    Raises:
        ValueError: the walks do not fit the configuration, or the checkpoint another model.
        RuntimeError: the loss is no longer finite.
    """
    config, where = config or WorldModelConfig(), torch.device(device)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.pt"
    run = _new_run(config, options, where)
    if checkpoint.exists():
        run.resume(checkpoint)
    with open(folder / "train.log", "a", buffering=1) as file:

        def say(line: str) -> None:
            file.write(line + "\n")
            log(line)

        windows = _Windows(split, config, where)
        say(f"walks {split.actions.shape}, options {options}, from step {run.step}")
        _steps(run, windows, options, checkpoint, say)
    run.save(checkpoint)
    return save_weights(folder / "weights.safetensors", run.averaged_state(), config)


def _steps(
    run: _Run,
    windows: _Windows,
    options: TrainingOptions,
    checkpoint: Path,
    say: Callable[[str], None],
) -> None:
    """Train ``run`` until its budget is spent."""
    device = next(run.model.parameters()).device
    mask = teacher_forcing_mask(run.model.config, device)
    compiled = options.compile and device.type == "cuda"
    loss_of: Callable[..., Tensor] = (
        torch.compile(training_loss, dynamic=False) if compiled else training_loss
    )
    parameters = list(run.model.parameters())
    report = _Report(run, options, say)
    saved = time.monotonic()
    for elapsed in _budget(run, options, device):
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(options, step=run.step, elapsed=elapsed)
        batch = windows.draw(options, run.generator)
        loss = loss_of(run.model, *batch.tensors(), mask)
        run.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, options.clip_norm)
        run.optimizer.step()
        run.update_average(options.ema)
        run.step += 1
        report.add(loss.detach(), norm)
        if time.monotonic() - saved >= options.checkpoint_seconds:
            report.flush()
            run.save(checkpoint)
            saved = time.monotonic()
    report.flush()


def _budget(run: _Run, options: TrainingOptions, device: torch.device) -> Iterator[float]:
    """The elapsed share of the budget before each step; keeps the run's clock."""
    before, began = run.seconds, time.monotonic()
    while True:
        if device.type == "cuda" and run.step % _SYNC_STEPS == 0:
            torch.cuda.synchronize(device)
        run.seconds = before + time.monotonic() - began
        if options.minutes is not None:
            elapsed = run.seconds / (60 * options.minutes)
        else:
            elapsed = run.step / (options.steps or 1)
        if elapsed >= 1:
            return
        yield elapsed


class _Report:
    """Mean loss, gradient norm and speed, said every few seconds; only then the GPU is read."""

    def __init__(self, run: _Run, options: TrainingOptions, say: Callable[[str], None]) -> None:
        self._run, self._options, self._say = run, options, say
        self._losses: list[Tensor] = []
        self._since, self._norm = time.monotonic(), torch.zeros(())

    def add(self, loss: Tensor, norm: Tensor) -> None:
        """Take a step's loss and gradient norm, both still on the device."""
        self._losses.append(loss)
        self._norm = norm
        if time.monotonic() - self._since >= self._options.log_seconds:
            self.flush()

    def flush(self) -> None:
        """Say what was added; RuntimeError where the loss is not finite."""
        if not self._losses:
            return
        loss = float(torch.stack(self._losses).mean())
        seconds, steps = time.monotonic() - self._since, len(self._losses)
        self._say(
            f"step {self._run.step:6d}  loss {loss:.5f}  gradient {float(self._norm):.3f}  "
            f"lr {self._run.optimizer.param_groups[0]['lr']:.2e}  "
            f"{1000 * seconds / steps:.1f} ms/step  {self._run.seconds:.0f} s  {_peak()}"
        )
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss is {loss} at step {self._run.step}; lower the rate")
        self._losses, self._since = [], time.monotonic()


def _peak() -> str:
    if not torch.cuda.is_available():
        return ""
    return f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
