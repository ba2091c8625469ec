"""Claims of the two papers, each with the measurement that tests it on the shipped world model."""

from videokv.studies.claims.claim import Claim, Finding, Verdict
from videokv.studies.claims.evidence import Evidence, EvidencePlan
from videokv.studies.claims.runner import Judged, judge_all

__all__ = ["Claim", "Evidence", "EvidencePlan", "Finding", "Judged", "Verdict", "judge_all"]
