"""Recipes and sweeps in the chunked prefill of SmolLM2: NLL a chunk, mass, bits.

    python benchmarks/prefill_recipes.py --recipes rtn-2bit+taylor*0.5,... --out FILE

As ``videokv prefill``, whose recipes have no multipliers: ``rtn-2bit+taylor*1.5`` multiplies
Taylor's terms by a fixed number, for the sweep that ``calibrated`` is held against.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
import traceback
from pathlib import Path

import torch
from swept import parse

import videokv
from videokv.studies.prefill import prefill_rows
from videokv.studies.prefill_inputs import (
    DEFAULT_MODEL,
    fingerprint,
    load_language_model,
    read_texts,
    token_ids,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--text", action="append", default=[])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--recipes", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting recipes after")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    language = load_language_model(options.model, device=device)
    texts = read_texts(options.text)
    ids = {text.name: token_ids(language, text, count=options.tokens + 1) for text in texts}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    began, rows = time.perf_counter(), []
    about = {
        "model": language.name,
        "texts": {text.name: text.source for text in texts},
        "token_ids_sha256": {name: fingerprint(found) for name, found in ids.items()},
        "tokens": options.tokens,
        "chunk_tokens": options.chunk,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "dtype": str(language.model.dtype),
        "torch": torch.__version__,
        "videokv": videokv.__version__,
    }
    for name in ["bf16", *options.recipes.split(",")]:
        if time.perf_counter() - began > options.seconds:
            print("out of time before", name)
            break
        try:
            found = [
                row
                for document, tokens in ids.items()
                for row in prefill_rows(
                    language.model,
                    tokens,
                    parse(name),
                    document=document,
                    chunk_tokens=options.chunk,
                )
            ]
        except Exception:
            traceback.print_exc(limit=4)
            continue
        kept = [dataclasses.asdict(row) for row in found if row.metric != "seconds_per_chunk"]
        rows += kept
        nll = [row["value"] for row in kept if row["metric"] == "nll"]
        print(
            f"{name:36s} {sum(nll) / len(nll):.4f}  n={len(nll)}  "
            f"{time.perf_counter() - began:.0f} s",
            flush=True,
        )
        options.out.write_text(json.dumps({"about": about, "rows": rows}, allow_nan=False))


if __name__ == "__main__":
    main()
