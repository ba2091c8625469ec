"""The sections of ``videokv bench``, in the order in which they run."""

from __future__ import annotations

from videokv.studies.bench import Section
from videokv.studies.bench_attention import attention, curve, decode, dense
from videokv.studies.bench_codec import copy, encode, reconstruct
from videokv.studies.bench_loop import end_to_end

SECTIONS: dict[str, Section] = {
    "copy": copy,
    "reconstruct": reconstruct,
    "dense": dense,
    "attention": attention,
    "encode": encode,
    "end_to_end": end_to_end,
    "decode": decode,
    "curve": curve,
}
