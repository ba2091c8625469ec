"""``videokv claims``: judge the papers' claims and write the page."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from videokv.report.run_options import AsJson, Device, Ray, Seed, Workers
from videokv.report.studies_cli import progress, split


def claims(
    quick: Annotated[
        bool, typer.Option("--quick", help="1 chunk a clip, few layers: minutes on two cores.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(help="Claims by name, with commas; runs what they need. Default: all."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs; resumed.")] = Path(
        "videokv-claims"
    ),
    page: Annotated[
        Path | None, typer.Option(help="Where the page goes. Default: claims.md in the folder.")
    ] = None,
    clips: Annotated[
        int | None,
        typer.Option(help="Clips; default 8, or 32 in a full run where ViZDoom is installed."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Begin no clip after that many; what is missing is not judged."),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    workers: Workers = 2,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Which claims of the two papers hold on the shipped world model, with figures and reasons."""
    import torch

    from videokv.devices import resolve_device
    from videokv.report.claims_page import claims_page
    from videokv.studies.claims import Evidence, EvidencePlan, chosen_claims, judge_all, needs_of
    from videokv.studies.results import versions, write_bytes

    names = () if only is None else split(only)
    chosen = chosen_claims(names)
    needs = needs_of(chosen) if names else None
    plan = EvidencePlan(out, quick, seed, device, workers, ray, clips, seconds, names)
    began = time.perf_counter()
    with progress() as on_unit:
        judged = judge_all(Evidence(plan, say=on_unit, needs=needs), claims=chosen)
    minutes = (time.perf_counter() - began) / 60
    where = resolve_device(device)
    place = torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU"
    text = claims_page(judged, plan, versions=versions(), device=place)
    page = out / "claims.md" if page is None else page
    page.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(page, text.encode())
    if as_json:
        print(json.dumps([each.as_json() for each in judged], indent=1, allow_nan=False))
        return
    for each in judged:
        figure = "" if each.finding is None else each.finding.text
        print(f"{each.verdict:<22} {each.claim.key:<27} {figure}")
    print(f"\npage  {page}")
    print(f"{minutes:.1f} minutes", file=sys.stderr)
