"""Claims of "Quantized Keys Steal Attention" (2605.26266)."""

from __future__ import annotations

import numpy as np
import torch

from videokv.studies.claims.claim import CORRECTION_PAPER as PAPER
from videokv.studies.claims.claim import Claim, Finding, above, below
from videokv.studies.claims.evidence import (
    LARGE_PLAIN,
    PER_CHANNEL,
    SMALL_CORRECTED,
    Evidence,
)

DIAGNOSE = "videokv diagnose --recipes {} {{diagnosed}}"
COMPARE = "videokv compare --recipes {} {{rolled}}"
CLAIMED = "videokv claims --only {} {{claimed}}"
CLEAR_ABOVE, CLEAR_BELOW = "above 0 by two standard errors", "below 0 by two standard errors"
PER_CENT = 100.0


def _steals(evidence: Evidence) -> Finding:
    shift = [PER_CENT * v for v in evidence.diagnosed("mass_shift", "quarot-2bit")]
    return above(shift, "mass shift of quarot-2bit", unit="points")


def _steals_everywhere(evidence: Evidence) -> Finding:
    heads = evidence.details["by_head"]["quarot-2bit"]["mass_shift"]
    share = PER_CENT * float(np.mean(np.asarray(heads) > 0))
    return Finding(
        "heads, layers and steps with a positive shift", share, None, len(heads), share >= 90, "%"
    )


def _restores(evidence: Evidence) -> Finding:
    plain = evidence.diagnosed("mass_shift", "quarot-2bit")
    corrected = evidence.diagnosed("mass_shift", "quarot-2bit+taylor")
    change = [PER_CENT * (abs(c) - abs(p)) for c, p in zip(corrected, plain, strict=True)]
    return below(change, "|mass shift| with Taylor minus without, quarot-2bit", unit="points")


def _overcorrects(evidence: Evidence) -> Finding:
    shift = [PER_CENT * v for v in evidence.diagnosed("mass_shift", "quarot-2bit+taylor")]
    return below(shift, "mass shift of quarot-2bit+taylor", unit="points")


def _why_too_little(evidence: Evidence) -> str:
    plain = evidence.diagnosed("mass_shift", "quarot-2bit")
    corrected = evidence.diagnosed("mass_shift", "quarot-2bit+taylor")
    taken = PER_CENT * (1 - float(np.mean(corrected)) / float(np.mean(plain)))
    return (
        "rounding errors go with the keys a little, so that large scores grow, which no variance "
        f"accounts for: Taylor takes {taken:.0f} % of the shift away here (n = {len(plain)})"
    )


def _why_no_bias(evidence: Evidence) -> str:
    shift = below([PER_CENT * v for v in evidence.diagnosed("mass_shift", "qvg-2bit")], "shift")
    return (
        "ternary residuals shrink towards their centroids, so that scores gain no variance and "
        f"there is no bias to take away (mass shift of qvg-2bit without a correction: "
        f"{shift.value:+.3g} ± {shift.sem or 0:.2g} points, n = {shift.n}); codebooks are small "
        "too (8 centroids for 324 tokens, so that bits are equal)"
    )


def _small_at_4_bits(evidence: Evidence) -> Finding:
    small = evidence.diagnosed("mass_shift", "quarot-4bit")
    large = evidence.diagnosed("mass_shift", "quarot-2bit")
    gap = [PER_CENT * (abs(s) - abs(w) / 5) for s, w in zip(small, large, strict=True)]
    return below(gap, "|shift| at 4 bits minus a fifth of that at 2", unit="points")


def _divergence(evidence: Evidence) -> Finding:
    change = evidence.diagnosed("jsd_nats", "quarot-2bit+taylor", "quarot-2bit")
    return below(change, "JSD with Taylor minus without, quarot-2bit", unit="nats")


def _output(evidence: Evidence) -> Finding:
    change = evidence.diagnosed("output_mse", "quarot-2bit+taylor", "quarot-2bit")
    return below(change, "output MSE with Taylor minus without, quarot-2bit")


def _four_bits_are_fine(evidence: Evidence) -> Finding:
    gap = evidence.rolled("psnr_db", "rtn-4bit", "rtn-2bit")
    return above(gap, "PSNR of rtn-4bit minus rtn-2bit", bound=5, unit="dB")


def _helps(recipe: str):  # type: ignore[no-untyped-def]
    def judge(evidence: Evidence) -> Finding:
        gain = evidence.rolled("psnr_db", f"{recipe}+taylor", recipe)
        return above(gain, f"PSNR of {recipe}+taylor minus {recipe}", unit="dB")

    return judge


