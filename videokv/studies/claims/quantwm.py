"""Claims of "QuantWM" (2609.26425)."""

from __future__ import annotations

import numpy as np

from videokv.studies.claims.claim import QUANTWM_PAPER as PAPER
from videokv.studies.claims.claim import Claim, Finding, Untestable, above, below, within
from videokv.studies.claims.evidence import BOTH, KIVI, KIVI_PACKED, NEITHER, PSAC, QSAC, Evidence
from videokv.studies.claims.jensen import (
    CLAIMED,
    CLEAR_ABOVE,
    CLEAR_BELOW,
    COMPARE,
    DIAGNOSE,
    PER_CENT,
)

KVSPLIT = "videokv kvsplit --recipes qvg-2bit {rolled}"
ABLATE = "videokv ablate --parts {} {{rolled}}"
LONGCAT_TOKENS, HEAD_DIM, LONGCAT_RATIO = 29640, 128, 21.709 / 3.625


def _keys_err_less(evidence: Evidence) -> Finding:
    keys = evidence.diagnosed("key_mse_relative", "qvg-2bit")
    values = evidence.diagnosed("value_mse_relative", "qvg-2bit")
    gap = [k - v for k, v in zip(keys, values, strict=True)]
    return below(gap, "relative error of keys minus that of values, qvg-2bit")


def _keys_hurt_more(evidence: Evidence) -> Finding:
    keys = evidence.diagnosed("output_mse_keys_only", "qvg-2bit")
    values = evidence.diagnosed("output_mse_values_only", "qvg-2bit")
    gap = [k - v for k, v in zip(keys, values, strict=True)]
    return above(gap, "output MSE of keys alone minus values alone, qvg-2bit")


def _keys_dominate(evidence: Evidence) -> Finding:
    gap = evidence.rolled("psnr_db", "qvg-2bit K16V2", "qvg-2bit K2V16")
    return above(gap, "PSNR of K16V2 minus K2V16", unit="dB")


def _both_like_keys(evidence: Evidence) -> Finding:
    gap = evidence.rolled("psnr_db", "qvg-2bit", "qvg-2bit K2V16")
    return within(gap, "PSNR of K2V2 minus K2V16", bound=1.0, unit="dB")


def _few_directions(evidence: Evidence) -> Finding:
    curves = [head for layer in evidence.details["query_energy"].values() for head in layer]
    shares = [PER_CENT * curve[7] for curve in curves]
    return above(shares, "query energy in the top 8 directions", bound=60, unit="%")


def _token_shift(recipe: str, minus: str, what: str):  # type: ignore[no-untyped-def]
    def judge(evidence: Evidence) -> Finding:
        gap = [PER_CENT * v for v in evidence.diagnosed("token_shift", recipe, minus)]
        return below(gap, what, unit="points")

    return judge


def _better(recipe: str, minus: str, what: str):  # type: ignore[no-untyped-def]
    def judge(evidence: Evidence) -> Finding:
        return above(evidence.rolled("psnr_db", recipe, minus), what, unit="dB")

    return judge


def _why_kivi_is_better(evidence: Evidence) -> str:
    more = evidence.rolled("held_bytes", KIVI, BOTH)
    held = evidence.rollouts.find(BOTH, "held_bytes")
    if held is None:
        raise Untestable(f"no bytes of {BOTH} were counted")
    return (
        "KIVI's newest chunk stays in BF16, which is the part that queries look at most: its cache "
        f"holds {1 + float(np.mean(more)) / held.mean:.2f} times the bytes of {BOTH} at the end "
        f"(n = {len(more)}); without that window see the next line"
    )


def _more_candidates(evidence: Evidence) -> Finding:
    gap = evidence.rolled("psnr_db", "16 candidates", BOTH)
    return within(gap, "PSNR of 16 candidates minus 4", bound=0.3, unit="dB")


def _full_metric(evidence: Evidence) -> Finding:
    gap = evidence.rolled("psnr_db", "full metric", BOTH)
    return below(gap, "PSNR of the full metric minus the diagonal", bound=0.3, unit="dB")


def _ratio(evidence: Evidence) -> Finding:
    from videokv.recipes import bits_per_element

    counted = 16 / bits_per_element(BOTH, tokens=LONGCAT_TOKENS, head_dim=HEAD_DIM)
    off = PER_CENT * (counted / LONGCAT_RATIO - 1)
    return Finding(
        f"counted ratio {counted:.3f} against the paper's {LONGCAT_RATIO:.3f}", off, None, 1,
        bool(np.abs(off) < 0.2), "%",
    )  # fmt: skip


