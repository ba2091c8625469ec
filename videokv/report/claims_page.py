"""docs/claims.md, made by ``videokv claims``: a table a paper, then the reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from videokv.studies.claims import EvidencePlan, Judged
from videokv.studies.claims.claim import CORRECTION_PAPER, QUANTWM_PAPER

TITLES = {
    CORRECTION_PAPER: "Quantized Keys Steal Attention (2605.26266)",
    QUANTWM_PAPER: "QuantWM (2609.26425)",
}
VERDICTS = ("holds", "does not hold here", "cannot be tested here")


def claims_page(
    judged: Sequence[Judged], plan: EvidencePlan, *, versions: Mapping[str, str], device: str
) -> str:
    """The page as Markdown; the same findings give the same text. device: in words."""
    counts = ", ".join(f"{v}: {sum(j.verdict == v for j in judged)}" for v in VERDICTS)
    undecided = sum(j.finding is not None and j.finding.undecided for j in judged)
    of_these = f" Not decided, of those that do not hold: {undecided}." if undecided else ""
    chunks = "chunk" if plan.chunks == 1 else "chunks"
    lines = [
        "# Which of the papers' claims hold here",
        "",
        f"Made by `{plan.command} --page docs/claims.md`; do not edit.",
        "",
        f"{counts[0].upper()}{counts[1:]}.{of_these}",
        "",
        f"*Here* is the shipped world model (15.8 M parameters, 8 layers, 3 heads of 128): "
        f"{plan.clip_count} clips, {plan.chunks} generated {chunks} of 324 tokens after 2 of real "
        f"play, the same noise and actions in every run, seed {plan.seed}; frames against the "
        "rollout with the BF16 cache (all generated frames). Attention figures are teacher-forced. "
        "± is the standard error over clips (over chunks for language models) of paired "
        "differences; a relation *holds* where the rule is met. A claim that does not hold here "
        "is not thereby refuted for the authors' models; the likely reason is given below the "
        "table and is our reading, not a measurement, unless it names one.",
        "",
        f"{device}, torch {versions['torch']}, Python {versions['python']}, videokv "
        f"{versions['videokv']}.",
        "",
    ]
    for paper, title in TITLES.items():
        chosen = [j for j in judged if j.claim.paper == paper]
        if chosen:
            lines += _section(title, chosen)
    return "\n".join(lines).rstrip() + "\n"


def _section(title: str, judged: Sequence[Judged]) -> list[str]:
    lines = [
        f"## {title}",
        "",
        "| claim | where | verdict | measured here | rule | command |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in judged:
        figure = "" if each.finding is None else f"{each.finding.text}; n = {each.finding.n}"
        command = f"`{each.command}`" if each.command else ""
        cells = (
            each.claim.says, each.claim.where, f"**{each.verdict}**", figure, each.claim.rule,
            command,
        )  # fmt: skip
        lines.append("| " + " | ".join(_cell(c) for c in cells) + " |")
    reasons = [each for each in judged if each.why]
    if reasons:
        lines += ["", "Reasons:", ""]
        lines += [f"- *{each.claim.says}* {each.verdict}: {each.why}." for each in reasons]
    return [*lines, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
