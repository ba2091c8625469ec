"""Heading, unit, digits and factor of every metric of the studies, for tables and plots."""

from __future__ import annotations

import re

from videokv.report.style import COLUMNS

Column = tuple[str, str, int, float]

STUDY_COLUMNS: dict[str, Column] = {
    **COLUMNS,
    "psnr_first_chunk_db": ("PSNR, first chunk", "dB to BF16", 2, 1),
    "psnr_pooled_db": ("PSNR, pooled", "dB to BF16", 2, 1),
    "identical_frames": ("Identical frames", "frames", 1, 1),
    "flicker": ("Flicker", "×1000, to BF16", 2, 1000),
    "lpips_alex": ("LPIPS Alex", "to BF16", 3, 1),
    "lpips_vgg": ("LPIPS VGG", "to BF16", 3, 1),
    "psnr_early_db": ("PSNR, first quarter", "dB to BF16", 2, 1),
    "sharpness_late_to_real": ("Sharpness, last quarter", "% of real", 1, 100),
    "saturation_late_to_real": ("Saturation, last quarter", "% of real", 1, 100),
    "motion_late_to_real": ("Motion, last quarter", "% of real", 1, 100),
    "drift_late": ("Drift, last quarter", "×1000", 1, 1000),
    "flip": ("FLIP", "to BF16", 3, 1),
    "on_pareto_front": ("Pareto front", "1: on it", 0, 1),
    "nll": ("NLL", "nats a token", 4, 1),
    "nll_gap_recovered": ("Gap closed", "%", 1, 100),
    "mass_shift": ("Mass shift", "points", 2, 100),
    "jsd_nats": ("JSD", "millinats", 2, 1000),
    "token_shift": ("Token shift", "%", 2, 100),
    "any_token_shift": ("Token shift, all keys", "%", 2, 100),
    "log_partition_error_nats": ("Log partition error", "millinats", 1, 1000),
    "effective_tokens": ("Effective tokens", "tokens", 1, 1),
    "output_mse": ("Output MSE", "×1000", 2, 1000),
    "output_mse_keys_only": ("Output MSE, keys", "×1000", 2, 1000),
    "output_mse_values_only": ("Output MSE, values", "×1000", 2, 1000),
    "output_mse_relative": ("Output error", "% of power", 2, 100),
    "output_mse_relative_keys_only": ("Output error, keys", "% of power", 2, 100),
    "output_mse_relative_values_only": ("Output error, values", "% of power", 2, 100),
    "key_mse": ("Key MSE", "×1000", 2, 1000),
    "key_mse_relative": ("Key error", "% of power", 2, 100),
    "value_mse": ("Value MSE", "×1000", 2, 1000),
    "value_mse_relative": ("Value error", "% of power", 2, 100),
    "dense_bytes": ("Dense", "MB", 2, 1e-6),
    "held_bytes": ("Held", "MB", 2, 1e-6),
    "formula_bytes": ("Held, by the formula", "MB", 2, 1e-6),
    "difference_bytes": ("Measured - formula", "bytes", 0, 1),
    "peak_bytes": ("Peak", "MB", 1, 1e-6),
    "workspace_bytes": ("Workspace", "MB", 1, 1e-6),
    "longest_latent_frames": ("Longest", "latent frames", 0, 1),
}


def column_of(metric: str) -> Column:
    """Of any metric: one that is not listed keeps its name and shows four digits."""
    if metric.startswith("psnr_chunk_"):
        return (f"PSNR, chunk {int(metric.split('_')[2])}", "dB to BF16", 2, 1)
    if is_of_one_chunk(metric):
        name, _, number = metric.partition("_chunk_")
        return (f"{name.capitalize()}, chunk {int(number)}", "×1000", 2, 1000)
    return STUDY_COLUMNS.get(metric, (metric.replace("_", " "), "", 4, 1))


def is_of_one_chunk(metric: str) -> bool:
    """Whether it is a figure of one chunk by number; those are drawn, tables leave them out."""
    return re.search(r"_chunk_\d", metric) is not None
