"""Every recipe on the shipped world model, paired clips: PSNR against the BF16 cache, cached mass.

    python benchmarks/worldmodel_recipes.py --clips 32 --chunks 4 --recipes rtn-2bit,... --out FILE

``rtn-2bit+taylor*1.5`` multiplies Taylor's terms by a fixed number, for the sweep that
``calibrated`` is held against; ``kivi-2bit@recent_chunks=0`` sets an option. Clips beyond the
shipped ones are played with ViZDoom. bits: of what is packed; 16 / ratio: of everything held,
dense recent chunks included.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
import traceback
from pathlib import Path

import torch
from swept import parse

import videokv
from videokv.metrics import psnr
from videokv.recipes import Recipe, recipe
from videokv.studies.rollout import CONTEXT_FRAMES, get_clips
from videokv.worldmodel.sampler import rollout
from videokv.worldmodel.weights import load_weights


def run(model, chosen: Recipe, clips, *, chunks: int, seed: int, batch: int):
    """Frames [N, F, H, W, 3], masses [N], the memory of the last batch, seconds."""
    frames, masses, memory = [], [], None
    began = time.perf_counter()
    count = len(clips.frames)
    for first in range(0, count, batch):
        index = list(range(first, min(first + batch, count)))
        cache = chosen.new_cache(
            record_mass=True, window_chunks=model.config.window_chunks, workspace_bytes=2**33
        )
        made = rollout(
            model,
            clips.frames[index, :CONTEXT_FRAMES],
            clips.actions[index],
            cache,
            chunks=chunks,
            seed=seed,
            clips=index,
            autocast=torch.bfloat16,
        )
        frames.append(made)
        masses.append(torch.stack([m for _, _, m in cache.masses()]).mean(0).cpu())
        memory = cache.memory()
    return torch.cat(frames), torch.cat(masses), memory, time.perf_counter() - began


def mean_sem(values: list[float]) -> tuple[float, float]:
    """Mean and standard error."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, 0.0
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clip-seed", type=int, default=0, help="of the clips played anew")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many (8 are shipped)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--recipes", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting recipes after")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_weights(options.weights, device=device)
    clips = get_clips(options.skip + options.clips, seed=options.clip_seed)
    clips = dataclasses.replace(
        clips, frames=clips.frames[options.skip :], actions=clips.actions[options.skip :]
    )
    began = time.perf_counter()
    settings = {"chunks": options.chunks, "seed": options.seed, "batch": options.batch}
    about = {
        "clips": len(clips.frames),
        "source": clips.source,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "videokv": videokv.__version__,
        **settings,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    reference, mass, _, seconds = run(model, recipe("bf16"), clips, **settings)
    rows = [{"recipe": "bf16", "mass": mass.tolist(), "seconds": seconds, "bits": 16.0}]
    print(f"{'recipe':36s} first        all          mass     bits   s")
    print(f"{'bf16':36s} {'':25s} {mass.mean():.4f}  {seconds:.1f}")
    for name in options.recipes.split(","):
        if time.perf_counter() - began > options.seconds:
            print("out of time before", name)
            break
        try:
            made, mass, memory, seconds = run(model, parse(name), clips, **settings)
        except Exception:
            traceback.print_exc(limit=4)
            continue
        pairs = zip(made.numpy(), reference.numpy(), strict=True)
        frames = [psnr(ours, theirs).per_frame_db for ours, theirs in pairs]
        first = [sum(f[:3]) / 3 for f in frames]
        four = [sum(f) / len(f) for f in frames]
        rows.append(
            {
                "recipe": name,
                "bits": memory.bits_per_element,
                "ratio": memory.ratio,
                "psnr_first_db": first,
                "psnr_db": four,
                "mass": mass.tolist(),
                "seconds": seconds,
            }
        )
        (a, ae), (b, be) = mean_sem(first), mean_sem(four)
        print(
            f"{name:36s} {a:5.2f}±{ae:.2f}  {b:5.2f}±{be:.2f}  {mass.mean():.4f}  "
            f"{memory.bits_per_element:.3f}  {seconds:.1f}",
            flush=True,
        )
        options.out.write_text(json.dumps({"about": about, "rows": rows}, allow_nan=False))


if __name__ == "__main__":
    main()