def _half_the_bits(evidence: Evidence) -> Finding:
    gap = evidence.rolled("psnr_db", SMALL_CORRECTED, LARGE_PLAIN)
    return above(gap, "PSNR of 2.19 corrected bits minus 4.38 plain ones", unit="dB")


def _per_token(evidence: Evidence) -> Finding:
    gap = evidence.rolled("psnr_db", "rtn-2bit+taylor", PER_CHANNEL)
    return above(gap, "PSNR per token minus per channel, both with Taylor", unit="dB")


def _unbiased(evidence: Evidence) -> Finding:
    """Monte Carlo: uniform errors of one key, exact correction."""
    from videokv.attention.sinhc import log_sinhc

    generator = torch.Generator().manual_seed(evidence.plan.seed)
    size, draws = 128, 200_000
    query = torch.randn(size, generator=generator, dtype=torch.float64)
    bound = torch.full((size,), 1.0, dtype=torch.float64)
    scale = size**-0.5
    error = (torch.rand(draws, size, generator=generator, dtype=torch.float64) - 0.5) * bound
    noise = (error * query).sum(-1) * scale
    b = log_sinhc(query * bound * scale / 2).sum()
    values = torch.exp(noise - b)
    mean, sem = float(values.mean()), float(values.std() / draws**0.5)
    return Finding(
        "mean of exp(noise - b)", mean, sem, draws, abs(mean - 1) < 3 * sem, "(exactly 1 claimed)"
    )


def _taylor_is_larger(evidence: Evidence) -> Finding:
    from videokv.attention.sinhc import log_sinhc

    alpha = torch.linspace(0.01, 20, 2000, dtype=torch.float64)
    excess = alpha.square() / 6 - log_sinhc(alpha)
    return Finding(
        "least excess of alpha^2/6 over log(sinh alpha / alpha)", float(excess.min()), None,
        len(alpha), bool((excess > 0).all()),
    )  # fmt: skip


def _no_storage(evidence: Evidence) -> Finding:
    extra = evidence.rolled("held_bytes", "quarot-2bit+taylor", "quarot-2bit")
    return Finding(
        "bytes held with Taylor minus without", float(np.mean(extra)), None, len(extra),
        all(v == 0 for v in extra), "bytes",
    )  # fmt: skip


def _language_degrades(evidence: Evidence) -> Finding:
    gap = evidence.prefilled("nll", "rtn-2bit", "bf16")
    return above(gap, "NLL of rtn-2bit minus bf16", unit="nats a token")


def _language_recovers(evidence: Evidence) -> Finding:
    gap = evidence.prefilled("nll", "rtn-2bit+taylor", "rtn-2bit")
    return below(gap, "NLL of rtn-2bit+taylor minus rtn-2bit", unit="nats a token")


