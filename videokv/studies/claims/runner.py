"""Judge every claim; results.json holds one row a tested claim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from videokv.studies.claims import jensen, quantwm
from videokv.studies.claims.claim import Claim, Finding, Untestable, Verdict
from videokv.studies.claims.evidence import Evidence
from videokv.studies.results import write_json

CLAIMS: tuple[Claim, ...] = (*jensen.CLAIMS, *quantwm.CLAIMS)


@dataclass(frozen=True)
class Judged:
    """finding: None where it could not be tested; why: the likely reason of a failure, or why it
    could not be tested, else ''. command: the claim's, at the size that was run."""

    claim: Claim
    verdict: Verdict
    finding: Finding | None
    why: str
    command: str

    def as_json(self) -> dict[str, object]:
        found = self.finding
        figures: dict[str, object] = {}
        if found is not None:
            figures = {
                "figure": found.figure, "value": found.value, "sem": found.sem, "n": found.n,
                "unit": found.unit, "undecided": found.undecided,
            }  # fmt: skip
        return {
            "claim": self.claim.key, "paper": self.claim.paper, "where": self.claim.where,
            "says": self.claim.says, "command": self.command, "rule": self.claim.rule,
            "verdict": self.verdict, "why": self.why, **figures,
        }  # fmt: skip


def judge_all(
    evidence: Evidence,
    *,
    claims: Sequence[Claim] = CLAIMS,
    on_claim: Callable[[Judged], None] | None = None,
) -> tuple[Judged, ...]:
    """Every claim in order; evidence is run when the first claim needs it. Writes claims.json."""
    found = []
    for claim in claims:
        found.append(judge(claim, evidence))
        if on_claim is not None:
            on_claim(found[-1])
    evidence.plan.out.mkdir(parents=True, exist_ok=True)
    write_json(evidence.plan.out / "claims.json", [each.as_json() for each in found])
    return tuple(found)


def judge(claim: Claim, evidence: Evidence) -> Judged:
    """One claim."""
    verdict, finding, why = _verdict(claim, evidence)
    return Judged(claim, verdict, finding, why, claim.command.format(**evidence.plan.size_options))


def _verdict(claim: Claim, evidence: Evidence) -> tuple[Verdict, Finding | None, str]:
    if claim.judge is None:
        return "cannot be tested here", None, claim.otherwise
    try:
        finding = claim.judge(evidence)
    except Untestable as reason:
        return "cannot be tested here", None, str(reason)
    if finding.holds:
        return "holds", finding, ""
    why = claim.otherwise
    if finding.undecided:
        why = (
            f"not decided by n = {finding.n}: the figure is within two standard errors of its "
            "bound, so more clips may show it either way"
        )
    return "does not hold here", finding, why
