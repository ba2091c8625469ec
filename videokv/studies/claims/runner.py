"""Judge every claim; results.json holds one row a tested claim."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from videokv.studies.claims import jensen, quantwm
from videokv.studies.claims.claim import Claim, Finding, Untestable, Verdict
from videokv.studies.claims.evidence import Evidence, Needs
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


def chosen_claims(names: Sequence[str]) -> tuple[Claim, ...]:
    """Claims by name in the order of the list, all without names; ValueError names them all."""
    known = [claim.key for claim in CLAIMS]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"no claim is called {name!r}{hint}; there are {', '.join(known)}")
    return tuple(claim for claim in CLAIMS if not names or claim.key in names)


def needs_of(claims: Sequence[Claim]) -> Needs:
    """What the judges and reasons of some claims ask of the evidence, found by asking them."""
    asked = _Asked()
    for claim in claims:
        for part in (claim.judge, claim.otherwise):
            if callable(part):
                # Answers are stand-ins: whatever a judge makes of them, it has asked by then.
                with suppress(Untestable, ZeroDivisionError):
                    part(asked)  # type: ignore[arg-type]
    return Needs(frozenset(asked.recipes), asked.diagnosis, asked.prefill)


class _Asked:
    """Stands in for ``Evidence`` and notes what it is asked for."""

    def __init__(self) -> None:
        self.recipes: set[str] = set()
        self.diagnosis = self.prefill = False

    def rolled(self, metric: str, recipe: str, minus: str) -> tuple[float, ...]:
        self.recipes |= {recipe, minus}
        return (1.0, 2.0)

    def diagnosed(self, metric: str, recipe: str, minus: str | None = None) -> tuple[float, ...]:
        self.diagnosis = True
        return (1.0, 2.0)

    def prefilled(self, metric: str, recipe: str, minus: str) -> tuple[float, ...]:
        self.prefill = True
        return (1.0, 2.0)

    @property
    def details(self) -> dict[str, Any]:
        self.diagnosis = True
        raise Untestable("nothing is run yet")

    @property
    def rollouts(self) -> Any:
        raise Untestable("nothing is run yet")

    @property
    def plan(self) -> Any:
        raise Untestable("nothing is run yet")


def judge(claim: Claim, evidence: Evidence) -> Judged:
    """One claim."""
    verdict, finding, why = _verdict(claim, evidence)
    return Judged(claim, verdict, finding, why, claim.command.format(**evidence.plan.size_options))


def _verdict(claim: Claim, evidence: Evidence) -> tuple[Verdict, Finding | None, str]:
    if claim.judge is None:
        return "cannot be tested here", None, _reason(claim, evidence)
    try:
        finding = claim.judge(evidence)
    except Untestable as reason:
        return "cannot be tested here", None, str(reason)
    if finding.holds:
        return "holds", finding, ""
    if finding.undecided:
        why = (
            f"not decided by n = {finding.n}: the figure is within two standard errors of its "
            "bound, so more clips may show it either way"
        )
    else:
        why = _reason(claim, evidence)
    return "does not hold here", finding, why


def _reason(claim: Claim, evidence: Evidence) -> str:
    return claim.otherwise if isinstance(claim.otherwise, str) else claim.otherwise(evidence)