NO_MODEL = (
    "needs the authors' models (MAGI-1, SkyReels-V2, HY-WorldPlay) with their weights and a GPU; "
    "`videokv run` takes a checkout"
)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "mass-shift", PAPER, "§5.3, Fig. 4",
        "Under INT2 (QuaRot+RTN) cached keys draw more attention mass than exact ones.",
        DIAGNOSE.format("quarot-2bit"), CLEAR_ABOVE,
        "errors that correlate with keys can lower the partition sum", _steals,
    ),
    Claim(
        "mass-shift-everywhere", PAPER, "§1",
        "The shift is consistent across layers, heads and denoising steps.",
        DIAGNOSE.format("quarot-2bit"), "positive in 90 % of them or more",
        "heads that attend to few tokens see an error of either sign, not its expectation",
        _steals_everywhere,
    ),
    Claim(
        "correction-restores-mass", PAPER, "§5.3, Fig. 4",
        "The Taylor correction moves the mass shift towards zero.",
        DIAGNOSE.format("quarot-2bit,quarot-2bit+taylor"), CLEAR_BELOW,
        "it over-corrects by more than what it corrects", _restores,
    ),
    Claim(
        "slight-over-correction", PAPER, "§5.3",
        "On INT2 (QuaRot+RTN) the Taylor correction slightly over-corrects, into negative shifts.",
        DIAGNOSE.format("quarot-2bit+taylor"), CLEAR_BELOW,
        _why_too_little, _overcorrects,
    ),
    Claim(
        "small-at-int4", PAPER, "App. K",
        "At INT4 the shift is small already.",
        DIAGNOSE.format("quarot-4bit,quarot-2bit"),
        "less than a fifth of that at 2 bits, by two standard errors",
        "the step of 4 bits is a fifth, its square a twenty-fifth; nearest FP8 steps clip",
        _small_at_4_bits,
    ),
    Claim(
        "jsd", PAPER, "App. L", "The correction brings attention weights closer to BF16 (JSD).",
        DIAGNOSE.format("quarot-2bit,quarot-2bit+taylor"), CLEAR_BELOW,
        "noise of single scores, which no mean correction removes, rules the divergence",
        _divergence,
    ),
    Claim(
        "output-mse", PAPER, "App. M", "The correction lowers the error of the attention output.",
        DIAGNOSE.format("quarot-2bit,quarot-2bit+taylor"), CLEAR_BELOW,
        "noise of single scores and of values rules the output error", _output,
    ),
    Claim(
        "int4-reasonable", PAPER, "§1",
        "INT4 preserves quality where INT2 distorts frames severely.",
        COMPARE.format("rtn-4bit,rtn-2bit"), "more than 5 dB apart, by two standard errors",
        "the model leans little on its cache", _four_bits_are_fine,
    ),
    Claim(
        "helps-rtn", PAPER, "Table 1", "The correction improves fidelity of RTN at INT2.",
        COMPARE.format("rtn-2bit,rtn-2bit+taylor"), CLEAR_ABOVE,
        "Taylor over-corrects where single groups have large steps", _helps("rtn-2bit"),
    ),
    Claim(
        "helps-quarot", PAPER, "Table 1", "The correction improves fidelity of QuaRot at INT2.",
        COMPARE.format("quarot-2bit,quarot-2bit+taylor"), CLEAR_ABOVE,
        "the shift was small", _helps("quarot-2bit"),
    ),
    Claim(
        "helps-qvg", PAPER, "Table 1, §5.2",
        "The correction improves fidelity of QVG: the methods are complementary.",
        COMPARE.format("qvg-2bit,qvg-2bit+taylor"), CLEAR_ABOVE,
        _why_no_bias, _helps("qvg-2bit"),
    ),
    Claim(
        "half-the-bits", PAPER, "§5.3, Fig. 5",
        "2.19 bits with the correction outperform 4.38 bits without it.",
        "videokv tradeoff --bits 2,4 --groups 64,128 {rolled}", CLEAR_ABOVE,
        "4 bits are nearly exact on this model; the paper's rollouts are long and chaotic, where "
        "PSNR saturates", _half_the_bits,
    ),
    Claim(
        "per-token-beats-per-channel", PAPER, "App. E",
        "Per-token groups with their correction beat per-channel groups with a shared one.",
        CLAIMED.format("per-token-beats-per-channel"), CLEAR_ABOVE,
        "keys of this model have channels of very unequal size (RMS-normed with learned scales), "
        "which groups along tokens serve best, as KIVI found", _per_token,
    ),
    Claim(
        "unbiased", PAPER, "Eq. 10-12",
        "Subtracting log(sinh a / a) makes the expected contribution of a key exact.",
        CLAIMED.format("unbiased"), "1 within three standard errors of 200,000 draws",
        "an error in the formula", _unbiased,
    ),
    Claim(
        "taylor-above-exact", PAPER, "App. A, Fig. A1",
        "The Taylor form over-estimates the exact correction, more so for large noise.",
        CLAIMED.format("taylor-above-exact"), "positive everywhere on a grid",
        "an error in the formula", _taylor_is_larger,
    ),
    Claim(
        "no-extra-storage", PAPER, "§4.3", "The correction needs no storage beside the cache.",
        COMPARE.format("quarot-2bit,quarot-2bit+taylor"), "exactly 0 bytes",
        "factors are stored", _no_storage,
    ),
    Claim(
        "llm-degrades", PAPER, "App. O", "Plain INT2 raises the NLL of chunked LLM prefill.",
        "videokv prefill --chunk 256 {prefilled} --recipes bf16,rtn-2bit", CLEAR_ABOVE,
        "the text is short", _language_degrades,
    ),
    Claim(
        "llm-recovers", PAPER, "App. O", "The Taylor correction lowers that NLL.",
        "videokv prefill --chunk 256 {prefilled} --recipes bf16,rtn-2bit,rtn-2bit+taylor",
        CLEAR_BELOW,
        "over-correction on unrotated keys", _language_recovers,
    ),
    Claim(
        "overhead-5-percent", PAPER, "§4.3",
        "In FlexAttention the correction costs about 5 % end to end on MAGI-1.",
        "", "", NO_MODEL, None,
    ),
    Claim(
        "vbench", PAPER, "Table 5", "The correction brings VBench totals back to BF16's.",
        "", "", f"{NO_MODEL}; VBench's own weights are not here either", None,
    ),
)  # fmt: skip
