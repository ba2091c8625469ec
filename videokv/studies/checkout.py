"""Runs the entry script of a repository that the user has, with its model inside ``compress``.

The script is the repository's own, run as it is; the model is taken hold of at its first pass
with a cache. What the script allocates before that (text encoder, a first dense cache) is its
own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from videokv.adapters import Compressed, compress
from videokv.recipes import Recipe, recipe
from videokv.studies.checkout_models import CHECKOUTS, IN_PYTHON, Checkout, edited

LAUNCHED = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@dataclass(frozen=True)
class RunOptions:
    """What a user gives. None or (): the script's own default."""

    checkpoint: Path | None = None
    config: Path | None = None
    prompts: tuple[str, ...] = ()
    out: Path = Path("videokv-run")
    frames: int | None = None
    seed: int | None = None
    more: tuple[str, ...] = ()


def run_checkout(name: str, repo: Path, chosen: str | Recipe, options: RunOptions) -> Compressed:
    """Run a repository's script; what ``compress`` gave for its model.

    Raises:
        ValueError: unknown model, no such checkout, no GPU, or arguments that the script does not
            take; the model was never called with a cache.
        OSError: a folder or file cannot be read or written.
    """
    known = _known(name)
    repo = repo.resolve()
    script = _script(known, repo, name)
    picked = recipe(chosen)
    if not torch.cuda.is_available():
        raise ValueError(
            f"{name}'s own {known.entry} needs an NVIDIA GPU (it puts its models on 'cuda'), and "
            "torch finds none here; run this on a machine with one. The model alone, inside your "
            "own script, is served on the CPU too: with videokv.compress(model, recipe)"
        )
    arguments = _arguments(known, repo, name, options)
    with _inside(known, repo, script, arguments), contextlib.ExitStack() as stack:
        held = _hold_on_first_pass(known, picked, stack)
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise ValueError(
                    f"{known.entry} ended with {end.code!r}; its arguments were {arguments}"
                ) from end
    if not held:
        raise ValueError(
            f"{known.entry} ended without calling {known.module}.{known.cls} with a cache; nothing "
            "was compressed: check its arguments"
        )
    return held[0]


def _known(name: str) -> Checkout:
    if name in IN_PYTHON:
        raise ValueError(
            f"{name} has no script that videokv could run; in your own: with "
            f"videokv.compress(model, recipe), as docs/models/{IN_PYTHON[name]} shows"
        )
    if name not in CHECKOUTS:
        raise ValueError(
            f"unknown model {name!r}; with its own script videokv runs {', '.join(CHECKOUTS)}. "
            "The other supported models are served inside your script: videokv.compress"
        )
    return CHECKOUTS[name]


def _script(known: Checkout, repo: Path, name: str) -> Path:
    script = repo / known.entry
    code = repo / (known.module.replace(".", "/") + ".py")
    for path in (script, code):
        if not path.is_file():
            raise ValueError(
                f"{repo} is no checkout of {name}: it has no {path.relative_to(repo)}; give the "
                "folder of the repository as --repo"
            )
    return script


def _arguments(known: Checkout, repo: Path, name: str, options: RunOptions) -> list[str]:
    """The script's arguments; writes what they name (prompts, a changed config)."""
    _refuse_options(known, name, options)
    values = _values(known, repo, options)
    changed = {key: json.dumps(values[kind]) for kind, key in known.edits.items() if kind in values}
    if changed:
        copy = options.out.resolve() / "config.yaml"
        copy.write_text(edited(Path(values["config"]).read_text(), changed))
        values["config"] = str(copy)
    given = [
        text
        for kind, flag in known.takes.items()
        if kind in values
        for text in (flag, str(values[kind]))
    ]
    return [*known.fixed, *given, *options.more]


