"""Runs the entry script of a repository that the user has, with its model inside ``compress``.

The script is the repository's own, run as it is; the model is taken hold of at its first pass
with a cache. What the script allocates before that (text encoder, a first dense cache) is its
own.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from videokv.adapters import Compressed, compress
from videokv.recipes import Recipe, recipe


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


@dataclass(frozen=True)
class Checkout:
    """How a repository is run.

    module, cls: where its model is. entry: its script. config: its own default. arguments: from the
    options, or None where the script takes its own (after ``--``).
    """

    module: str
    cls: str
    entry: str
    config: str | None = None
    arguments: Callable[[RunOptions, Path], list[str]] | None = None


def wan_arguments(options: RunOptions, prompts: Path) -> list[str]:
    """The arguments that Self-Forcing and its direct kin take."""
    given = {
        "--config_path": options.config,
        "--checkpoint_path": options.checkpoint,
        "--data_path": prompts,
        "--output_folder": options.out,
        "--num_output_frames": options.frames,
        "--seed": options.seed,
    }
    return [text for key, value in given.items() if value is not None for text in (key, str(value))]


def causvid_arguments(options: RunOptions, prompts: Path) -> list[str]:
    """Those of CausVid, whose length and seed are fixed in its script."""
    for name in ("frames", "seed"):
        if getattr(options, name) is not None:
            raise ValueError(f"causvid's script has no option for {name}; leave --{name} out")
    if options.checkpoint is not None and not options.checkpoint.is_dir():
        raise ValueError(
            f"causvid takes the folder that holds model.pt, got {options.checkpoint}; give the "
            "folder as --checkpoint"
        )
    given = {
        "--config_path": options.config,
        "--checkpoint_folder": options.checkpoint,
        "--output_folder": options.out,
        "--prompt_file_path": prompts,
    }
    return [text for key, value in given.items() if value is not None for text in (key, str(value))]


WAN_MODULE = "wan.modules.causal_model"
CHECKOUTS = {
    "self-forcing": Checkout(
        WAN_MODULE, "CausalWanModel", "inference.py", "configs/self_forcing_dmd.yaml", wan_arguments
    ),
    "causal-forcing": Checkout(
        WAN_MODULE,
        "CausalWanModel",
        "inference.py",
        "configs/causal_forcing_dmd_chunkwise.yaml",
        wan_arguments,
    ),
    "rolling-forcing": Checkout(
        WAN_MODULE,
        "CausalWanModel",
        "inference.py",
        "configs/rolling_forcing_dmd.yaml",
        wan_arguments,
    ),
    "causvid": Checkout(
        "causvid.models.wan.causal_model",
        "CausalWanModel",
        "minimal_inference/autoregressive_inference.py",
        "configs/wan_causal_dmd.yaml",
        causvid_arguments,
    ),
    "longlive-v1": Checkout(WAN_MODULE, "CausalWanModel", "inference.py"),
    "longlive": Checkout("wan_5b.modules.causal_model", "CausalWanModel", "inference.py"),
    "matrix-game-2": Checkout(WAN_MODULE, "CausalWanModel", "inference.py"),
}


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
    with _inside(repo, script, arguments), contextlib.ExitStack() as stack:
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
    out = options.out.resolve()
    if known.arguments is None:
        given = [key for key in ("checkpoint", "config", "frames", "seed") if getattr(options, key)]
        given += ["prompt"] if options.prompts else []
        if given:
            raise ValueError(
                f"{name} takes its options from its own script; leave out {', '.join(given)} and "
                "give the script's arguments after --"
            )
        return list(options.more)
    if not options.prompts or options.checkpoint is None:
        raise ValueError(f"{name} needs --checkpoint and at least one --prompt")
    out.mkdir(parents=True, exist_ok=True)
    prompts = out / "prompts.txt"
    prompts.write_text("".join(f"{_one_line(prompt)}\n" for prompt in options.prompts))
    config = options.config.resolve() if options.config else repo / str(known.config)
    for path in (config, options.checkpoint):
        if not path.exists():
            raise FileNotFoundError(2, "no such file", str(path))
    resolved = RunOptions(
        checkpoint=options.checkpoint.resolve(),
        config=config,
        out=out,
        frames=options.frames,
        seed=options.seed,
    )
    return [*known.arguments(resolved, prompts), *options.more]


def _one_line(prompt: str) -> str:
    line = " ".join(prompt.split())
    if not line:
        raise ValueError("--prompt is empty; write what the video shows")
    return line


@contextlib.contextmanager
def _inside(repo: Path, script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """The folder, the path and the arguments that the script expects."""
    before = (os.getcwd(), list(sys.path), list(sys.argv))
    os.chdir(repo)
    sys.path.insert(0, str(repo))
    sys.argv = [str(script), *arguments]
    try:
        yield
    finally:
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
    original, held = cls.forward, []

    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("kv_cache") is None:
            return original(model, *args, **kwargs)
        cls.forward = original
        held.append(stack.enter_context(compress(model, chosen)))
        return model.forward(*args, **kwargs)

    cls.forward = forward
    stack.callback(setattr, cls, "forward", original)
    return held
