"""Claims of the two papers, each with the measurement that tests it on the shipped world model."""

from videokv.studies.claims.claim import Claim, Finding, Verdict
from videokv.studies.claims.evidence import Evidence, EvidencePlan, Needs
from videokv.studies.claims.runner import Judged, chosen_claims, judge_all, needs_of

__all__ = [
    "Claim",
    "Evidence",
    "EvidencePlan",
    "Finding",
    "Judged",
    "Needs",
    "Verdict",
    "chosen_claims",
    "judge_all",
    "needs_of",
]