SHORT = (
    "324 tokens a chunk leave 8 centroids (equal bits), so that choosing among centroids has "
    "little to choose from"
)
NO_MODEL = "needs the authors' world models with their weights and a GPU"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "keys-err-less", PAPER, "§3.2, Table 1",
        "Quantized keys have smaller reconstruction errors than values.",
        DIAGNOSE.format("qvg-2bit"), CLEAR_BELOW,
        "their sizes are compared relative to the mean square; the paper's normalisation is not "
        "stated", _keys_err_less,
    ),
    Claim(
        "keys-hurt-more", PAPER, "§3.2, Table 1",
        "Quantizing keys alone causes a larger output error than quantizing values alone.",
        DIAGNOSE.format("qvg-2bit"), CLEAR_ABOVE,
        "attention is flat, so score noise averages out", _keys_hurt_more,
    ),
    Claim(
        "keys-dominate", PAPER, "§3.2, Table 2",
        "K2V16 degrades the video much more than K16V2.", KVSPLIT, CLEAR_ABOVE,
        "attention is flat, so score noise averages out", _keys_dominate,
    ),
    Claim(
        "both-like-keys", PAPER, "§3.2, Table 2", "K2V2 performs similarly to K2V16.",
        KVSPLIT, "within 1 dB by two standard errors",
        "values cost quality of their own here", _both_like_keys,
    ),
    Claim(
        "few-directions", PAPER, "§4.2, Fig. 4",
        "The top 8 directions hold more than 60 % of the query energy.",
        DIAGNOSE.format("qvg-2bit"), "above 60 % by two standard errors over layers and heads",
        "queries of this model are spread", _few_directions,
    ),
    Claim(
        "token-shift", PAPER, "Table 5",
        "QuantWM shifts the top-1 cached token far less often than QVG.",
        DIAGNOSE.format("qvg-2bit,quantwm-2bit"), CLEAR_BELOW, SHORT,
        _token_shift(BOTH, "qvg-2bit", "token shift of quantwm-2bit minus qvg-2bit"),
    ),
    Claim(
        "qsac-token-shift", PAPER, "Table 6", "QSAC alone lowers the token shift.",
        CLAIMED.format("qsac-token-shift"), CLEAR_BELOW, SHORT,
        _token_shift(QSAC, NEITHER, "token shift of QSAC alone minus neither"),
    ),
    Claim(
        "psac-stronger", PAPER, "Table 6", "PSAC lowers the token shift more than QSAC does.",
        CLAIMED.format("psac-stronger"), CLEAR_BELOW,
        "8 directions hold less of the error here",
        _token_shift(PSAC, QSAC, "token shift of PSAC alone minus QSAC alone"),
    ),
    Claim(
        "qsac-psnr", PAPER, "Table 6", "QSAC alone improves frame quality.",
        ABLATE.format("qsac-psac"), CLEAR_ABOVE, SHORT,
        _better(QSAC, NEITHER, "PSNR of QSAC alone minus neither"),
    ),
    Claim(
        "psac-psnr", PAPER, "Table 6", "PSAC alone improves frame quality.",
        ABLATE.format("qsac-psac"), CLEAR_ABOVE, "8 directions hold less of the error here",
        _better(PSAC, NEITHER, "PSNR of PSAC alone minus neither"),
    ),
    Claim(
        "together-best", PAPER, "Table 6", "QSAC and PSAC together beat PSAC alone.",
        ABLATE.format("qsac-psac"), CLEAR_ABOVE, SHORT,
        _better(BOTH, PSAC, "PSNR of both minus PSAC alone"),
    ),
    Claim(
        "beats-qvg", PAPER, "Tables 3 and 4", "QuantWM beats QVG in frame quality.",
        COMPARE.format("qvg-2bit,quantwm-2bit"), CLEAR_ABOVE, SHORT,
        _better(BOTH, "qvg-2bit", "PSNR of quantwm-2bit minus qvg-2bit"),
    ),
    Claim(
        "beats-kivi", PAPER, "Tables 3 and 4", "QuantWM beats KIVI in frame quality.",
        COMPARE.format("kivi-2bit,quantwm-2bit"), CLEAR_ABOVE,
        _why_kivi_is_better, _better(BOTH, KIVI, "PSNR of quantwm-2bit minus kivi-2bit"),
    ),
    Claim(
        "beats-kivi-packed", PAPER, "Tables 3 and 4",
        "The same against KIVI without its recent window in BF16.",
        CLAIMED.format("beats-kivi-packed"), CLEAR_ABOVE, SHORT,
        _better(BOTH, KIVI_PACKED, "PSNR of quantwm-2bit minus kivi-2bit, all packed"),
    ),
    Claim(
        "rank", PAPER, "Table 9", "A higher rank of PSAC improves frame quality (2 to 32).",
        ABLATE.format("rank"), CLEAR_ABOVE, "the top directions hold nearly all energy already",
        _better("rank 32", "rank 2", "PSNR of rank 32 minus rank 2"),
    ),
    Claim(
        "candidates", PAPER, "Table 11", "More than 4 candidates bring marginal changes only.",
        ABLATE.format("candidates"), "within 0.3 dB by two standard errors", SHORT,
        _more_candidates,
    ),
    Claim(
        "diagonal", PAPER, "Table 10", "The full query metric is no better than its diagonal.",
        ABLATE.format("metric"), "less than 0.3 dB better, by two standard errors",
        "channels of queries are correlated here", _full_metric,
    ),
    Claim(
        "longcat-memory", PAPER, "§5.5", "LongCat's cache shrinks from 21.709 to 3.625 GiB.",
        f"videokv recipes --tokens {LONGCAT_TOKENS} --head-dim {HEAD_DIM}",
        "within 0.2 % of 5.989, counted from a chunk that is really packed",
        "storage the paper does not count", _ratio,
    ),
    Claim(
        "latency", PAPER, "Table 7", "Latency grows by 5.4 to 5.9 %, or falls where it offloads.",
        "", "", NO_MODEL, None,
    ),
    Claim(
        "vbench-blind", PAPER, "§5.2", "VBench hardly sees the flicker of 2-bit caches.",
        "", "", f"{NO_MODEL}; VBench's own weights are not here either", None,
    ),
)  # fmt: skip