def _refuse_options(known: Checkout, name: str, options: RunOptions) -> None:
    """Nothing that is given is ignored, and nothing that is needed is missing."""
    given = {
        "checkpoint": options.checkpoint is not None,
        "config": options.config is not None,
        "prompt": bool(options.prompts),
        "frames": options.frames is not None,
        "seed": options.seed is not None,
    }
    kinds = {
        "prompt": {"prompt", "prompts"},
        "frames": {"frames", "video_frames", "chunks"},
    }
    served = {*known.takes, *known.edits}
    hint = f" ({known.hint})" if known.hint else ""
    extra = [
        key for key, is_given in given.items() if is_given and not kinds.get(key, {key}) & served
    ]
    if extra:
        raise ValueError(
            f"{name}'s script has no option for {', '.join(extra)}; leave out "
            f"{', '.join(f'--{key}' for key in extra)}{hint}"
        )
    missing = [f"--{key}" for key in known.needs if not given[key]]
    if missing:
        raise ValueError(f"{name} needs {' and '.join(missing)}{hint}")
    if "prompt" in known.takes and len(options.prompts) > 1:
        raise ValueError(f"{name}'s script takes one --prompt, got {len(options.prompts)}")
    if options.checkpoint is not None and known.folder and not options.checkpoint.is_dir():
        raise ValueError(f"{name} takes a folder as --checkpoint, got {options.checkpoint}{hint}")
    if options.frames is not None and "chunks" in served and options.frames % 4:
        raise ValueError(f"{name} makes chunks of 4 latent frames, got --frames {options.frames}")


def _values(known: Checkout, repo: Path, options: RunOptions) -> dict[str, Any]:
    """What each kind of argument is, paths in full."""
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {"out": str(out), "video": str(out / "video.mp4")}
    if options.prompts:
        lines = [_one_line(prompt) for prompt in options.prompts]
        values["prompts"], values["prompt"] = str(out / "prompts.txt"), lines[0]
        Path(values["prompts"]).write_text("".join(f"{line}\n" for line in lines))
    config = options.config
    if config is None and known.config is not None:
        config = repo / known.config
    for key, path in (("config", config), ("checkpoint", options.checkpoint)):
        if path is not None:
            values[key] = str(path.resolve())
            if not path.exists():
                raise FileNotFoundError(2, "no such file", values[key])
    if options.seed is not None:
        values["seed"] = options.seed
    if options.frames is not None:
        values |= {"frames": options.frames, "chunks": options.frames // 4}
        values["video_frames"] = 4 * (options.frames - 1) + 1
    return values


def _one_line(prompt: str) -> str:
    line = " ".join(prompt.split())
    if not line:
        raise ValueError("--prompt is empty; write what the video shows")
    return line


@contextlib.contextmanager
def _inside(known: Checkout, repo: Path, script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """The folder, the path, the environment and the arguments that the script expects."""
    added = {key: value for key, value in LAUNCHED.items() if key not in os.environ}
    added = added if known.launched else {}
    os.environ.update(added)
    before = (os.getcwd(), list(sys.path), list(sys.argv))
    os.chdir(repo)
    sys.path.insert(0, str(repo))
    sys.argv = [str(script), *arguments]
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)
        os.chdir(before[0])
        sys.path[:], sys.argv[:] = before[1], before[2]


def _hold_on_first_pass(
    known: Checkout, chosen: Recipe, stack: contextlib.ExitStack
) -> list[Compressed]:
    """Filled when the model is first called with a cache, which is then inside ``compress``."""
    cls = getattr(importlib.import_module(known.module), known.cls, None)
    if cls is None:
        raise ValueError(
            f"{known.module} has no class {known.cls!r}; this version is not supported"
        )
    original: Any = getattr(cls, known.method)
    held: list[Compressed] = []
    signature = inspect.signature(original)

    @functools.wraps(original)
    def first_pass(model: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**signature.bind_partial(model, *args, **kwargs).arguments, **kwargs}
        if all(given.get(mark) is None or given.get(mark) is False for mark in known.marks):
            return original(model, *args, **kwargs)
        setattr(cls, known.method, original)
        held.append(stack.enter_context(compress(model, chosen)))
        return getattr(model, known.method)(*args, **kwargs)

    setattr(cls, known.method, first_pass)
    stack.callback(setattr, cls, known.method, original)
    return held
